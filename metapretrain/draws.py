"""All seeded randomness of the package: draws that are a function of a seed and of what they are for.

- :class:`Bits` and its :func:`integers`, :func:`distinct` and :func:`permutations`: episodes and batches, many at once;
- :func:`key`, and :func:`generator`, :func:`uniform` and :func:`pick` by it: what has names, as a scheduler's sources;
- :func:`split_keys`: on any device, inside a CUDA graph;
- :func:`numpy_generator` and those below it: the libraries' own generators, in data sets and for initial weights.

The first three take only raw bits from NumPy, fixed across its versions, and are exactly uniform.
"""

import hashlib
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

CHUNK = 1 << 22  # random keys held at once, so that large classes do not exhaust the memory
NARROW = 256  # up to this many lanes, 32-bit keys leave at least 24 random bits and ties stay rare


class Use(IntEnum):
    """What random bits are for: each use has its own key, so that no two uses of a seed share bits."""

    EPISODES = 0
    BATCHES = 1
    TASKS = 2
    SHUFFLE = 3


class Bits:
    """Random bits that depend on (seed, use, epoch, block) alone.

    Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3" (Philox4x64-10).
    """

    def __init__(self, seed: int, use: Use, epoch: int, block: int) -> None:
        key = np.array([seed, int(use)], dtype=np.uint64)
        counter = np.array([0, 0, block, epoch], dtype=np.uint64)
        self._philox = np.random.Philox(key=key, counter=counter)

    def words(self, count: int, *, wide: bool = False) -> npt.NDArray[Any]:
        """(count,) uint32, or uint64 if `wide`."""
        if wide:
            return np.asarray(self._philox.random_raw(count))
        raw = np.asarray(self._philox.random_raw((count + 1) // 2))
        return raw.astype("<u8", copy=False).view("<u4")[:count]


def integers(bits: Bits, sizes: Ints) -> Ints:
    """One integer of 0..size-1 for each lane: sizes (M,) -> (M,)."""
    return distinct(bits, sizes, 1)[:, 0]


def distinct(bits: Bits, sizes: Ints, count: int) -> Ints:
    """`count` different integers of 0..size-1 for each lane, in random order: sizes (M,) -> (M, count).

    Every ordered selection has the same probability. Needs 1 <= count <= sizes.min() and sizes below 2**32.
    """
    large = count * (count - 1) <= sizes
    if large.all():
        return _until_good(_with_replacement, bits, sizes, count)
    if not large.any():
        return _by_sorting(bits, sizes, count)
    result = np.empty((len(sizes), count), dtype=np.int64)
    result[large] = _until_good(_with_replacement, bits, sizes[large], count)
    result[~large] = _by_sorting(bits, sizes[~large], count)
    return result


def permutations(bits: Bits, sizes: Ints) -> Ints:
    """Uniformly random orders of 0..size-1: sizes (M,) -> (M, sizes.max()), of which the first sizes[m] count."""
    return _by_sorting(bits, sizes, int(sizes.max()))


def _until_good(draw: Callable[..., tuple[Ints, Bools]], bits: Bits, sizes: Ints, count: int) -> Ints:
    """What `draw` gives, where the lanes that are not good are drawn again; a part of the lanes may be narrower."""
    drawn, good = draw(bits, sizes, count)
    todo = np.flatnonzero(~good)
    while todo.size:
        again, good = draw(bits, sizes[todo], count)
        drawn[todo[good], : again.shape[1]] = again[good]
        todo = todo[~good]
    return drawn


def _with_replacement(bits: Bits, sizes: Ints, count: int) -> tuple[Ints, Bools]:
    """(M, count) draws and which lanes (M,) hold neither a biased draw (Lemire 2019) nor a repeat."""
    span = sizes.astype(np.uint64)[:, None]
    words = bits.words(len(sizes) * count).reshape(len(sizes), count)
    product = words.astype(np.uint64) * span
    biased = product.astype(np.uint32) < (np.uint64(2**32) % span).astype(np.uint32)
    drawn = (product >> np.uint64(32)).astype(np.uint32)
    good = np.asarray(~biased.any(axis=1))
    if count > 1:
        ordered = np.sort(drawn, axis=1)
        good &= (ordered[:, 1:] != ordered[:, :-1]).all(axis=1)
    return drawn.astype(np.int64), good


def _by_sorting(bits: Bits, sizes: Ints, count: int) -> Ints:
    step = max(1, CHUNK // int(sizes.max()))
    parts = [_until_good(_by_keys, bits, sizes[i : i + step], count) for i in range(0, len(sizes), step)]
    return np.concatenate([np.pad(part, ((0, 0), (0, count - part.shape[1]))) for part in parts])


def _by_keys(bits: Bits, sizes: Ints, count: int) -> tuple[Ints, Bools]:
    """Positions (M, count) by random keys, and which lanes have no tie; the others are drawn again."""
    width, lanes = int(sizes.max()), len(sizes)
    wide = width > NARROW
    kind = np.uint64 if wide else np.uint32
    shift = kind(max(width - 1, 1).bit_length())
    low = kind((1 << int(shift)) - 1)
    keys = bits.words(lanes * width, wide=wide).reshape(lanes, width) & ~low
    keys |= np.arange(width).astype(kind)
    ragged = int(sizes.min()) < width
    if ragged:  # positions beyond a lane's size go to the end
        keys[np.arange(width) >= sizes[:, None]] = np.iinfo(kind).max
    keys.sort(axis=1)
    random_part = keys >> shift
    flat = random_part.reshape(-1)
    if not (flat[1:] == flat[:-1]).any():  # the usual case, and cheaper to see over all lanes at once
        return (keys[:, :count] & low).astype(np.int64), np.ones(lanes, dtype=np.bool_)
    tied = random_part[:, 1 : count + 1] == random_part[:, :-1][:, :count]
    if ragged:
        tied &= np.arange(1, tied.shape[1] + 1) < sizes[:, None]
    return (keys[:, :count] & low).astype(np.int64), ~tied.any(axis=1)


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
    """A number of [0, 1) in steps of 2**-53."""
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


def pick_by_size(sizes: Mapping[str, float], seed: int, number: int) -> str:
    """One of the names, with probability proportional to its size: the draw of this number under the seed."""
    return pick(list(sizes), list(sizes.values()), seed, number, "proportional")


def take_turns(names: Sequence[str], number: int, left: Collection[str]) -> str:
    """The name whose turn has this number, from 0; the turn of one that is not `left` goes to the next.

    Example:
        >>> [take_turns("abc", number, "ac") for number in range(4)]
        ['a', 'c', 'c', 'a']
    """
    turns = (names[(number + skipped) % len(names)] for skipped in range(len(names)))
    return next(name for name in turns if name in left)


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

    `calls`, the number of calls before this one, is a 0-d int64 tensor, on whose device the keys are.
    """
    row = torch.arange(rows, device=calls.device, dtype=torch.int64)
    return mix(((calls << 32) + row) * _GAMMA + _mixed(seed))


def numpy_generator(*seeds: int) -> np.random.Generator:
    """NumPy's default generator, seeded by the numbers in this order."""
    return np.random.default_rng(seeds)


def philox_generator(*seeds: int) -> np.random.Generator:
    """NumPy's generator over Philox, seeded by the numbers in this order: for data that is made or sampled once."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(seeds)))


def torch_generator(seed: int) -> torch.Generator:
    """PyTorch's CPU generator at `seed`, of 0..2**64-1."""
    return torch.Generator().manual_seed(seed)


@contextmanager
def seeded(seed: int, devices: Sequence[torch.device | int] | None = ()) -> Iterator[None]:
    """PyTorch's global generators at `seed` inside the block; those of the CPU and `devices` (None: all) restored."""
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield


def epoch_order(rows: int, seed: int, epoch: int) -> Tensor:
    """The numbers 0..rows-1 in the order of an epoch, int64 (rows,)."""
    return torch.from_numpy(numpy_generator(seed, epoch).permutation(rows))


def stratified_queries(keys: Tensor, y: Tensor, query_fraction: float) -> Tensor:
    """(B,) bool: in each class the rounded fraction, at least 1 and never all; none in a class of one."""
    by_key = torch.argsort(keys)
    order = by_key[torch.argsort(y[by_key], stable=True)]
    ordered = y[order].contiguous()
    start = torch.searchsorted(ordered, ordered)
    size = torch.searchsorted(ordered, ordered, right=True) - start
    wanted = (size.float() * query_fraction).round().long().clamp_min(1)
    place = torch.arange(len(y), device=y.device) - start
    chosen = place < torch.minimum(wanted, size - 1)
    return torch.zeros_like(chosen).scatter(0, order, chosen)
