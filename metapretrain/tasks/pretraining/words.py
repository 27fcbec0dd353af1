"""A class of each word of running text: what capitalisation and token-document relation have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from metapretrain.data.documents import Corpus, Documents
from metapretrain.tasks.pretraining.base import IGNORE
from metapretrain.tasks.pretraining.forms import LabelTask
from metapretrain.tasks.pretraining.frame import Batch, Frame
from metapretrain.tasks.pretraining.masked_lm import token_runs


class WordTask(LabelTask):
    """Two classes of words of running text in lower case; rows are runs of a document's tokens.

    Args:
        texts: documents of each split.
        frame: how sequences are put together.
    """

    classes = 2

    def __init__(self, texts: Mapping[str, Documents], frame: Frame) -> None:
        self.corpora = {split: frame.corpus(part, lower=True) for split, part in texts.items()}
        self.rows: dict[str, list[tuple[int, int]]] = {}
        self.labels: dict[str, NDArray[np.int64]] = {}
        for split, corpus in self.corpora.items():
            runs = token_runs(corpus, frame.room())
            labels = np.where(corpus.letters, self.word_labels(corpus, runs), IGNORE)
            at_token = np.full(len(corpus.ids), IGNORE, np.int64)
            shown = corpus.words[1:] > corpus.words[:-1]
            at_token[corpus.words[:-1][shown]] = labels[shown]
            self.labels[split] = at_token
            self.rows[split] = [run for run in runs if (at_token[slice(*run)] != IGNORE).any()]
        super().__init__(frame, texts, {split: len(rows) for split, rows in self.rows.items()})

    @abstractmethod
    def word_labels(self, corpus: Corpus, runs: list[tuple[int, int]]) -> NDArray[np.int64]:
        """The class (W,) of each word, or IGNORE; words that do not begin with a letter count for nothing."""

    def make(self, split: str, rows: Sequence[int], random: np.random.Generator) -> Batch:
        """See :class:`PretrainingTask`; nothing is drawn."""
        corpus, runs = self.corpora[split], [self.rows[split][row] for row in rows]
        framed = [self.frame.sequence(corpus.ids[begin:end]) for begin, end in runs]
        batch = self.frame.pad([(ids, types) for ids, types, _ in framed])
        labels = np.full(batch["input_ids"].shape, IGNORE, np.int64)
        for number, ((begin, end), (_, _, (start,))) in enumerate(zip(runs, framed, strict=True)):
            labels[number, start : start + end - begin] = self.labels[split][begin:end]
        return batch | {"labels": torch.from_numpy(labels)}
