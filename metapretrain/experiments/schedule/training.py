"""Pretraining by a scheduler's choices, what it probes and logs, and fine-tuning on downstream tasks."""

import inspect
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from metapretrain.draws import generator, key, seeded
from metapretrain.episodes import TaskStream
from metapretrain.experiments.base import Context, Machine, Training
from metapretrain.experiments.schedule.recipe import ScheduleData, ScheduleMethod, ScheduleRecipe, scheduler_of
from metapretrain.experiments.schedule.tasks.base import PretrainingTask, Tensors, to_device
from metapretrain.models.text_encoders import TextEncoder
from metapretrain.scheduling import SCHEDULERS, Choice, Probe, UtilityScheduler, agreement
from metapretrain.scheduling.probes import Weights, mean_losses
from metapretrain.training import TrainReport, TrainSettings, train
from metapretrain.training.environment import mixed_precision

HEAD_LR = 1e-3
ScheduleContext = Context[ScheduleRecipe, ScheduleData, ScheduleMethod]


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

    def forward(self, batches: Mapping[str, Tensors]) -> dict[str, Tensor]:
        return {name: self.tasks[name].loss(self.encoder, self.heads[name], batch) for name, batch in batches.items()}

    def joint_losses(self, batches: Mapping[str, Sequence[Tensors]], machine: Machine) -> dict[str, Tensor]:
        """Losses float32 (M,) of M batches of each task, whose sequences the encoder takes all at once."""
        found, row = dict[str, Tensor](), 0
        with mixed_precision(machine.device, machine.precision):
            states = self.encoder.hidden(_together([batch for own in batches.values() for batch in own]))
            for name, own in batches.items():
                losses = []
                for batch in own:
                    rows, width = batch["input_ids"].shape
                    part, row = states[row : row + rows, :width], row + rows
                    losses.append(self.tasks[name].loss_of(self.encoder, self.heads[name], part, batch))
                found[name] = torch.stack(losses).float()
        return found


class TaskProbe:
    """The probe of a task, for schedulers; batches depend on the generator alone, losses have the precision of updates.

    `joint`: M batches are one forward pass.
    """

    def __init__(
        self,
        step: ScheduleStep,
        name: str,
        split: str,
        size: int,
        machine: Machine,
        joint: bool = False,
        rows: Any = None,
    ) -> None:
        self.step, self.name, self.machine, self.place = step, name, machine, (split, size, rows)
        self.loss_many = (lambda batches: step.joint_losses({name: batches}, machine)[name]) if joint else None

    def sample(self, generator: torch.Generator) -> Tensors:
        split, size, rows = self.place
        return to_device(self.step.tasks[self.name].sample(split, size, generator, rows), self.step)

    def loss(self, batch: Tensors) -> Tensor:
        with mixed_precision(self.machine.device, self.machine.precision):
            loss: Tensor = self.step({self.name: batch})[self.name]
            return loss.float()


def _together(batches: Sequence[Tensors]) -> Tensors:
    """The sequences of all batches as one of the width of the widest; what was added counts as padding."""
    width = max(batch["input_ids"].shape[1] for batch in batches)
    names = ("input_ids", "attention_mask", *["token_type_ids"] * ("token_type_ids" in batches[0]))
    return {
        name: torch.cat([nn.functional.pad(batch[name], (0, width - batch[name].shape[1])) for batch in batches])
        for name in names
    }


