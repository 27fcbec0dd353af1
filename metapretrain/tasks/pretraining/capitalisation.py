"""Capitalisation prediction: which words had a capital letter."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from metapretrain.data.documents import Corpus
from metapretrain.tasks.pretraining.words import WordTask


class Capitalisation(WordTask):
    """Tell which words of a text in lower case began with a capital letter (class 1).

    Texts must have capitals: not the Penn Treebank. The main metric is F1 of the capitalised words.

    Source: Sun et al. (2020, ERNIE 2.0), capitalization prediction.
    """

    name = "capitalisation"

    def word_labels(self, corpus: Corpus, runs: list[tuple[int, int]]) -> NDArray[np.int64]:
        """See :class:`WordTask`."""
        return corpus.capital.astype(np.int64)
