"""Tags of words and F1 of whole entities."""

from __future__ import annotations

import pytest
import torch
from entity_tasks import TokenLabelling, entity_spans

from metapretrain.data.annotated import TAGS, TaggedRow, begin_tags
from metapretrain.data.texts import Rows
from metapretrain.experiments.schedule.tasks import Frame


def tags(*names: str) -> list[int]:
    return [TAGS.index(name) for name in names]


ROWS = Rows(
    [TaggedRow(["Anna", "Brown", "left", "Rome"], tags("B-PER", "I-PER", "O", "B-LOC")), TaggedRow(["Rain"], tags("O"))]
)


def test_first_tokens_carry_the_tags(frame: Frame) -> None:
    task = TokenLabelling({"train": ROWS}, frame)
    batch = task.make("train", [0, 1], task.random("train", 0))
    kept = batch["labels"] != -100
    assert batch["labels"][kept].tolist() == tags("B-PER", "I-PER", "O", "B-LOC", "O")
    shown = [frame.tokenizer.decode([int(token)]) for token in batch["input_ids"][kept]]
    assert shown == ["an", "br", "le", "ro", "ra"]


def test_words_that_do_not_fit_are_counted(frame: Frame) -> None:
    task = TokenLabelling({"train": Rows([TaggedRow(["word"] * 40, [0] * 40)])}, frame)
    assert task.lost == {"train": 40 - 31}  # room for 62 tokens, two a word
    assert (task.make("train", [0], task.random("train", 0))["labels"] != -100).sum() == 31


def test_entities_must_be_whole(frame: Frame) -> None:
    task = TokenLabelling({"train": ROWS}, frame)
    true = tags("B-PER", "I-PER", "O", "B-LOC", "B-LOC")
    found = tags("B-PER", "O", "O", "B-LOC", "B-LOC")
    row = torch.tensor([0, 0, 0, 0, 1])
    outcome = {"found": torch.tensor(found), "labels": torch.tensor(true), "row": row}
    assert task.measure([outcome, outcome]) == pytest.approx({"f1": 2 / 3, "accuracy": 0.8})
    right, nothing = {**outcome, "found": outcome["labels"]}, {**outcome, "found": torch.zeros_like(row)}
    assert task.measure([right, nothing])["f1"] == pytest.approx(2 * 3 / (3 + 6))  # rows of two batches are not one


def test_tags_of_iob1_and_back_to_spans() -> None:
    given = ["I-PER", "B-PER", "I-PER", "O", "I-LOC", "I-MISC"]
    numbers = tags(*begin_tags(given))
    assert entity_spans(numbers) == [(0, 0, 1), (0, 1, 3), (2, 4, 5), (3, 5, 6)]
