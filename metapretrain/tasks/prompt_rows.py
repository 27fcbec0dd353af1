"""Rows of the meta tasks of prompt pretraining: those of a step, and those held out."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from metapretrain.episodes import EpisodeSampler, EpisodeSpec
from metapretrain.episodes.groups import tidy_groups
from metapretrain.errors import InputError


class MetaRows:
    """Rows of each meta task: 2m of all K tasks for a step, and others that are held out.

    Args:
        groups: (N,); -1 marks rows in none.
        shots: m.
        held_out: batches of 2m rows of a task to validate on; smaller tasks repeat theirs.
        seed: of which rows are held out, and of those of each step.

    Raises:
        InputError: no group has 4m rows.

    Example:
        >>> rows = MetaRows([0] * 8 + [1] * 8, shots=2, held_out=1, seed=0)
        >>> rows.tasks, rows.at(0).shape, len(rows.held_out)
        (2, torch.Size([2, 4]), 1)
    """

    def __init__(self, groups: Any, *, shots: int, held_out: int, seed: int) -> None:
        tidied, self.moved = tidy_groups(np.asarray(groups), smallest=4 * shots, small="merge")
        codes, size = tidied.numpy(), 2 * shots
        self.seed, self.size = seed, size
        self.tasks, self.sizes = int(codes.max()) + 1, np.bincount(codes[codes >= 0]).tolist()
        random = np.random.default_rng([seed, 1])
        spec = EpisodeSpec(None, shots, shots)
        self._train, held = [], []
        for task in range(self.tasks):
            own = torch.from_numpy(random.permutation(np.flatnonzero(codes == task)))
            count = size * max(1, min(held_out, len(own) // 5 // size))
            held.append(own[:count])
            sampler = EpisodeSampler([0] * (len(own) - count), spec, None, seed=seed * 1_000 + task)
            self._train.append((own[count:], sampler))
        place = torch.arange(size)
        self.held_out = [
            torch.stack([rows[(batch * size + place) % len(rows)] for rows in held]) for batch in range(held_out)
        ]

    def at(self, step: int) -> Tensor:
        """Rows (K, 2m) of a step, all of a task different: m of the support part, then m of the query part."""
        return torch.stack([self.of(task, step) for task in range(self.tasks)])

    def of(self, task: int, visit: int) -> Tensor:
        """Rows (2m,) of one task, when it comes for the time numbered `visit`."""
        rows, sampler = self._train[task]
        return rows[torch.tensor(list(sampler.plan(visit)))]

    def training(self, task: int) -> Tensor:
        """All rows of a task that are not held out."""
        return self._train[task][0]


def crossed(rows: Tensor, step: int) -> Tensor:
    """Rows (K, 2m) whose query half is that of another place, each once; which one changes with the step.

    Raises:
        InputError: there is one place only.

    Example:
        >>> crossed(torch.tensor([[1, 1], [2, 2], [3, 3]]), step=0).tolist()
        [[1, 3], [2, 1], [3, 2]]
    """
    tasks, size = rows.shape
    if tasks < 2:
        raise InputError("meta.query=other needs two meta tasks or more; there is one")
    support, query = rows.split(size // 2, 1)
    return torch.cat([support, query.roll(1 + step % (tasks - 1), 0)], 1)
