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
    chosen = max(names, key=lambda name: approximate[name])
    correlation = _spearman([exact[name] for name in names], [approximate[name] for name in names])
    return Agreement(correlation, max(exact.values()) - exact[chosen])


def _spearman(a: list[float], b: list[float]) -> float:
    if len(set(a)) == 1 or len(set(b)) == 1:
        return math.nan  # scipy would warn
    from scipy.stats import spearmanr  # not at import: scipy.stats costs half a second

    return float(spearmanr(a, b).statistic)
