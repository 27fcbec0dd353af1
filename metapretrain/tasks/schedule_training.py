"""The phases of a scheduling experiment: pretrain by a scheduler's choices, then fine-tune on downstream tasks."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from metapretrain.episodes import TaskStream
from metapretrain.models.text_encoders import TextEncoder
from metapretrain.scheduling import Choice, UtilityScheduler, agreement
from metapretrain.scheduling.draws import key
from metapretrain.tasks.machine import Machine
from metapretrain.tasks.pretraining.frame import Batch
from metapretrain.tasks.schedule_data import ScheduleData
from metapretrain.tasks.schedule_methods import ScheduleMethod, ScheduleRecipe
from metapretrain.tasks.schedule_policy import Policy, make_scheduler
from metapretrain.tasks.schedule_probes import JointProbe, Losses, ScheduleStep, TaskLoader, TaskProbe
from metapretrain.training import RunFolder, TrainReport, TrainSettings, train
from metapretrain.training.devices import mixed_precision

HEAD_LR = 1e-3


class Pretraining:
    """One row's pretraining, ready to run.

    Args:
        encoder: changed in place.
        run: a run folder, or None.

    Attributes:
        step: encoder and heads.
        policy: has the choices and their cost.
        last: what the last evaluation gave.
        fitting_units: cost of fitting the heads, a forward pass an update.
    """

    def __init__(
        self, encoder: TextEncoder, method: ScheduleMethod, data: ScheduleData, recipe: ScheduleRecipe, seed: int,
        machine: Machine, run: RunFolder | None = None,
    ) -> None:  # fmt: skip
        self.method, self.data, self.recipe, self.seed = method, data, recipe, seed
        self.machine, self.run_folder = machine, run
        self.sources, self.targets = data.chosen(method.setting), data.watched(method.setting)
        names = dict.fromkeys((*self.sources, *self.targets))
        self.step = ScheduleStep(encoder, {name: data.tasks[name] for name in names}, seed).to(machine.device)
        looked_at = self._probes("probe")
        sources = {name: self._probe(name, "train") for name in self.sources}
        sizes = {name: data.tasks[name].sizes["train"] for name in self.sources}
        joint = self._joint if recipe.joint else None
        scheduler = make_scheduler(method, sources, looked_at, self.step, sizes, recipe, seed, joint)
        self.policy = Policy(scheduler, self._watch)
        self.reported = Losses(self.step, self._probes("report"), recipe.target_batches, 0, "report")
        self.last: dict[str, float] = {}
        self._peak, self.on_gpu = 0, torch.device(machine.device).type == "cuda"
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats(machine.device)
        self.fitting_units = recipe.head_updates * len(self.targets)

    def run(self) -> TrainReport:
        """Train, and go on where a run that was cut short stopped."""
        recipe = self.recipe
        self._fit_heads()
        loaders = {name: TaskLoader(self.data.tasks[name], recipe.batch_size, self.seed) for name in self.sources}
        stream = TaskStream(loaders, self.policy, seed=self.seed, steps=recipe.updates)
        settings = TrainSettings(
            steps=recipe.updates, lr=recipe.lr, optimizer="adamw", weight_decay=recipe.weight_decay,
            schedule=recipe.schedule, warmup=recipe.warmup, clip=recipe.clip, precision=self.machine.precision,
            device=self.machine.device, seed=self.seed, cuda_graph=graphs(self.step, self.machine),
            log_every=max(1, min(50, recipe.updates // 20)),
            evaluate_every=max(1, recipe.updates // recipe.evaluations),
        )  # fmt: skip
        title = f"{self.method.name} seed {self.seed}"
        return train(self.step, stream, settings, run=self.run_folder, evaluate=self.evaluate, title=title)

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

    def _measured(self) -> dict[str, float]:
        losses, policy, cost = self.reported(), self.policy, self.policy.scheduler.cost
        found = {"target_loss": sum(losses.values()) / len(losses)}
        found |= {f"target_loss_{name}": value for name, value in losses.items()}
        counts = policy.scheduler.counts
        found |= {f"share_{name}": count / max(1, policy.updates) for name, count in counts.items()}
        total = 3 * policy.updates + cost.units + self.fitting_units
        return found | {
            "compute_units": float(total), "probe_units": float(cost.units),
            "probe_share": cost.units / max(1, total), "probe_seconds": cost.seconds,
        }  # fmt: skip

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

    def _probe(self, name: str, split: str) -> TaskProbe:
        kind = JointProbe if self.recipe.joint else TaskProbe
        return kind(self.step, name, split, self.recipe.batch_size, self.machine)

    def _probes(self, use: str) -> dict[str, TaskProbe]:
        return {name: self._probe(name, self.data.part(name, use)) for name in self.targets}

    def _joint(self, batches: Mapping[str, Sequence[Batch]]) -> dict[str, Tensor]:
        with mixed_precision(self.machine.device, self.machine.precision):
            return {name: losses.float() for name, losses in self.step.joint_losses(batches).items()}

    def _fit_heads(self) -> None:
        """Train the targets' heads on the encoder as it is: a utility through an untrained head is noise."""
        if not self.recipe.head_updates:
            return
        steps, seed = self.recipe.head_updates * len(self.targets), key(self.seed, "heads") % 2**32
        loaders = {name: TaskLoader(self.data.tasks[name], self.recipe.batch_size, seed) for name in self.targets}
        settings = TrainSettings(
            steps=steps, lr=HEAD_LR, optimizer="adamw", weight_decay=0.0, schedule="constant",
            precision=self.machine.precision, device=self.machine.device, seed=seed,
            cuda_graph=graphs(self.step, self.machine),
        )  # fmt: skip
        self.step.encoder.requires_grad_(False)
        try:
            train(self.step, TaskStream(loaders, "round-robin", seed=seed, steps=steps), settings, title="heads")
        finally:
            self.step.encoder.requires_grad_(True)


def graphs(step: ScheduleStep, machine: Machine) -> bool | None:
    """Whether updates may be CUDA graphs: as `machine` says, unless the encoder cannot be recorded."""
    return machine.cuda_graph if step.encoder.recordable else False


def finetune(
    encoder: TextEncoder, name: str, data: ScheduleData, recipe: ScheduleRecipe, seed: int, machine: Machine
) -> dict[str, float]:
    """Fine-tune a copy of the encoder with a new head on a downstream task; return metrics by split and name."""
    task = data.tasks[name]
    step = ScheduleStep(copy.deepcopy(encoder), {name: task}, key(seed, "downstream"))
    loaders = {name: TaskLoader(task, recipe.finetune_batch, seed)}
    settings = TrainSettings(
        steps=recipe.finetune_updates, lr=recipe.finetune_lr, optimizer="adamw", weight_decay=recipe.weight_decay,
        schedule="linear", warmup=0.1, clip=1.0, precision=machine.precision, device=machine.device, seed=seed,
        cuda_graph=graphs(step, machine),
    )  # fmt: skip
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
