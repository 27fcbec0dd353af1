"""Classes of sentences and of pairs of them: RTE, MRPC, CoLA, QNLI, WiC, CB."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from metapretrain.data.texts import TextSet
from metapretrain.errors import InputError
from metapretrain.tasks.pretraining.forms import ClassTask, f1, joined
from metapretrain.tasks.pretraining.frame import Batch, Frame

MAIN = {"cola": "matthews"}  # other sets: accuracy


class Sentences(ClassTask):
    """Tell the class of a sentence, or of a pair joined by the separator.

    The metrics are accuracy, F1 of class 1 and Matthews' correlation; the main one is accuracy, for CoLA the
    correlation.

    Args:
        texts: labelled rows of each split.
        frame: how sequences are put together; what does not fit is cut, the longer sentence first.
        name: of the task.
        classes: C.

    Raises:
        InputError: a split without labels, or with one of another class.
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
            self.rows[split] = [frame.sequence(*frame.cut(*row))[:2] for row in zip(*coded, strict=True)]
        super().__init__(frame, texts, {split: len(part) for split, part in texts.items()})

    def make(self, split: str, rows: Sequence[int], random: np.random.Generator) -> Batch:
        """See :class:`PretrainingTask`; nothing is drawn."""
        batch = self.frame.pad([self.rows[split][row] for row in rows])
        return batch | {"labels": self.labels[split][list(rows)]}

    def measure(self, outcomes: list[Batch]) -> dict[str, float]:
        """Accuracy, F1 of class 1, Matthews' correlation."""
        found, labels = joined(outcomes, "found"), joined(outcomes, "labels")
        scores = {"accuracy": float((found == labels).mean()), "f1": f1(found == 1, labels == 1)}
        return scores | {"matthews": matthews(found, labels)}


def matthews(found: np.ndarray, true: np.ndarray) -> float:
    """Matthews' correlation of classes (N,) and (N,); 0 where either is all one class.

    Example:
        >>> matthews(np.array([1, 1, 0, 0]), np.array([1, 0, 0, 0])).__round__(3)
        0.577
    """
    classes = max(int(found.max()), int(true.max())) + 1
    a, b = np.eye(classes)[found], np.eye(classes)[true]
    a, b = a - a.mean(0), b - b.mean(0)
    spread = float(np.sqrt((a * a).sum() * (b * b).sum()))
    return float((a * b).sum()) / spread if spread else 0.0
