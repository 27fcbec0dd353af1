"""Sentence reordering: which permutation of consecutive sentences is this."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import permutations

import numpy as np
import torch

from metapretrain.data.documents import Documents
from metapretrain.errors import InputError
from metapretrain.tasks.pretraining.forms import ClassTask
from metapretrain.tasks.pretraining.frame import Batch, Frame


class Reordering(ClassTask):
    """Tell in which order `parts` consecutive sentences of a document were put, one of parts! classes.

    Every run of `parts` sentences of a document is a row; its order is drawn anew for each batch. ERNIE 2.0 cuts
    paragraphs into 1..m segments and has a class for each permutation of each number; here the number is fixed, since
    the separators between the segments would show it.

    Args:
        texts: documents of each split.
        frame: how sequences are put together; sentences that do not fit are cut, the longest first.
        parts: sentences of a row, 2..4.

    Raises:
        InputError: `parts` out of 2..4, or no document with as many sentences.

    Source: Sun et al. (2020, ERNIE 2.0), sentence reordering.
    """

    name = "reordering"

    def __init__(self, texts: Mapping[str, Documents], frame: Frame, *, parts: int = 3) -> None:
        if parts not in (2, 3, 4):
            raise InputError(f"parts must be 2, 3 or 4, got {parts!r}")
        self.parts, self.orders = parts, list(permutations(range(parts)))
        self.classes = len(self.orders)
        self.corpora = {split: frame.corpus(part) for split, part in texts.items()}
        self.rows = {
            split: np.concatenate(
                [
                    np.arange(first, last - parts + 1)
                    for first, last in zip(corpus.documents[:-1], corpus.documents[1:], strict=True)
                ]
            )
            for split, corpus in self.corpora.items()
        }
        super().__init__(frame, texts, {split: len(rows) for split, rows in self.rows.items()})

    def make(self, split: str, rows: Sequence[int], random: np.random.Generator) -> Batch:
        """See :class:`PretrainingTask`."""
        corpus, labels = self.corpora[split], random.integers(self.classes, size=len(rows))
        sequences = []
        for row, label in zip(rows, labels, strict=True):
            first = int(self.rows[split][row])
            sentences = [corpus.tokens(first + part, first + part + 1) for part in self.orders[label]]
            ids, types, _ = self.frame.sequence(*self.frame.cut(*sentences))
            sequences.append((ids, types))
        return self.frame.pad(sequences) | {"labels": torch.from_numpy(labels)}
