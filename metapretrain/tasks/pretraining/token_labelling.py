"""Token labelling: the named entities of a sentence (CoNLL-2003)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from metapretrain.data.conll2003 import TAGS, Tagged
from metapretrain.data.documents import tokenize_words
from metapretrain.tasks.pretraining.base import IGNORE
from metapretrain.tasks.pretraining.forms import LabelTask
from metapretrain.tasks.pretraining.frame import Batch, Frame


class TokenLabelling(LabelTask):
    """Tag each word with what its first token says: nothing, or the beginning or inside of a kind of entity.

    The main metric is F1 of whole entities: kind, first and last word must be right. Words that do not fit, or that
    have no token, have no tag, so that figures leave them out; `lost` counts them.

    Args:
        texts: sentences of each split.
        frame: how sequences are put together.

    Attributes:
        lost: words left out, by split.
    """

    name = "conll2003"
    classes = len(TAGS)

    def __init__(self, texts: Mapping[str, Tagged], frame: Frame) -> None:
        self.rows: dict[str, list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]]] = {}
        self.lost = dict.fromkeys(texts, 0)
        for split, part in texts.items():
            ids, sizes = tokenize_words(part.words, frame.tokenizer)
            starts, first, rows = np.concatenate([[0], np.cumsum(sizes)]), 0, []
            for words, tags in zip(part.words, part.tags, strict=True):
                places = starts[first : first + len(words) + 1]
                first += len(words)
                coded, types, (begin,) = frame.sequence(ids[places[0] : places[-1]][: frame.room()])
                at = places[:-1] - places[0]
                fits = (at < frame.room()) & (places[1:] > places[:-1])
                labels = np.full(len(coded), IGNORE, np.int64)
                labels[at[fits] + begin] = np.array(tags)[fits]
                self.lost[split] += int((~fits).sum())
                rows.append((coded, types, labels))
            self.rows[split] = rows
        super().__init__(frame, texts, {split: len(rows) for split, rows in self.rows.items()})

    def make(self, split: str, rows: Sequence[int], random: np.random.Generator) -> Batch:
        """See :class:`PretrainingTask`; nothing is drawn."""
        chosen = [self.rows[split][row] for row in rows]
        batch = self.frame.pad([(ids, types) for ids, types, _ in chosen])
        labels = np.full(batch["input_ids"].shape, IGNORE, np.int64)
        for number, (_, _, row) in enumerate(chosen):
            labels[number, : len(row)] = row
        return batch | {"labels": torch.from_numpy(labels)}

    def measure(self, outcomes: list[Batch]) -> dict[str, float]:
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
