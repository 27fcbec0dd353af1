"""Checks of names and numbers that the schedulers share."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from metapretrain.errors import InputError


def check_names(what: str, given: Iterable[str]) -> tuple[str, ...]:
    """The names, which are texts, at least one, and all different.

    Raises:
        InputError: they are not.

    Example:
        >>> check_names("sources", {"mlm": 1, "order": 2})
        ('mlm', 'order')
    """
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise InputError(f"{what} is {given!r}; give several names, such as {{name: ...}} or [name, ...]")
    names = tuple(given)
    if not names or not all(isinstance(name, str) for name in names):
        raise InputError(f"{what} is {list(names)!r}; give at least one, each under a name that is text")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InputError(f"{what} has {', '.join(twice)} more than once; give different names")
    return names


def check_number(
    what: str, given: Any, low: float, high: float = math.inf, *, above: bool = False, below: bool = False
) -> float:
    """Return `given` as a finite float of [low, high], without `low` if `above`, without `high` if `below`.

    Raises:
        InputError: it is not.

    Example:
        >>> check_number("epsilon", 1, 0, 1)
        1.0
    """
    right = isinstance(given, int | float) and not isinstance(given, bool) and math.isfinite(given)
    if not right or given < low or given > high or (above and given == low) or (below and given == high):
        limits = f"{'above' if above else 'of at least'} {low:g}"
        if high < math.inf:
            limits += f" and {'below' if below else 'at most'} {high:g}"
        raise InputError(f"{what} is {given!r}; give a number {limits}")
    return float(given)


def check_whole(what: str, given: Any, low: int) -> int:
    """Return `given`, a whole number of at least `low`.

    Raises:
        InputError: it is not.

    Example:
        >>> check_whole("samples", 2, 1)
        2
    """
    if not isinstance(given, int) or isinstance(given, bool) or given < low:
        raise InputError(f"{what} is {given!r}; give a whole number of at least {low}")
    return given
