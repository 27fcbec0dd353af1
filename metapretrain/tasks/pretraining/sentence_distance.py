"""Sentence distance: next to each other, in one document, or in two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from metapretrain.data.documents import Documents
from metapretrain.errors import InputError
from metapretrain.tasks.pretraining.forms import ClassTask
from metapretrain.tasks.pretraining.frame import Batch, Frame


class SentenceDistance(ClassTask):
    """Tell of two sentences whether the second follows the first (0), is elsewhere in its document (1), or is of
    another document (2).

    A row is a first sentence; each batch draws the class and the second sentence. The last sentence of a document,
    and documents of fewer than four, are no rows.

    Args:
        texts: documents of each split.
        frame: how sequences are put together.

    Raises:
        InputError: a split with fewer than two documents.

    Source: Sun et al. (2020, ERNIE 2.0), sentence distance.
    """

    name = "sentence-distance"
    classes = 3

    def __init__(self, texts: Mapping[str, Documents], frame: Frame) -> None:
        few = [split for split, part in texts.items() if len(part) < 2]
        if few:
            raise InputError(f"{self.name} needs two documents or more, {few[0]} has {len(texts[few[0]])}")
        self.corpora = {split: frame.corpus(part) for split, part in texts.items()}
        self.rows: dict[str, list[tuple[int, int]]] = {}  # sentence, document
        for split, corpus in self.corpora.items():
            bounds = zip(corpus.documents[:-1].tolist(), corpus.documents[1:].tolist(), strict=True)
            self.rows[split] = [
                (sentence, number)
                for number, (first, last) in enumerate(bounds)
                if last - first >= 4
                for sentence in range(first, last - 1)
            ]
        super().__init__(frame, texts, {split: len(rows) for split, rows in self.rows.items()})

    def make(self, split: str, rows: Sequence[int], random: np.random.Generator) -> Batch:
        """See :class:`PretrainingTask`."""
        corpus, labels = self.corpora[split], random.integers(3, size=len(rows))
        sequences = []
        for row, label in zip(rows, labels, strict=True):
            sentence, number = self.rows[split][row]
            first, last = int(corpus.documents[number]), int(corpus.documents[number + 1])
            if label == 0:
                other = sentence + 1
            elif label == 1:
                far = [place for place in range(first, last) if abs(place - sentence) > 1]
                other = far[int(random.integers(len(far)))]
            else:
                # Skipping the own document keeps the draw uniform over all other sentences.
                other = int(random.integers(int(corpus.documents[-1]) - (last - first)))
                other += (last - first) * (other >= first)
            parts = (corpus.tokens(place, place + 1) for place in (sentence, other))
            sequences.append(self.frame.sequence(*self.frame.cut(*parts))[:2])
        return self.frame.pad(sequences) | {"labels": torch.from_numpy(labels)}
