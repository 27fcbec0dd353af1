"""Tasks of entities in the scheduling benchmark: relations of two, and a tag of each word."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from metapretrain.checks import decisive
from metapretrain.data.annotated import RELATIONS, TAGS, RelationRow, TaggedRow, load_conll04, load_conll2003
from metapretrain.data.made import made_relations
from metapretrain.data.texts import Rows
from metapretrain.evaluation.metrics import f1
from metapretrain.experiments.schedule.tasks import Frame, Tensors, register
from metapretrain.experiments.schedule.tasks.base import (
    IGNORE,
    ClassTask,
    Example,
    PooledHead,
    PretrainingTask,
    joined,
    tokenize_rows,
)
from metapretrain.models.text_encoders import TextEncoder


class LabelTask(PretrainingTask):
    """Cross entropy of a class of each word, from its first token; the batch has `labels` (B, L), IGNORE elsewhere."""

    metric = "f1"
    classes: int

    @abstractmethod
    def example(self, split: str, row: int) -> Example:
        """Ids, types and labels of a row, each (L,)."""

    def make(self, split: str, rows: Sequence[int], random: np.random.Generator) -> Tensors:
        examples = [self.example(split, row) for row in rows]
        batch = self.frame.pad([(ids, types) for ids, types, _ in examples])
        labels = np.full(batch["input_ids"].shape, IGNORE, np.int64)
        for number, (_, _, row) in enumerate(examples):
            labels[number, : len(row)] = row
        return batch | {"labels": torch.from_numpy(labels)}

    def head(self, hidden: int) -> nn.Module:
        return nn.Sequential(nn.Dropout(0.1), nn.Linear(hidden, self.classes))

    def loss_of(self, encoder: TextEncoder, head: nn.Module, states: Tensor, batch: Tensors) -> Tensor:
        """The mean over words; 0 for a batch without any label."""
        logits, labels = head(states).float().flatten(0, 1), batch["labels"].flatten()
        total = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")
        return total / (labels != IGNORE).sum().clamp(min=1)

    def outcome(self, encoder: TextEncoder, head: nn.Module, states: Tensor, batch: Tensors) -> Tensors:
        """Predicted and true classes of the words that have one, and the row of each."""
        row, place = (batch["labels"] != IGNORE).nonzero(as_tuple=True)
        return {
            "found": decisive(head(states)[row, place]).argmax(1),
            "labels": batch["labels"][row, place],
            "row": row,
        }

    def measure(self, outcomes: list[Tensors]) -> dict[str, float]:
        """F1 of class 1, its mean over all classes, and accuracy."""
        found, labels = joined(outcomes, "found"), joined(outcomes, "labels")
        each = [f1(labels == label, found == label) for label in range(self.classes)]
        return {"f1": each[1], "macro_f1": sum(each) / len(each), "accuracy": float((found == labels).mean())}


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
    pair has the piece that ends with it; pairs too far apart for any piece are left out and counted in `lost` by split.
    """

    name = "conll04"
    metric = "f1"
    classes = len(RELATIONS) + 1

    def __init__(self, texts: Mapping[str, Rows[RelationRow]], frame: Frame) -> None:
        self.rows: dict[str, list[_Pair]] = {split: [] for split in texts}
        self.lost = dict.fromkeys(texts, 0)
        for split, part in texts.items():
            coded = tokenize_rows([row.words for row in part.rows], frame)
            for row, (ids, places) in zip(part.rows, coded, strict=True):
                pairs = _pairs(row, ids, places, frame)
                self.rows[split] += pairs
                self.lost[split] += len(row.entities) * (len(row.entities) - 1) - len(pairs)
        super().__init__(frame, texts, self.rows)

    def head(self, hidden: int) -> nn.Module:
        return PooledHead(3 * hidden, self.classes)

    def make(self, split: str, rows: Sequence[int], random: np.random.Generator) -> Tensors:
        """The batch of these rows; `pair` (B, 2, L) marks the two entities' tokens."""
        chosen = [self.rows[split][row] for row in rows]
        batch = self.frame.pad([pair.sequence for pair in chosen])
        spans = torch.tensor([[pair.head, pair.tail] for pair in chosen]).unsqueeze(-1)
        place = torch.arange(batch["input_ids"].shape[1])
        marks = (place >= spans[:, :, 0]) & (place < spans[:, :, 1])
        return batch | {"pair": marks.float(), "labels": torch.tensor([pair.label for pair in chosen])}

    def logits(self, encoder: TextEncoder, head: nn.Module, states: Tensor, batch: Tensors) -> Tensor:
        share = batch["pair"] / batch["pair"].sum(-1, keepdim=True)
        entities = (share @ states.float()).flatten(1)
        logits: Tensor = head(torch.cat([entities, encoder.pool(states, batch["attention_mask"])], 1))
        return logits.float()

    def measure(self, outcomes: list[Tensors]) -> dict[str, float]:
        """Micro F1 of the relations, and accuracy with `none` as a class."""
        found, labels = joined(outcomes, "found"), joined(outcomes, "labels")
        one_hot = np.eye(self.classes, dtype=bool)[:, 1:]
        return {"f1": f1(one_hot[labels].ravel(), one_hot[found].ravel()), "accuracy": float((found == labels).mean())}


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


