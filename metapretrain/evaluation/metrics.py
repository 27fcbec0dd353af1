"""F1, Pearson and Spearman, and the scores of text tasks."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from metapretrain.errors import InputError, one_of

if TYPE_CHECKING:
    from metapretrain.data.texts import TextTask


def _pair(targets: ArrayLike, predictions: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    y, predicted = (np.asarray(values, dtype=np.float64) for values in (targets, predictions))
    if y.shape != predicted.shape or y.ndim != 1 or len(y) == 0:
        shapes = f"shapes {y.shape} and {predicted.shape}"
        raise InputError(f"targets and predictions must be as many, (N,) with N >= 1; got {shapes}")
    for what, values in (("target", y), ("prediction", predicted)):
        if not np.isfinite(values).all():
            raise InputError(f"a {what} is NaN or infinite; every one must be finite")
    return y, predicted


def f1(targets: ArrayLike, predictions: ArrayLike, classes: int = 2, *, macro: bool = False) -> float:
    """F1 of class 1 of two, or (of more classes, or if `macro`) the plain mean of the F1 of each class.

    `F1 = 2 TP / (2 TP + FP + FN)` of classes (N,); 0 where a class is neither there nor predicted.

    Example:
        >>> f1([1, 1, 0, 0], [1, 0, 1, 1]), round(f1([1, 1, 0, 0], [1, 1, 1, 1], macro=True), 3)
        (0.4, 0.333)
    """
    if classes < 2:
        raise InputError(f"F1 needs 2 classes or more; got {classes}")
    scored = np.arange(classes) if macro or classes > 2 else np.array([1])
    y, predicted = _pair(targets, predictions)
    if (y % 1).any() or (predicted % 1).any() or (y < 0).any():
        raise InputError("F1 is of classes, which are whole numbers from 0 on; a target or a prediction is not")
    there, said = y[:, None] == scored, predicted[:, None] == scored
    return float((2 * (there & said).sum(0) / np.maximum(there.sum(0) + said.sum(0), 1)).mean())


def pearson(targets: ArrayLike, predictions: ArrayLike) -> float:
    """Pearson's correlation of values (N,); 0 where one side is constant, for which it is not defined."""
    y, predicted = _pair(targets, predictions)
    # The difference from the maximum is exactly 0 for a constant side; its mean may be off by a rounding error.
    if np.ptp(y) == 0 or np.ptp(predicted) == 0:
        return 0.0
    return float(np.clip((_unit(y) * _unit(predicted)).sum(), -1.0, 1.0))


