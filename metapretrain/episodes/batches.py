"""Shuffled batches of row indices: the ordinary loader of supervised and contrastive training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from metapretrain.episodes.checks import check_rank, check_seed, whole
from metapretrain.episodes.draws import Bits, Ints, Use, permutations
from metapretrain.episodes.labels import read_labels
from metapretrain.errors import InputError


class ShuffledBatches:
    """Yields int64 row indices (B,) on the CPU; batch i of an epoch depends on (seed, epoch, i) alone.

    Without `labels` an epoch visits every row once (but for a dropped last batch). With `labels` the batches
    are class-balanced: every class comes once in each round, so that class counts within a batch differ by at
    most two, and not at all where a batch over all ranks is whole rounds. A class with fewer rows than its
    share of the epoch is repeated, each time in a new order; of one with more, a new random part is seen in
    each epoch.

    Args:
        n: rows.
        batch_size: rows of a rank's batch; together the ranks hold the batch that one process with
            batch_size * world_size would get.
        seed: 0..2**64-1.
        epoch, start: the epoch, and the first batch to give: what resumes a run.
        drop_last: leave out a last batch that is not full.
        labels: one label a row (N,), for class-balanced batches.

    Raises:
        InputError: counts are malformed, there is no batch, or ranks would get unequal parts.

    Example:
        >>> batches = ShuffledBatches(10, 4, seed=0, drop_last=False)
        >>> len(batches), sorted(torch.cat(list(batches)).tolist())
        (3, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
    """

    def __init__(
        self,
        n: int,
        batch_size: int,
        *,
        seed: int,
        epoch: int = 0,
        drop_last: bool = True,
        start: int = 0,
        rank: int = 0,
        world_size: int = 1,
        labels: Any = None,
    ) -> None:
        self.n, self.batch_size = whole("n", n), whole("batch_size", batch_size, 1)
        self.seed, self.drop_last = check_seed(seed), drop_last
        self.rank, self.world_size = check_rank(rank, world_size)
        self._codes = None if labels is None else read_labels(labels).codes
        if self._codes is not None and len(self._codes) != self.n:
            raise InputError(f"labels must be one a row: got {len(self._codes)} labels and {self.n} rows")
        self._rows = self.batch_size * self.world_size  # of a batch over all ranks
        self.total = self.n // self._rows if drop_last else -(-self.n // self._rows)
        self._check()
        self._cached: tuple[int, torch.Tensor] | None = None
        self.epoch, self.start = whole("epoch", epoch), whole("start", start)

    def _check(self) -> None:
        if not self.total:
            raise InputError(
                f"{self.n} rows do not fill one batch of {self._rows}: lower batch_size"
                + (" or keep the last batch with drop_last=False" if self.n else "")
            )
        last = 0 if self.drop_last else self.n % self._rows
        if last % self.world_size:
            raise InputError(
                f"the last batch of {last} rows cannot be shared equally by {self.world_size} ranks:"
                " use drop_last=True"
            )

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch and begin it at its first batch."""
        self.epoch, self.start = whole("epoch", epoch), 0

    def __len__(self) -> int:
        return max(self.total - self.start, 0)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return self.iter_from(self.start)

    def iter_from(self, position: int) -> Iterator[torch.Tensor]:
        """The batches of the epoch but for the first `position`.

        Example:
            >>> batches = ShuffledBatches(6, 2, seed=0)
            >>> torch.equal(next(batches.iter_from(2)), list(batches)[2])
            True
        """
        return self._batches(self._order(self.epoch), whole("position", position))

    def _batches(self, order: torch.Tensor, position: int) -> Iterator[torch.Tensor]:
        for i in range(position, self.total):
            batch = order[i * self._rows : (i + 1) * self._rows]
            part = len(batch) // self.world_size
            yield batch[self.rank * part : (self.rank + 1) * part].clone()

    def _order(self, epoch: int) -> torch.Tensor:
        if self._cached is None or self._cached[0] != epoch:
            bits = Bits(self.seed, Use.BATCHES, epoch, 0)
            if self._codes is None:
                order = permutations(bits, np.array([self.n]))[0]
            else:
                order = _balanced(bits, self._codes)
            self._cached = epoch, torch.from_numpy(order)
        return self._cached[1]


def _balanced(bits: Bits, codes: Ints) -> Ints:
    """len(codes) rows in rounds of one row of every class, each round in its own random order of classes."""
    size = np.bincount(codes)
    classes, n = len(size), len(codes)
    rounds = -(-n // classes)
    rows, first = np.argsort(codes, kind="stable"), np.cumsum(size) - size
    passes = -(-rounds // size)
    lane_class = np.repeat(np.arange(classes), passes)
    order = permutations(bits, size[lane_class])
    inside = np.arange(order.shape[1]) < size[lane_class][:, None]
    sequence = rows[(order + first[lane_class][:, None])[inside]]  # class after class, pass after pass
    begin = np.cumsum(passes * size) - passes * size
    table = sequence[begin[:, None] + np.arange(rounds)]  # (classes, rounds)
    class_order = permutations(bits, np.full(rounds, classes))
    result: Ints = np.take_along_axis(table.T, class_order, axis=1).reshape(-1)[:n]
    return result
