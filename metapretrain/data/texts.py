"""Texts of one split in memory, the task that its splits make up, near-duplicates, and few-shot draws of rows."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from metapretrain.checks import whole
from metapretrain.data.images import validation_split
from metapretrain.draws import philox_generator
from metapretrain.errors import InputError, one_of

KINDS = ("classification", "pair-classification", "regression", "pair-regression")
Row = TypeVar("Row")
RowsType = TypeVar("RowsType", bound="Rows[Any]")


@dataclass(frozen=True)
class Rows(Generic[Row]):
    """Rows of one split; `counts` and `files` as those of :class:`TextSet`."""

    rows: list[Row]
    split: str = "train"
    counts: dict[str, int] = field(default_factory=dict)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.rows)


def join_rows(parts: Sequence[RowsType], split: str = "train") -> RowsType:
    """Return the rows of all parts, one after the other."""
    files = {name: record for part in parts for name, record in part.files.items()}
    return replace(parts[0], rows=[row for part in parts for row in part.rows], split=split, counts={}, files=files)


@dataclass(frozen=True)
class TextSet:
    """Sentences, or pairs of them, of one split, with labels and the checksums of the files they came from.

    Attributes:
        first, second: N sentences, and the N others of pairs (else None).
        labels: int64 classes or float32 scores (N,); None for a split without labels.
        ids: N names of rows, as written beside predictions; by default their numbers.
        counts: rows left out and overlaps, by what they are, such as ``{"unlabelled": 2}``.
        files: ``{file name: {"bytes": int, "md5": str, "official": True | False | None}}``.
        classes: names in label order, where the reader knows them: a task must have the same.

    Raises InputError: the numbers of rows differ, or labels are neither int64 nor float32 (N,).

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
    classes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("first", "second", "ids"):  # a pandas Series would be read by its index, not by position
            texts = getattr(self, name)
            if isinstance(texts, str) or not isinstance(texts, Iterable | None):
                raise InputError(f"{self.split}: {name} must be a list of texts, got {type(texts).__name__}")
            if texts is not None and not isinstance(texts, list):
                object.__setattr__(self, name, list(texts))
            wrong = next((text for text in getattr(self, name) or () if not isinstance(text, str)), None)
            if wrong is not None:
                raise InputError(f"{self.split}: {name} must be texts, got a {type(wrong).__name__}")
        if not self.ids:
            object.__setattr__(self, "ids", [str(row) for row in range(len(self.first))])
        labels = self.labels
        if labels is not None and (
            not isinstance(labels, Tensor) or labels.ndim != 1 or labels.dtype not in (torch.int64, torch.float32)
        ):
            given = f"{labels.dtype} {tuple(labels.shape)}" if isinstance(labels, Tensor) else type(labels).__name__
            wanted = "a tensor of int64 classes or float32 scores (N,)"
            raise InputError(f"{self.split}: labels must be {wanted}, got {given}")
        for what, part in {"second sentences": self.second, "labels": labels, "ids": self.ids}.items():
            if part is not None and len(part) != len(self.first):
                raise InputError(f"{self.split}: {len(self.first)} sentences but {len(part)} {what}")

    def __len__(self) -> int:
        return len(self.first)

    @property
    def pairs(self) -> bool:
        return self.second is not None

    def subset(self, index: Tensor | Sequence[int] | np.ndarray[Any, Any]) -> TextSet:
        """Return the rows at `index` (M,), in that order; counts and files stay those of the whole."""
        rows = torch.as_tensor(index if isinstance(index, Tensor) else np.array(index))  # a Series by position
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
        """Return the labels (N,), or raise InputError where the split has none."""
        if self.labels is None:
            raise InputError(f"{self.split}: its {len(self)} rows have no label; name the column that holds it")
        return self.labels


