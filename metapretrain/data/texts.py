"""Texts of one split in memory, the task that its splits make up, and the checks that every reader shares."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from metapretrain.data.splits import validation_split
from metapretrain.errors import InputError, one_of

KINDS = ("classification", "pair-classification", "pair-regression")


@dataclass(frozen=True)
class TextSet:
    """Sentences, or pairs of them, of one split, with labels and the checksums of the files they came from.

    Attributes:
        first: N sentences.
        second: the N other sentences of pairs; None where a row is one sentence.
        labels: int64 classes or float32 scores (N,); None for a split without labels.
        ids: N names of rows, as written beside predictions.
        split: such as ``"train"``.
        counts: rows left out and overlaps, by what they are, such as ``{"unlabelled": 2}``.
        files: ``{file name: {"bytes": int, "md5": str, "official": True | False | None}}``.

    Raises:
        InputError: the numbers of rows differ, or labels are neither int64 nor float32 (N,).

    Example:
        >>> rows = TextSet(["good", "bad", "fine"], labels=torch.tensor([1, 0, 1]))
        >>> len(rows), rows.pairs, rows.ids, rows.subset([2, 0]).first
        (3, False, ['0', '1', '2'], ['fine', 'good'])
    """

    first: list[str]
    second: list[str] | None = None
    labels: Tensor | None = None
    ids: list[str] = field(default_factory=list)
    split: str = "train"
    counts: dict[str, int] = field(default_factory=dict)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Number the rows where there are no ids, and check that all parts have as many rows."""
        if not self.ids:
            object.__setattr__(self, "ids", [str(row) for row in range(len(self.first))])
        if self.labels is not None and (
            self.labels.ndim != 1 or self.labels.dtype not in (torch.int64, torch.float32)
        ):
            given = f"{self.labels.dtype} {tuple(self.labels.shape)}"
            raise InputError(f"{self.split}: labels must be int64 classes or float32 scores (N,), got {given}")
        parts = {"second sentences": self.second, "labels": self.labels, "ids": self.ids}
        for what, part in parts.items():
            if part is not None and len(part) != len(self.first):
                raise InputError(f"{self.split}: {len(self.first)} sentences but {len(part)} {what}")

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.first)

    @property
    def pairs(self) -> bool:
        """Whether a row is a pair of sentences."""
        return self.second is not None

    def subset(self, index: Tensor | Sequence[int] | np.ndarray[Any, Any]) -> TextSet:
        """Return the rows at `index` (M,), in that order; counts and files stay those of the whole."""
        rows = torch.as_tensor(index)
        rows = rows.nonzero().flatten() if rows.dtype == torch.bool else rows.long()
        chosen = rows.tolist()
        return replace(
            self,
            first=[self.first[row] for row in chosen],
            second=None if self.second is None else [self.second[row] for row in chosen],
            labels=None if self.labels is None else self.labels[rows],
            ids=[self.ids[row] for row in chosen],
        )

    def require_labels(self) -> Tensor:
        """Return the labels (N,).

        Raises:
            InputError: the split has none.
        """
        if self.labels is None:
            raise InputError(f"{self.split}: its {len(self)} rows have no label; name the column that holds it")
        return self.labels


