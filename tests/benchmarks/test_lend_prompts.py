"""Pretrained prompts of one table in another: copied where only tuning differs, refused elsewhere; kept LDA tasks."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.lend_prompts import LendingExperiment
from benchmarks.pseudo_labels import pseudo_labelled
from benchmarks.run_prompts import METHODS, TRIAL
from metapretrain.data.made import made_sentiment
from metapretrain.data.texts import TextSet
from metapretrain.errors import InputError
from metapretrain.experiments.base import Machine
from metapretrain.experiments.prompts.data import NO_TEXTS, PromptData, kept_groups
from metapretrain.experiments.prompts.recipe import PromptRecipe
from metapretrain.experiments.prompts.tuning import Stack
from metapretrain.files import SUMS, read_json
from metapretrain.prompts import PromptMAML

ROWS = {name: METHODS[name] for name in ("ppt", "metapt-random")}
PTB: dict[str, dict[str, Any]] = {"ptb/ptb.zip": {"bytes": 3, "md5": "0", "official": None}}
MORE = replace(TRIAL, examples=14, tune=replace(TRIAL.tune, epochs=3))


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)


def experiment(
    out: Path, recipe: PromptRecipe, sets: Sequence[str] = ("sst2",), plain: TextSet = NO_TEXTS, **options: Any
) -> LendingExperiment:
    made = made_sentiment()
    data = PromptData.of(made["yelp5"], [made[name] for name in sets], recipe, plain=plain, labeller=pseudo_labelled)
    return LendingExperiment("prompts", "made", "trial", recipe, data, Machine(), out, None, **options)


def test_prompts_of_another_table_save_their_pretraining(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = experiment(tmp_path / "first", TRIAL)
    list(first.rows(ROWS, [0]))
    alone = list(experiment(tmp_path / "alone", MORE).rows(ROWS, [0]))
    stacks: list[int | None] = []
    plain = Stack.__init__

    def counted(self: Stack, *given: Any, steps: int | None = None, **options: Any) -> None:
        stacks.append(steps)
        plain(self, *given, steps=steps, **options)

    monkeypatch.setattr(Stack, "__init__", counted)
    monkeypatch.setattr(PromptMAML, "backward", None)  # pretraining would call it
    other = experiment(tmp_path / "other", MORE, lender=first.root)
    other.check(ROWS, [0])
    lent = list(other.rows(ROWS, [0]))
    assert stacks == [None, None]  # tuning only
    assert [one["metrics"] for one in lent] == [one["metrics"] for one in alone]
    assert [one["budget"]["pretrain_reads"] for one in lent] == [80, 80]
    again = experiment(tmp_path / "other", MORE, resume=True)  # what was copied is a run of this table
    assert [one["metrics"] for one in again.rows(ROWS, [0])] == [one["metrics"] for one in alone]
    result = json.loads((other.root / "pretrain-ppt-s0/result.json").read_text())
    assert result["counts"] == other.data.counts and result["kind"] == "pretraining"


@pytest.mark.parametrize("change", [{"reads": 160}, {"length": 6}, {"rows": 90}])
def test_prompts_of_other_choices_are_refused(tmp_path: Path, change: dict[str, int]) -> None:
    first = experiment(tmp_path / "first", TRIAL)
    list(first.rows({"ppt": ROWS["ppt"]}, [0]))
    other = experiment(tmp_path / "other", replace(TRIAL, **change), lender=first.root)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=f"in another way: .*{next(iter(change))} was"):
        other.check(ROWS, [0])
    other.check({"metapt-random": ROWS["metapt-random"]}, [0])  # which is not there
    with pytest.raises(InputError, match="no folder"):
        experiment(tmp_path / "other", TRIAL, lender=tmp_path / "nowhere").check(ROWS, [0])


@pytest.mark.parametrize(
    ("name", "damage", "words"),
    [
        ("config.json", {"config": {"data": [1], "choices": 3}}, r"config\.json is damaged: it has no choices"),
        ("config.json", {"config": None}, r"config\.json is damaged: it has no choices"),
        ("result.json", {"budget": {}}, r"result\.json is damaged: it has no metrics"),
        ("prompt", None, "has no folder prompt"),
    ],
)
def test_a_damaged_table_is_refused_before_anything_is_copied(
    tmp_path: Path, name: str, damage: Any, words: str
) -> None:
    first = experiment(tmp_path / "first", TRIAL)
    list(first.rows({"ppt": ROWS["ppt"]}, [0]))
    place = first.root / "pretrain-ppt-s0" / name
    (place.parent / SUMS).unlink()  # of an older version; else all but the result is refused by its checksum
    if damage is None:
        shutil.rmtree(place)
    else:
        place.write_text(json.dumps(damage))
    other = experiment(tmp_path / "other", TRIAL, lender=first.root)
    with pytest.raises(InputError, match=words):
        other.check({"ppt": ROWS["ppt"]}, [0])
    assert not other.root.exists()


def test_a_pretraining_of_another_seed_is_refused_and_none_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = experiment(tmp_path / "first", TRIAL)
    list(first.rows({"ppt": ROWS["ppt"]}, [0]))
    other = experiment(tmp_path / "other", TRIAL, lender=first.root)
    caplog.set_level(logging.WARNING)
    other.check({"ppt": ROWS["ppt"]}, [1])
    assert "has no pretraining of these rows and seeds" in caplog.text
    (first.root / "pretrain-ppt-s0").rename(first.root / "pretrain-ppt-s1")
    with pytest.raises(InputError, match="in another way: seed was 0, is 1"):
        other.check({"ppt": ROWS["ppt"]}, [1])


def test_pseudo_labels_know_the_downstream_sets(tmp_path: Path) -> None:
    pseudo = {"ppt-pseudo": METHODS["ppt-pseudo"]}
    known = made_sentiment()["sst2"].train.first[0].upper()
    plain = TextSet([*made_sentiment(seed=1, pretraining=400)["yelp5"].train.first, known], files=PTB)
    first = experiment(tmp_path / "first", TRIAL, plain=plain)
    (row,) = first.rows(pseudo, [0])
    assert known not in first.data.plain.first
    pretraining = read_json(first.root / "pretrain-ppt-pseudo-s0" / "result.json") or {}
    assert row["data"] == pretraining["data"] == {"ptb/ptb.zip": {**PTB["ptb/ptb.zip"], "only": "pseudo labels"}}
    (other,) = first.rows({"pt": METHODS["pt"]}, [0])
    assert other["data"] == {}
    metrics = pretraining["metrics"]
    assert metrics["plain_sentences"] + metrics["sentences_in_downstream"] == len(plain)
    experiment(tmp_path / "same", MORE, plain=plain, lender=first.root).check(pseudo, [0])
    with pytest.raises(InputError, match="in another way: counts"):
        experiment(tmp_path / "other", TRIAL, ["sst5"], plain, lender=first.root).check(pseudo, [0])
    plain = replace(plain, files={"ptb/ptb.zip": {**PTB["ptb/ptb.zip"], "md5": "1"}})
    with pytest.raises(InputError, match=r"in another way: files\.ptb"):
        experiment(tmp_path / "other", TRIAL, plain=plain, lender=first.root).check(pseudo, [0])


def test_tasks_of_lda_are_found_once(tmp_path: Path) -> None:
    inputs = experiment(tmp_path, TRIAL, cache=tmp_path / "cache").inputs
    found = inputs.groups("lda", "labelled", 0)
    (file,) = (tmp_path / "cache/groups").iterdir()
    before = file.stat().st_mtime_ns
    again = experiment(tmp_path, TRIAL, cache=tmp_path / "cache").inputs
    assert torch.equal(again.groups("lda", "labelled", 0), found) and file.stat().st_mtime_ns == before
    again.groups("lda", "labelled", 1)
    assert len(list((tmp_path / "cache/groups").iterdir())) == 2  # another seed
    whole = file.read_text()
    for bad in (b"1 x", b"\xff" + whole.encode()[1:], whole.replace("1", "9", 1).encode(), b"9" * 30 + whole.encode()):
        file.write_bytes(bad)
        assert torch.equal(kept_groups(tmp_path / "cache", again.texts("labelled").first, 5, 0, lambda: found), found)
        assert file.read_text() == whole


def test_kept_groups_with_a_flipped_bit_are_found_anew(tmp_path: Path) -> None:
    def groups(*found: int) -> list[int]:
        return kept_groups(tmp_path, ["a", "b"], 2, 0, lambda: torch.tensor(found)).tolist()

    groups(0, 1)
    (file,) = (tmp_path / "groups").iterdir()
    whole = file.read_bytes()
    assert groups(1, 1) == [0, 1]
    for place in range(len(whole)):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        assert groups(1, 1) == [1, 1]
