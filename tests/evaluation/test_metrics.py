"""Metrics and intervals against scikit-learn, scipy and what they promise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from metapretrain.errors import InputError
from metapretrain.evaluation.intervals import (
    Interval,
    correlation_interval,
    independent_mean_interval,
    mean_interval,
    proportion_interval,
)
from metapretrain.evaluation.metrics import calibration_error, f1, pearson, spearman, temperature


def classes(seed: int, n: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    random = np.random.default_rng(seed)
    y = random.integers(0, count, n)
    return y, np.where(random.random(n) < 0.6, y, random.integers(0, count, n))


def scores(seed: int, n: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    random = np.random.default_rng(seed)
    y = random.integers(0, 11, n) / 2  # with many ties, as similarities are
    return y, np.round(y + random.normal(0, 2, n), 1)


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("n", [1, 7, 500])
def test_f1_is_that_of_its_equation(count: int, n: int) -> None:
    y, predicted = classes(n, n, count)
    each = []
    for label in range(count):
        hits = sum(a == b == label for a, b in zip(y, predicted, strict=True))
        each.append(2 * hits / max(1, sum(y == label) + sum(predicted == label)))
    assert f1(y, predicted, count, macro=True) == pytest.approx(sum(each) / count, abs=1e-15)
    assert f1(y, predicted, count) == pytest.approx(each[1] if count == 2 else sum(each) / count, abs=1e-15)


def test_f1_is_of_class_1() -> None:
    assert f1([0, 0, 1], [0, 0, 0]) == 0
    assert f1([1, 1, 0], [1, 1, 1]) == pytest.approx(0.8)
    for wrong in ([0.5, 1], [-100, 1], [-1, 1]):
        with pytest.raises(InputError, match="classes, which are whole numbers from 0 on"):
            f1(wrong, [0, 1])


@pytest.mark.parametrize("n", [2, 3, 50, 1000])
def test_correlations_are_scipys(n: int) -> None:
    y, predicted = scores(n, n)
    assert pearson(y, predicted) == pytest.approx(stats.pearsonr(y, predicted).statistic, abs=1e-12)
    assert spearman(y, predicted) == pytest.approx(stats.spearmanr(y, predicted).statistic, abs=1e-12)


def test_correlations_do_not_depend_on_scale_and_shift() -> None:
    y, predicted = scores(0, 100)
    for scale, shift in ((3.0, 1.0), (1e-8, 5.0), (1e160, 0.0), (1e-160, 0.0)):
        assert pearson(y, scale * predicted + shift) == pytest.approx(pearson(y, predicted), rel=1e-6)
    assert pearson(y, -predicted) == pytest.approx(-pearson(y, predicted))
    assert spearman(y, np.exp(predicted)) == pytest.approx(spearman(y, predicted))


@pytest.mark.parametrize("constant", [0.0, 0.1, 1e300])
def test_a_constant_correlates_with_nothing(constant: float) -> None:
    y, _ = scores(1, 37)
    assert pearson(y, np.full(37, constant)) == spearman(np.full(37, constant), y) == 0.0


@pytest.mark.parametrize(
    ("y", "predicted", "match"),
    [
        ([], [], "N >= 1"),
        ([1, 2], [1], "as many"),
        ([[1, 2]], [[1, 2]], "as many"),
        ([1.0, 2.0], [1.0, np.nan], "prediction is NaN"),
    ],
)
def test_what_cannot_be_scored(y: list[Any], predicted: list[Any], match: str) -> None:
    for metric in (f1, pearson, spearman):
        with pytest.raises(InputError, match=match):
            metric(y, predicted)


@pytest.mark.parametrize("n", [4, 30, 863])
def test_fisher_is_scipys(n: int) -> None:
    y, predicted = scores(n, n)
    found = stats.pearsonr(y, predicted)
    interval = correlation_interval(float(found.statistic), n)
    expected = found.confidence_interval(0.95)
    assert (interval.low, interval.high) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_fishers_ends() -> None:
    assert not correlation_interval(0.5, 3).known
    assert (correlation_interval(-1.0, 9).low, correlation_interval(-1.0, 9).high) == (-1.0, -1.0)
    for r, n in ((1.01, 9), (0.5, 0)):
        with pytest.raises(InputError, match="a correlation needs"):
            correlation_interval(r, n)


def test_mean_of_independent_parts() -> None:
    part = Interval(0.5, 0.03, 10, float("nan"), 0.46, 0.52)
    mean = independent_mean_interval([part] * 4)
    assert (mean.mean, mean.low, mean.high, mean.n) == pytest.approx((0.5, 0.48, 0.51, 40))
    assert not independent_mean_interval([part, mean_interval([0.5])]).known
    with pytest.raises(InputError, match="one or more"):
        independent_mean_interval([])


def test_mean_of_independent_parts_covers_95_of_100_times() -> None:
    random = np.random.default_rng(7)
    hits = 0
    for first, second in zip(random.binomial(100, 0.5, 2000), random.binomial(900, 0.9, 2000), strict=True):
        interval = independent_mean_interval([proportion_interval(first, 100), proportion_interval(second, 900)])
        hits += interval.low <= 0.7 <= interval.high
    assert 0.935 < hits / 2000 < 0.965


def shares(seed: int, n: int = 300, count: int = 4) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Logits of classes, and labels drawn from their probabilities."""
    random = np.random.default_rng(seed)
    logits = 2 * random.normal(size=(n, count))
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    return logits, (p.cumsum(1) < random.random((n, 1))).sum(1)


def softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(np.exp(logits) / np.exp(logits).sum(1, keepdims=True))


@pytest.mark.parametrize("bins", [1, 10, 15])
def test_calibration_error_is_that_of_a_loop_over_bins(bins: int) -> None:
    logits, y = shares(0)
    p = softmax(3 * logits)
    expected = 0.0
    for place in range(bins):
        inside = [row for row in range(len(y)) if min(int(p[row].max() * bins), bins - 1) == place]
        if inside:
            right = np.mean([p[row].argmax() == y[row] for row in inside])
            expected += len(inside) / len(y) * abs(right - np.mean([p[row].max() for row in inside]))
    assert calibration_error(p, y, bins) == pytest.approx(expected)


@pytest.mark.parametrize("scale", [0.2, 1.0, 5.0])
def test_the_temperature_undoes_a_scale_and_calibrates(scale: float) -> None:
    logits, y = shares(1, n=4000)
    found = temperature(scale * logits, y)
    assert found == pytest.approx(scale, rel=0.1)
    assert found == pytest.approx(scale * temperature(logits, y), rel=1e-3)
    p = softmax(scale * logits / found)
    assert (
        calibration_error(p, y) <= calibration_error(softmax(scale * logits), y) + 0.01
        and (p.argmax(1) == logits.argmax(1)).all()
    )

    def loss(heat: float) -> float:
        return float(-np.log(softmax(scale * logits / heat)[np.arange(len(y)), y]).mean())

    assert all(loss(found) <= loss(found * factor) for factor in (0.9, 1.1))


def test_a_temperature_of_rows_that_are_all_right_stays_in_its_range() -> None:
    logits = 5 * np.eye(3)
    assert 0.01 <= temperature(logits, [0, 1, 2]) < 0.1 and 50 < temperature(logits, [1, 2, 0]) <= 100


@pytest.mark.parametrize(
    ("score", "match"),
    [
        (lambda: calibration_error([[0.5, 0.2]], [0]), "each row of sum 1"),
        (lambda: calibration_error([[0.5, 0.5]], [0, 1]), r"got \(1, 2\)"),
        (lambda: calibration_error([[0.5, 0.5]], [-100]), r"classes 0..C-1 \(N,\)"),
        (lambda: calibration_error([[0.5, 0.5]], [2]), r"classes 0..C-1 \(N,\)"),
        (lambda: calibration_error(np.zeros((0, 2)), []), r"got \(0, 2\)"),
        (lambda: temperature([[0.0, 1.0]], [2]), "classes 0..C-1"),
        (lambda: temperature([0.0, 1.0], [1]), r"got \(2,\)"),
    ],
)
def test_what_has_no_calibration(score: Callable[[], float], match: str) -> None:
    with pytest.raises(InputError, match=match):
        score()
