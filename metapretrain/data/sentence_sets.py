"""Labelled sentences with a training and a test part, the few-shot rows drawn of them, and the rows seen elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from metapretrain.data.text_overlap import normalise_text
from metapretrain.data.texts import TextSet, check_outputs
from metapretrain.errors import InputError

TEST_ROWS = 1_000


@dataclass(frozen=True)
class SentenceData:
    """A data set of sentences, or of pairs of them, in classes: a training part to draw from and a test part.

    Attributes:
        name: such as ``"sst5"``.
        classes: names in label order, from the most negative to the most positive for sentiment.
        train: labelled rows to pretrain on, or to draw few-shot rows from.
        test: labelled rows to report on.
        note: what a reader of results must know, such as where the test part comes from; may be empty.

    Raises:
        InputError: fewer than two classes, a part without rows or labels, a label outside of the classes, pairs in one
            part only, or a class of the test part that the training part never has.

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
        """Check classes, labels and parts."""
        check_outputs(self.name, "pair-classification" if self.pairs else "classification", self.classes, 0, 1)
        if self.train.pairs != self.test.pairs:
            raise InputError(f"{self.name}: one part has pairs of sentences, the other single sentences")
        for part, rows in (("train", self.train), ("test", self.test)):
            labels = rows.require_labels()
            if not len(rows):
                raise InputError(f"{self.name}: the {part} part has no rows")
            if labels.dtype != torch.int64 or labels.min() < 0 or labels.max() >= len(self.classes):
                raise InputError(
                    f"{self.name}: labels of the {part} part must be int64 in 0..{len(self.classes) - 1}, got "
                    f"{labels.dtype} in {labels.min().item()}..{labels.max().item()}"
                )
        unseen = set(self.test.require_labels().tolist()) - set(self.train.require_labels().tolist())
        if unseen:
            raise InputError(
                f"{self.name}: no training row has the class {self.classes[min(unseen)]!r} of the test part"
            )

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.classes)

    @property
    def pairs(self) -> bool:
        """Whether a row is a pair of sentences."""
        return self.train.pairs


def few_shot_draw(
    train: TextSet, training: int = 40, validation: int = 40, *, seed: int, stratified: bool = True
) -> tuple[Tensor, Tensor]:
    """Draw the few rows to train and to validate on: the same rows for every method that gives the same seed.

    Args:
        train: labelled rows.
        training: rows to train on, of all classes together.
        validation: rows to validate on, of all classes together; none of them is trained on.
        seed: of the draw.
        stratified: each class has its share of both (largest remainders), at least one row; otherwise rows are drawn
            whatever their class (a class may be missing).

    Returns:
        (rows (training,), rows (validation,)), int64, in a random order.

    Raises:
        InputError: counts below 1 or above the rows that there are, or, stratified, below one a class.

    Example:
        >>> rows = TextSet(list("abcdefgh"), labels=torch.tensor([0, 0, 0, 0, 0, 0, 1, 1]))
        >>> drawn, held = few_shot_draw(rows, 3, 2, seed=0)
        >>> sorted(rows.subset(drawn).labels.tolist()), sorted(rows.subset(held).labels.tolist())
        ([0, 0, 1], [0, 1])
    """
    labels = train.require_labels().numpy()
    for what, count in (("training", training), ("validation", validation)):
        if isinstance(count, bool) or not isinstance(count, int | np.integer) or count < 1:
            raise InputError(f"few-shot {what} rows must be an integer of at least 1, got {count!r}")
    if training + validation > len(labels):
        raise InputError(
            f"{training} training and {validation} validation rows asked for, but there are {len(labels)} rows; lower "
            "the counts or give more data"
        )
    random = np.random.Generator(np.random.Philox(seed))
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
    return (
        torch.from_numpy(random.permutation(drawn)),
        torch.from_numpy(random.permutation(np.concatenate(held))),
    )


def fixed_sample(test: TextSet, count: int = TEST_ROWS) -> TextSet:
    """Return at most `count` rows, stratified by class, in their order: the same for every method and seed.

    Raises:
        InputError: no labels, or a count below 1.

    Example:
        >>> rows = TextSet([str(n) for n in range(6)], labels=torch.tensor([0, 0, 0, 0, 1, 1]))
        >>> fixed_sample(rows, 3).labels.tolist()
        [0, 0, 1]
    """
    if isinstance(count, bool) or not isinstance(count, int | np.integer) or count < 1:
        raise InputError(f"a sample's rows must be an integer of at least 1, got {count!r}")
    labels = test.require_labels().numpy()
    if len(labels) <= count:
        return test
    classes, counts = np.unique(labels, return_counts=True)
    order = np.random.Generator(np.random.Philox(0)).permutation(len(labels))
    shares = _shares(counts, counts, int(count), least=0)
    rows = [order[labels[order] == label][:share] for label, share in zip(classes, shares, strict=True)]
    return test.subset(np.sort(np.concatenate(rows)))


def balanced_sample(rows: TextSet, count: int, seed: int) -> TextSet:
    """Draw `count` rows, as many of each class as its rows allow, in a random order.

    Raises:
        InputError: no labels, or a count outside of 1..N.

    Example:
        >>> rows = TextSet(list("abcdef"), labels=torch.tensor([0, 0, 0, 0, 0, 1]))
        >>> sorted(balanced_sample(rows, 4, seed=0).labels.tolist())
        [0, 0, 0, 1]
    """
    labels = rows.require_labels().numpy()
    if isinstance(count, bool) or not isinstance(count, int | np.integer) or not 1 <= count <= len(labels):
        raise InputError(f"a balanced sample has 1 to {len(labels)} rows (all that there are), got {count!r}")
    classes, counts = np.unique(labels, return_counts=True)
    random = np.random.Generator(np.random.Philox(seed))
    order = random.permutation(len(labels))
    shares = _shares(np.ones(len(classes)), counts, int(count), least=0)
    chosen = [order[labels[order] == label][:share] for label, share in zip(classes, shares, strict=True)]
    return rows.subset(random.permutation(np.concatenate(chosen)))


def known_texts(texts: Iterable[str]) -> frozenset[str]:
    """Return the normalised texts of, for example, the pretraining data, for :func:`without_known`."""
    return frozenset(normalise_text(text) for text in texts)


def without_known(rows: TextSet, known: Set[str], what: str = "in_pretraining") -> TextSet:
    """Drop the rows of which a sentence is known, by normalised text, and count them as `what`.

    Example:
        >>> rows = without_known(TextSet(["Good food!", "bad"]), known_texts(["good  food"]))
        >>> rows.first, rows.counts
        (['bad'], {'in_pretraining': 1})
    """
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
