"""Tasks of spans in the scheduling benchmark: the best span, questions with passages, machine reading."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from metapretrain.checks import decisive
from metapretrain.data.annotated import Question, load_squad
from metapretrain.data.made import made_questions
from metapretrain.data.texts import Rows
from metapretrain.experiments.schedule.tasks import Frame, PretrainingTask, Tensors, register
from metapretrain.experiments.schedule.tasks.base import joined, tokenize_rows
from metapretrain.models.text_encoders import TextEncoder


class SpanTask(PretrainingTask):
    """Mean cross entropy of a span's first and last token; `begin`, `end` (B,), and `allowed` (B, L), bool.

    Source: Devlin et al. (2019), section 4.2.
    """

    metric = "f1"
    longest = 16  # tokens of a predicted span

    def head(self, hidden: int) -> nn.Module:
        return nn.Sequential(nn.Dropout(0.1), nn.Linear(hidden, 2))

    def logits(self, head: nn.Module, states: Tensor, batch: Tensors) -> tuple[Tensor, Tensor]:
        """Logits (B, L) of a span's first and of its last token; the lowest number where it cannot be."""
        logits = head(states).float()
        logits = logits.masked_fill(~batch["allowed"].unsqueeze(-1), torch.finfo(logits.dtype).min)
        return logits[..., 0], logits[..., 1]

    def loss_of(self, encoder: TextEncoder, head: nn.Module, states: Tensor, batch: Tensors) -> Tensor:
        begin, end = self.logits(head, states, batch)
        return (F.cross_entropy(begin, batch["begin"]) + F.cross_entropy(end, batch["end"])) / 2

    def outcome(self, encoder: TextEncoder, head: nn.Module, states: Tensor, batch: Tensors) -> Tensors:
        """The best span (B, 2) and its score, beside the true one."""
        span, score = best_spans(*self.logits(head, states, batch), self.longest)
        return {"found": span, "score": decisive(score), "true": torch.stack([batch["begin"], batch["end"]], 1)}

    def measure(self, outcomes: list[Tensors]) -> dict[str, float]:
        """Exact matches, and F1 of the tokens that both spans have, averaged over rows."""
        found, true = joined(outcomes, "found"), joined(outcomes, "true")
        same = np.minimum(found[:, 1], true[:, 1]) - np.maximum(found[:, 0], true[:, 0]) + 1
        sizes = (found[:, 1] - found[:, 0] + 1) + (true[:, 1] - true[:, 0] + 1)
        return {"f1": float((2 * same.clip(0) / sizes).mean()), "exact": float((found == true).all(1).mean())}


