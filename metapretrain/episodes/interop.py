"""Adapters to and from learn2learn's task sets."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from metapretrain.checks import check_seed, require, whole
from metapretrain.draws import Bits, Use, permutations
from metapretrain.episodes.dataset import Batch, Episode, check_rows
from metapretrain.episodes.sampler import EpisodeSampler
from metapretrain.errors import InputError


def to_metadataset(x: torch.Tensor, labels: torch.Tensor) -> Any:
    """learn2learn's `MetaDataset` over rows x (N, ...) and labels (N,); :class:`EpisodeSampler` takes it as labels.

    Raises InputError: learn2learn is not installed.
    """
    return require("learn2learn", "a MetaDataset").data.MetaDataset(torch.utils.data.TensorDataset(x, labels))


def to_taskset(dataset: Any, sampler: EpisodeSampler) -> Any:
    """A learn2learn `Taskset` whose task i is the sampler's episode i (of its rank; the next one if it is endless).

    A task is a pair (data, labels 0..W-1), support rows first, then query rows. Items of `dataset` are (x, label).
    Raises InputError: learn2learn is not installed, or labels and rows differ in number.
    """
    l2l = require("learn2learn", "a Taskset")
    check_rows(dataset, sampler)
    if not isinstance(dataset, l2l.data.MetaDataset):
        if not isinstance(dataset, torch.utils.data.Dataset):
            raise InputError(f"learn2learn needs a torch Dataset, not {type(dataset).__name__}")
        dataset = l2l.data.MetaDataset(dataset, indices_to_labels=dict(enumerate(sampler.labels)))
    tasks = -1 if sampler.episodes is None else len(sampler)
    taskset: Any = _taskset_class(l2l)(dataset, num_tasks=tasks)
    taskset.sampler = sampler
    taskset.given = itertools.count()
    return taskset


def _taskset_class(l2l: Any) -> Any:
    class EpisodeTaskset(l2l.data.Taskset):  # type: ignore[misc]
        def __getitem__(self, i: int) -> Any:
            return super().__getitem__(i) if self.num_tasks == -1 else self.get_task(self._describe(i))

        def sample_task_description(self) -> list[Any]:
            return self._describe(next(self.given))

        def _describe(self, i: int) -> list[Any]:
            sampler: EpisodeSampler = self.sampler
            plan = sampler.plan(sampler.index_of(i))
            y = torch.cat([plan.support_y, plan.query_y]).tolist()
            described = []
            for row, label in zip(plan, y, strict=True):
                item = l2l.data.task_dataset.DataDescription(row)
                item.transforms = [self.dataset.__getitem__, lambda item, label=label: (item[0], label)]
                described.append(item)
            return described

    return EpisodeTaskset


class TasksetEpisodes:
    """The tasks of a learn2learn `Taskset` as episodes; see :func:`from_taskset`."""

    def __init__(self, taskset: Any, shots: int, *, seed: int = 0) -> None:
        self.taskset, self.shots, self.seed = taskset, whole("shots", shots, 1), check_seed(seed)
        self.endless = taskset.num_tasks == -1

    def __len__(self) -> int:
        if self.endless:
            raise TypeError("an endless Taskset (num_tasks=-1) has no length")
        return len(self.taskset)

    def __iter__(self) -> Iterator[Episode]:
        for index in itertools.count() if self.endless else range(len(self)):
            yield self._episode(index, *self.taskset[index])

    def _episode(self, index: int, x: torch.Tensor, y: torch.Tensor) -> Episode:
        values, code, count = torch.unique(y, return_inverse=True, return_counts=True)
        if int(count.min()) <= self.shots:
            told = f"shots = {self.shots} leaves no query of a class with {int(count.min())} rows in task {index}"
            raise InputError(f"{told}; lower shots or raise KShots")
        by_class = torch.argsort(code, stable=True)
        rank = torch.arange(len(y)) - (torch.cumsum(count, 0) - count)[code[by_class]]
        support, query = by_class[rank < self.shots], by_class[rank >= self.shots]
        order = permutations(Bits(self.seed, Use.SHUFFLE, 0, index), np.array([len(query)]))[0]
        query = query[torch.from_numpy(order)]
        halves = [Batch(x[rows], code[rows]) for rows in (support, query)]
        return Episode(halves[0], halves[1], tuple(values.tolist()), index)


def from_taskset(taskset: Any, shots: int, *, seed: int = 0) -> TasksetEpisodes:
    """The tasks of a learn2learn `Taskset` as episodes: the first `shots` rows of each class are support.

    The other rows are the query part, in an order that depends on (seed, task) alone. Which rows a task has is
    learn2learn's choice, from Python's global random state.
    Raises InputError: a class of a task has no row beyond `shots` (when that task is read).

    Example:
        >>> task = torch.arange(4.0), torch.tensor([1, 1, 0, 0])
        >>> class Tasks(list):
        ...     num_tasks = 1
        >>> [episode.support.x.tolist() for episode in from_taskset(Tasks([task]), shots=1)]
        [[2.0, 0.0]]
    """
    return TasksetEpisodes(taskset, shots, seed=seed)
