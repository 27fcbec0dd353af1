"""What an episode holds: how many classes, support examples and query examples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from metapretrain.episodes.checks import whole
from metapretrain.errors import InputError

Count = int | tuple[int, int]


@dataclass(frozen=True)
class EpisodeSpec:
    """The size of an episode: classes (ways), and support (shots) and query examples of each class.

    Each is an integer of at least 1, or a range (low, high), both included, from which every episode draws
    uniformly; all classes of one episode have the same shots and queries. ``ways=None`` means shots + queries
    disjoint examples of a group whatever their labels (the meta tasks of prompt pretraining).

    Raises:
        InputError: a count is not an integer, is below 1, or a range is not low <= high.

    Example:
        >>> EpisodeSpec(ways=5, shots=1, queries=15).longest
        80
        >>> EpisodeSpec(ways=(3, 5), shots=(1, 5), queries=10).ranges
        ((3, 5), (1, 5), (10, 10))
        >>> EpisodeSpec(ways=5, shots=0, queries=15)
        Traceback (most recent call last):
        ...
        metapretrain.errors.InputError: shots must be at least 1, not 0
    """

    ways: Count | None
    shots: Count
    queries: Count

    def __post_init__(self) -> None:
        _ = self.ranges

    @property
    def ranges(self) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
        """(low, high) of ways, shots and queries; ways=None counts as one."""
        ways = (1, 1) if self.ways is None else _range("ways", self.ways)
        return ways, _range("shots", self.shots), _range("queries", self.queries)

    @property
    def per_class(self) -> int:
        """The most examples that an episode takes from one class."""
        _, shots, queries = self.ranges
        return shots[1] + queries[1]

    @property
    def longest(self) -> int:
        """The most examples that an episode holds."""
        return self.ranges[0][1] * self.per_class


def _range(what: str, given: Any) -> tuple[int, int]:
    if not isinstance(given, (tuple, list)):
        number = whole(what, given, 1)
        return number, number
    if len(given) != 2:
        raise InputError(f"{what} must be an integer or a range (low, high), not {given!r}")
    low, high = whole(f"{what}'s low", given[0], 1), whole(f"{what}'s high", given[1], 1)
    if low > high:
        raise InputError(f"{what} must be a range (low, high) with low <= high, not {given!r}")
    return low, high
