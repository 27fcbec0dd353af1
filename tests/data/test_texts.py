"""Sets and tasks of texts: checks, classes of scores, the held-out split and overlaps between splits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from metapretrain.data.texts import (
    Rows,
    TextSet,
    TextTask,
    check_tasks,
    hold_out,
    join_rows,
    normalise_text,
    overlap,
    pair_keys,
)
from metapretrain.errors import InputError

ROWS = TextSet(["a", "b", "c", "d"], labels=torch.tensor([0, 1, 0, 1]), ids=["w", "x", "y", "z"])
SCORES = TextSet(["a", "b"], ["c", "d"], torch.tensor([0.0, 5.0]))


def make(**changes: Any) -> TextTask:
    given: dict[str, Any] = {
        "name": "t",
        "kind": "classification",
        "train": ROWS,
        "validation": ROWS,
        "dev": ROWS,
        "classes": ("no", "yes"),
    }
    return TextTask(**{**given, **changes})


def test_the_rows_and_files_of_all_parts_are_joined() -> None:
    joined = join_rows([Rows(["a"], files={"1": {}}), Rows(["b", "c"], files={"2": {}})], "dev")
    assert (joined.rows, joined.split, list(joined.files)) == (["a", "b", "c"], "dev", ["1", "2"])


def test_rows_are_chosen_in_order_with_their_labels_and_ids() -> None:
    for index in ([3, 1], torch.tensor([3, 1])):
        chosen = ROWS.subset(index)
        assert (chosen.first, chosen.ids) == (["d", "b"], ["z", "x"]) and chosen.require_labels().tolist() == [1, 1]
    mask = ROWS.subset(torch.tensor([True, False, True, False]))
    assert mask.first == ["a", "c"] and SCORES.subset([1]).second == ["d"]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"second": ["x"]}, "2 sentences but 1 second sentences"),
        ({"labels": torch.tensor([1])}, "2 sentences but 1 labels"),
        ({"ids": ["x"]}, "2 sentences but 1 ids"),
        ({"labels": torch.tensor([1, 2], dtype=torch.int32)}, "int64 classes or float32 scores"),
        ({"labels": torch.zeros(2, 1)}, r"got torch.float32 \(2, 1\)"),
    ],
)
def test_parts_that_disagree_are_one_line(parts: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        TextSet(["a", "b"], **parts)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "my task"}, "letters, digits, - and _ only, got 'my task'"),
        ({"name": "../x"}, "letters, digits"),
        ({"kind": "pair-clasification"}, "did you mean 'pair-classification'"),
        ({"classes": ("one",)}, "two classes or more"),
        ({"classes": ("one", "one")}, "each named once"),
        ({"train": ROWS.subset([])}, "t train has no rows"),
        ({"dev": ROWS.subset([])}, "t dev has no rows"),
        ({"dev": replace(ROWS, labels=None)}, "t dev: its 4 rows have no label"),
        ({"test": SCORES}, "t test holds pairs of sentences, which classification cannot use"),
        ({"kind": "pair-classification"}, "t train holds single sentences"),
        ({"train": replace(ROWS, labels=torch.ones(4))}, "needs torch.int64 labels, got torch.float32"),
        ({"dev": replace(ROWS, labels=torch.tensor([0, 1, 2, -1]))}, "2 labels outside of 0..1, the first is 2 of row"),
    ],
)
def test_a_task_that_cannot_be_used_is_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make(**changes)


def test_regression_has_a_range_and_no_classes() -> None:
    parts = {"kind": "pair-regression", "train": SCORES, "validation": SCORES, "dev": SCORES}
    assert make(**parts, classes=(), high=5.0).num_classes == 6
    with pytest.raises(InputError, match="has a range"):
        make(**parts, high=5.0)
    with pytest.raises(InputError, match=r"1 labels outside of 0.0..4.0, the first is 5.0 of row 1"):
        make(**parts, classes=(), high=4.0)
    with pytest.raises(InputError, match="low must be below high"):
        make(**parts, classes=(), low=5.0, high=5.0)
    with pytest.raises(InputError, match="outside"):
        make(**{**parts, "dev": replace(SCORES, labels=torch.tensor([float("nan"), 1]))}, classes=(), high=5.0)


def test_scores_are_rounded_half_up_from_the_lowest() -> None:
    values = torch.tensor([1.0, 1.4, 1.5, 2.5, 3.5, 4.49, 4.5, 5.0])
    rows = TextSet(["a"] * 8, ["b"] * 8, values)
    task = make(kind="pair-regression", train=rows, validation=rows, dev=rows, classes=(), low=1.0, high=5.0)
    assert task.num_classes == 5
    assert task.class_labels(rows).tolist() == [0, 0, 1, 2, 3, 3, 4, 4]
    assert make().class_labels(ROWS).tolist() == [0, 1, 0, 1]


def test_a_task_name_given_twice_is_one_line() -> None:
    assert check_tasks([make(), make(name="u")])[1].name == "u"
    with pytest.raises(InputError, match="'t' is given twice"):
        check_tasks([make(), make(name="u"), make()])
    with pytest.raises(InputError, match="at least one"):
        check_tasks([])


def test_the_held_out_rows_are_fixed_stratified_and_apart() -> None:
    rows = TextSet([str(row) for row in range(40)], labels=torch.tensor([0, 0, 0, 1] * 10), counts={"unlabelled": 2})
    train, held = hold_out(rows, 8)
    assert torch.bincount(held.require_labels()).tolist() == [6, 2]
    assert sorted(train.first + held.first) == sorted(rows.first)
    assert (train.split, held.split) == ("train", "validation")
    assert hold_out(rows, 8)[1].first == held.first != hold_out(rows, 8, seed=1)[1].first
    scores = replace(rows, labels=torch.linspace(0, 5, 40))
    assert len(hold_out(scores, 10)[1]) == 10
    with pytest.raises(InputError, match=r"validation size is .*; give a whole number from 0 to 39"):
        hold_out(rows, 40)


def test_near_duplicates_have_one_form() -> None:
    assert normalise_text("What's  up?") == normalise_text("what’s up") == "what s up"
    assert normalise_text("ﬁne, Straße") == "fine strasse"
    assert normalise_text("C#") == "c" and normalise_text(" ?! ") == "?!"
    assert pair_keys(TextSet(["B?", "a"], ["a", "b"])) == [("a", "b"), ("a", "b")]


def test_overlap_equals_a_slow_loop() -> None:
    train = TextSet(["a", "b", "c", "d", "a"], ["b", "a", "x", "y", "z"])
    dev = TextSet(["B", "c"], ["A!", "q"])
    slow = [
        {normalise_text(t), normalise_text(u)} & {normalise_text(s) for s in dev.first + (dev.second or [])}
        for t, u in zip(train.first, train.second or [], strict=True)
    ]
    assert overlap(train, dev) == {"pairs": 2, "sentences": sum(map(bool, slow))}
    assert overlap(TextSet(["a", "b"]), TextSet(["A", "c"])) == {"pairs": 1, "sentences": 1}
