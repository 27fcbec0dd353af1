"""Checks of counts, seeds and ranks that the samplers and loaders share."""

from __future__ import annotations

import operator
from typing import Any

from metapretrain.errors import InputError

MOST = 2**62


def whole(what: str, given: Any, minimum: int = 0) -> int:
    """Return `given` as an int of at least `minimum`.

    Raises:
        InputError: it is a bool, a float, any other non-integer, or below `minimum` or above 2**62 (a seed: see
            :func:`check_seed`).

    Example:
        >>> whole("shots", 5, 1)
        5
    """
    try:
        if isinstance(given, bool):
            raise TypeError
        number = operator.index(given)
    except TypeError:
        raise InputError(f"{what} must be an integer of at least {minimum}, not {given!r}") from None
    if number < minimum:
        raise InputError(f"{what} must be at least {minimum}, not {number}")
    if number > MOST and what != "seed":
        raise InputError(f"{what} must be at most {MOST}, not {number}")
    return number


def check_seed(seed: Any) -> int:
    """Return `seed` if it lies in 0..2**64-1.

    Raises:
        InputError: it does not.

    Example:
        >>> check_seed(7)
        7
    """
    number = whole("seed", seed)
    if number >= 2**64:
        raise InputError(f"seed must be below 2**64, not {number}")
    return number


def check_rank(rank: Any, world_size: Any) -> tuple[int, int]:
    """Return (rank, world_size) if the rank lies in 0..world_size-1.

    Raises:
        InputError: it does not.

    Example:
        >>> check_rank(1, 4)
        (1, 4)
    """
    rank, world_size = whole("rank", rank), whole("world_size", world_size, 1)
    if rank >= world_size:
        raise InputError(f"rank must be below world_size, not rank {rank} of {world_size}")
    return rank, world_size
