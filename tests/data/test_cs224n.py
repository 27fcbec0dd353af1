"""CS224N's reader on small files in the official layout, sentences made here: what is dropped, counted and kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from metapretrain.data.cs224n import check_qqp, load_cs224n, load_qqp
from metapretrain.data.published import concatenate
from metapretrain.data.registry import DATASETS
from metapretrain.data.texts import TextSet, TextTask, pair_keys
from metapretrain.errors import InputError


def table(path: Path, header: str, rows: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([header, *rows] if header else rows) + "\n", encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "cs224n"
    for split in ("train", "dev"):
        sst = [f"{n}\t{split}{n}\t {split} film number {n}\t{n % 5}" for n in range(25)]
        table(root / f"ids-sst-{split}.csv", "\tid\tsentence\tsentiment", sst)
        sts = [f"{n}\t{split}{n}\t{split} cat {n}\t{split} dog {n}\t{n % 11 / 2}" for n in range(22)]
        table(root / f"sts-{split}.csv", "\tid\tsentence1\tsentence2\tsimilarity", sts)
    table(root / "ids-sst-test-student.csv", "\t\tid\tsentence", ["0\t0.0\tt0\t Last film", "1\t1.0\tt1\tNo film"])
    table(root / "sts-test-student.csv", "\tid\tsentence1\tsentence2", ["5\ts0\tone\ttwo"])
    header = "\tid\tsentence1\tsentence2\tis_duplicate"
    pairs = [f"{n}\tp{n}\thow to {n}?\twhy {n}?\t{n % 2}.0" for n in range(20)]
    table(root / "quora-train.csv", header, [*pairs, '77\tp77\t"is it "" open?"\t\t'])
    more = ["30\tm30\tHOW TO 3\tWhy 3\t1.0", "31\tm31\tWhy 4\thow to 4\t0.0", "32\tm32\twhat now\twhat then\t1.0"]
    table(root / "quora-train-more.csv", "", more)
    dev = ["90\td0\tWho is he?\tWho was he?\t1.0", "91\td1\thow to 5\tWhere is it?\t0.0", "92\td2\tno\tlabel\t"]
    table(root / "quora-dev.csv", header, dev)
    return tmp_path


@pytest.fixture
def qqp(tmp_path: Path) -> Path:
    root = tmp_path / "more"
    lines = [
        b"1\tWho was he\tWHO IS HE\t11",  # in dev, turned round
        b"0\tnew one\tnew two\t12",
        b'1\tbroken \xe2\x80 quote\t"a ""b"""\t13',
        b"1\thow to 7\twhy 7?\t14",  # in train or held out
    ]
    root.mkdir()
    (root / "dev.tsv").write_bytes(b"\n".join(lines) + b"\n")
    records = {
        "0": {"text_a": "new two", "text_b": "New one!", "label": "0"},  # a repetition of dev.tsv's
        "1": {"text_a": "how to 5", "text_b": "a sentence of dev, another pair", "label": "1"},
    }
    (root / "glue_pretrain_QQP").mkdir()
    (root / "glue_pretrain_QQP" / "train.json").write_text(json.dumps(records), encoding="utf-8")
    return root


def test_tasks_splits_labels_and_ids(folder: Path) -> None:
    sst, para, sts = load_cs224n(folder, validation=5)
    assert [task.name for task in (sst, para, sts)] == ["sst", "para", "sts"]
    assert (sst.num_classes, para.num_classes, sts.num_classes, sts.low, sts.high) == (5, 2, 6, 0.0, 5.0)
    assert (len(sst.train), len(sst.validation), len(sst.dev)) == (20, 5, 25)
    assert sst.dev.first[3] == "dev film number 3" and sst.dev.ids[3] == "dev3"
    assert sst.dev.require_labels().tolist() == [n % 5 for n in range(25)]
    assert sst.validation.require_labels().sort().values.tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(sts.dev.require_labels(), torch.tensor([n % 11 / 2 for n in range(22)]))
    assert sts.dev.second is not None and sts.dev.second[1] == "dev dog 1"
    assert sst.test is not None and sst.test.labels is None and sst.test.ids == ["t0", "t1"]
    assert sst.test.first == ["Last film", "No film"]
    assert sts.test is not None and sts.test.second == ["two"] and para.test is None
    assert set(para.train.files) == {"quora-train.csv", "quora-train-more.csv"}
    assert [task.train.first for task in load_cs224n(folder / "cs224n", validation=5)] == [
        task.train.first for task in (sst, para, sts)
    ]


