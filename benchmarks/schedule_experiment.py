"""A scheduling experiment on the disk: one run folder a row and seed, resumable to the same choices."""

import copy
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from metapretrain.draws import key
from metapretrain.experiments.base import Experiment, Outcome
from metapretrain.experiments.schedule.recipe import ScheduleData, ScheduleMethod, ScheduleRecipe, planned_scheduler
from metapretrain.experiments.schedule.training import (
    ScheduleContext,
    ScheduledPretraining,
    ScheduleStep,
    task_training,
)
from metapretrain.files import json_bytes, write_whole
from metapretrain.models.text_encoders import TextEncoder, save_text_encoder
from metapretrain.report.figures import read_curves
from metapretrain.report.layout import Column, Layout
from metapretrain.scheduling import BlockScheduler
from metapretrain.training import train
from metapretrain.training.environment import mixed_precision

log = logging.getLogger("metapretrain.schedule_experiment")
ENCODER, CHOICES = "encoder", "choices.json"
AGREED = ("taylor_rank_correlation", "taylor_regret")
TITLES = {"accuracy": "accuracy %", "f1": "F1 %", "matthews": "Matthews"}


def downstream_column(task: str, metric: str) -> Column:
    """The column of a downstream task's main metric."""
    title, kind = TITLES.get(metric, metric.replace("_", " ")), "proportion" if metric == "accuracy" else None
    return Column(task, f"{task}_{metric}", f"{task} {title}", metric != "matthews", True, f"{task}_test", kind)


def downstream_scores(encoder: TextEncoder, name: str, context: ScheduleContext) -> dict[str, float]:
    """Fine-tune a copy of the encoder with a new head on a downstream task; return metrics by split and name."""
    data, recipe, seed, machine = context.data, context.recipe, context.seed, context.machine
    task = data.tasks[name]
    step = ScheduleStep(copy.deepcopy(encoder), {name: task}, key(seed, "downstream"))
    tuning: dict[str, Any] = {"steps": recipe.finetune_updates, "lr": recipe.finetune_lr, "seed": seed}
    tuning |= {"weight_decay": recipe.weight_decay, "schedule": "linear", "warmup": 0.1, "clip": 1.0}
    parts = step, machine, {name: None}, recipe.finetune_batch, "longest", f"fine-tuning on {name}"
    train(**vars(task_training(*parts, **tuning)))
    found: dict[str, float] = {}
    for split in ("validation", "test"):
        if split in task.sizes and not (data.tuning and split == "test"):
            prefix = "" if split == "test" else "validation_"
            with mixed_precision(machine.device, machine.precision):
                scores = task.score(step.encoder, step.heads[name], split)
            found |= {f"{prefix}{name}_{metric}": float(value) for metric, value in scores.items()}
    return found