class ScheduledPretraining:
    """One row's pretraining, ready to run; the encoder is changed in place.

    The `scheduler` keeps its choices; `last` is the last evaluation, `fitting_units` what fitting the heads costs.
    """

    def __init__(self, encoder: TextEncoder, context: ScheduleContext) -> None:
        method, data, recipe, seed = context.method, context.data, context.recipe, context.seed
        self.context, self.recipe, self.machine = context, recipe, context.machine
        sources, self.targets = data.chosen(method.setting), data.watched(method.setting)
        tasks = {name: data.tasks[name] for name in (*sources, *self.targets)}
        self.step = ScheduleStep(encoder, tasks, seed).to(self.machine.device)
        self.held = {name: data.halves(name, recipe.held_out) for name in self.targets}
        self.looks = "targets" in inspect.signature(SCHEDULERS[method.kind]).parameters
        held = self.held if self.looks else {}
        self.rows = {name: held[name][0] if name in held else range(tasks[name].sizes["train"]) for name in sources}
        probes = {name: self._probe(name, "train", self.rows[name]) for name in sources}
        sizes = {name: len(self.rows[name]) for name in sources}
        joint = partial(self.step.joint_losses, machine=self.machine) if recipe.joint else None
        looked_at = {name: self._probe(name, "train", self.held[name][1]) for name in self.targets}
        self.scheduler = scheduler_of(method, recipe, sizes, probes, looked_at, self.step, joint, seed)
        self.scheduler.choices, self.scheduler.watch = [], self._watch
        self._reported: dict[str, list[Tensors]] = {}
        self.last: dict[str, float] = {}
        self.report: TrainReport
        self._peak, self.on_gpu = 0, torch.device(self.machine.device).type == "cuda"
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats(self.machine.device)
        self.fitting_units = recipe.head_updates * len(self.targets)
        self.updates = method.updates or recipe.updates

    def labels(self) -> dict[str, int]:
        """Rows of each labelled target, at most, whose labels updates, fitting of heads and probes have read."""
        if self.context.method.setting != "aware":
            return {}
        scheduler, size = self.scheduler, self.recipe.batch_size
        looks = -(-sum(scheduler.counts.values()) // scheduler.every) if scheduler.units else 0
        drawn = looks * getattr(scheduler, "samples", 0)
        read = {name: scheduler.counts.get(name, 0) + self.recipe.head_updates + drawn for name in self.targets}
        held = {name: min(drawn * size, len(self.held[name][1])) if self.looks else 0 for name in read}
        return {name: min(read[name] * size, len(self.rows[name])) + held[name] for name in read}

    def fit_heads(self) -> None:
        """Train the targets' heads on the encoder as it is: a utility through an untrained head is noise."""
        if self.fitting_units:
            self.step.encoder.requires_grad_(False)
            seed = key(self.context.seed, "heads") % 2**32
            how: dict[str, Any] = {"steps": self.fitting_units, "lr": HEAD_LR, "weight_decay": 0.0, "seed": seed}
            rows = {name: self.held[name][0] for name in self.targets}
            parts = self.step, self.machine, rows, self.recipe.batch_size, "round-robin", "heads"
            train(**vars(task_training(*parts, schedule="constant", **how)))
            self.step.encoder.requires_grad_(True)

    def training(self) -> Training:
        """What the training loop is called with, once the heads are fitted."""
        recipe, seed = self.recipe, self.context.seed
        parts = self.step, self.machine, self.rows, recipe.batch_size, self.scheduler
        title, how = f"{self.context.method.name} seed {seed}", {**recipe.terms, "evaluations": recipe.evaluations}
        return task_training(*parts, title, self.evaluate, steps=self.updates, seed=seed, **how)

    def evaluate(self, done: int) -> dict[str, float]:
        """Target losses, shares of the sources and cost after `done` updates; with utilities, how Taylor's agree.

        What is looked at here, exact and Taylor utilities of one draw too, is not counted as cost.
        """
        self.last = self.measured() | self._compared()
        return self.last

    def peak_memory(self) -> int:
        """Bytes of the GPU that updates and decisions took at most, so far in this process; 0 on a CPU."""
        if self.on_gpu:
            self._peak = max(self._peak, torch.cuda.max_memory_allocated(self.machine.device))
        return self._peak

    def reported(self) -> dict[str, float]:
        """The mean loss of each target's batches for reports, the same ones each time."""
        probes = {name: self._probe(name, self.context.data.reported(name)) for name in self.targets}
        weights = Weights(self.step)
        with weights.untouched():
            if not self._reported:
                for name, probe in probes.items():
                    draws = generator(0, "report", 0, name)
                    self._reported[name] = [probe.sample(draws) for _ in range(self.recipe.target_batches)]
            return mean_losses(weights, probes, self._reported, 0, "report", 0)

    def measured(self) -> dict[str, float]:
        """Target losses, shares of the sources and cost so far."""
        losses, counts, cost = self.reported(), self.scheduler.counts, self.scheduler.cost
        updates = sum(counts.values())
        total = 3 * updates + cost.units + self.fitting_units
        return {
            "target_loss": sum(losses.values()) / len(losses),
            **{f"target_loss_{name}": value for name, value in losses.items()},
            **{f"share_{name}": count / max(1, updates) for name, count in counts.items()},
            "compute_units": float(total),
            "probe_units": float(cost.units),
            "probe_share": cost.units / max(1, total),
            "probe_seconds": cost.seconds,
        }

    def _compared(self) -> dict[str, float]:
        if self.context.method.kind != "utility" or not isinstance(self.scheduler, UtilityScheduler):
            return {}
        self.peak_memory()  # what the comparison takes is not the scheduler's
        both = self.scheduler.compare()
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats(self.machine.device)
        finite = [name for name in both["exact"] if all(math.isfinite(values[name]) for values in both.values())]
        if len(finite) < 2:
            return {}
        exact, taylor = ({name: both[kind][name] for name in finite} for kind in ("exact", "taylor"))
        agreed, spread = agreement(exact, taylor), max(exact.values()) - min(exact.values())
        regret = agreed.regret / spread if spread else 0.0
        return {"taylor_rank_correlation": agreed.rank_correlation, "taylor_regret": regret}

    def _watch(self, update: int, choice: Choice) -> None:
        """Log where all began, and every decision that looked at utilities."""
        if (run := self.context.run) is None:
            return
        if update == 1:
            begin = {"compute_units": float(self.fitting_units), "probe_units": 0.0, "probe_share": 0.0}
            run.log(0, "validation", self.measured() | begin)
        if choice.utilities:
            values = {f"utility_{name}": value for name, value in choice.utilities.items()}
            values |= {f"chosen_{name}": float(name == choice.source) for name in choice.utilities}
            run.log(update, "schedule", values | {"seconds": choice.cost.seconds})

    def _probe(self, name: str, split: str, rows: range | None = None) -> Probe:
        return TaskProbe(self.step, name, split, self.recipe.batch_size, self.machine, self.recipe.joint, rows)


def task_training(
    step: ScheduleStep,
    machine: Machine,
    rows: Mapping[str, range | None],
    batch_size: int,
    policy: Any,
    title: str,
    evaluate: Any = None,
    *,
    steps: int,
    seed: int,
    evaluations: int = 1,
    **options: Any,
) -> Training:
    """What trains `step` on the training part of its tasks, or `rows` of them, by AdamW; `policy` chooses tasks."""
    loaders = {
        name: step.tasks[name].batches("train", batch_size=batch_size, seed=seed, rows=own)
        for name, own in rows.items()
    }
    how = machine.settings(steps, seed, evaluations, **options)
    how |= {} if step.encoder.recordable else {"cuda_graph": False}
    settings = TrainSettings(steps, optimizer="adamw", **how)
    return Training(step, TaskStream(loaders, policy, seed=seed, steps=steps), settings, evaluate, title)