def test_unlabelled_pairs_repetitions_and_overlaps_are_counted(folder: Path) -> None:
    para = load_cs224n(folder, validation=0)[1]
    # 20 + 3 labelled pairs; two of the headerless file repeat pairs 3 and 4, the second turned round.
    assert len(para.train) == 21 and para.train.ids[-1] == "m32"
    assert para.train.counts == {"unlabelled": 1, "duplicates": 2, "overlap_pairs": 0, "overlap_sentences": 1}
    assert para.train.require_labels()[3] == 1 and len(para.dev) == 2 and para.dev.counts == {"unlabelled": 1}


def test_more_quora_pairs_are_never_those_of_dev_validation_or_train(folder: Path, qqp: Path) -> None:
    alone, both = (load_cs224n(folder, qqp=more, validation=6)[1] for more in (None, qqp))
    assert both.validation.first == alone.validation.first, "held-out rows are the same with and without more pairs"
    added = both.train.ids[len(alone.train) :]
    assert added == ["qqp-12", "qqp-13", "qqp-1"] and both.train.ids[: len(alone.train)] == alone.train.ids
    assert "broken \ufffd quote" in both.train.first and both.train.second and 'a "b"' in both.train.second
    keys = pair_keys(both.train)
    assert len(set(keys)) == len(keys) and not set(keys) & set(pair_keys(both.dev) + pair_keys(both.validation))
    counts = both.train.counts
    assert (counts["qqp"], counts["qqp_undecodable"], counts["qqp_in_dev"]) == (6, 1, 1)
    assert counts["qqp_in_validation"] + counts["qqp_duplicates"] == 2
    assert counts["overlap_sentences"] == 1 + alone.train.counts["overlap_sentences"]
    assert {"dev.tsv", "train.json"} < set(both.train.files)


def test_bad_rows_name_file_and_line(folder: Path, qqp: Path) -> None:
    (qqp / "test.tsv").write_text("1\tone\ttwo\t1\n2\tone\ttwo\t2\n")
    with pytest.raises(InputError, match=r"test\.tsv: 1 of 2 rows .*: line 2: label '2' is not one of 0..1"):
        load_qqp(qqp)
    path = folder / "cs224n" / "sts-dev.csv"
    path.write_text(path.read_text() + "9\tx\tone\ttwo\t5.2\n")
    with pytest.raises(InputError, match=r"sts-dev\.csv: .* line 24: label '5.2' is not a score in 0.0..5.0"):
        load_cs224n(folder, validation=5)
    with pytest.raises(InputError, match=r"sst: validation size is .*; give a whole number from 0 to 24"):
        load_cs224n(folder)
    path.write_text("\tid\tsentence1\tsentence2\tsimilarity\n")
    with pytest.raises(InputError, match=r"sts-dev\.csv has no rows"):
        load_cs224n(folder, validation=5)


def test_missing_files_are_named(folder: Path, tmp_path: Path) -> None:
    (folder / "cs224n" / "quora-dev.csv").unlink()
    with pytest.raises(InputError, match=r"cs224n lacks quora-dev\.csv; it must hold"):
        load_cs224n(folder)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"no Quora pairs in .*empty: it must hold dev\.tsv"):
        load_qqp(tmp_path / "empty")
    with pytest.raises(InputError, match=r"lacks ids-sst-train\.csv, ids-sst-dev\.csv, quora-train\.csv"):
        load_cs224n(tmp_path / "empty")
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="file is a file, not a folder"):
        load_cs224n(tmp_path / "file")


def test_check_says_what_is_there(folder: Path, qqp: Path) -> None:
    assert DATASETS["cs224n"].check(folder) == (
        "cs224n: sst 25 train + 25 dev + 2 test, para 21 train + 2 dev, sts 22 train + 22 dev + 1 test"
    )
    assert check_qqp(qqp) == "qqp: 6 pairs; files: 2; lines not UTF-8: 1"


def test_sets_are_joined_with_their_files_told_apart() -> None:
    one = TextSet(["a"], labels=torch.tensor([1]), counts={"unlabelled": 1}, files={"x": {"bytes": 1}})
    joined = concatenate([one, one], "train")
    assert joined.counts == {"unlabelled": 2} and len(joined.files) == 2 and joined.require_labels().tolist() == [1, 1]
    with pytest.raises(InputError, match="sets to join must all be of pairs or not"):
        concatenate([one, TextSet(["a"], ["b"], torch.tensor([1]))], "train")
    task = TextTask("t", "classification", joined, joined.subset([]), joined, classes=("no", "yes"))
    assert len(task.validation) == 0
