"""Tasks of whole sentences: classes, order, distance, responses, relations."""

from collections.abc import Mapping, Sequence
from itertools import pairwise, permutations

import numpy as np
import torch
from numpy.typing import NDArray

from metapretrain.data.annotated import Dialogue
from metapretrain.data.documents import Corpus, Documents
from metapretrain.data.texts import Rows, TextSet
from metapretrain.errors import InputError
from metapretrain.evaluation.metrics import f1
from metapretrain.experiments.schedule.tasks.base import ChoiceTask, ClassTask, CorpusTask, Frame, Tensors, joined

MAIN = {"cola": "matthews"}  # other sets: accuracy


class Sentences(ClassTask):
    """Tell the class of a sentence, or of a pair joined by the separator.

    The metrics are accuracy, F1 of class 1 and Matthews' correlation; the main one is accuracy, for CoLA the
    correlation. What does not fit is cut, the longer sentence first. Labels of other classes are an InputError.
    """

    def __init__(self, texts: Mapping[str, TextSet], frame: Frame, *, name: str, classes: int = 2) -> None:
        self.name, self.classes, self.metric = name, classes, MAIN.get(name, "accuracy")
        self.labels = {split: part.require_labels() for split, part in texts.items()}
        self.rows = {}
        for split, part in texts.items():
            labels = self.labels[split]
            if len(part) and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
                raise InputError(f"{name} {split}: labels must be in 0..{classes - 1}")
            columns = [part.first] if part.second is None else [part.first, part.second]
            coded = [frame.all_ids(column) for column in columns]
            self.rows[split] = [frame.fitted(*row) for row in zip(*coded, strict=True)]
        super().__init__(frame, texts, texts)

    def make(self, split: str, rows: Sequence[int], random: np.random.Generator) -> Tensors:
        batch = self.frame.pad([self.rows[split][row] for row in rows])
        return batch | {"labels": self.labels[split][list(rows)]}

    def measure(self, outcomes: list[Tensors]) -> dict[str, float]:
        found, labels = joined(outcomes, "found"), joined(outcomes, "labels")
        scores = {"accuracy": float((found == labels).mean()), "f1": f1(labels == 1, found == 1)}
        return scores | {"matthews": matthews(found, labels)}


def matthews(found: np.ndarray, true: np.ndarray) -> float:
    """Matthews' correlation of classes (N,) and (N,); 0 where either is all one class."""
    classes = max(int(found.max()), int(true.max())) + 1
    a, b = np.eye(classes)[found], np.eye(classes)[true]
    a, b = a - a.mean(0), b - b.mean(0)
    spread = float(np.sqrt((a * a).sum() * (b * b).sum()))
    return float((a * b).sum()) / spread if spread else 0.0


class Reordering(CorpusTask, ClassTask):
    """Tell in which order `parts` consecutive sentences of a document were put, one of parts! classes.

    Every run of `parts` (2..4) sentences of a document is a row; its order is drawn anew for each batch. Sentences that
    do not fit are cut, the longest first. Source: Sun et al. (2020, ERNIE 2.0), sentence reordering, but of a fixed
    number of segments, which the separators would show.
    """

    name = "reordering"

    def __init__(self, texts: Mapping[str, Documents], frame: Frame, *, parts: int = 3) -> None:
        if parts not in (2, 3, 4):
            raise InputError(f"parts must be 2, 3 or 4, got {parts!r}")
        self.parts, self.orders = parts, list(permutations(range(parts)))
        self.classes = len(self.orders)

        def rows(corpus: Corpus) -> NDArray[np.int64]:
            return np.concatenate([np.arange(first, last - parts + 1) for first, last in pairwise(corpus.documents)])

        super().__init__(texts, frame, rows)

    def make(self, split: str, rows: Sequence[int], random: np.random.Generator) -> Tensors:
        corpus, labels = self.corpora[split], random.integers(self.classes, size=len(rows))
        sequences = []
        for row, label in zip(rows, labels, strict=True):
            first = int(self.rows[split][row])
            sentences = [corpus.tokens(first + part, first + part + 1) for part in self.orders[label]]
            sequences.append(self.frame.fitted(*sentences))
        return self.frame.pad(sequences) | {"labels": torch.from_numpy(labels)}


class ResponseSelection(ChoiceTask):
    """Choose the right one of C responses, given the turns before.

    A row is a dialogue. Each batch draws one of its right responses and its place among the C; wrong ones are the
    dialogue's own, drawn, and right responses of other dialogues where it has too few. Of a long context the last
    tokens are kept, which are next to the response; a response has at most half of the room. COPA has this form, too.
    `choices` (C) below 2, or a split with fewer than C dialogues, is an InputError.
    """

    def __init__(
        self, texts: Mapping[str, Rows[Dialogue]], frame: Frame, *, choices: int = 4, name: str = "response-selection"
    ) -> None:
        small = [split for split, part in texts.items() if 0 < len(part) < choices]
        if choices < 2 or small:
            where = f", and {small[0]} has {len(texts[small[0]])} dialogues" if small else ""
            raise InputError(f"choices must be at least 2 and at most the dialogues of a split, got {choices}{where}")
        self.name, self.choices, self.texts = name, choices, dict(texts)
        dialogues = [row for part in texts.values() for row in part.rows]
        unlike = list(dict.fromkeys(text for row in dialogues for text in (*row.context, *row.right, *row.wrong)))
        self._ids = dict(zip(unlike, frame.all_ids(unlike), strict=True))
        super().__init__(frame, texts, texts)

    def make(self, split: str, rows: Sequence[int], random: np.random.Generator) -> Tensors:
        texts, sequences = self.texts[split], []
        labels = random.integers(self.choices, size=len(rows))
        for row, label in zip(rows, labels, strict=True):
            dialogue = texts.rows[row]
            own = random.permutation(len(dialogue.wrong))[: self.choices - 1]
            wrong = [dialogue.wrong[place] for place in own]
            others = random.choice(len(texts), self.choices, replace=False)
            more = [_any(texts.rows[other].right, random) for other in others if other != row]
            shown = (wrong + more)[: self.choices - 1]
            shown.insert(int(label), _any(dialogue.right, random))
            context = [token for turn in dialogue.context for token in self._ids[turn]]
            for response in shown:
                answer = self._ids[response][: self.frame.room(2) // 2]
                sequences.append(self.frame.sequence(context[len(answer) - self.frame.room(2) :], answer)[:2])
        return self.frame.pad(sequences) | {"labels": torch.from_numpy(labels)}


def _any(texts: Sequence[str], random: np.random.Generator) -> str:
    return texts[int(random.integers(len(texts)))]
