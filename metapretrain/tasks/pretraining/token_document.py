"""Token-document relation: which words of a segment are in other segments of its document, too."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from metapretrain.data.documents import Corpus
from metapretrain.tasks.pretraining.base import IGNORE
from metapretrain.tasks.pretraining.words import WordTask


class TokenDocument(WordTask):
    """Tell which words of a run are also in the rest of its document (class 1).

    Documents that are one run have no rest and are left out. Five of six words are in the rest, so the main metric is
    the mean F1 of both classes.

    Source: Sun et al. (2020, ERNIE 2.0), token-document relation prediction.
    """

    name = "token-document"
    metric = "macro_f1"

    def word_labels(self, corpus: Corpus, runs: list[tuple[int, int]]) -> NDArray[np.int64]:
        """See :class:`WordTask`."""
        labels = np.full(len(corpus.types), IGNORE, np.int64)
        run = np.searchsorted([begin for begin, _ in runs], corpus.words[:-1], "right")
        for first, last in zip(corpus.documents[:-1], corpus.documents[1:], strict=True):
            words = slice(int(corpus.sentences[first]), int(corpus.sentences[last]))
            of_word, types = run[words], corpus.types[words]
            if of_word[0] == of_word[-1]:
                continue
            # A word is elsewhere if its type is in two runs or more.
            _, places = np.unique(types, return_inverse=True)
            in_run = np.unique(np.stack([places, of_word]), axis=1)[0]
            labels[words] = np.bincount(in_run)[places] > 1
        return labels
