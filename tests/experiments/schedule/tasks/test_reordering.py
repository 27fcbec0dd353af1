"""Which permutation of three sentences."""

from __future__ import annotations

import pytest

from metapretrain.data.documents import Documents
from metapretrain.errors import InputError
from metapretrain.experiments.schedule.tasks import Frame
from metapretrain.experiments.schedule.tasks.sentences import Reordering

TEXTS = {"train": Documents([[["a"], ["b"], ["c"], ["d"]], [["e"], ["f"]], [["g"], ["h"], ["i"]]])}


def test_labels_undo_the_order(frame: Frame) -> None:
    task = Reordering(TEXTS, frame)
    assert task.classes == 6 and task.sizes == {"train": 3}  # abc, bcd, ghi; two sentences are too few
    seen = set()
    for epoch in range(12):
        batch = task.make("train", [0, 1, 2], task.random("train", epoch))
        for text, ids, label in zip(("abc", "bcd", "ghi"), batch["input_ids"], batch["labels"], strict=True):
            shown = frame.tokenizer.decode(ids, skip_special_tokens=True).replace(" ", "")
            assert shown == "".join(text[part] for part in task.orders[label])
            seen.add(int(label))
    assert seen == set(range(6))


def test_long_sentences_are_cut_not_lost(frame: Frame) -> None:
    task = Reordering({"train": Documents([[["a"] * 90, ["b"] * 90, ["c"]]])}, frame)
    ids = task.make("train", [0], task.random("train", 0))["input_ids"][0]
    assert len(ids) == 64 and {frame.ids(letter)[0] for letter in "abc"} <= set(ids.tolist())


def test_parts_are_two_to_four(frame: Frame) -> None:
    with pytest.raises(InputError, match="parts must be 2, 3 or 4, got 5"):
        Reordering(TEXTS, frame, parts=5)
    with pytest.raises(InputError, match="no training rows"):
        Reordering({"train": Documents([[["a"]]])}, frame)
