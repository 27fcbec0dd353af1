"""Machine reading: the span of a passage that answers a question."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from metapretrain.data.documents import tokenize_words
from metapretrain.data.squad import Questions
from metapretrain.models.text_encoders import TextEncoder
from metapretrain.tasks.pretraining.base import scored
from metapretrain.tasks.pretraining.forms import SpanTask, joined
from metapretrain.tasks.pretraining.frame import Batch, Frame


@dataclass(frozen=True)
class _Window:
    """A question with a piece of its passage."""

    question: int
    ids: NDArray[np.int64]
    types: NDArray[np.int64]
    start: int  # of the piece in the sequence
    words: NDArray[np.int64]  # of each token of the piece
    span: tuple[int, int]  # first and last token of the answer; (0, 0) where the piece does not hold it


class Reading(SpanTask):
    """Find the answer to a question in a passage.

    Passages that do not fit are read in windows that overlap by half. Losses are of windows that hold the whole
    answer (rows of batches); :meth:`score` reads all windows of a question and takes the best span of all. The main
    metric is SQuAD's F1 of the words, beside exact matches.

    Args:
        texts: questions of each split.
        frame: how sequences are put together; a question has at most a third of the room.
        name: of the task.

    Source: Rajpurkar et al. (2016); Devlin et al. (2019), section 4.2.
    """

    longest = 24

    def __init__(self, texts: Mapping[str, Questions], frame: Frame, *, name: str = "squad") -> None:
        self.name, self.texts = name, dict(texts)
        self.windows = {split: _windows(part, frame) for split, part in texts.items()}
        self.answered = {
            split: [row for row, window in enumerate(windows) if window.span != (0, 0)]
            for split, windows in self.windows.items()
        }
        super().__init__(frame, texts, {split: len(rows) for split, rows in self.answered.items()})

    def make(self, split: str, rows: Sequence[int], random: np.random.Generator) -> Batch:
        """See :class:`PretrainingTask`; nothing is drawn."""
        return self._batch(split, [self.answered[split][row] for row in rows])

    def score(
        self,
        encoder: TextEncoder,
        head: nn.Module,
        split: str = "test",
        *,
        batch_size: int = 64,
        rows: int | None = None,
    ) -> dict[str, float]:
        """SQuAD's F1 and exact matches of a split's questions, or of the first `rows` questions."""
        texts = self.texts[self._split(split)]
        count = len(texts.rows) if rows is None else min(rows, len(texts.rows))
        chosen = [row for row, window in enumerate(self.windows[split]) if window.question < count]
        groups = [chosen[begin : begin + batch_size] for begin in range(0, len(chosen), batch_size)]
        outcomes = scored(self, encoder, head, (self._batch(split, group) for group in groups))
        spans, scores = joined(outcomes, "found"), joined(outcomes, "score")
        best: dict[int, tuple[float, str]] = {}
        for row, (first, last), score in zip(chosen, spans, scores, strict=True):
            window = self.windows[split][row]
            words = texts.rows[window.question].words
            a, b = window.words[first - window.start], window.words[last - window.start]
            if window.question not in best or score > best[window.question][0]:
                best[window.question] = float(score), " ".join(words[a : b + 1])
        pairs = [(best.get(row, (0.0, ""))[1], texts.rows[row].answer) for row in range(count)]
        return {
            "f1": sum(answer_f1(*pair) for pair in pairs) / len(pairs),
            "exact": sum(normalise(found) == normalise(true) for found, true in pairs) / len(pairs),
        }

    def _batch(self, split: str, rows: Sequence[int]) -> Batch:
        windows = [self.windows[split][row] for row in rows]
        batch = self.frame.pad([(window.ids, window.types) for window in windows])
        place = torch.arange(batch["input_ids"].shape[1])
        start = torch.tensor([[window.start] for window in windows])
        size = torch.tensor([[len(window.words)] for window in windows])
        span = torch.tensor([window.span for window in windows])
        allowed = (place >= start) & (place < start + size)
        return batch | {"allowed": allowed, "begin": span[:, 0].clone(), "end": span[:, 1].clone()}

    def outcome(self, encoder: TextEncoder, head: nn.Module, states: Tensor, batch: Batch) -> Batch:
        """The best span (B, 2) and its score."""
        found = super().outcome(encoder, head, states, batch)
        return {"found": found["found"], "score": found["score"]}


def _windows(texts: Questions, frame: Frame) -> list[_Window]:
    windows = []
    ids, sizes = tokenize_words([row.words for row in texts.rows], frame.tokenizer)
    starts, first = np.concatenate([[0], np.cumsum(sizes)]), 0
    for number, row in enumerate(texts.rows):
        places = starts[first : first + len(row.words) + 1]
        first += len(row.words)
        passage = ids[places[0] : places[-1]]
        words = np.repeat(np.arange(len(row.words)), np.diff(places))
        answer = int(places[row.begin] - places[0]), int(places[row.end + 1] - places[0]) - 1
        question = frame.ids(row.question)[: frame.room(2) // 3]
        room = frame.room(2) - len(question)
        for begin in range(0, max(1, len(passage) - room // 2), max(1, room // 2)):
            piece = slice(begin, begin + room)
            coded, types, (_, start) = frame.sequence(question, passage[piece])
            held = begin <= answer[0] <= answer[1] < begin + room
            span = (answer[0] - begin + start, answer[1] - begin + start) if held else (0, 0)
            windows.append(_Window(number, coded, types, start, words[piece], span))
    return windows


def normalise(answer: str) -> str:
    """Lower case without punctuation, articles and more than one space, as SQuAD compares answers.

    Example:
        >>> normalise("The  Duke , of Kent")
        'duke of kent'
    """
    bare = "".join(letter for letter in answer.lower() if letter not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())


def answer_f1(found: str, true: str) -> float:
    """F1 of the words of two answers, compared as SQuAD does.

    Example:
        >>> answer_f1("the Duke", "duke of Kent")
        0.5
    """
    a, b = normalise(found).split(), normalise(true).split()
    both = sum((Counter(a) & Counter(b)).values())
    return 2 * both / (len(a) + len(b)) if both else float(a == b)
