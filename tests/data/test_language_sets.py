"""Readers of the scheduling benchmark's sets, on files written by hand; what cannot be used is named."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from metapretrain.data.annotated import TAGS, load_conll04, load_conll2003, load_dailydialog_pp, load_mutual, load_squad
from metapretrain.data.glue import load_copa, load_glue, load_wic
from metapretrain.data.registry import DATASETS, names_giving
from metapretrain.errors import InputError
from metapretrain.experiments.schedule.tasks import TASKS


def write(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text, encoding="utf-8")
    return folder


def json_lines(*rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_conll04_entities_and_relations(tmp_path: Path) -> None:
    row = {
        "tokens": ["Ann", "lives", "in", "Rome"],
        "entities": [{"type": "Peop", "start": 0, "end": 1}, {"type": "Loc", "start": 3, "end": 4}],
        "relations": [{"type": "Live_In", "head": 0, "tail": 1}],
    }
    parts = {"train": [row], "dev": [row], "test": [row]}
    write(tmp_path / "conll04", conll04__json=json.dumps(parts))
    (found,) = load_conll04(tmp_path)["validation"].rows
    assert found.entities == [("Peop", 0, 1), ("Loc", 3, 4)] and found.relations == {(0, 1): "Live_In"}
    assert DATASETS["conll04"].check(tmp_path) == "conll04: train 1, validation 1, test 1"

    wrong = {**row, "entities": [{"type": "Loc", "start": 3, "end": 9}], "relations": []}
    write(tmp_path / "conll04", conll04__json=json.dumps({**parts, "dev": [row, wrong]}))
    with pytest.raises(InputError, match=r"dev row 1: the Loc 3\.\.9 is outside of its 4 words"):
        load_conll04(tmp_path)
    unknown = {**row, "relations": [{"type": "Likes", "head": 0, "tail": 1}]}
    write(tmp_path / "conll04", conll04__json=json.dumps({**parts, "test": [unknown]}))
    with pytest.raises(InputError, match=r"test\[0\]\.relations\[0\]\.type must be one of .*, got 'Likes'"):
        load_conll04(tmp_path)


def test_conll2003_sentences_and_tags(tmp_path: Path) -> None:
    text = "-DOCSTART- -X- O O\n\nAnn NNP I-NP I-PER\nBo NNP I-NP B-PER\n\nRain NN I-NP O\n"
    write(tmp_path, eng__train=text, eng__testa=text, eng__testb=text + "bad line\n")
    with pytest.raises(InputError, match=r"eng\.testb, line 7: expected `word POS chunk entity`, got 'bad line'"):
        load_conll2003(tmp_path)
    write(tmp_path, eng__testb=text)
    found = load_conll2003(tmp_path)["train"]
    assert [row.words for row in found.rows] == [["Ann", "Bo"], ["Rain"]]
    assert [[TAGS[tag] for tag in row.tags] for row in found.rows] == [["B-PER", "B-PER"], ["O"]]


def squad_folder(root: Path, span: str) -> Path:
    context, question = "It rained in Rome .\n", "Where ?\n"
    for folder, stem in (("small_train", "train"), ("all_val", "val")):
        parts = {"context": context, "question": question, "answer": "Rome\n", "span": span}
        write(root / folder, **{f"{stem}__{part}": text * 2 for part, text in parts.items()})
    answer = {"answer_start": 3, "text": "don't"}
    inside = {"answer_start": 0, "text": "W"}
    qas = [{"question": "What ?", "answers": [answer]}, {"question": "Who ?", "answers": [inside]}]
    data = {"data": [{"paragraphs": [{"context": "We don't.", "qas": qas}]}]}
    return write(root, xquad__en__json=json.dumps(data))


def test_squad_words_and_answers(tmp_path: Path) -> None:
    parts = load_squad(squad_folder(tmp_path, "3 3\n"), every=2)
    assert {split: len(rows) for split, rows in parts.items()} == {"train": 4, "validation": 0, "test": 1}
    row = parts["test"].rows[0]  # an answer within a word is left out
    assert row.words == ["We", "don", "'", "t", "."] and (row.begin, row.end, row.answer) == (1, 3, "don't")
    assert parts["test"].counts == {"unaligned": 1}
    assert load_squad(squad_folder(tmp_path, "4 3\n"))["train"].counts == {"unaligned": 4}
    with pytest.raises(InputError, match=r"train\.span, line 1: words 3\.\.9 are not in the 5"):
        load_squad(squad_folder(tmp_path, "3 9\n"))
    squad_folder(tmp_path, "3 3\n")
    write(tmp_path / "all_val", val__question="Where ?\n")
    with pytest.raises(InputError, match=r"as many lines as each other.*'val\.question': 1"):
        load_squad(tmp_path)


def test_dailydialog_training_has_no_context_of_the_test(tmp_path: Path) -> None:
    right = {"context": ["hi"], "positive_responses": ["hello", " "]}
    wrong = {"adversarial_negative_responses": ["high"], "random_negative_responses": ["no"]}
    other = {**right, "context": ["bye"]}
    write(tmp_path, data_positives__json=json_lines(right, other), dev__json=json_lines({**right, **wrong}))
    write(tmp_path, test__json=json_lines({**right, **wrong}))
    parts = load_dailydialog_pp(tmp_path)
    assert [row.context for row in parts["train"].rows] == [["bye"]]
    assert parts["test"].rows[0].right == ["hello"] and parts["test"].rows[0].wrong == ["high", "no"]
    write(tmp_path, test__json=json_lines({**right, **wrong}, right))
    with pytest.raises(InputError, match=r"test\.json, line 2: it has no 'adversarial_negative_responses'"):
        load_dailydialog_pp(tmp_path)


def test_mutual_turns_options_and_answers(tmp_path: Path) -> None:
    def pack(answer: str) -> None:
        row = {"article": "m : hi . f : what ?", "options": ["m : a", "m : b"], "answers": answer, "id": "x"}
        with tarfile.open(tmp_path / "mutual.tar.gz", "w:gz") as archive:
            for part in ("train", "dev", "test"):
                about = tarfile.TarInfo(f"data/mutual/{part}/{part}_1.txt")
                content = json.dumps(row).encode()
                about.size = len(content)
                archive.addfile(about, io.BytesIO(content))

    pack("B")
    (row,) = load_mutual(tmp_path)["validation"].rows
    assert row.context == ["m : hi .", "f : what ?"] and (row.right, row.wrong) == (["m : b"], ["m : a"])
    whole = (tmp_path / "mutual.tar.gz").read_bytes()
    for damaged in (b"no archive", gzip.compress(b"no archive" * 60), whole[:-9], whole[:60] + b"\0\0" + whole[62:]):
        (tmp_path / "mutual.tar.gz").write_bytes(damaged)
        with pytest.raises(InputError, match=r"mutual\.tar\.gz: .*; expected mutual") as refused:
            load_mutual(tmp_path)
        assert "\n" not in str(refused.value)
    pack("C")
    with pytest.raises(InputError, match=r"train_1\.txt: the answer must be a letter of one of 2 options, got 'C'"):
        load_mutual(tmp_path)


def test_cola_joins_both_dev_parts(tmp_path: Path) -> None:
    lines = [f'gj04\t{row % 2}\t{"*" * (row % 2)}\tA "sentence {row}.\n' for row in range(20)]
    folder = write(tmp_path / "CoLA", in_domain_train__tsv="".join(lines), in_domain_dev__tsv=lines[0])
    write(folder, out_of_domain_dev__tsv=lines[1] + lines[3])
    parts = load_glue("cola", tmp_path)
    assert {split: len(rows) for split, rows in parts.items()} == {"train": 18, "validation": 2, "test": 3}
    assert parts["test"].first[1] == 'A "sentence 1.' and parts["test"].labels.tolist() == [0, 1, 1]


def test_wic_of_two_forms(tmp_path: Path) -> None:
    rows = [
        {"label": row % 2, "text": f"Word: go. Sentence 1: I go {row} . Sentence 2: It went {row} !"}
        for row in range(21)
    ]
    folder = write(tmp_path / "WiC", train__jsonl=json_lines(*rows))
    test = {"word": "go", "sentence1": "It went 20!", "sentence2": "I go 20.", "label": True, "idx": 0}
    write(folder / "FewGLUE_32dev", val__jsonl=json_lines(test))
    parts = load_wic(tmp_path)
    assert len(parts["train"]) == 18 and parts["train"].counts["in_test"] == 1
    assert parts["test"].first == ["go: It went 20!"] and parts["test"].labels.tolist() == [1]
    pairs = list(zip(parts["train"].first, parts["train"].second, strict=True))
    assert ("go: I go 1 .", "It went 1 !") in pairs and ("go: I go 20 .", "It went 20 !") not in pairs
    write(folder, train__jsonl=json_lines(rows[0], {"label": 1, "text": "Word: go"}))
    with pytest.raises(InputError, match=r"train\.jsonl, line 2: expected"):
        load_wic(tmp_path)


def test_copa_as_dialogues(tmp_path: Path) -> None:
    row = {"premise": "It rained.", "choice1": "a", "choice2": "b", "question": "effect", "label": 1}
    write(tmp_path, train__jsonl=json_lines(*[row] * 10), val__jsonl=json_lines(row))
    parts = load_copa(tmp_path)
    assert [len(rows) for rows in parts.values()] == [9, 1, 1]
    assert parts["test"].rows[0].context == ["It rained.", "What happened as a result?"]
    assert (parts["test"].rows[0].right, parts["test"].rows[0].wrong) == (["b"], ["a"])


@pytest.mark.parametrize("name", names_giving("splits"))
def test_every_set_has_source_terms_and_a_line_for_a_folder_that_is_not_there(name: str, tmp_path: Path) -> None:
    about = DATASETS[name]
    assert about.source.startswith("https://") and about.terms and about.layout
    with pytest.raises(InputError, match="nowhere"):
        about.check(tmp_path / "nowhere")


def test_every_task_names_sets_of_the_registry() -> None:
    assert {name for task in TASKS.values() for name in task.data} <= set(DATASETS)
