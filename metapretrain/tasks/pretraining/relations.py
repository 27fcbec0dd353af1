"""Relation extraction: which relation, if any, an ordered pair of a sentence's entities has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

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
    """Two entities of a sentence, each from a token to before another."""

    sentence: int
    head: tuple[int, int]
    tail: tuple[int, int]
    label: int


class RelationExtraction(ClassTask):
    """Classify ordered pairs of the entities that a sentence is marked with: a relation, or none (class 0).

    The head sees the mean states of both entities and of the sentence. The main metric is micro F1 of the relations;
    entities are given, so figures are not those of extraction from plain sentences. Pairs with an entity that does
    not fit are left out and counted in `lost`.

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
        self.sequences: dict[str, list[tuple[Any, Any]]] = {}
        self.lost = dict.fromkeys(texts, 0)
        for split, part in texts.items():
            ids, sizes = tokenize_words([row.words for row in part.rows], frame.tokenizer)
            starts, first = np.concatenate([[0], np.cumsum(sizes)]), 0
            self.rows[split], self.sequences[split] = [], []
            for row in part.rows:
                places = starts[first : first + len(row.words) + 1]
                first += len(row.words)
                kept, types, (begin,) = frame.sequence(ids[places[0] : places[-1]][: frame.room()])
                pairs = _pairs(row, len(self.sequences[split]), places - places[0] + begin)
                fit = [pair for pair in pairs if max(pair.head[1], pair.tail[1]) <= begin + frame.room()]
                self.lost[split] += len(pairs) - len(fit)
                self.rows[split] += fit
                self.sequences[split].append((kept, types))
        super().__init__(frame, texts, {split: len(rows) for split, rows in self.rows.items()})

    def head(self, hidden: int) -> nn.Module:
        """See :class:`PretrainingTask`."""
        return PooledHead(3 * hidden, self.classes)

    def make(self, split: str, rows: Sequence[int], random: np.random.Generator) -> Batch:
        """See :class:`PretrainingTask`; `pair` (B, 2, L) marks the two entities' tokens."""
        chosen = [self.rows[split][row] for row in rows]
        batch = self.frame.pad([self.sequences[split][pair.sentence] for pair in chosen])
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


def _pairs(row: RelationRow, sentence: int, places: NDArray[np.int64]) -> list[_Pair]:
    """The ordered pairs of a sentence's entities; `places` (W + 1,) is where each word begins in the sequence."""
    spans = [(int(places[first]), int(places[last])) for _, first, last in row.entities]
    pairs = []
    for head, tail in permutations(range(len(spans)), 2):
        relation = row.relations.get((head, tail))
        label = 0 if relation is None else RELATIONS.index(relation) + 1
        if spans[head][0] < spans[head][1] and spans[tail][0] < spans[tail][1]:  # not words without a token
            pairs.append(_Pair(sentence, spans[head], spans[tail], label))
    return pairs
