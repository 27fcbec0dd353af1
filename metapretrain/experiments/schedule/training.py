"""Pretraining by a scheduler's choices, what it probes and logs, and fine-tuning on downstream tasks."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from metapretrain.draws import generator, key, seeded
from metapretrain.episodes import TaskStream
from metapretrain.experiments.base import Context, Machine, Training
from metapretrain.experiments.schedule.data import ScheduleData
from metapretrain.experiments.schedule.recipe import ScheduleMethod, ScheduleRecipe, scheduler_of
from metapretrain.experiments.schedule.tasks.base import PretrainingTask, RowBatches, Tensors, to_device
from metapretrain.models.text_encoders import TextEncoder
from metapretrain.scheduling import BlockScheduler, Choice, UtilityScheduler, agreement
from metapretrain.scheduling.probes import Weights, mean_losses
from metapretrain.training import TrainReport, TrainSettings, train
from metapretrain.training.devices import mixed_precision

Watch = Callable[[int, Choice], None]


class Policy:
    """A scheduler that notes its choices, [source, updates in a row], and shows each decision to `watch`.

    `watch` is called with the number of the update that a decision begins with, from 1, and the choice.

    Example:
        >>> from metapretrain.scheduling import RoundRobin
        >>> policy = Policy(RoundRobin(["mlm", "order"], updates=2))
        >>> for _ in range(5):
        ...     choice = policy.choose()
        >>> policy.choices
        [['mlm', 2], ['order', 2], ['mlm', 1]]
    """

    def __init__(self, scheduler: BlockScheduler, watch: Watch | None = None) -> None:
        self.scheduler, self.watch = scheduler, watch
        self.choices: list[list[Any]] = []

    @property
    def updates(self) -> int:
        """Updates chosen for so far."""
        return sum(self.scheduler.counts.values())

    def choose(self) -> Choice:
        decisions = self.scheduler.decisions
        choice = self.scheduler.choose()
        if self.choices and self.choices[-1][0] == choice.source:
            self.choices[-1][1] += 1
        else:
            self.choices.append([choice.source, 1])
        if self.watch is not None and self.scheduler.decisions > decisions:
            self.watch(self.updates, choice)
        return choice

    def state_dict(self) -> dict[str, Any]:
        return {"scheduler": self.scheduler.state_dict(), "choices": [list(run) for run in self.choices]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.scheduler.load_state_dict(state["scheduler"])
        self.choices = [list(run) for run in state["choices"]]


class ScheduleStep(nn.Module):
    """One encoder with a head for each task: `step({task: batch})` returns `{task: loss}`."""

    def __init__(self, encoder: TextEncoder, tasks: Mapping[str, PretrainingTask], seed: int) -> None:
        super().__init__()
        self.encoder, self.tasks = encoder, dict(tasks)
        heads = {}
        for name, task in tasks.items():  # a head's first weights depend on (seed, task) alone
            with seeded(key(seed, "head", name)):
                heads[name] = task.head(encoder.features)
        self.heads = nn.ModuleDict(heads)

    def loss(self, name: str, batch: Tensors) -> Tensor:
        """The loss of one task's batch."""
        return self.tasks[name].loss(self.encoder, self.heads[name], batch)

    def joint_losses(self, batches: Mapping[str, Sequence[Tensors]]) -> dict[str, Tensor]:
        """Losses (M,) of M batches of each task, whose sequences the encoder takes all at once."""
        flat = [(name, batch) for name, listed in batches.items() for batch in listed]
        states = self.encoder.hidden(_together([batch for _, batch in flat]))
        found: dict[str, list[Tensor]] = {name: [] for name in batches}
        row = 0
        for name, batch in flat:
            rows, width = batch["input_ids"].shape
            own = states[row : row + rows, :width]
            found[name].append(self.tasks[name].loss_of(self.encoder, self.heads[name], own, batch))
            row += rows
        return {name: torch.stack(losses) for name, losses in found.items()}

    def forward(self, batches: Mapping[str, Tensors]) -> dict[str, Tensor]:
        return {name: self.loss(name, batch) for name, batch in batches.items()}


class TaskProbe:
    """A task as a scheduler sees it; batches depend on the generator alone, losses have the precision of updates."""

    def __init__(self, step: ScheduleStep, name: str, split: str, batch_size: int, machine: Machine) -> None:
        self.step, self.name, self.split, self.batch_size, self.machine = step, name, split, batch_size, machine

    def sample(self, generator: torch.Generator) -> Tensors:
        return to_device(self.step.tasks[self.name].sample(self.split, self.batch_size, generator), self.step)

    def loss(self, batch: Tensors) -> Tensor:
        with mixed_precision(self.machine.device, self.machine.precision):
            return self.step.loss(self.name, batch).float()