@dataclass(frozen=True)
class TextTask:
    """A text task: its splits, and the classes or the range of scores that they share.

    Attributes:
        name: letters, digits, ``-`` and ``_``; it names metrics and prediction files.
        kind: ``"classification"``, ``"pair-classification"`` or ``"pair-regression"``.
        train: labelled rows.
        validation: labelled rows to choose by; may be empty.
        dev: labelled rows to report on.
        test: rows to predict, with or without labels.
        classes: names in label order, for classification.
        low: lowest score of regression.
        high: highest score of regression.

    Raises:
        InputError: a bad name, kind, class list or range; a split that is empty, unlabelled, not of pairs (or of
            pairs) as the kind says, or has a label outside of the classes or the range.

    Example:
        >>> rows = TextSet(["a", "b"], ["a", "c"], torch.tensor([5.0, 2.5]))
        >>> task = TextTask("sts", "pair-regression", rows, rows.subset([]), rows, low=0.0, high=5.0)
        >>> task.num_classes, task.class_labels(rows).tolist()
        (6, [5, 3])
    """

    name: str
    kind: str
    train: TextSet
    validation: TextSet
    dev: TextSet
    test: TextSet | None = None
    classes: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        """Check the name, the kind, the classes or the range, and every split against them."""
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", self.name):
            raise InputError(f"a task's name has letters, digits, - and _ only, got {self.name!r}")
        one_of("kind of task", self.kind, KINDS)
        check_outputs(self.name, self.kind, self.classes, self.low, self.high)
        splits = {"train": self.train, "validation": self.validation, "dev": self.dev, "test": self.test}
        for split, rows in splits.items():
            if rows is not None:
                self._check_split(split, rows)

    def _check_split(self, split: str, rows: TextSet) -> None:
        where = f"{self.name} {split}"
        if not len(rows) and split in ("train", "dev"):
            raise InputError(f"{where} has no rows")
        if rows.pairs != self.kind.startswith("pair"):
            what = "pairs of sentences" if rows.pairs else "single sentences"
            raise InputError(f"{where} holds {what}, which {self.kind} cannot use")
        if rows.labels is None:
            if split == "test":
                return
            raise InputError(f"{where}: its {len(rows)} rows have no label")
        wanted = torch.float32 if self.regression else torch.int64
        if rows.labels.dtype != wanted:
            raise InputError(f"{where}: {self.kind} needs {wanted} labels, got {rows.labels.dtype}")
        low, high = (self.low, self.high) if self.regression else (0, len(self.classes) - 1)
        outside = ~((rows.labels >= low) & (rows.labels <= high))
        if outside.any():
            row = int(outside.nonzero()[0])
            raise InputError(
                f"{where}: {int(outside.sum())} labels outside of {low}..{high}, the first is "
                f"{rows.labels[row].item()} of row {rows.ids[row]}"
            )

    @property
    def regression(self) -> bool:
        """Whether labels are scores."""
        return self.kind == "pair-regression"

    @property
    def num_classes(self) -> int:
        """Number of classes; for regression, of rounded scores: int(high - low) + 1."""
        return int(self.high - self.low) + 1 if self.regression else len(self.classes)

    def class_labels(self, rows: TextSet) -> Tensor:
        """Return the classes int64 (N,) of a split's rows: labels, or scores minus `low` rounded half up.

        A range that is no whole number, such as 0..1.5, has its last half step in the class below.

        Raises:
            InputError: the split has no labels.
        """
        labels = rows.require_labels()
        if not self.regression:
            return labels
        return (labels.double() - self.low + 0.5).floor().long().clamp(0, self.num_classes - 1)


def check_outputs(name: str, kind: str, classes: Sequence[str], low: float, high: float) -> None:
    """Check the classes of a classification task or the range of a regression task.

    Raises:
        InputError: fewer than two classes, two of one name, classes for regression, or `low` not below `high`.
    """
    if kind == "pair-regression":
        if classes:
            raise InputError(f"{name}: {kind} has a range (low, high), not classes; got {len(classes)} classes")
        if not -np.inf < low < high < np.inf:
            raise InputError(f"{name}: low must be below high, both finite; got {low} and {high}")
    elif len(classes) < 2 or len(set(classes)) < len(classes):
        raise InputError(f"{name}: {kind} needs two classes or more, each named once; got {tuple(classes)}")


def check_tasks(tasks: Sequence[TextTask]) -> list[TextTask]:
    """Return the tasks as a list.

    Raises:
        InputError: there is none, or two have one name.
    """
    names = [task.name for task in tasks]
    if not names:
        raise InputError("give at least one text task")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InputError(f"the task name {twice[0]!r} is given twice; metrics and prediction files need one each")
    return list(tasks)


def hold_out(train: TextSet, count: int, seed: int = 0) -> tuple[TextSet, TextSet]:
    """Split off `count` training rows for validation: the same rows for every seed of a run, stratified by class.

    Args:
        train: labelled rows; scores are not stratified.
        count: number of validation rows, 0 <= count < N.
        seed: of the split itself; leave it alone to compare runs.

    Returns:
        (train of N - count rows, validation of count rows), each in the order of `train`.

    Raises:
        InputError: no labels, or a count that leaves nothing (of a class) to train on.

    Example:
        >>> train, validation = hold_out(TextSet(list("abcd"), labels=torch.tensor([0, 0, 1, 1])), 2)
        >>> validation.labels.tolist(), validation.split
        ([0, 1], 'validation')
    """
    labels = train.require_labels()
    strata = torch.zeros(len(train), dtype=torch.int64) if labels.is_floating_point() else labels
    kept, held = validation_split(strata, count, seed)
    return train.subset(kept), replace(train.subset(held), split="validation", counts={})