def _unit(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Centred, and scaled to length 1 by way of the largest, so that no square is lost or overflows (SciPy's are)."""
    centred = values - values.mean()
    centred /= np.abs(centred).max()
    return np.asarray(centred / np.linalg.norm(centred, axis=0))


def spearman(targets: ArrayLike, predictions: ArrayLike) -> float:
    """Spearman's correlation of values (N,): Pearson's of the ranks with ties at their mean rank."""
    from scipy.stats import rankdata  # not at import: scipy.stats costs half a second

    y, predicted = _pair(targets, predictions)
    return pearson(rankdata(y), rankdata(predicted))


def reliability(probabilities: ArrayLike, targets: ArrayLike, bins: int = 15) -> NDArray[np.float64]:
    """Rows, sum of the highest probabilities and right predictions (3, bins), in bins of equal width of the former.

    Probabilities are (N, C), targets classes (N,): a reliability diagram's numbers (Guo et al., 2017, section 2).
    """
    p, y = np.asarray(probabilities, np.float64), np.asarray(targets, np.float64)
    fits = p.ndim == 2 and p.shape[:1] == y.shape and p.size > 0 and (abs(p.sum(1) - 1) < 1e-3).all()
    if not fits or not np.isin(y, np.arange(p.shape[1])).all():
        told = f"got {p.shape} and {y.shape}"
        raise InputError(f"calibration needs probabilities (N, C), each row of sum 1, and classes 0..C-1 (N,); {told}")
    confidence, right = p.max(axis=1), p.argmax(axis=1) == y
    place = np.minimum((confidence * bins).astype(int), bins - 1)
    return np.stack([np.bincount(place, weights, minlength=bins) for weights in (np.ones(len(y)), confidence, right)])


def calibration_error(probabilities: ArrayLike, targets: ArrayLike, bins: int = 15) -> float:
    """Expected calibration error of probabilities (N, C) for classes (N,): Guo et al. (2017), equation 3."""
    rows, confidence, right = reliability(probabilities, targets, bins)
    return float(np.abs(confidence - right).sum() / rows.sum())


def temperature(logits: ArrayLike, targets: ArrayLike) -> float:
    """The T that makes softmax(logits / T) of held-out rows (N, C) most likely: Guo et al. (2017), section 4.2.

    It lies in 0.01 to 100; predicted classes stay. Log-probabilities are logits too.

    Example:
        >>> round(temperature([[4.0, 0.0], [4.0, 0.0], [0.0, 4.0], [4.0, 0.0]], [0, 0, 1, 1]), 2)  # e^(4/T) = 3
        3.64
    """
    from scipy.optimize import minimize_scalar
    from scipy.special import log_softmax

    z, y = np.asarray(logits, np.float64), np.asarray(targets, np.int64)
    if z.ndim != 2 or z.shape[:1] != y.shape or z.size == 0 or not 0 <= y.min() <= y.max() < z.shape[1]:
        raise InputError(f"a temperature needs logits (N, C) and classes 0..C-1 (N,); got {z.shape} and {y.shape}")
    rows, limit = np.arange(len(y)), np.log(100)
    loss = minimize_scalar(lambda t: -log_softmax(z / np.exp(t), axis=1)[rows, y].mean(), bounds=(-limit, limit))
    return float(np.exp(loss.x))


Values = Tensor | Sequence[float] | NDArray[np.float64] | NDArray[np.int64]
log = logging.getLogger(__name__)

# The first metric of a kind is the main one, which the overall figure means over.
METRICS: Mapping[str, tuple[str, ...]] = {
    "classification": ("accuracy",),
    "pair-classification": ("accuracy", "f1"),
    "regression": ("pearson", "spearman"),
    "pair-regression": ("pearson", "spearman"),
}
MAIN = {names[0] for names in METRICS.values()}
MAJORITY, PROTOTYPE = "majority_", "nearest_prototype_"
PREFIXES = (MAJORITY, PROTOTYPE, "validation_", "train_")  # figures of another kind or part, not of dev


def score_task(task: TextTask, predictions: Values, *, prefix: str = "") -> dict[str, float]:
    """Score predictions for the rows of `task.dev`: accuracy, also F1 for pairs, or Pearson and Spearman.

    Predictions are classes int (N,) or, for regression, scores (N,); of constant ones the correlation is 0. `prefix` is
    put before each name. Raises InputError: not one prediction per row, a prediction that is NaN or no class, or a task
    whose name begins as other figures do (`train_`).
    """
    kind = one_of("kind of task", task.kind, METRICS)
    if task.name.startswith(PREFIXES) or task.name == "overall":
        raise InputError(f"a task may not be called {task.name!r}: other figures are; begin with another word")
    given = predictions.detach().cpu().double() if isinstance(predictions, Tensor) else predictions
    labels, predicted = task.dev.require_labels().cpu().numpy(), np.asarray(given, dtype=np.float64)
    if predicted.shape != labels.shape:
        raise InputError(f"{task.name}: {len(labels)} dev rows need as many predictions (N,); got {predicted.shape}")
    if not task.regression:
        classes = len(task.classes)
        wrong = ~np.isin(predicted, np.arange(classes))
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            raise InputError(f"{task.name}: prediction {predicted[row]} of row {row} is no class 0..{classes - 1}")
        scores = {"accuracy": float((labels == predicted).mean()), "f1": f1(labels, predicted, classes)}
    else:
        scores = {"pearson": pearson(labels, predicted), "spearman": spearman(labels, predicted)}
        if np.ptp(predicted) == 0 and not prefix:
            log.warning("%s: all %d predictions are equal, so that the correlations are 0", task.name, len(labels))
    return {f"{prefix}{task.name}_{metric}": scores[metric] for metric in METRICS[kind]}


def majorities(tasks: Sequence[TextTask]) -> dict[str, float]:
    """Return the `majority` of each task and their overall figures."""
    return with_overall(dict(score for task in tasks for score in majority(task).items()), (MAJORITY,))


def majority(task: TextTask) -> dict[str, float]:
    """Score the most frequent class of the training rows, the lowest of equals; for regression a constant, so 0."""
    constant = 0.0
    if not task.regression:
        constant = float(np.bincount(task.train.require_labels().cpu().numpy()).argmax())
    return score_task(task, np.full(len(task.dev), constant), prefix=MAJORITY)


def main_scores(scores: Mapping[str, float], prefix: str = "") -> dict[str, float]:
    """Return the main metric of each task, by the task's name: accuracy or Pearson; other figures may be among them.

    Example:
        >>> main_scores({"sst_accuracy": 0.5, "para_f1": 0.7, "sts_pearson": 0.8, "majority_sst_accuracy": 0.25})
        {'sst': 0.5, 'sts': 0.8}
    """
    found = {}
    for name, value in scores.items():
        rest = name.removeprefix(prefix)
        task, _, metric = rest.rpartition("_")
        if name.startswith(prefix) and metric in MAIN and task and not f"{task}_".startswith(PREFIXES):
            found[task] = float(value)
    return found


def overall(scores: Mapping[str, float], prefix: str = "", without: str = "") -> float:
    """Return the plain mean of the tasks' main metrics, as the paper (section 5.4) reports it, or of all but one's.

    Example:
        >>> round(overall({"sst_accuracy": 0.490, "para_accuracy": 0.825, "sts_pearson": 0.857}), 3)
        0.724
    """
    known = [value for name, value in main_scores(scores, prefix).items() if name != without]
    if not known:
        raise InputError(f"no task's accuracy or Pearson correlation among {', '.join(scores) or 'no scores'}")
    return sum(known) / len(known)


def with_overall(scores: Mapping[str, float], prefixes: Sequence[str] = ("",)) -> dict[str, float]:
    """Return the scores with `overall`, and `overall_without_para` where it is something else, of each prefix."""
    added = dict(scores)
    for prefix in prefixes:
        added[f"{prefix}overall"] = overall(scores, prefix)
        if "para" in (tasks := main_scores(scores, prefix)) and len(tasks) > 1:
            added[f"{prefix}overall_without_para"] = overall(scores, prefix, without="para")
    return added
