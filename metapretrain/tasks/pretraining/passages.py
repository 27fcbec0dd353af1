"""Questions made from running text: what span selection and cloze question answering have in common."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from metapretrain.data.documents import Corpus
from metapretrain.tasks.pretraining.frame import Batch, Frame, Ids

BEFORE = 3  # at most so many sentences before the one with the answer begin a passage


def cut_passage(
    corpus: Corpus, answer: tuple[int, int], lowest: int, highest: int, room: int, random: np.random.Generator
) -> tuple[NDArray[np.int32], int, int]:
    """A run of tokens that holds an answer, from the beginning of a sentence where that fits.

    Args:
        corpus: where it is from.
        answer: first word, and word after the last.
        lowest: first sentence that the passage may have.
        highest: sentence after the last that it may have.
        room: tokens of the passage at most.
        random: draws how many sentences stand before the answer's.

    Returns:
        token ids (L,), and the answer's first and last token in them.
    """
    first, last = int(corpus.words[answer[0]]), int(corpus.words[answer[1]])
    sentence = int(np.searchsorted(corpus.sentences, answer[0], "right")) - 1
    begin = _begin(corpus, max(lowest, sentence - int(random.integers(BEFORE + 1))))
    if last - begin > room:
        begin = _begin(corpus, sentence)
    begin = max(begin, last - room)
    end = min(begin + room, _begin(corpus, highest))
    last = max(first + 1, min(last, end))
    return corpus.ids[begin:end], first - begin, last - 1 - begin


def span_batch(frame: Frame, rows: Sequence[tuple[Ids, NDArray[np.int32], int, int]]) -> Batch:
    """A batch of (question, passage, first and last token of the answer in it) for :class:`SpanTask`."""
    framed = [frame.sequence(question, passage) for question, passage, _, _ in rows]
    batch = frame.pad([(ids, types) for ids, types, _ in framed])
    place = torch.arange(batch["input_ids"].shape[1])
    start = torch.tensor([starts[1] for _, _, starts in framed])
    size = torch.tensor([len(passage) for _, passage, _, _ in rows])
    allowed = (place >= start[:, None]) & (place < (start + size)[:, None])
    begin, end = (torch.tensor([row[part] for row in rows]) + start for part in (2, 3))
    return batch | {"allowed": allowed, "begin": begin, "end": end}


def word_tokens(corpus: Corpus, words: Sequence[int]) -> list[int]:
    """Token ids of some words, in the order given."""
    return [int(i) for word in words for i in corpus.ids[corpus.words[word] : corpus.words[word + 1]]]


def _begin(corpus: Corpus, sentence: int) -> int:
    return int(corpus.words[corpus.sentences[sentence]])
