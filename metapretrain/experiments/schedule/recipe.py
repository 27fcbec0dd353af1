"""What can be chosen in a scheduling experiment: schedulers, settings, recipes and the tasks by their part in it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from metapretrain.checks import number, whole
from metapretrain.errors import InputError, one_of
from metapretrain.experiments.schedule.tasks.base import PretrainingTask
from metapretrain.scheduling import SCHEDULERS, BlockScheduler, Probe, Schedule, build_scheduler, option_defaults
from metapretrain.scheduling.probes import Params
from metapretrain.scheduling.registry import blank_probes, parse_schedule
from metapretrain.scheduling.utility import TargetLosses
from metapretrain.training import TrainSettings

UTILITY = {"utility-exact": "exact", "utility-taylor": "taylor"}
FIXED = "fixed"
OPTIONS = ("alpha", "samples", "epsilon", "floor", "decay", "smoothing", "gamma")  # of utility and exp3, by recipes
SETTINGS = ("aware", "agnostic")
MOST_KEPT = 1000  # batches of a target


def scheduler_names() -> tuple[str, ...]:
    """The schedulers that rows have: all that are registered, `utility` by both of its utilities, without `fixed`."""
    return (*UTILITY, *(name for name in SCHEDULERS if name not in ("utility", FIXED)))


@dataclass(frozen=True)
class ScheduleMethod:
    """A row of the table: the scheduler, and what it may choose and look at.

    Args:
        scheduler: one of :func:`scheduler_names`, or `fixed`.
        setting: `aware`: sources are the pretraining tasks and the targets' own training parts, and the targets are
            looked at; `agnostic`: sources are the pretraining tasks, which are the targets as well (T = S).
        source: of `fixed`, and of no other.
        block: updates of a decision (softmax, pike: from probe to probe) in place of the recipe's; none for `fixed`.
        updates: source updates of this row, with their own decay of the rate; None: those of the recipe.
        options: of the scheduler, as `--schedule` has them: `temperature=0.3,smoothing=0.8`.
    """

    scheduler: str
    setting: str
    source: str | None = None
    block: int | None = None
    updates: int | None = None
    options: str = ""

    def __post_init__(self) -> None:
        one_of("scheduler", self.scheduler, (*scheduler_names(), FIXED))
        one_of("setting", self.setting, SETTINGS)
        if (self.source is not None) != (self.scheduler == FIXED):
            raise InputError(f"scheduler {self.scheduler} with source {self.source}; fixed has a source, no other has")
        if self.block is not None and (self.block < 1 or self.scheduler == FIXED):
            raise InputError(f"scheduler {self.scheduler} with block {self.block}: at least 1, and none for fixed")
        if self.updates is not None:
            whole(f"updates of {self.scheduler}", self.updates, 1)
        if self.options:
            parse_schedule(f"{self.kind}:{self.options}", ["a", "b"])

    @property
    def kind(self) -> str:  # the name in the registry
        return "utility" if self.scheduler in UTILITY else self.scheduler

    @property
    def name(self) -> str:
        own = [f"{what}{value}" for what in ("block", "updates") if (value := getattr(self, what)) is not None]
        return "-".join(filter(None, (self.scheduler, self.source, self.options.replace(",", "-"), *own, self.setting)))


@dataclass(frozen=True)
class ScheduleRecipe:
    """Choices of a scheduling experiment; those not told here are of AdamW or of the scheduler.

    Args:
        updates: source updates of every row; batch_size: examples of a batch, in updates and probes.
        encoder: see `--encoder` of `run_schedule.py`.
        block: N, updates of a decision by utility or by exp3; None: the least with probes at or under a quarter of all
            compute. The other schedulers decide before every update.
        floor: one above epsilon counts as epsilon.
        joint: what allows it goes through the encoder at once: the batches of all targets, and for Taylor utilities
            the M batches of a source. False: batch after batch, for where Taylor's graph of T M batches is too large.
        fall: relative fall of the targets' losses in a block that is exp3's reward 1; as much of a rise is 0.
        held_out: share of each target's training rows, the last ones, that a row whose scheduler looks at targets takes
            for probes and does not train on; the other rows train on all. So no row reads a label that another may not.
        head_updates: updates of the targets' heads on the encoder as it is, before the first decision, in every row.
        target_batches: batches of each target that the reported loss is a mean over, 1 to 1000; all are kept.
        evaluations: how often it is measured.
        finetune_updates, finetune_batch, finetune_lr: the fixed budget of each downstream task.
    """

    updates: int = 6000
    batch_size: int = 32
    encoder: str = "small"
    lr: float = 5e-4
    weight_decay: float = 0.01
    schedule: str = "linear"
    warmup: float = 0.06
    clip: float | None = 1.0
    alpha: float = 0.02
    samples: int = 2
    block: int | None = None
    epsilon: float = 0.1
    floor: float = 0.02
    decay: float = 0.97
    smoothing: float = 0.0
    normalise: str | None = None
    joint: bool = True
    gamma: float = 0.2
    fall: float = 0.1
    held_out: float = 0.1
    head_updates: int = 50
    target_batches: int = 8
    evaluations: int = 20
    finetune_updates: int = 300
    finetune_batch: int = 32
    finetune_lr: float = 3e-4

    def __post_init__(self) -> None:
        """Check every value now: fine-tuning begins hours after the start."""
        for name in ("target_batches", "evaluations", "finetune_updates", "batch_size", "finetune_batch"):
            whole(name, getattr(self, name), 1)
        whole("head_updates", self.head_updates)
        whole("target_batches", self.target_batches, 1, MOST_KEPT)
        number("held_out", self.held_out, above=0, below=1)
        number("floor", self.floor, least=0, most=1)  # the scheduler gets none above epsilon
        for scheduler in ("utility-exact", "exp3"):
            planned_scheduler(ScheduleMethod(scheduler, "aware"), ["a", "b"], ["c"], self)
        TrainSettings(self.finetune_updates, self.finetune_lr)
        TrainSettings(self.updates, optimizer="adamw", **self.terms)

    @property
    def terms(self) -> dict[str, Any]:
        """Terms of the training of the encoder."""
        return {name: getattr(self, name) for name in ("lr", "weight_decay", "schedule", "warmup", "clip")}


def scheduler_of(
    method: ScheduleMethod,
    recipe: ScheduleRecipe,
    sizes: Mapping[str, int],
    sources: Mapping[str, Probe],
    targets: Mapping[str, Probe],
    params: Params,
    target_losses: TargetLosses | None = None,
    seed: int = 0,
) -> BlockScheduler:
    """The scheduler of a row: options that the recipe states, and else the defaults of the constructor.

    Without a block of the row or the recipe, one that probes decides again after so many updates that its probes take a
    quarter of the compute; the others, without one of the row, before every update.
    """
    known = option_defaults(method.kind)
    stated: dict[str, Any] = {"normalise": recipe.normalise, "source": method.source}
    if method.kind in ("utility", "exp3"):
        stated |= {option: getattr(recipe, option) for option in OPTIONS}
        stated |= {"floor": min(recipe.floor, recipe.epsilon), "reward": recipe.fall}
    stated |= {"utility": UTILITY[method.scheduler]} if method.scheduler in UTILITY else {}
    own = parse_schedule(f"{method.kind}:{method.options}", sizes).options if method.options else {}
    usual = {key: value for key, value in stated.items() if key in known}

    def build(**more: int) -> BlockScheduler:
        schedule = Schedule(method.kind, {**usual, **own, **more})
        return build_scheduler(
            schedule, sizes, sources, params, targets=targets, target_losses=target_losses, seed=seed
        )

    every = "every" if "every" in known else "updates"
    if method.block is not None:
        return build(**{every: method.block})
    units = build().units
    if every in own or not units:
        return build() if own else build(updates=1)
    return build(**{every: units if recipe.block is None else recipe.block})


def planned_scheduler(
    method: ScheduleMethod, sources: Sequence[str], targets: Sequence[str], recipe: ScheduleRecipe
) -> BlockScheduler:
    """The scheduler of a row before there is a model: it has `updates` of a decision and its cost in `units`.

    Example:
        >>> recipe = ScheduleRecipe()
        >>> for name, block in (("utility-exact", None), ("uniform", None), ("utility-exact", 50)):
        ...     planned = planned_scheduler(ScheduleMethod(name, "aware", block=block), "abcde", "fghi", recipe)
        ...     print(planned.updates, planned.units)
        110 110
        1 0
        50 110
    """
    sizes, weights = dict.fromkeys(sources, 1), [torch.zeros(1, requires_grad=True)]
    return scheduler_of(method, recipe, sizes, blank_probes(sources), blank_probes(targets), weights)


@dataclass(frozen=True)
class ScheduleData:
    """Tasks by their part in an experiment; each has one part, and each part a task.

    Args:
        sources: names of the pretraining tasks.
        targets: names of the tasks that downstream-aware utilities look at; their training parts are sources too.
        downstream: names of the tasks that pretrained encoders are fine-tuned on.
        tuning: leave the test parts alone; what is reported are the validation parts.
    """

    tasks: Mapping[str, PretrainingTask]
    sources: tuple[str, ...]
    targets: tuple[str, ...]
    downstream: tuple[str, ...]
    tuning: bool = False
    files: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        seen: dict[str, str] = {}
        for what in ("sources", "targets", "downstream"):
            names: tuple[str, ...] = getattr(self, what)
            if not names:
                raise InputError(f"{what} names no task; there are: {', '.join(self.tasks)}")
            for name in names:
                one_of("task", name, self.tasks)
                if name in seen:
                    raise InputError(f"{name} is among {seen[name]} and {what}; give every task one part")
                seen[name] = what
        for name in seen:
            self.reported(name)

    def reported(self, name: str) -> str:
        """The split of a task that is reported, which nothing else reads."""
        wanted = ("validation",) if self.tuning else ("test", "validation")
        found = next((split for split in wanted if split in self.tasks[name].sizes), None)
        if found is None:
            raise InputError(f"{name} has no rows held out of training; every task of an experiment needs some")
        return found

    def halves(self, name: str, held_out: float) -> tuple[range, range]:
        """The training rows of a task without those that are held out for probes, and these, the last."""
        size = self.tasks[name].sizes["train"]
        begin = max(1, size - max(1, round(held_out * size)))
        return range(begin), range(begin, size)

    def chosen(self, setting: str) -> tuple[str, ...]:
        return self.sources + self.targets if setting == "aware" else self.sources

    def watched(self, setting: str) -> tuple[str, ...]:
        return self.targets if setting == "aware" else self.sources

    @property
    def test(self) -> tuple[str, ...]:
        """The downstream tasks, or nothing while a recipe is chosen."""
        return () if self.tuning else self.downstream

    @property
    def counts(self) -> dict[str, int]:
        """Rows of each part of each task."""
        used = (*self.sources, *self.targets, *self.downstream)
        found = {f"{name}_{split}": size for name in used for split, size in self.tasks[name].sizes.items()}
        return {key: size for key, size in found.items() if not (self.tuning and key.endswith("_test"))}