def best_spans(begin: Tensor, end: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    """First and last token int64 (B, 2) of the best spans of at most `longest` tokens, from logits (B, L) of both.

    Best is the highest sum of the log-probabilities of both ends; the sums (B,) are returned, too.

    Example:
        >>> best_spans(torch.tensor([[0.0, 5.0, 0.0]]), torch.tensor([[9.0, 0.0, 1.0]]), 2)[0].tolist()
        [[0, 0]]
    """
    size = begin.shape[1]
    place = torch.arange(size, device=begin.device)
    gap = place - place.unsqueeze(1)
    # log-probabilities, so that sums stay finite and windows of one question can be compared by them
    sums = begin.log_softmax(1).unsqueeze(2) + end.log_softmax(1).unsqueeze(1)
    sums = sums.masked_fill((gap < 0) | (gap >= longest), -torch.inf).flatten(1)
    score, best = sums.max(1)
    return torch.stack([best // size, best % size], 1), score


@dataclass(frozen=True)
class Window:
    """A question with a passage, or a piece of one, as :class:`SpanTask` reads it."""

    ids: NDArray[np.int64]
    types: NDArray[np.int64]
    start: int  # of the piece in the sequence
    size: int
    span: tuple[int, int]  # first and last token of the answer; (0, 0) where the piece does not hold it
    question: int = 0
    words: NDArray[np.int64] | None = None  # of each token of the piece


def span_batch(frame: Frame, windows: Sequence[Window]) -> Tensors:
    batch = frame.pad([(window.ids, window.types) for window in windows])
    place = torch.arange(batch["input_ids"].shape[1])
    start, size = (torch.tensor([[getattr(window, name)] for window in windows]) for name in ("start", "size"))
    begin, end = (torch.tensor([window.span[part] for window in windows]) for part in (0, 1))
    return batch | {"allowed": (place >= start) & (place < start + size), "begin": begin, "end": end}


class Reading(SpanTask):
    """Find the answer to a question in a passage.

    Passages that do not fit are read in windows that overlap by half. Losses are of windows that hold the whole
    answer (rows of batches), scores of the best span of all windows of a question. The main metric is SQuAD's F1 of the
    words, beside exact matches. A question has at most a third of the room.

    Source: Rajpurkar et al. (2016); Devlin et al. (2019), section 4.2.
    """

    longest = 24

    def __init__(self, texts: Mapping[str, Rows[Question]], frame: Frame, *, name: str = "squad") -> None:
        self.name, self.texts = name, dict(texts)
        self.windows = {split: _windows(part, frame) for split, part in texts.items()}
        self.answered: dict[str, list[int]] = {}
        self.order: dict[str, list[int]] = {}  # windows that hold an answer come first: they are the rows
        for split, windows in self.windows.items():
            self.order[split] = sorted(
                range(len(windows)), key=[window.span == (0, 0) for window in windows].__getitem__
            )
            self.answered[split] = [place for place in self.order[split] if windows[place].span != (0, 0)]
        super().__init__(frame, texts, self.answered)

    def make(self, split: str, rows: Sequence[int], random: np.random.Generator) -> Tensors:
        return span_batch(self.frame, self._windows(split, rows))

    def scored_rows(self, split: str) -> Sequence[int]:
        """All windows of a split's questions."""
        row = {place: row for row, place in enumerate(self.order[split])}
        return [row[place] for place in range(len(self.windows[split]))]

    def measure_rows(self, split: str, rows: Sequence[int], outcomes: list[Tensors]) -> dict[str, float]:
        """SQuAD's F1 and exact matches of the best span of all windows of a question."""
        best: dict[int, tuple[float, str]] = {}
        spans, scores, questions = joined(outcomes, "found"), joined(outcomes, "score"), self.texts[split].rows
        for window, (first, last), score in zip(self._windows(split, rows), spans, scores, strict=True):
            assert window.words is not None
            a, b = window.words[first - window.start], window.words[last - window.start]
            if window.question not in best or score > best[window.question][0]:
                best[window.question] = float(score), " ".join(questions[window.question].words[a : b + 1])
        pairs = [(found, questions[number].answer) for number, (_, found) in best.items()]
        return {
            "f1": sum(answer_f1(*pair) for pair in pairs) / len(pairs),
            "exact": sum(normalise(found) == normalise(true) for found, true in pairs) / len(pairs),
        }

    def _windows(self, split: str, rows: Sequence[int]) -> list[Window]:
        return [self.windows[split][self.order[split][row]] for row in rows]


def _windows(texts: Rows[Question], frame: Frame) -> list[Window]:
    windows = []
    coded = tokenize_rows([row.words for row in texts.rows], frame)
    for number, (row, (passage, places)) in enumerate(zip(texts.rows, coded, strict=True)):
        words = np.repeat(np.arange(len(row.words)), np.diff(places))
        answer = int(places[row.begin]), int(places[row.end + 1]) - 1
        question = frame.ids(row.question)[: frame.room(2) // 3]
        room = frame.room(2) - len(question)
        for begin in range(0, max(1, len(passage) - room // 2), max(1, room // 2)):
            piece = slice(begin, begin + room)
            ids, types, (_, start) = frame.sequence(question, passage[piece])
            held = begin <= answer[0] <= answer[1] < begin + room
            span = (answer[0] - begin + start, answer[1] - begin + start) if held else (0, 0)
            windows.append(Window(ids, types, start, len(words[piece]), span, number, words[piece]))
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


register(
    Reading,
    lambda library: load_squad(library.folder),
    data=("squad",),
    made=made_questions,
    kind="target",
    name="squad",
)
