"""Which rows of a batch are queries: a function of (seed, call, row) alone, on any device.

The keys are draws of the SplitMix64 stream (Steele, Lea and Flood, 2014) computed in wrapping int64
arithmetic. Unlike a torch.Generator this gives one split on CPU and GPU, can be captured in a CUDA graph,
and is resumed from the call counter.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _signed(x: int) -> int:
    x &= (1 << 64) - 1
    return x - (1 << 64) if x >> 63 else x


_GAMMA = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Logical right shift: int64 shifts copies of the sign in, which the mask removes."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser, a bijection on int64."""
    x = (x ^ _shifted(x, 30)) * _MIX_1
    x = (x ^ _shifted(x, 27)) * _MIX_2
    return x ^ _shifted(x, 31)


def _mixed(x: int) -> int:
    """:func:`mix` of a Python number."""
    x &= (1 << 64) - 1
    for bits, factor in ((30, _MIX_1), (27, _MIX_2)):
        x = ((x ^ (x >> bits)) * factor) & ((1 << 64) - 1)
    return _signed(x ^ (x >> 31))


def split_keys(seed: int, calls: Tensor, rows: int) -> Tensor:
    """(rows,) int64 keys, all different: draws ``calls * 2**32 + row`` of the stream that `seed` starts.

    Args:
        seed: any whole number.
        calls: 0-d int64 tensor, the number of calls before this one; its device is the keys'.
        rows: B.
    """
    row = torch.arange(rows, device=calls.device, dtype=torch.int64)
    return mix(((calls << 32) + row) * _GAMMA + _mixed(seed))


def query_count(rows: int, query_fraction: float) -> int:
    """Number of queries in a batch of `rows`: the rounded fraction, but never an empty side.

    Example:
        >>> query_count(128, 0.25), query_count(2, 0.1)
        (32, 1)
    """
    return max(1, min(rows - 1, round(query_fraction * rows)))


def random_queries(keys: Tensor, query_fraction: float) -> Tensor:
    """The :func:`query_count` rows (Q,) with the lowest keys."""
    return torch.argsort(keys)[: query_count(len(keys), query_fraction)]


def stratified_queries(keys: Tensor, y: Tensor, query_fraction: float) -> Tensor:
    """(B,) bool: in each class the rounded fraction, at least 1 and never all; none in a class of one.

    Sorted by class and then by key, a row's place in its class is its position minus the position where its
    class starts.

    Example:
        >>> y = torch.tensor([0, 0, 0, 0, 1, 1, 2])
        >>> stratified_queries(torch.arange(7), y, 0.25).tolist()
        [True, False, False, False, True, False, False]
    """
    by_key = torch.argsort(keys)
    order = by_key[torch.argsort(y[by_key], stable=True)]
    ordered = y[order].contiguous()
    start = torch.searchsorted(ordered, ordered)
    size = torch.searchsorted(ordered, ordered, right=True) - start
    wanted = (size.float() * query_fraction).round().long().clamp_min(1)
    place = torch.arange(len(y), device=y.device) - start
    chosen = place < torch.minimum(wanted, size - 1)
    return torch.zeros_like(chosen).scatter(0, order, chosen)
