"""Random numbers that depend on a seed and on what they are for, and on nothing drawn before.

A scheduler's state is then a few counts, and adding a source leaves the draws of the others as they were.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence

import torch


def key(*parts: int | str) -> int:
    """A number of 0..2**63-1 that looks random and depends on the parts alone.

    Example:
        >>> key(0, 7, "mlm") == key(0, 7, "mlm") != key(0, 7, "nsp")
        True
    """
    text = "/".join(f"{len(str(part))}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator(*parts: int | str) -> torch.Generator:
    """A CPU generator seeded by :func:`key`."""
    return torch.Generator().manual_seed(key(*parts))


def uniform(*parts: int | str) -> float:
    """A number of [0, 1) in steps of 2**-53.

    Example:
        >>> 0 <= uniform(0, "explore") < 1
        True
    """
    return (key(*parts) >> 10) / 2**53


def pick(names: Sequence[str], weights: Sequence[float] | None, *parts: int | str) -> str:
    """One of the names, with probability proportional to its weight.

    Example:
        >>> pick(["a", "b"], [0.0, 1.0], 3)
        'b'
    """
    shares = list(itertools.accumulate(weights or [1.0] * len(names)))
    at = uniform(*parts) * shares[-1]
    return next((name for name, share in zip(names, shares, strict=True) if at < share), names[-1])