class JointProbe(TaskProbe):
    """The same with M batches in one forward pass."""

    def loss_many(self, batches: Sequence[Tensors]) -> Tensor:
        with mixed_precision(self.machine.device, self.machine.precision):
            return self.step.joint_losses({self.name: batches})[self.name].float()


def _together(batches: Sequence[Tensors]) -> Tensors:
    """The sequences of all batches as one of the width of the widest; what was added counts as padding."""
    width = max(batch["input_ids"].shape[1] for batch in batches)
    names = ("input_ids", "attention_mask", *["token_type_ids"] * ("token_type_ids" in batches[0]))
    return {
        name: torch.cat([nn.functional.pad(batch[name], (0, width - batch[name].shape[1])) for batch in batches])
        for name in names
    }


HEAD_LR = 1e-3


ScheduleContext = Context[ScheduleRecipe, ScheduleData, ScheduleMethod]


class ScheduledPretraining:
    """One row's pretraining, ready to run; the encoder is changed in place.

    Attributes:
        last: what the last evaluation gave.
        fitting_units: cost of fitting the heads, a forward pass per update.
    """

    def __init__(self, encoder: TextEncoder, context: ScheduleContext) -> None:
        method, data, recipe = context.method, context.data, context.recipe
        seed, machine = context.seed, context.machine
        self.method, self.data, self.recipe, self.seed = method, data, recipe, seed
        self.machine, self.run_folder = machine, context.run
        self.sources, self.targets = data.chosen(method.setting), data.watched(method.setting)
        names = dict.fromkeys((*self.sources, *self.targets))
        self.step = ScheduleStep(encoder, {name: data.tasks[name] for name in names}, seed).to(machine.device)
        looked_at = self._probes("probe")
        sources = {name: self._probe(name, "train") for name in self.sources}
        sizes = {name: data.tasks[name].sizes["train"] for name in self.sources}
        joint = self._joint if recipe.joint else None
        scheduler = scheduler_of(method, recipe, sizes, sources, looked_at, self.step, joint, seed)
        self.policy = Policy(scheduler, self._watch)
        self._reported: dict[str, list[Tensors]] = {}
        self.last: dict[str, float] = {}
        self.report: TrainReport
        self._peak, self.on_gpu = 0, torch.device(machine.device).type == "cuda"
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats(machine.device)
        self.fitting_units = recipe.head_updates * len(self.targets)

    def training(self) -> Training:
        """Fit the heads; return what the training loop is called with."""
        recipe = self.recipe
        self._fit_heads()
        stream = TaskStream(self._loaders(self.sources, self.seed), self.policy, seed=self.seed, steps=recipe.updates)
        settings = adamw(
            self.step,
            self.machine,
            steps=recipe.updates,
            lr=recipe.lr,
            weight_decay=recipe.weight_decay,
            schedule=recipe.schedule,
            warmup=recipe.warmup,
            clip=recipe.clip,
            seed=self.seed,
            log_every=max(1, min(50, recipe.updates // 20)),
            evaluate_every=max(1, recipe.updates // recipe.evaluations),
        )
        return Training(self.step, stream, settings, self.evaluate, f"{self.method.name} seed {self.seed}")

    def evaluate(self, done: int) -> dict[str, float]:
        """Target losses, shares of the sources and cost after `done` updates; with utilities, how Taylor's agree.

        What is looked at here, exact and Taylor utilities of one draw too, is not counted as cost.
        """
        self.last = self._measured() | self._compared()
        return self.last

    def peak_memory(self) -> int:
        """Bytes of the GPU that updates and decisions took at most, so far in this process; 0 on a CPU."""
        if self.on_gpu:
            self._peak = max(self._peak, torch.cuda.max_memory_allocated(self.machine.device))
        return self._peak

    def reported(self) -> dict[str, float]:
        """The mean loss of each target's batches for reports, the same ones each time."""
        probes, weights = self._probes("report"), Weights(self.step)
        with weights.untouched():
            if not self._reported:
                for name, probe in probes.items():
                    draws = generator(0, "report", 0, name)
                    self._reported[name] = [probe.sample(draws) for _ in range(self.recipe.target_batches)]
            return mean_losses(weights, probes, self._reported, 0, "report", 0)

    def _measured(self) -> dict[str, float]:
        losses, policy, cost = self.reported(), self.policy, self.policy.scheduler.cost
        found = {"target_loss": sum(losses.values()) / len(losses)}
        found |= {f"target_loss_{name}": value for name, value in losses.items()}
        found |= {f"share_{name}": count / max(1, policy.updates) for name, count in policy.scheduler.counts.items()}
        total = 3 * policy.updates + cost.units + self.fitting_units
        return found | {
            "compute_units": float(total),
            "probe_units": float(cost.units),
            "probe_share": cost.units / max(1, total),
            "probe_seconds": cost.seconds,
        }

    def _compared(self) -> dict[str, float]:
        scheduler = self.policy.scheduler
        if not isinstance(scheduler, UtilityScheduler):
            return {}
        self.peak_memory()  # what the comparison takes is not the scheduler's
        both = scheduler.compare()
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats(self.machine.device)
        finite = [name for name in both["exact"] if all(math.isfinite(values[name]) for values in both.values())]
        if len(finite) < 2:
            return {}
        exact, taylor = ({name: both[kind][name] for name in finite} for kind in ("exact", "taylor"))
        agreed, spread = agreement(exact, taylor), max(exact.values()) - min(exact.values())
        return {
            "taylor_rank_correlation": agreed.rank_correlation,
            "taylor_regret": agreed.regret / spread if spread else 0.0,
        }

    def _watch(self, update: int, choice: Choice) -> None:
        """Log where all began, and every decision that looked at utilities."""
        if self.run_folder is None:
            return
        if update == 1:
            begin = {"compute_units": float(self.fitting_units), "probe_units": 0.0, "probe_share": 0.0}
            self.run_folder.log(0, "validation", self._measured() | begin)
        if choice.utilities:
            values = {f"utility_{name}": value for name, value in choice.utilities.items()}
            values |= {f"chosen_{name}": float(name == choice.source) for name in choice.utilities}
            self.run_folder.log(update, "schedule", values | {"seconds": choice.cost.seconds})

    def _loaders(self, names: Sequence[str], seed: int) -> dict[str, RowBatches]:
        size = self.recipe.batch_size
        return {name: self.data.tasks[name].batches("train", batch_size=size, seed=seed) for name in names}

    def _probe(self, name: str, split: str) -> TaskProbe:
        kind = JointProbe if self.recipe.joint else TaskProbe
        return kind(self.step, name, split, self.recipe.batch_size, self.machine)

    def _probes(self, use: str) -> dict[str, TaskProbe]:
        return {name: self._probe(name, self.data.part(name, use)) for name in self.targets}

    def _joint(self, batches: Mapping[str, Sequence[Tensors]]) -> dict[str, Tensor]:
        with mixed_precision(self.machine.device, self.machine.precision):
            return {name: losses.float() for name, losses in self.step.joint_losses(batches).items()}

    def _fit_heads(self) -> None:
        """Train the targets' heads on the encoder as it is: a utility through an untrained head is noise."""
        if not self.recipe.head_updates:
            return
        steps, seed = self.recipe.head_updates * len(self.targets), key(self.seed, "heads") % 2**32
        stream = TaskStream(self._loaders(self.targets, seed), "round-robin", seed=seed, steps=steps)
        settings = adamw(
            self.step, self.machine, steps=steps, lr=HEAD_LR, weight_decay=0.0, schedule="constant", seed=seed
        )
        self.step.encoder.requires_grad_(False)
        try:
            train(self.step, stream, settings, title="heads")
        finally:
            self.step.encoder.requires_grad_(True)


def adamw(step: ScheduleStep, machine: Machine, **options: Any) -> TrainSettings:
    """Settings of AdamW on a machine; updates are no CUDA graphs where the encoder cannot be recorded."""
    graph = machine.cuda_graph if step.encoder.recordable else False
    return TrainSettings(
        optimizer="adamw", precision=machine.precision, device=machine.device, cuda_graph=graph, **options
    )


def downstream_scores(encoder: TextEncoder, name: str, context: ScheduleContext) -> dict[str, float]:
    """Fine-tune a copy of the encoder with a new head on a downstream task; return metrics by split and name."""
    data, recipe, seed, machine = context.data, context.recipe, context.seed, context.machine
    task = data.tasks[name]
    step = ScheduleStep(copy.deepcopy(encoder), {name: task}, key(seed, "downstream"))
    loaders = {name: task.batches("train", batch_size=recipe.finetune_batch, seed=seed)}
    settings = adamw(
        step,
        machine,
        steps=recipe.finetune_updates,
        lr=recipe.finetune_lr,
        weight_decay=recipe.weight_decay,
        schedule="linear",
        warmup=0.1,
        clip=1.0,
        seed=seed,
    )
    stream = TaskStream(loaders, "longest", seed=seed, steps=recipe.finetune_updates)
    train(step, stream, settings, title=f"fine-tuning on {name}")
    found: dict[str, float] = {}
    for split in ("validation", "test"):
        if split in task.sizes and not (data.tuning and split == "test"):
            prefix = "" if split == "test" else "validation_"
            with mixed_precision(machine.device, machine.precision):
                scores = task.score(step.encoder, step.heads[name], split)
            found |= {f"{prefix}{name}_{metric}": float(value) for metric, value in scores.items()}
    return found
