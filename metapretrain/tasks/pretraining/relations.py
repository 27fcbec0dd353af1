"""Relation extraction: which relation, if any, an ordered pair of a sentence's entities has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from metapretrain.data.conll04 import RELATIONS, RelationRow, Relations
from metapretrain.data.documents import tokenize_words
from metapretrain.models.text_encoders import TextEncoder
from metapretrain.tasks.pretraining.forms import ClassTask, PooledHead, f1, joined
from metapretrain.tasks.pretraining.frame import Batch, Frame


@dataclass(frozen=True)
class _Pair:
    """A sequence, two entities of it, each from a token to before another, and their class."""

    sequence: tuple[NDArray[np.int64], NDArray[np.int64]]
    head: tuple[int, int]
    tail: tuple[int, int]
    label: int


class RelationExtraction(ClassTask):
    """Classify ordered pairs of the entities that a sentence is marked with: a relation, or none (class 0).

    The head sees the mean states of both entities and of the sentence. The main metric is micro F1 of the relations;
    entities are given, so figures are not those of extraction from plain sentences. Of sentences that do not fit, a
    pair has the piece that ends with it; pairs too far apart for any piece are left out and counted in `lost`.

    Args:
        texts: sentences of each split.
        frame: how sequences are put together.

    Attributes:
        lost: pairs left out, by split.
    """

    name = "conll04"
    metric = "f1"
    classes = len(RELATIONS) + 1

    def __init__(self, texts: Mapping[str, Relations], frame: Frame) -> None:
        self.rows: dict[str, list[_Pair]] = {}
        self.lost = dict.fromkeys(texts, 0)
        for split, part in texts.items():
            ids, sizes = tokenize_words([row.words for row in part.rows], frame.tokenizer)
            starts, first = np.concatenate([[0], np.cumsum(sizes)]), 0
            self.rows[split] = []
            for row in part.rows:
                places = starts[first : first + len(row.words) + 1]
                first += len(row.words)
                pairs = _pairs(row, ids[places[0] : places[-1]], places - places[0], frame)
                self.rows[split] += pairs
                self.lost[split] += len(row.entities) * (len(row.entities) - 1) - len(pairs)
        super().__init__(frame, texts, {split: len(rows) for split, rows in self.rows.items()})

    def head(self, hidden: int) -> nn.Module:
        """See :class:`PretrainingTask`."""
        return PooledHead(3 * hidden, self.classes)

    def make(self, split: str, rows: Sequence[int], random: np.random.Generator) -> Batch:
        """See :class:`PretrainingTask`; `pair` (B, 2, L) marks the two entities' tokens."""
        chosen = [self.rows[split][row] for row in rows]
        batch = self.frame.pad([pair.sequence for pair in chosen])
        spans = torch.tensor([[pair.head, pair.tail] for pair in chosen]).unsqueeze(-1)
        place = torch.arange(batch["input_ids"].shape[1])
        marks = (place >= spans[:, :, 0]) & (place < spans[:, :, 1])
        return batch | {"pair": marks.float(), "labels": torch.tensor([pair.label for pair in chosen])}

    def logits(self, encoder: TextEncoder, head: nn.Module, states: Tensor, batch: Batch) -> Tensor:
        """Logits (B, C)."""
        share = batch["pair"] / batch["pair"].sum(-1, keepdim=True)
        entities = (share @ states.float()).flatten(1)
        logits: Tensor = head(torch.cat([entities, encoder.pool(states, batch["attention_mask"])], 1))
        return logits.float()

    def measure(self, outcomes: list[Batch]) -> dict[str, float]:
        """Micro F1 of the relations, and accuracy with `none` as a class."""
        found, labels = joined(outcomes, "found"), joined(outcomes, "labels")
        one_hot = np.eye(self.classes, dtype=bool)[:, 1:]
        return {"f1": f1(one_hot[found], one_hot[labels]), "accuracy": float((found == labels).mean())}


def _pairs(row: RelationRow, ids: NDArray[np.int32], places: NDArray[np.int64], frame: Frame) -> list[_Pair]:
    """The ordered pairs of a sentence's entities; `places` (W + 1,) is where each word begins in `ids`."""
    spans = [(int(places[first]), int(places[last])) for _, first, last in row.entities]
    pieces: dict[int, tuple[NDArray[np.int64], NDArray[np.int64], int]] = {}
    pairs = []
    for head, tail in permutations(range(len(spans)), 2):
        begin = max(0, max(spans[head][1], spans[tail][1]) - frame.room())
        kept = begin <= min(spans[head][0], spans[tail][0])
        if not kept or spans[head][0] == spans[head][1] or spans[tail][0] == spans[tail][1]:  # words without a token
            continue
        if begin not in pieces:
            sequence, types, (start,) = frame.sequence(ids[begin : begin + frame.room()])
            pieces[begin] = sequence, types, start - begin
        sequence, types, shift = pieces[begin]
        one, other = ((first + shift, last + shift) for first, last in (spans[head], spans[tail]))
        relation = row.relations.get((head, tail))
        label = 0 if relation is None else RELATIONS.index(relation) + 1
        pairs.append(_Pair((sequence, types), one, other, label))
    return pairs
