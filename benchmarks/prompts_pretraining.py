"""Pretraining of prompts on meta tasks, all or scheduled, and of prompts on all data as one task."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from metapretrain.draws import epoch_order, numpy_generator
from metapretrain.episodes import EpisodeSampler, EpisodeSpec, ShuffledBatches
from metapretrain.episodes.groups import tidy_groups
from metapretrain.errors import InputError
from metapretrain.experiments.prompts.data import Pool
from metapretrain.experiments.prompts.recipe import PromptRecipe, passes_of_loss
from metapretrain.prompts import PromptBatch, PromptMAML
from metapretrain.scheduling import (
    BlockScheduler,
    FunctionProbe,
    Schedule,
    build_scheduler,
    parse_schedule,
    probe_units,
)
from metapretrain.scheduling.probes import Params
from metapretrain.training import RunFolder

Losses = Callable[[Tensor], Tensor]  # of rows (T, 2m), one loss (T,) per task


class MetaTasks:
    """The meta tasks and their rows: 2m of all K tasks for a step, an episode of each, and others that are held out.

    Args:
        groups: (N,); -1 marks rows in none; InputError if no group has 4m rows. shots: m.
        held_out: batches of 2m rows of a task to validate on; smaller tasks repeat theirs.
        seed: of which rows are held out, and of those of each step.
    """

    def __init__(self, groups: Any, *, shots: int, held_out: int, seed: int) -> None:
        tidied, self.moved = tidy_groups(np.asarray(groups), smallest=4 * shots, small="merge")
        codes, size = tidied.numpy(), 2 * shots
        self.seed, self.size = seed, size
        self.tasks, self.sizes = int(codes.max()) + 1, np.bincount(codes[codes >= 0]).tolist()
        random = numpy_generator(seed, 1)
        spec = EpisodeSpec(None, shots, shots)
        self._train, held = [], []
        for task in range(self.tasks):
            own = torch.from_numpy(random.permutation(np.flatnonzero(codes == task)))
            count = size * max(1, min(held_out, len(own) // 5 // size))
            held.append(own[:count])
            sampler = EpisodeSampler([0] * (len(own) - count), spec, None, seed=seed * 1_000 + task)
            self._train.append((own[count:], sampler))
        places = [torch.arange(size) + batch * size for batch in range(held_out)]
        self.held_out = [torch.stack([rows[place % len(rows)] for rows in held]) for place in places]

    def at(self, step: int) -> Tensor:
        """Rows (K, 2m) of a step, all of a task different: m of the support part, then m of the query part."""
        return torch.stack([self.of(task, step) for task in range(self.tasks)])

    def of(self, task: int, visit: int) -> Tensor:
        """Rows (2m,) of one task, when it comes for the time numbered `visit`."""
        rows, sampler = self._train[task]
        return rows[torch.tensor(list(sampler.plan(visit)))]

    def in_turn(self, place: int, within: int = 0, of: int = 1) -> Tensor:
        """Rows (2m,) of the task whose turn is numbered `place`, `of` times in a turn; each round has another order.

        A task's rows come all once before one comes again, but for those that fill no batch.
        """
        turn, place = divmod(place, self.tasks)
        task = int(epoch_order(self.tasks, self.seed, turn)[place])
        own = self._train[task][0]
        order = partial(epoch_order, len(own), self.seed * 1_000 + task)
        return own[ShuffledBatches(len(own), self.size, seed=self.seed, order=order).batch(turn * of + within)]

    @property
    def training(self) -> Tensor:
        """All rows that are not held out."""
        return torch.cat([rows for rows, _ in self._train])

    def probe(self, task: int, losses: Losses) -> FunctionProbe:
        """A task as a scheduler sees it: rows (2m,) of its training part; M batches are one pass."""
        own = self._train[task][0]

        def sample(generator: torch.Generator) -> Tensor:
            return own[torch.randperm(len(own), generator=generator)[: self.size]]

        return FunctionProbe(sample, lambda rows: losses(rows[None])[0], lambda rows: losses(torch.stack([*rows])))


def crossed(rows: Tensor, step: int) -> Tensor:
    """Rows (K, 2m) whose query half is that of another task, which changes with the step; InputError if K is 1."""
    tasks, size = rows.shape
    if tasks < 2:
        raise InputError("meta.query=other needs two meta tasks or more; there is one")
    support, query = rows.split(size // 2, 1)
    return torch.cat([support, query.roll(1 + step % (tasks - 1), 0)], 1)


def a_quarter(schedule: Schedule, tasks: int, passes: tuple[int, int]) -> int:
    """N, the least number of updates per decision with which its probes are at or under a quarter of all passes.

    `passes`: sequences through the model of one loss, inner steps and all, and of its backward pass.
    """
    options = map(schedule.option, ("samples", "utility", "normalise"))
    probes = probe_units(tasks, tasks, *options, passes=passes)  # every task is a source and a target
    return math.ceil(3 * probes / sum(passes))


class ScheduledTasks:
    """As many meta tasks per step as there are, each chosen anew: one may come several times, with other rows.

    Args:
        schedule: for :func:`metapretrain.scheduling.parse_schedule`; tasks are named `task-0` to `task-(K-1)`.
        losses: of rows (T, 2m), at the weights of the moment, `params`.
        most: tasks whose graph memory has room for, as the learner's `chunk`; None: all that there are. Taylor
            utilities then take batches one by one where M of a task, or of every task, are more.
        passes: sequences through the model of one loss, and of its backward pass, in which probes are counted.

    InputError: a schedule that cannot be read.
    """

    def __init__(
        self,
        rows: MetaTasks,
        schedule: str,
        losses: Losses,
        params: Params,
        *,
        seed: int,
        most: int | None = None,
        passes: tuple[int, int] = (1, 2),
    ) -> None:
        self.rows = rows
        self.name, self.numbers = schedule, {f"task-{task}": task for task in range(rows.tasks)}
        self.losses, self.passes = losses, passes
        sizes = {name: rows.sizes[task] for name, task in self.numbers.items()}
        parsed = parse_schedule(schedule, sizes)
        samples, utility = parsed.option("samples"), parsed.option("utility")
        for name, often in (("utility", "updates"), ("softmax", "every")):
            if parsed.name == name and parsed.option(often) is None:
                parsed = Schedule(name, {**parsed.options, often: a_quarter(parsed, rows.tasks, passes)})
        probes = {name: rows.probe(task, losses) for name, task in self.numbers.items()}
        if most is not None and samples is not None and samples > most:
            probes = {name: replace(probe, loss_many=None) for name, probe in probes.items()}
        # Exact utilities look at targets without a graph, for which the learner's chunks are enough.
        joint = most is None or utility in (None, "exact") or samples * rows.tasks <= most
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
        told, (forward, backward) = self.scheduler.spent(), self.passes
        probes = forward * told["probe_forwards"] + backward * told["probe_backwards"]
        total = probes + (forward + backward) * sum(told["updates"].values())
        share = round(probes / max(1, total), 4)
        return {"schedule": {"name": self.name, **told, "probe_passes": probes, "probe_share": share}}

    def _together(self, batches: Mapping[str, Sequence[Tensor]]) -> dict[str, Tensor]:
        """Losses (M,) of M batches of each task, from one pass."""
        found = self.losses(torch.stack([rows for own in batches.values() for rows in own]))
        return dict(zip(batches, found.split([len(own) for own in batches.values()]), strict=True))


@dataclass(frozen=True)
class TrainedPrompt:
    """A prompt (L, D) on the CPU, steps taken and kept, its held-out accuracy, meta tasks, and what more to tell.

    `diverged`: training ended with weights that were no numbers; the prompt is that of `best_step` all the same.
    """

    prompt: Tensor
    steps: int
    best_step: int
    accuracy: float
    tasks: int
    seconds: float
    about: Mapping[str, Any] = field(default_factory=dict)
    diverged: bool = False


class MetaPairs:
    """The (support, query) tokens of each outer step, without end, by `pair` of its rows (K, 2m).

    Its state is the step, and that of a scheduler. With `other`, the query part of a task is that of another one.
    """

    def __init__(
        self, tasks: MetaTasks | ScheduledTasks, pair: Callable[[Tensor], tuple[PromptBatch, PromptBatch]], other: bool
    ) -> None:
        self.tasks, self.pair, self.other, self.step = tasks, pair, other, 0

    def __iter__(self) -> Iterator[tuple[PromptBatch, PromptBatch]]:
        while True:
            rows, step = self.tasks.at(self.step), self.step
            self.step += 1
            yield self.pair(crossed(rows, step) if self.other else rows)

    def follow(self, optimizer: torch.optim.Optimizer, clip: float | None = None) -> None:
        if isinstance(self.tasks, ScheduledTasks):
            self.tasks.scheduler.follow(optimizer, clip)

    def state_dict(self) -> dict[str, Any]:
        scheduler = self.tasks.scheduler.state_dict() if isinstance(self.tasks, ScheduledTasks) else None
        return {"step": self.step, "scheduler": scheduler}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step = state["step"]
        if isinstance(self.tasks, ScheduledTasks):
            self.tasks.scheduler.load_state_dict(state["scheduler"])


def train_meta(
    learner: PromptMAML,
    rows: MetaTasks,
    pool: Pool,
    recipe: PromptRecipe,
    run: RunFolder | None,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    *,
    objective: str = "meta",
) -> TrainedPrompt:
    """Train the learner's prompt on meta tasks by :meth:`PromptMAML.fit` (Algorithm 1), with its `run` and `context`.

    `pool` holds the tokens. `objective` "multitask": all 2m rows of a task in one loss, a learner of no inner step.
    """
    meta, multitask = recipe.meta, objective == "multitask"

    def halves(taken: Tensor) -> tuple[PromptBatch, PromptBatch]:
        return pool.gather(taken[:, : meta.shots]), pool.gather(taken[:, meta.shots :])

    def pair(taken: Tensor) -> tuple[PromptBatch, PromptBatch]:
        return (pool.gather(taken),) * 2 if multitask else halves(taken)

    def losses(taken: Tensor) -> Tensor:
        with context():
            return learner.losses(*pair(taken)).float()

    scheduled: ScheduledTasks | None = None
    if meta.scheduler:
        learned = [p for p in (learner.prompt.weight, learner.inner_lr) if isinstance(p, nn.Parameter)]
        limits: dict[str, Any] = {"most": learner.chunk, "passes": passes_of_loss(recipe, objective)}
        scheduled = ScheduledTasks(rows, meta.scheduler, losses, learned, seed=rows.seed, **limits)
    steps = recipe.steps(objective, rows.tasks)
    report = learner.fit(
        MetaPairs(scheduled or rows, pair, meta.query == "other" and not multitask),
        [halves(taken) for taken in rows.held_out],
        lr=meta.lr,
        weight_decay=meta.weight_decay,
        rate_lr=meta.rate_lr,
        most=steps,
        every=max(1, steps // recipe.validations),
        patience=meta.patience if recipe.budget == "paper" else None,
        log=lambda _step, _curves: scheduled.values() if scheduled else {},
        run=run,
        context=context,
    )
    prompt, best = learner.prompt.weight.detach().cpu().clone(), report.best
    seconds = report.seconds + (run.seconds_before if run is not None else 0.0)
    about = scheduled.about() if scheduled else {}
    return TrainedPrompt(prompt, report.steps, best.step, best.value, rows.tasks, seconds, about, best.diverged)
