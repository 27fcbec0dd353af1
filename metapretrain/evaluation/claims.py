"""Claims about two families of methods, tested on all their pairs: query against standard pretraining."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from metapretrain.evaluation.intervals import Interval, mean_interval
from metapretrain.evaluation.published import Published
from metapretrain.evaluation.results import Result

FAMILIES = (("prl-query", "prl-standard"),)  # the vision paper: the query variant outperforms the standard one


@dataclass(frozen=True)
class Claim:
    """Mean difference of test accuracy between two families, over their pairs of methods and common seeds.

    `over_seeds` is Student's t over seeds, each value the mean over the pairs; `better` counts the pairs
    whose mean over seeds is above 0. The published difference is the mean over the same pairs.
    """

    first: str
    second: str
    pairs: int
    better: int
    seeds: list[int]
    over_seeds: Interval
    published: float | None
    published_better: int | None


def compare_families(
    by_method: Mapping[str, Mapping[int, Result]], published: Mapping[str, Published], first: str, second: str
) -> Claim | None:
    """Compare two families, methods paired by the rest of their names, on the seeds that all share.

    Args:
        by_method: method to seed to result.
        published: method to published figures.
        first: a family, the beginning of its methods' names.
        second: the other.

    Returns:
        Claim: or None where there is no pair or no seed that all pairs share.
    """
    endings = [name.removeprefix(first) for name in sorted(by_method) if name.startswith(first)]
    endings = [ending for ending in endings if second + ending in by_method]
    names = [family + ending for ending in endings for family in (first, second)]
    if not names:
        return None
    seeds = sorted(set.intersection(*(set(by_method[name]) for name in names)))
    if not seeds:
        return None

    def accuracies(family: str) -> list[list[float]]:
        runs = [by_method[family + ending] for ending in endings]
        return [[float(run[seed]["metrics"]["test_accuracy"]) for seed in seeds] for run in runs]

    gaps = np.asarray(accuracies(first)) - np.asarray(accuracies(second))  # (pairs, seeds)
    cited = None
    printed = {name: row.scores.get("test") for name, row in published.items()}
    figures = {name: value for name, value in printed.items() if value is not None}
    if all(name in figures for name in names):
        cited = [figures[first + ending] - figures[second + ending] for ending in endings]
    return Claim(
        first=first,
        second=second,
        pairs=len(endings),
        better=int((gaps.mean(axis=1) > 0).sum()),
        seeds=seeds,
        over_seeds=mean_interval(gaps.mean(axis=0)),
        published=float(np.mean(cited)) if cited else None,
        published_better=sum(gap > 0 for gap in cited) if cited else None,
    )
