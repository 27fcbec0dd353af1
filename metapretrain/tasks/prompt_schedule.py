"""Which meta tasks an outer step of prompt pretraining takes: all of them, or those that a scheduler chooses."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from metapretrain.scheduling import BlockScheduler, FunctionProbe, Probe, probe_units
from metapretrain.scheduling.weights import Params
from metapretrain.tasks.prompt_rows import MetaRows
from metapretrain.tasks.schedules import Schedule, build_scheduler, parse_schedule, spent

Losses = Callable[[Tensor], Tensor]  # of rows (T, 2m), one loss (T,) a task


def a_quarter(schedule: Schedule, tasks: int, passes: tuple[int, int]) -> int:
    """N, the least number of updates a decision with which its probes are at or under a quarter of all passes.

    The inner steps are a part of the loss, so that a look at a loss costs nearly as much as an update.

    Args:
        passes: sequences through the model of one loss, and of its backward pass.

    Example:
        >>> utility = parse_schedule("utility", ["a", "b"])
        >>> a_quarter(utility, 5, (1, 2)), a_quarter(utility, 5, (9, 1))
        (130, 300)
    """
    # Every task is a source and a target.
    probes = probe_units(tasks, tasks, schedule.samples, schedule.utility, schedule.normalise, passes=passes)
    return math.ceil(3 * probes / sum(passes))


class AllTasks:
    """Every meta task once a step."""

    def __init__(self, rows: MetaRows) -> None:
        self.rows = rows

    def at(self, step: int) -> Tensor:
        """Rows (K, 2m) of a step."""
        return self.rows.at(step)

    def values(self) -> dict[str, float]:
        """What to log."""
        return {}

    def about(self) -> dict[str, Any]:
        """What the result says."""
        return {}

    def state(self) -> Any:
        """What a checkpoint holds."""
        return None

    def load(self, state: Any) -> None:
        """Go on from a checkpoint."""


class MetaProbe:
    """A meta task seen by a scheduler: rows (2m,) of its training part; M batches go through the model together.

    Args:
        rows: of the meta tasks.
        task: its number.
        losses: of rows (T, 2m).
    """

    def __init__(self, rows: MetaRows, task: int, losses: Losses) -> None:
        self.own, self.size, self.losses = rows.training(task), rows.size, losses

    def sample(self, generator: torch.Generator) -> Tensor:
        """Rows (2m,)."""
        return self.own[torch.randperm(len(self.own), generator=generator)[: self.size]]

    def loss(self, batch: Tensor) -> Tensor:
        """The outer loss, a scalar."""
        return self.losses(batch[None])[0]

    def loss_many(self, batches: Sequence[Tensor]) -> Tensor:
        """Outer losses (M,)."""
        return self.losses(torch.stack(list(batches)))


class ScheduledTasks(AllTasks):
    """As many meta tasks a step as there are, each chosen anew: one may come several times, with other rows each time.

    So a step reads as much as one without a schedule, and `round-robin` takes the very same rows.

    Args:
        rows: of the meta tasks.
        schedule: for :func:`metapretrain.tasks.schedules.parse_schedule`; tasks are named `task-0` to `task-(K-1)`.
        losses: of rows (T, 2m), at the weights of the moment; `params` are those weights.
        seed: of all draws.
        most: tasks whose graph memory has room for, as the learner's `chunk`; None: all that there are. Taylor
            utilities then take batches one by one where M of a task, or of every task, are more.
        passes: sequences through the model of one loss, and of its backward pass, which is what probes are counted in.

    Raises:
        InputError: a schedule that cannot be read.
    """

    def __init__(
        self, rows: MetaRows, schedule: str, losses: Losses, params: Params, *, seed: int, most: int | None = None,
        passes: tuple[int, int] = (1, 2),
    ) -> None:  # fmt: skip
        super().__init__(rows)
        self.name, self.numbers = schedule, {f"task-{task}": task for task in range(rows.tasks)}
        self.losses, self.passes = losses, passes
        sizes = {name: rows.sizes[task] for name, task in self.numbers.items()}
        parsed = parse_schedule(schedule, sizes)
        if parsed.name == "utility" and parsed.updates is None:
            parsed = replace(parsed, updates=a_quarter(parsed, rows.tasks, passes))
        probes: dict[str, Probe] = {name: MetaProbe(rows, task, losses) for name, task in self.numbers.items()}
        if most is not None and parsed.samples > most:
            probes = {name: FunctionProbe(probe.sample, probe.loss) for name, probe in probes.items()}
        # Exact utilities look at targets without a graph, for which the learner's chunks are enough.
        joint = most is None or parsed.utility == "exact" or parsed.samples * rows.tasks <= most
        self.scheduler: BlockScheduler = build_scheduler(
            parsed, sizes, probes, params, target_losses=self._together if joint else None, seed=seed
        )

    def at(self, step: int) -> Tensor:
        """Rows (K, 2m) of the tasks that are chosen next; call it once for each step, in order."""
        found = []
        for _ in self.numbers:
            choice = self.scheduler.choose()
            found.append(self.rows.of(self.numbers[choice.source], self.scheduler.counts[choice.source] - 1))
        return torch.stack(found)

    def values(self) -> dict[str, float]:
        """How often each task was taken."""
        return {f"updates_{name}": float(count) for name, count in self.scheduler.counts.items()}

    def about(self) -> dict[str, Any]:
        """Choices, and what the probes took: a loss with inner steps is more than one pass."""
        told, (forward, backward) = spent(self.scheduler), self.passes
        probes = forward * told["probe_forwards"] + backward * told["probe_backwards"]
        total = probes + (forward + backward) * sum(told["updates"].values())
        share = round(probes / max(1, total), 4)
        return {"schedule": {"name": self.name, **told, "probe_passes": probes, "probe_share": share}}

    def state(self) -> Any:
        """The scheduler's."""
        return self.scheduler.state_dict()

    def load(self, state: Any) -> None:
        """Go on from a checkpoint."""
        self.scheduler.load_state_dict(state)

    def _together(self, batches: Mapping[str, Sequence[Tensor]]) -> dict[str, Tensor]:
        """Losses (M,) of M batches of each task, from one pass."""
        found = self.losses(torch.stack([rows for own in batches.values() for rows in own]))
        return dict(zip(batches, found.split([len(own) for own in batches.values()]), strict=True))
