"""Accuracy, F1, Pearson and Spearman over the last axis."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from metapretrain.errors import InputError


def _pair(targets: ArrayLike, predictions: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    y, predicted = (np.asarray(values, dtype=np.float64) for values in (targets, predictions))
    if y.shape != predicted.shape or y.ndim == 0 or y.shape[-1] == 0:
        raise InputError(
            f"targets and predictions must be as many, (..., N) with N >= 1; got {y.shape} and {predicted.shape}"
        )
    for what, values in (("target", y), ("prediction", predicted)):
        if not np.isfinite(values).all():
            raise InputError(f"a {what} is NaN or infinite; every one must be finite")
    return y, predicted


def accuracy(targets: ArrayLike, predictions: ArrayLike) -> NDArray[np.float64]:
    """Share of predicted classes that are right, (..., N) to (...).

    Example:
        >>> float(accuracy([0, 1, 2, 2], [0, 1, 2, 0]))
        0.75
    """
    y, predicted = _pair(targets, predictions)
    return np.asarray((y == predicted).mean(axis=-1))


def f1(targets: ArrayLike, predictions: ArrayLike, classes: int = 2) -> NDArray[np.float64]:
    """F1 of class 1 of two, or the plain mean of the F1 of each of more classes, (..., N) to (...).

    `F1 = 2 TP / (2 TP + FP + FN)`; 0 where a class is neither there nor predicted.

    Args:
        targets: classes 0..C-1.
        predictions: the same.
        classes: C, at least 2.

    Example:
        >>> float(f1([1, 1, 0, 0], [1, 0, 1, 1]))
        0.4
    """
    if classes < 2:
        raise InputError(f"F1 needs 2 classes or more; got {classes}")
    y, predicted = _pair(targets, predictions)
    scored = np.arange(classes)[1 if classes == 2 else 0 :].reshape(-1, *[1] * y.ndim)
    mine, theirs = y == scored, predicted == scored  # (scored classes, ..., N)
    hits, stated = 2 * (mine & theirs).sum(axis=-1), mine.sum(axis=-1) + theirs.sum(axis=-1)
    return np.asarray((hits / np.maximum(stated, 1)).mean(axis=0))


def macro_f1(targets: ArrayLike, predictions: ArrayLike, classes: int = 2) -> NDArray[np.float64]:
    """The plain mean of the F1 of each class, of two classes as well, (..., N) to (...).

    Example:
        >>> float(macro_f1([1, 1, 0, 0], [1, 1, 1, 1]))
        0.3333333333333333
    """
    if classes > 2:
        return f1(targets, predictions, classes)
    return (f1(targets, predictions) + f1(1 - np.asarray(targets), 1 - np.asarray(predictions))) / 2


def pearson(targets: ArrayLike, predictions: ArrayLike) -> NDArray[np.float64]:
    """Pearson's correlation, (..., N) to (...); 0 where one side is constant, for which it is not defined.

    Example:
        >>> round(float(pearson([1.0, 2.0, 3.0], [1.0, 2.0, 2.0])), 4), float(pearson([1.0, 2.0], [3.0, 3.0]))
        (0.866, 0.0)
    """
    y, predicted = _pair(targets, predictions)
    # The difference from the maximum is exactly 0 for a constant side; its mean may be off by a rounding error.
    constant = (np.ptp(y, axis=-1) == 0) | (np.ptp(predicted, axis=-1) == 0)
    y, predicted = (_unit(values) for values in (y, predicted))
    return np.asarray(np.where(constant, 0.0, np.clip((y * predicted).sum(axis=-1), -1.0, 1.0)))


def _unit(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Centred, and scaled to length 1 by way of the largest, so that no square is lost or overflows."""
    centred = values - values.mean(axis=-1, keepdims=True)
    largest = np.abs(centred).max(axis=-1, keepdims=True)
    centred = centred / np.where(largest == 0, 1.0, largest)
    length = np.linalg.norm(centred, axis=-1, keepdims=True)
    return np.asarray(centred / np.where(length == 0, 1.0, length))


def spearman(targets: ArrayLike, predictions: ArrayLike) -> NDArray[np.float64]:
    """Spearman's correlation, Pearson's of the ranks with ties at their mean rank, (..., N) to (...).

    Example:
        >>> float(spearman([1.0, 2.0, 3.0, 4.0], [0.1, 0.2, 0.4, 0.3]))
        0.8
    """
    from scipy.stats import rankdata  # not at import: scipy.stats costs half a second

    y, predicted = _pair(targets, predictions)
    return pearson(rankdata(y, axis=-1), rankdata(predicted, axis=-1))
