"""Pretraining of prompts on meta tasks, all or scheduled, and of prompts on all data as one task."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from metapretrain.episodes import EpisodeSampler, EpisodeSpec
from metapretrain.episodes.groups import tidy_groups
from metapretrain.errors import InputError
from metapretrain.experiments.prompts.data import Pool
from metapretrain.experiments.prompts.recipe import PromptRecipe, passes_of_loss
from metapretrain.experiments.prompts.tuning import Job, Progress, Stack
from metapretrain.graphs import Recorder
from metapretrain.prompts import OuterStep, PromptBatch, PromptMAML
from metapretrain.scheduling import (
    BlockScheduler,
    FunctionProbe,
    Probe,
    Schedule,
    build_scheduler,
    parse_schedule,
    probe_units,
)
from metapretrain.scheduling.probes import Params
from metapretrain.training import RunFolder, checkpoint


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
    probes = probe_units(
        tasks,
        tasks,
        schedule.option("samples"),
        schedule.option("utility"),
        schedule.option("normalise"),
        passes=passes,
    )
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
        schedule: for :func:`metapretrain.scheduling.parse_schedule`; tasks are named `task-0` to `task-(K-1)`.
        losses: of rows (T, 2m), at the weights of the moment; `params` are those weights.
        seed: of all draws.
        most: tasks whose graph memory has room for, as the learner's `chunk`; None: all that there are. Taylor
            utilities then take batches one by one where M of a task, or of every task, are more.
        passes: sequences through the model of one loss, and of its backward pass, which is what probes are counted in.

    Raises:
        InputError: a schedule that cannot be read.
    """

    def __init__(
        self,
        rows: MetaRows,
        schedule: str,
        losses: Losses,
        params: Params,
        *,
        seed: int,
        most: int | None = None,
        passes: tuple[int, int] = (1, 2),
    ) -> None:
        super().__init__(rows)
        self.name, self.numbers = schedule, {f"task-{task}": task for task in range(rows.tasks)}
        self.losses, self.passes = losses, passes
        sizes = {name: rows.sizes[task] for name, task in self.numbers.items()}
        parsed = parse_schedule(schedule, sizes)
        samples, utility = parsed.option("samples"), parsed.option("utility")
        if parsed.name == "utility" and parsed.option("updates") is None:
            parsed = Schedule("utility", {**parsed.options, "updates": a_quarter(parsed, rows.tasks, passes)})
        probes: dict[str, Probe] = {name: MetaProbe(rows, task, losses) for name, task in self.numbers.items()}
        if most is not None and samples is not None and samples > most:
            probes = {name: FunctionProbe(probe.sample, probe.loss) for name, probe in probes.items()}
        # Exact utilities look at targets without a graph, for which the learner's chunks are enough.
        joint = most is None or utility != "taylor" or samples * rows.tasks <= most
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


log = logging.getLogger(__name__)
CHECKPOINT_SECONDS = 60.0
CURVES = ("support_loss", "query_loss_before", "query_loss_after", "inner_gradient_norm", "accuracy")
Context = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Pretrained:
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


def train_meta(
    learner: PromptMAML,
    rows: MetaRows,
    pool: Pool,
    recipe: PromptRecipe,
    run: RunFolder | None,
    context: Context = nullcontext,
    *,
    objective: str = "meta",
) -> Pretrained:
    """Train the learner's prompt on meta tasks and return it as it was best on held-out rows (Algorithm 1).

    Args:
        rows: which rows each step reads.
        pool: their tokens.
        run: losses and curves are logged there, and a run that was cut short goes on.
        context: called before each pass for the context of its precision.
        objective: "meta", or "multitask": all 2m rows of a task in one loss, with a learner of no inner step.
    """
    loop = _MetaLoop(learner, rows, pool, recipe, run, context, objective)
    return loop.run()


