"""Metrics and intervals against scikit-learn, scipy and what they promise."""

from __future__ import annotations

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
from metapretrain.evaluation.metrics import f1, pearson, spearman


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
