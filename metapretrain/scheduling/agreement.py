"""How well cheap utilities stand for exact ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from metapretrain.errors import InputError


class Agreement(NamedTuple):
    """Spearman's rank correlation (NaN if all are equal on one side), and the regret.

    The regret is what following the approximate utilities loses: the best exact utility minus the exact
    utility of the source that the approximate ones put first; 0 is best.
    """

    rank_correlation: float
    regret: float


def agreement(exact: Mapping[str, float], approximate: Mapping[str, float]) -> Agreement:
    """Compare two sets of utilities of the same sources, as :meth:`UtilityScheduler.compare` gives.

    Raises:
        InputError: other sources on one side, or utilities that are not finite.

    Example:
        >>> agreement({"a": -1.0, "b": -2.0, "c": -4.0}, {"a": 0.1, "b": 0.2, "c": 0.0})
        Agreement(rank_correlation=0.5, regret=1.0)
    """
    if exact.keys() != approximate.keys() or not exact:
        raise InputError(f"utilities of {', '.join(exact)} against {', '.join(approximate)}; give the same sources")
    if not all(map(math.isfinite, [*exact.values(), *approximate.values()])):
        raise InputError("a utility is NaN or infinite: leave out the sources that are passed over")
    names = list(exact)
    first, second = (_ranks([values[name] for name in names]) for values in (exact, approximate))
    chosen = max(names, key=lambda name: approximate[name])
    return Agreement(_correlation(first, second), max(exact.values()) - exact[chosen])


def _ranks(values: list[float]) -> list[float]:
    """Ranks from 0; equal values share their mean rank."""
    return [sum(x < v for x in values) + (sum(x == v for x in values) - 1) / 2 for v in values]


def _correlation(a: list[float], b: list[float]) -> float:
    mean_a, mean_b = sum(a) / len(a), sum(b) / len(b)
    covariance = sum((x - mean_a) * (y - mean_b) for x, y in zip(a, b, strict=True))
    spread = math.sqrt(sum((x - mean_a) ** 2 for x in a) * sum((y - mean_b) ** 2 for y in b))
    return covariance / spread if spread else math.nan