class _MetaLoop:
    def __init__(
        self,
        learner: PromptMAML,
        rows: MetaRows,
        pool: Pool,
        recipe: PromptRecipe,
        run: RunFolder | None,
        context: Context,
        objective: str,
    ) -> None:
        self.learner, self.rows, self.pool, self.recipe, self.folder = learner, rows, pool, recipe, run
        self.context, self.shots, self.multitask = context, recipe.meta.shots, objective == "multitask"
        self.steps = recipe.meta_steps(rows.tasks)
        self.every = max(1, self.steps // recipe.validations)
        groups: list[dict[str, Any]] = [{"params": [learner.prompt.weight], "lr": recipe.meta.lr}]
        if isinstance(learner.inner_lr, nn.Parameter):
            groups.append({"params": [learner.inner_lr], "lr": recipe.meta.rate_lr, "weight_decay": 0.0})
        self.optimizer = torch.optim.AdamW(groups, weight_decay=recipe.meta.weight_decay)
        self.learned = [parameter for group in groups for parameter in group["params"]]
        self.outer_step, self.watched = OuterStep(learner, context), Recorder(self._curves)
        self.chosen = AllTasks(rows)
        if recipe.meta.scheduler:
            self.chosen = ScheduledTasks(
                rows,
                recipe.meta.scheduler,
                self._losses,
                self.learned,
                seed=rows.seed,
                most=learner.chunk,
                passes=passes_of_loss(recipe, objective),
            )
        self.best = learner.prompt.weight.detach().clone()
        self.step = self.best_step = self.since = 0
        self.accuracy, self.before, self.lost = -1.0, 0.0, False
        self.started = self.saved = time.monotonic()

    def run(self) -> Pretrained:
        from tqdm.auto import tqdm

        self._resume()
        if not self.step:
            self._validate([])
        losses: list[Tensor] = []
        bar = tqdm(total=self.steps, initial=self.step, desc="pretrain", unit="step", disable=None, leave=False)
        with bar:
            while self.step < self.steps and not self._stopped():
                losses.append(self._update())
                self.step += 1
                bar.update()
                if self.step % self.every == 0 or self.step == self.steps:
                    self._validate(losses)
                    losses = []
                    self._save()
                elif time.monotonic() - self.saved > CHECKPOINT_SECONDS:
                    self._save()
        return Pretrained(
            self.best.cpu(),
            self.step,
            self.best_step,
            self.accuracy,
            self.rows.tasks,
            self._seconds(),
            self.chosen.about(),
            self.lost,
        )

    def _stopped(self) -> bool:
        return self.lost or (self.recipe.budget == "paper" and self.since >= self.recipe.meta.patience)

    def _halves(self, rows: Tensor) -> tuple[Any, Any]:
        return self.pool.gather(rows[:, : self.shots]), self.pool.gather(rows[:, self.shots :])

    def _pair(self, rows: Tensor) -> tuple[Any, Any]:
        """Support and query rows; all rows are both where no inner step is taken."""
        return (self.pool.gather(rows),) * 2 if self.multitask else self._halves(rows)

    def _losses(self, rows: Tensor) -> Tensor:
        with self.context():
            return self.learner.losses(*self._pair(rows)).float()

    def _update(self) -> Tensor:
        rows = self.chosen.at(self.step)
        if self.recipe.meta.query == "other" and not self.multitask:
            rows = crossed(rows, self.step)
        self.optimizer.zero_grad()
        losses = self.outer_step(*self._pair(rows))
        self.optimizer.step()
        return losses.mean()

    def _curves(self, *leaves: Tensor) -> tuple[Tensor, ...]:
        with self.context():
            found = self.learner.curves(PromptBatch.of(*leaves[:4]), PromptBatch.of(*leaves[4:]))
        return tuple(found[name] for name in CURVES)

    def _validate(self, losses: Sequence[Tensor]) -> None:
        found = []
        for rows in self.rows.held_out:
            found.append(self.watched(*(leaf for part in self._halves(rows) for leaf in part.leaves())))
        means = [torch.stack(values).mean(0) for values in zip(*found, strict=True)]
        curves = dict(zip(CURVES, means, strict=True))
        accuracy = float(curves["accuracy"].mean())
        self.since += 1
        self.lost = self._diverged()
        if accuracy > self.accuracy and not self.lost:
            self.accuracy, self.best_step, self.since = accuracy, self.step, 0
            self.best = self.learner.prompt.weight.detach().clone()
        if self.folder is not None:
            values = {name: float(value.mean()) for name, value in curves.items()}
            tasks = {f"accuracy_task_{k}": float(value) for k, value in enumerate(curves["accuracy"])}
            self.folder.log(self.step, "validation", values | tasks | self.chosen.values())
            if losses:
                self.folder.log(self.step, "train", {"query_loss": torch.stack(list(losses)).mean()})

    def _diverged(self) -> bool:
        """Whether what is learned is no number any more; it stays so."""
        if all(bool(weight.isfinite().all()) for weight in self.learned):
            return False
        log.warning("diverged by step %d: the prompt of step %d is kept; lower meta.lr", self.step, self.best_step)
        return True

    def _seconds(self) -> float:
        return self.before + time.monotonic() - self.started

    def _save(self) -> None:
        self.saved = time.monotonic()
        if self.folder is None:
            return
        state = {
            "learner": {name: value for name, value in self.learner.named_parameters() if value.requires_grad},
            "optimizer": self.optimizer.state_dict(),
            "best": self.best,
            "best_step": self.best_step,
            "since": self.since,
            "accuracy": self.accuracy,
            "seconds": self._seconds(),
            "chosen": self.chosen.state(),
        }
        checkpoint.save(self.folder.checkpoints, self.step, state)

    def _resume(self) -> None:
        if self.folder is None:
            return
        found = checkpoint.load_latest(self.folder.checkpoints)
        self.folder.cut_back(-1 if found is None else found.step)
        if found is None:
            return
        state, learned = found.state, dict(self.learner.named_parameters())
        with torch.no_grad():
            for name, value in state["learner"].items():
                learned[name].copy_(value)
        self.optimizer.load_state_dict(state["optimizer"])
        self.chosen.load(state["chosen"])
        self.best = state["best"].to(self.best.device)
        self.step, self.best_step, self.since = found.step, state["best_step"], state["since"]
        self.accuracy, self.before = state["accuracy"], state["seconds"]
        self.folder.seconds_before, self.lost = self.before, self._diverged()


def train_mixed(
    make_stack: Callable[..., Stack],
    prompts: Mapping[int, Tensor],
    rows: int,
    recipe: PromptRecipe,
    words: tuple[int, ...],
    runs: Mapping[int, RunFolder],
) -> dict[int, Pretrained]:
    """Train a prompt for each seed on all rows as one task, batches of 4 (appendix A.2), the seeds in one stack.

    Args:
        make_stack: a :class:`Stack` of jobs with keyword arguments `steps`, `every`.
        prompts: seed to start.
        rows: pretraining rows N; as many are held out as meta tasks hold out, and those that fill no batch.
        runs: seed to its folder; each goes on from its own checkpoint.

    Raises:
        InputError: too few rows to train and to validate on.
    """
    held = min(2 * recipe.meta.shots * recipe.meta.clusters * recipe.held_out, rows // 5)
    if not held or rows - held < recipe.mixed.batch_size:
        raise InputError(f"{rows} pretraining rows leave none to validate on; give more")
    held += (rows - held) % recipe.mixed.batch_size  # whole batches: a step reads what the budget counts
    jobs = []
    for seed, prompt in prompts.items():
        order = torch.from_numpy(np.random.default_rng([seed, 1]).permutation(rows))
        jobs.append(Job(str(seed), prompt, order[held:], order[:held], words, seed))
    steps = recipe.mixed_steps(rows - held)
    stack = make_stack(jobs, steps=steps, every=max(1, steps // recipe.validations))
    started, before = time.monotonic(), dict.fromkeys(prompts, 0.0)
    for seed, run in runs.items():
        found = checkpoint.load_latest(run.checkpoints)
        run.cut_back(-1 if found is None else found.step)
        if found is not None:
            state = dict(found.state)
            before[seed] = run.seconds_before = state.pop("seconds")
            moved = {name: _on(value, stack.device) for name, value in state.items()}
            stack.progress[str(seed)] = Progress(**moved)

    def seconds(seed: int) -> float:
        return before[seed] + (time.monotonic() - started) / len(prompts)

    def note(job: Job, state: Progress) -> None:
        seed = int(job.name)
        runs[seed].log(state.step, "validation", {"accuracy": state.history[-1][1]})
        checkpoint.save(runs[seed].checkpoints, state.step, {**asdict(state), "seconds": seconds(seed)})

    done = stack.run(note)
    return {
        seed: Pretrained(
            state.best.cpu(), state.step, state.best_step, state.accuracy, 1, seconds(seed), diverged=state.diverged
        )
        for seed, state in ((int(name), state) for name, state in done.items())
    }


def _on(value: Any, device: str) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value
