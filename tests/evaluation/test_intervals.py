"""Intervals against scipy, closed forms and their own promise: how often they cover."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from metapretrain.errors import InputError
from metapretrain.evaluation.intervals import (
    mean_interval,
    paired_images_interval,
    paired_interval,
    proportion_interval,
)


@pytest.mark.parametrize("n", [2, 3, 5, 600])
def test_student_t_is_scipys(n: int) -> None:
    values = np.random.default_rng(n).normal(0.7, 0.1, n)
    low, high = stats.t.interval(0.95, n - 1, loc=values.mean(), scale=stats.sem(values))
    interval = mean_interval(values)
    assert (interval.low, interval.high) == pytest.approx((low, high), rel=1e-12)
    assert interval.half_width == pytest.approx((high - low) / 2, rel=1e-12)
    assert interval.sd == pytest.approx(values.std(ddof=1))
    assert interval.n == n


def test_tabulated_t_quantile() -> None:
    # sd 1, n 5: half-width 2.776 / sqrt(5), from any printed table of t
    values = np.array([-1.0, -1.0, 0.0, 1.0, 1.0])
    assert mean_interval(values).half_width == pytest.approx(2.776 / math.sqrt(5), abs=2e-4)


def test_one_value_has_no_interval() -> None:
    interval = mean_interval([0.5])
    assert interval.mean == 0.5
    assert not interval.known
    assert interval.to_json() == {"n": 1, "mean": 0.5, "half_width": None, "low": None, "high": None, "sd": None}


def test_t_interval_covers_95_of_100_times() -> None:
    rng = np.random.default_rng(1)
    hits = sum(abs(interval.mean) <= interval.half_width for interval in map(mean_interval, rng.normal(size=(4000, 3))))
    assert 0.940 < hits / 4000 < 0.960  # the normal quantile in place of t would cover 0.81


@pytest.mark.parametrize(
    ("correct", "n", "low", "high"),
    [
        (0, 10, 0.0, 3.841459 / 13.841459),  # z^2 / (n + z^2)
        (10, 10, 10 / 13.841459, 1.0),
        (5, 10, 0.5 - 1.959964 / (2 * math.sqrt(13.841459)), 0.5 + 1.959964 / (2 * math.sqrt(13.841459))),
    ],
)
def test_wilson_closed_forms(correct: int, n: int, low: float, high: float) -> None:
    interval = proportion_interval(correct, n)
    assert (interval.low, interval.high) == pytest.approx((low, high), abs=1e-6)


def test_wilson_is_scipys() -> None:
    reference = stats.binomtest(6230, 8000).proportion_ci(method="wilson")
    interval = proportion_interval(6230, 8000)
    assert (interval.low, interval.high) == pytest.approx((reference.low, reference.high), rel=1e-9)


def test_wilson_covers() -> None:
    rng = np.random.default_rng(2)
    drawn = rng.binomial(200, 0.9, 3000)
    intervals = [proportion_interval(int(k), 200) for k in drawn]
    covered = np.mean([interval.low <= 0.9 <= interval.high for interval in intervals])
    assert 0.935 < covered < 0.968


def test_paired_is_scipys_and_narrower_than_unpaired() -> None:
    rng = np.random.default_rng(3)
    seeds = rng.normal(0, 0.05, 5)
    a, b = 0.8 + seeds + rng.normal(0, 0.002, 5), 0.78 + seeds + rng.normal(0, 0.002, 5)
    reference = stats.ttest_rel(a, b).confidence_interval()
    interval = paired_interval(a, b)
    assert (interval.low, interval.high) == pytest.approx((reference.low, reference.high), rel=1e-9)
    assert interval.half_width < mean_interval(a).half_width / 5


def test_paired_images_averages_seeds_first() -> None:
    rng = np.random.default_rng(4)
    a, b = rng.random((3, 500)) < 0.8, rng.random((2, 500)) < 0.7
    by_hand = mean_interval(a.mean(axis=0) - b.mean(axis=0))
    assert paired_images_interval(a, b) == by_hand
    assert by_hand.n == 500
    assert by_hand.mean == pytest.approx(a.mean() - b.mean())


def test_paired_images_covers_a_true_difference() -> None:
    rng = np.random.default_rng(5)
    covered = 0
    for _ in range(1500):
        hard = rng.random(400)  # the same images are hard for both: paired, not independent
        a, b = rng.random(400) < 0.9 * hard + 0.05, rng.random(400) < 0.9 * hard
        interval = paired_images_interval(a, b)
        covered += interval.low <= 0.05 <= interval.high
    assert 0.935 < covered / 1500 < 0.965


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: mean_interval([]), "one or more"),
        (lambda: mean_interval([0.5, math.nan, 0.5]), "value 1 of 3 is nan"),
        (lambda: mean_interval([0.5, math.inf]), "value 1 of 2 is inf"),
        (lambda: proportion_interval(3, 0), "n >= 1"),
        (lambda: proportion_interval(11, 10), "correct=11"),
        (lambda: paired_interval([0.1, 0.2], [0.1]), "2 and 1"),
        (lambda: paired_images_interval([1, 0, 1], [1, 0]), "3 and 2 images"),
        (lambda: paired_images_interval(np.zeros((1, 2, 2)), [1, 0]), r"\(seeds, images\)"),
    ],
)
def test_bad_input_is_one_line(call: object, match: str) -> None:
    with pytest.raises(InputError, match=match) as caught:
        call()  # type: ignore[operator]
    assert "\n" not in str(caught.value)