@dataclass(frozen=True)
class ScheduleExperiment(
    Experiment[ScheduleRecipe, ScheduleData, ScheduleMethod, ScheduledPretraining, Mapping[str, float]]
):
    """A scheduling experiment: see :class:`metapretrain.experiments.base.Experiment`.

    Args:
        make_encoder: seed to an encoder that has not been trained on any source.
    """

    make_encoder: Callable[[int], TextEncoder] = field(kw_only=True)

    @property
    def table_layout(self) -> Layout:
        """The layout with a column for each downstream task."""
        mean = Column("downstream", "downstream", "downstream %", drawn="mean over downstream tasks")
        layout = self.layout or Layout((mean,), mean.name, part="test", first_row=True, compared=(mean.name,))
        return layout.with_tasks(downstream_column(task, self.data.tasks[task].metric) for task in self.data.downstream)

    def check_row(self, name: str, method: ScheduleMethod) -> None:
        """Refuse a row whose decision would not end within the run."""
        decision, updates = self._decision(method), method.updates or self.recipe.updates
        if decision.units and decision.every > updates:
            log.warning("%s: %d updates are one decision of %d", name, updates, decision.every)

    def model(self, method: ScheduleMethod) -> dict[str, Any]:
        data = self.data
        return {
            "encoder": self.recipe.encoder,
            "sources": list(data.chosen(method.setting)),
            "targets": list(data.watched(method.setting)),
            "downstream": list(data.downstream),
        }

    @property
    def files(self) -> dict[str, Any]:
        return dict(self.data.files)

    def plan(self, methods: Mapping[str, ScheduleMethod]) -> list[str]:
        lines = []
        for name, method in methods.items():
            decision, updates = self._decision(method), method.updates or self.recipe.updates
            spent = -(-updates // decision.every) * decision.units
            fitted = self.recipe.head_updates * len(self.data.watched(method.setting))
            total = 3 * updates + spent + fitted
            told = f"{updates:,} source updates of {self.recipe.batch_size} rows, a decision every {decision.updates:,}"
            if decision.units:
                apart = f", probes every {decision.every:,} of" if decision.every > decision.updates else " costs"
                told += f"{apart} {decision.units} forward passes"
            lines.append(
                f"{name}: {told}; {total:,} forward passes in all, probes {100 * spent / total:.0f}%; then "
                f"{self.recipe.finetune_updates:,} updates on each of {', '.join(self.data.downstream)}"
            )
        return lines

    def train(self, context: ScheduleContext) -> ScheduledPretraining:
        """Pretrain a new encoder on the sources that the scheduler chooses."""
        pretraining = ScheduledPretraining(self.make_encoder(context.seed), context)
        pretraining.fit_heads()
        pretraining.report = train(**vars(pretraining.training()), run=context.run)
        return pretraining

    def score(self, context: ScheduleContext, trained: ScheduledPretraining) -> dict[str, float]:
        """Target losses, cost, and scores of the encoder fine-tuned on each downstream task."""
        run, last = context.folder, trained.last
        metrics = {key: last[key] for key in last if key.startswith("target_loss") or key == "probe_share"}
        metrics["labels"] = float(sum(trained.labels().values()))
        if peak := trained.peak_memory():
            metrics["peak_memory_mib"] = peak / 2**20
        curves = read_curves(run.path)
        losses, compute = (curves[f"validation/{name}"][1] for name in ("target_loss", "compute_units"))
        metrics["target_loss_area"] = float(np.trapezoid(losses, compute) / (compute[-1] - compute[0]))
        for agreed in AGREED:
            values = [v for v in curves.get(f"validation/{agreed}", ((), ()))[1] if math.isfinite(v)]
            if values:
                metrics[agreed] = float(sum(values) / len(values))
        for task in self.data.downstream:
            scores = downstream_scores(trained.step.encoder, task, context)
            run.log(trained.updates, "downstream", scores)
            metrics |= scores
        return metrics | self._means(metrics)

    def outcome(self, context: ScheduleContext, trained: ScheduledPretraining, scores: Mapping[str, float]) -> Outcome:
        method, last, scheduler = context.method, trained.last, trained.scheduler
        tuned = self.recipe.finetune_updates * len(self.data.downstream)
        passes = scheduler.cost.forwards + trained.fitting_units + trained.updates
        budget = {
            "encoder_passes": passes * self.recipe.batch_size + tuned * self.recipe.finetune_batch,
            "updates": trained.updates + tuned,
            "pretrain_updates": trained.updates,
            "finetune_updates": tuned,
            "decisions": scheduler.decisions,
            "compute_units": int(last["compute_units"]),
            "probe_units": scheduler.cost.units,
        }
        curves = read_curves(context.folder.path)
        curve = {
            name: curves[f"validation/{name}"][1].tolist()
            for name in ("target_loss", "compute_units", *(key for key in last if key.startswith("share_")))
        }
        extra = {
            "encoder": self.recipe.encoder,
            "setting": method.setting,
            "scheduler": method.scheduler,
            **{key: value for key in ("source", "block", "options") if (value := getattr(method, key))},
            "labels": trained.labels(),
            "probe_seconds": round(scheduler.cost.seconds, 3),
            "updates_per_s": round(trained.report.updates_per_second, 2),
            "curve": {"updates": curves["validation/target_loss"][0].tolist(), **curve},
        }
        return Outcome(scores, budget, extra)

    def save(self, context: ScheduleContext, trained: ScheduledPretraining, scores: Mapping[str, float]) -> None:
        save_text_encoder(trained.step.encoder, context.folder.path / ENCODER)
        write_whole(context.folder.path / CHOICES, json_bytes(trained.scheduler.choices))

    def _decision(self, method: ScheduleMethod) -> BlockScheduler:
        sources, targets = self.data.chosen(method.setting), self.data.watched(method.setting)
        return planned_scheduler(method, sources, targets, self.recipe)

    def _means(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Means of the downstream tasks' main metrics, on test and on validation parts."""
        found = {}
        for prefix, name in (("", "downstream"), ("validation_", "validation_downstream")):
            keys = [f"{prefix}{task}_{self.data.tasks[task].metric}" for task in self.data.downstream]
            if all(key in metrics for key in keys):
                found[name] = sum(metrics[key] for key in keys) / len(keys)
        return found
