"""The sampler of episodes: episode i depends on (seed, epoch, i, block size) alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data import Sampler

from metapretrain.episodes.checks import check_rank, check_seed, whole
from metapretrain.episodes.labels import read_groups, read_labels
from metapretrain.episodes.plan import EpisodePlan, plan_at, plans_at
from metapretrain.episodes.planner import PlanBlock, Planner
from metapretrain.episodes.spec import EpisodeSpec
from metapretrain.errors import InputError

BLOCK = 512


class EpisodeSampler(Sampler[list[int]]):
    """Yields episode plans of random classes and rows; give it to a DataLoader as `batch_sampler`.

    Every episode draws a group uniformly (with `groups`), classes uniformly in uniformly random order, and
    different rows of each class. Classes with fewer rows than the most shots + queries of the spec are left
    out.

    Args:
        labels: one label a row (N,): list, array, tensor, or a data set with `.targets`, `.labels` or
            learn2learn's `.indices_to_labels`.
        spec: ways, shots and queries.
        episodes: episodes of an epoch over all ranks; None is endless.
        seed: 0..2**64-1.
        rank, world_size: rank r gives episodes r, r + world_size, ...; never pass the loader to accelerate's
            `prepare`, which would shard a second time.
        groups: one group a row (N,); an episode stays inside a group.
        start: the first episode to give, counted over all ranks: what resumes a run.
        epoch: see :meth:`set_epoch`.
        uneven: allow ranks to give different numbers of episodes: for evaluation; training would hang.
        block_size: episodes planned together; part of what an episode depends on.

    Raises:
        InputError: labels, groups or counts are malformed, no class is large enough, fewer than `ways`
            classes remain, or `episodes` does not divide by `world_size` and `uneven` is off.

    Example:
        >>> sampler = EpisodeSampler([0, 0, 0, 1, 1, 1], EpisodeSpec(ways=2, shots=1, queries=2), 4, seed=0)
        >>> len(sampler), [len(plan) for plan in sampler]
        (4, [6, 6, 6, 6])
        >>> list(sampler) == [sampler.plan(i) for i in range(4)]
        True
    """

    def __init__(
        self,
        labels: Any,
        spec: EpisodeSpec,
        episodes: int | None,
        *,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        groups: Any = None,
        start: int = 0,
        epoch: int = 0,
        uneven: bool = False,
        block_size: int = BLOCK,
    ) -> None:
        super().__init__()
        if not isinstance(spec, EpisodeSpec):
            raise InputError(f"spec must be EpisodeSpec(ways, shots, queries), not {type(spec).__name__}")
        self.spec = spec
        self.episodes = None if episodes is None else whole("episodes", episodes, 1)
        self.rank, self.world_size = check_rank(rank, world_size)
        self.set_epoch(epoch, start)
        if self.episodes is not None and self.episodes % self.world_size and not uneven:
            raise InputError(
                f"episodes must divide by world_size so that all ranks take the same number of steps, not"
                f" {self.episodes} over {self.world_size}; for evaluation pass uneven=True"
            )
        read = read_labels(labels)
        if spec.ways is not None and isinstance(read.names[0], int) and read.names[0] < 0:
            raise InputError(
                f"labels must not be negative, but the least is {read.names[0]}: -1 marks unlabelled rows;"
                " give the labelled rows only"
            )
        self.rows = len(read.codes)
        self._last: tuple[int, int, PlanBlock] | None = None
        self._planner = Planner(
            read,
            read_groups(groups, self.rows),
            spec,
            seed=check_seed(seed),
            block_size=whole("block_size", block_size, 1),
        )

    @property
    def labels(self) -> list[Any]:
        """The label value of every row."""
        names = self._planner.labels.names
        return [names[code] for code in self._planner.labels.codes.tolist()]

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Choose the epoch, and its first episode to give, counted over all ranks.

        Raises:
            InputError: a number is negative or not an integer.

        Example:
            >>> sampler = EpisodeSampler([0, 0, 1, 1], EpisodeSpec(2, 1, 1), 10, seed=0)
            >>> sampler.set_epoch(3, start=8)
            >>> [plan.index for plan in sampler]
            [8, 9]
        """
        self.epoch, self.start = whole("epoch", epoch), whole("start", start)

    def __len__(self) -> int:
        if self.episodes is None:
            raise TypeError("an endless EpisodeSampler (episodes=None) has no length")
        return len(range(self._first(), self.episodes, self.world_size))

    def __iter__(self) -> Iterator[EpisodePlan]:
        return self._from(self._first())

    def iter_from(self, position: int) -> Iterator[EpisodePlan]:
        """This rank's episodes of the epoch but for the first `position`, whatever `start` is.

        Example:
            >>> sampler = EpisodeSampler([0, 0, 1, 1], EpisodeSpec(2, 1, 1), 6, seed=0, rank=1, world_size=2)
            >>> [plan.index for plan in sampler.iter_from(1)]
            [3, 5]
        """
        return self._from(self.rank + whole("position", position) * self.world_size)

    def plan(self, index: int) -> EpisodePlan:
        """Episode `index` of the epoch, whichever rank's it is.

        Example:
            see the class.
        """
        block, lane = divmod(whole("index", index), self._planner.block_size)
        if self._last is None or self._last[:2] != (self.epoch, block):
            self._last = self.epoch, block, self._planner.block(self.epoch, block)
        tables, place = self._last[2]
        table, at = place[lane]
        return plan_at(tables[table], at)

    def index_of(self, position: int) -> int:
        """The number of the episode that this rank gives `position` episodes after its first.

        Example:
            >>> sampler = EpisodeSampler([0, 0, 1, 1], EpisodeSpec(2, 1, 1), 6, seed=0, rank=1, world_size=2)
            >>> sampler.index_of(2)
            5
        """
        return self._first() + position * self.world_size

    def _first(self) -> int:
        return self.start + (self.rank - self.start) % self.world_size

    def _from(self, first: int) -> Iterator[EpisodePlan]:
        size, epoch = self._planner.block_size, self.epoch
        for block in itertools.count(first // size):
            begin = block * size
            end = begin + size if self.episodes is None else min(begin + size, self.episodes)
            if first >= end and end < begin + size:
                return
            mine = np.arange(first, end, self.world_size)
            if mine.size:
                tables, place = self._planner.block(epoch, block)
                yield from plans_at(tables, [place[lane] for lane in (mine - begin).tolist()])
                first = int(mine[-1]) + self.world_size