@dataclass(frozen=True)
class TextTask:
    """A text task: its splits, and the classes or the range of scores that they share.

    Attributes:
        name: letters, digits, ``-`` and ``_``; it names metrics and prediction files.
        kind: one of :data:`KINDS`.
        train, validation, dev: labelled rows to train on, to choose by (may be empty) and to report on.
        test: rows to predict, with or without labels.
        classes, low, high: names in label order, for classification; range of scores, for regression.

    Raises InputError: a bad name, kind, class list or range, or a split that does not fit them.

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
        _check_class_order(where, self.classes, rows)
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
            first = f"{rows.labels[row].item()} of row {rows.ids[row]}"
            raise InputError(f"{where}: {int(outside.sum())} labels outside of {low}..{high}, the first is {first}")

    @property
    def regression(self) -> bool:
        return self.kind.endswith("regression")

    @property
    def num_classes(self) -> int:
        """Number of classes; for regression, of rounded scores."""
        return int(self.high - self.low) + 1 if self.regression else len(self.classes)

    def class_labels(self, rows: TextSet) -> Tensor:
        """Return the classes int64 (N,) of a split's rows: labels, or scores minus `low` rounded half up.

        A range that is no whole number, such as 0..1.5, has its last half step in the class below.
        """
        labels = rows.require_labels()
        if not self.regression:
            return labels
        return (labels.double() - self.low + 0.5).floor().long().clamp(0, self.num_classes - 1)


def _check_class_order(where: str, classes: tuple[str, ...], rows: TextSet) -> None:
    if rows.classes and rows.classes != classes:
        told = f"{where}: its rows were read with the classes {', '.join(rows.classes)}, but the"
        raise InputError(f"{told} classes are {', '.join(classes)}; give both the same names in the same order")


def check_outputs(name: str, kind: str, classes: Sequence[str], low: float, high: float) -> None:
    """Check that there are two classes or more, each named once, or for regression that `low` is below `high`."""
    if kind.endswith("regression"):
        if classes:
            raise InputError(f"{name}: {kind} has a range (low, high), not classes; got {len(classes)} classes")
        if not -np.inf < low < high < np.inf:
            raise InputError(f"{name}: low must be below high, both finite; got {low} and {high}")
    elif len(classes) < 2 or len(set(classes)) < len(classes):
        raise InputError(f"{name}: {kind} needs two classes or more, each named once; got {tuple(classes)}")


def check_tasks(tasks: Sequence[TextTask]) -> list[TextTask]:
    """Return the tasks as a list, having checked that there is one, and that each has a name of its own."""
    names = [task.name for task in tasks]
    if not names:
        raise InputError("give at least one text task")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InputError(f"the task name {twice[0]!r} is given twice; metrics and prediction files need one each")
    return list(tasks)


def hold_out(train: TextSet, count: int, seed: int = 0) -> tuple[TextSet, TextSet]:
    """Split off `count` training rows for validation: the same rows for every seed of a run, stratified by class.

    Both parts are in the order of `train`; scores are not stratified. Raises InputError: no labels, or none are left.

    Example:
        >>> train, validation = hold_out(TextSet(list("abcd"), labels=torch.tensor([0, 0, 1, 1])), 2)
        >>> validation.labels.tolist(), validation.split
        ([0, 1], 'validation')
    """
    labels = train.require_labels()
    strata = torch.zeros(len(train), dtype=torch.int64) if labels.is_floating_point() else labels
    kept, held = validation_split(strata, count, seed)
    return train.subset(kept), replace(train.subset(held), split="validation", counts={})


def normalise_text(text: str) -> str:
    """Return `text` as near-duplicates are compared: NFKC, lower case, letters and digits (if any), single spaces."""
    lowered = unicodedata.normalize("NFKC", text).casefold()
    return " ".join(re.findall(r"\w+", lowered)) or " ".join(lowered.split())


def pair_keys(rows: TextSet) -> list[tuple[str, ...]]:
    """Return for each row its normalised sentences, sorted, so that a pair in either order has one key."""
    second = rows.second if rows.second is not None else [None] * len(rows)
    return [
        tuple(sorted(normalise_text(text) for text in pair if text is not None))
        for pair in zip(rows.first, second, strict=True)
    ]


def overlap(train: TextSet, dev: TextSet) -> dict[str, int]:
    """Count the training rows that dev has too, by normalised text: whole ``pairs`` and their single ``sentences``."""
    own, keys = pair_keys(train), set(pair_keys(dev))
    single = {text for key in keys for text in key}
    return {"pairs": sum(key in keys for key in own), "sentences": sum(not single.isdisjoint(key) for key in own)}


TEST_ROWS = 1_000


@dataclass(frozen=True)
class SentenceData:
    """A data set of sentences, or of pairs of them, in classes: a training part to draw from and a test part.

    `classes`: names in label order, from the most negative to the most positive for sentiment; `note`: what a reader of
    results must know, such as where the test part comes from.
    Raises InputError: parts and classes do not fit each other, or the test part has a class that training never has.

    Example:
        >>> rows = TextSet(["bad", "good"], labels=torch.tensor([0, 1]))
        >>> SentenceData("sst2", ("negative", "positive"), rows, rows).num_classes
        2
    """

    name: str
    classes: tuple[str, ...]
    train: TextSet
    test: TextSet
    note: str = ""

    def __post_init__(self) -> None:
        check_outputs(self.name, "pair-classification" if self.pairs else "classification", self.classes, 0, 1)
        if self.train.pairs != self.test.pairs:
            raise InputError(f"{self.name}: one part has pairs of sentences, the other single sentences")
        for part, rows in (("train", self.train), ("test", self.test)):
            labels = rows.require_labels()
            _check_class_order(f"{self.name} {part}", self.classes, rows)
            if not len(rows):
                raise InputError(f"{self.name}: the {part} part has no rows")
            if labels.dtype != torch.int64 or labels.min() < 0 or labels.max() >= len(self.classes):
                told = f"{self.name}: labels of the {part} part must be int64 in 0..{len(self.classes) - 1}"
                raise InputError(f"{told}, got {labels.dtype} in {labels.min().item()}..{labels.max().item()}")
        unseen = set(self.test.require_labels().tolist()) - set(self.train.require_labels().tolist())
        if unseen:
            raise InputError(f"{self.name}: no training row has class {self.classes[min(unseen)]!r} of the test part")

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    @property
    def pairs(self) -> bool:
        return self.train.pairs


def few_shot_draw(
    train: TextSet, training: int = 40, validation: int = 40, *, seed: int, stratified: bool = True
) -> tuple[Tensor, Tensor]:
    """Draw the few rows to train and to validate on, int64 (training,) and (validation,), in a random order.

    The rows are the same for every method that gives the same `seed`, none is in both. `stratified`: each class has
    its share of both (largest remainders), at least one row; otherwise a class may be missing.
    Raises InputError: counts below 1 or above the rows that there are, or, stratified, below one a class.
    """
    labels = train.require_labels().numpy()
    for what, count in (("training", training), ("validation", validation)):
        whole(f"few-shot {what} rows", count, 1)
    if training + validation > len(labels):
        told = f"{training} training and {validation} validation rows asked for, but there are {len(labels)} rows"
        raise InputError(f"{told}; lower the counts or give more data")
    random = philox_generator(seed)
    order = random.permutation(len(labels))
    if not stratified:
        return torch.from_numpy(order[:training].copy()), torch.from_numpy(order[training:][:validation].copy())
    classes, counts = np.unique(labels, return_counts=True)
    if counts.min() < 2 or min(training, validation) < len(classes):
        raise InputError(
            f"stratified rows need two rows of each class and {len(classes)} rows or more of each part for "
            f"{len(classes)} classes; got {training} training and {validation} validation rows, and "
            f"{counts.min()} of class {classes[counts.argmin()]}; raise them, or draw without strata"
        )
    first = _shares(counts, counts - 1, training, least=1)
    second = _shares(counts, counts - first, validation, least=1)
    by_class = [order[labels[order] == label] for label in classes]
    drawn = np.concatenate([rows[:share] for rows, share in zip(by_class, first, strict=True)])
    held = [rows[start : start + share] for rows, start, share in zip(by_class, first, second, strict=True)]
    return (torch.from_numpy(random.permutation(drawn)), torch.from_numpy(random.permutation(np.concatenate(held))))


def fixed_sample(test: TextSet, count: int = TEST_ROWS) -> TextSet:
    """Return at most `count` labelled rows, stratified by class, in their order: the same for every method and seed."""
    whole("rows of a sample", count, 1)
    labels = test.require_labels().numpy()
    if len(labels) <= count:
        return test
    classes, counts = np.unique(labels, return_counts=True)
    order = philox_generator(0).permutation(len(labels))
    shares = _shares(counts, counts, int(count), least=0)
    rows = [order[labels[order] == label][:share] for label, share in zip(classes, shares, strict=True)]
    return test.subset(np.sort(np.concatenate(rows)))


def balanced_sample(rows: TextSet, count: int, seed: int) -> TextSet:
    """Draw `count` (1..N) labelled rows, as many of each class as its rows allow, in a random order."""
    labels = rows.require_labels().numpy()
    whole("the size of a balanced sample", count, 1, len(labels))
    classes, counts = np.unique(labels, return_counts=True)
    random = philox_generator(seed)
    order = random.permutation(len(labels))
    shares = _shares(np.ones(len(classes)), counts, int(count), least=0)
    chosen = [order[labels[order] == label][:share] for label, share in zip(classes, shares, strict=True)]
    return rows.subset(random.permutation(np.concatenate(chosen)))


def known_texts(texts: Iterable[str]) -> frozenset[str]:
    """Return the normalised texts of, for example, the pretraining data, for :func:`without_known`."""
    return frozenset(map(normalise_text, texts))


def without_known(rows: TextSet, known: Set[str], what: str = "in_pretraining") -> TextSet:
    """Drop the rows of which a sentence is known, by normalised text, and count them as `what`."""
    sentences = [rows.first] if rows.second is None else [rows.first, rows.second]
    kept = [
        row
        for row, texts in enumerate(zip(*sentences, strict=True))
        if not any(normalise_text(text) in known for text in texts)
    ]
    return replace(rows.subset(kept), counts={**rows.counts, what: len(rows) - len(kept)})


def _shares(counts: np.ndarray, available: np.ndarray, size: int, least: int) -> np.ndarray:
    """Shares (C,) of `size` in the ratio of `counts`, each of `least` rows or more and no more than are available."""
    quota = size * counts / counts.sum()
    take: np.ndarray = np.clip(np.floor(quota).astype(np.int64), least, available)
    while take.sum() < size:
        take[np.where(take < available, quota - take, -np.inf).argmax()] += 1
    while take.sum() > size:
        take[np.where(take > least, take - quota, -np.inf).argmax()] -= 1
    return take