class TokenLabelling(LabelTask):
    """Tag each word with what its first token says: nothing, or the beginning or inside of a kind of entity.

    The main metric is F1 of whole entities: kind, first and last word must be right. Words that do not fit, or that
    have no token, have no tag, so that figures leave them out; `lost` counts them by split.
    """

    name = "conll2003"
    classes = len(TAGS)

    def __init__(self, texts: Mapping[str, Rows[TaggedRow]], frame: Frame) -> None:
        self.rows: dict[str, list[Example]] = {split: [] for split in texts}
        self.lost = dict.fromkeys(texts, 0)
        for split, part in texts.items():
            for (ids, places), sentence in zip(
                tokenize_rows([sentence.words for sentence in part.rows], frame), part.rows, strict=True
            ):
                coded, types, (begin,) = frame.sequence(ids[: frame.room()])
                fits = (places[:-1] < frame.room()) & (places[1:] > places[:-1])
                labels = np.full(len(coded), IGNORE, np.int64)
                labels[places[:-1][fits] + begin] = np.array(sentence.tags)[fits]
                self.lost[split] += int((~fits).sum())
                self.rows[split].append((coded, types, labels))
        super().__init__(frame, texts, self.rows)

    def example(self, split: str, row: int) -> Example:
        return self.rows[split][row]

    def measure(self, outcomes: list[Tensors]) -> dict[str, float]:
        """F1 of whole entities, and the share of words with the right tag."""
        found: set[tuple[int, ...]] = set()
        true: set[tuple[int, ...]] = set()
        right = words = offset = 0
        for outcome in outcomes:
            right += int((outcome["found"] == outcome["labels"]).sum())
            words += len(outcome["labels"])
            for row in outcome["row"].unique().tolist():
                here = outcome["row"] == row
                for tags, spans in ((outcome["found"], found), (outcome["labels"], true)):
                    spans.update((offset + row, *span) for span in entity_spans(tags[here].tolist()))
            offset += 1 + max(outcome["row"].tolist(), default=0)
        total = len(found) + len(true)
        return {"f1": 2 * len(found & true) / total if total else 0.0, "accuracy": right / words if words else 0.0}


def entity_spans(tags: Sequence[int]) -> list[tuple[int, int, int]]:
    """Entities (kind, first word, word after the last) of tags; an I after another kind begins one, as in conlleval.

    Example:
        >>> entity_spans([TAGS.index(tag) for tag in ("B-PER", "I-PER", "O", "I-LOC", "B-LOC")])
        [(0, 0, 2), (2, 3, 4), (2, 4, 5)]
    """
    spans: list[tuple[int, int, int]] = []
    open_kind, begin = None, 0
    for place, tag in enumerate([*tags, 0]):
        kind = None if tag == 0 else (tag - 1) // 2
        if open_kind is not None and (kind != open_kind or tag % 2 == 1):  # odd: B
            spans.append((open_kind, begin, place))
            open_kind = None
        if kind is not None and open_kind is None:
            open_kind, begin = kind, place
    return spans


register(
    RelationExtraction,
    lambda library: load_conll04(library.folder),
    data=("conll04",),
    made=made_relations,
    kind="target",
)
register(TokenLabelling, lambda library: load_conll2003(library.folder), data=("conll2003",), kind="target")
