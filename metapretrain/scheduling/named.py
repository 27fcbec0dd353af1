"""A bandit over tasks that is rewarded by how far the losses of the targets fall."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from metapretrain.draws import generator, key
from metapretrain.errors import InputError, one_of
from metapretrain.experiments.recipe import override
from metapretrain.scheduling import (
    UTILITIES,
    BlockScheduler,
    Choice,
    Cost,
    Exp3,
    Fixed,
    FunctionProbe,
    Probe,
    Proportional,
    RoundRobin,
    Uniform,
    UtilityScheduler,
)
from metapretrain.scheduling.probes import Params, Weights
from metapretrain.scheduling.utility import TargetLosses
from metapretrain.training.devices import mixed_precision

EXP3_UPDATES = 10  # updates of a decision of exp3, where none are given: a reward over one update is mostly noise


class LossExp3(Exp3):
    """Exp3 that rewards the last decision by how far the targets' losses fell since.

    The reward is the mean over targets of (before - now) / before, of the same M training batches of each target at
    every decision; -`reward` to `reward` is mapped to [0, 1]. Looking leaves no trace in weights, buffers, modes or
    generators.

    Args:
        sources: names of the source tasks.
        targets: a probe for each target.
        params: the module that their losses use.
        samples: M.
        reward: above 0.
        gamma, updates, seed: see :class:`metapretrain.scheduling.Exp3`.

    Raises:
        InputError: samples below 1, a reward that is not above 0, and what `Exp3` refuses; from `choose`, losses of
            targets that are not finite.

    Example:
        >>> from metapretrain.scheduling import FunctionProbe
        >>> w = torch.zeros(1, requires_grad=True)
        >>> goal = FunctionProbe(lambda _: None, lambda _: (w - 1).square().sum())
        >>> scheduler = LossExp3(["good", "idle"], {"goal": goal}, [w], gamma=0.3, updates=1)
        >>> for _ in range(200):
        ...     if scheduler.choose().source == "good":
        ...         w.data += 0.1 * (1 - w.data)
        >>> scheduler.probabilities()["good"] > 0.8
        True
    """

    def __init__(
        self,
        sources: Collection[str] | Mapping[str, Any],
        targets: Mapping[str, Probe],
        params: Params,
        *,
        samples: int = 2,
        reward: float = 0.05,
        gamma: float = 0.1,
        updates: int = EXP3_UPDATES,
        seed: int = 0,
    ) -> None:
        if samples < 1 or not 0 < reward < math.inf:
            raise InputError(f"exp3 needs samples of at least 1 and a reward above 0, got {samples} and {reward}")
        super().__init__(sources, gamma=gamma, low=-reward, high=reward, updates=updates, seed=seed)
        self.targets, self.samples = dict(targets), samples
        self._weights = Weights(params)
        self._before: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        """The state as JSON values."""
        return {**super().state_dict(), "before": list(self._before)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where another such scheduler was."""
        super().load_state_dict(state)
        self._before = list(state["before"])

    def _identity(self) -> dict[str, Any]:
        return {**super()._identity(), "targets": list(self.targets), "samples": self.samples}

    def _decide(self) -> Choice:
        start = time.perf_counter()
        now = self._losses()
        bad = [name for name, loss in zip(self.targets, now, strict=True) if not math.isfinite(loss)]
        if bad:
            raise InputError(f"losses of target {', '.join(bad)} are not finite: look at the weights and the losses")
        falls = [(before - loss) / before for before, loss in zip(self._before, now, strict=False) if before > 0]
        if falls:
            self.observe(self._last.source, sum(falls) / len(falls))
        self._before = now
        cost = Cost(forwards=len(self.targets) * self.samples, seconds=time.perf_counter() - start)
        return dataclasses.replace(super()._decide(), cost=cost)

    def _losses(self) -> list[float]:
        """Mean loss of each target's batches, the same ones in every call."""
        means = []
        with self._weights.untouched(), torch.no_grad():
            for name, probe in self.targets.items():
                losses = []
                for sample in range(self.samples):
                    self._weights.reset(key(self.seed, "exp3 loss", name, sample))
                    losses.append(probe.loss(probe.sample(generator(self.seed, "exp3 batch", name, sample))))
                means.append(torch.stack(losses).float().mean())
            return torch.stack(means).tolist() if means else []


PROBING = ("utility", "exp3")  # these look at losses of batches of their own
MOST_SAMPLES = 100  # all batches of a decision are held at once
SCHEDULES = ("uniform", "proportional", "round-robin", "utility", "exp3", "fixed")
_OPTIONS = {  # of each schedule; the others have `updates` alone
    "utility": ("updates", "samples", "alpha", "utility", "normalise", "epsilon", "floor", "decay", "smoothing"),
    "exp3": ("updates", "samples", "gamma", "reward"),
}


@dataclass(frozen=True)
class Schedule:
    """A scheduler by name; see :mod:`metapretrain.scheduling` for what the terms mean.

    Args:
        name: one of :data:`SCHEDULES`.
        task: of `fixed`.
        updates: N, of a decision; None: 1, or 10 for `exp3`, or for `utility` the least with which probes are at or
            under a quarter of the compute.
        samples: M, 1 to :data:`MOST_SAMPLES` batches of each task that `utility` and `exp3` look at.
        alpha, utility, normalise, epsilon, floor, decay, smoothing: of `utility`.
        gamma: of `exp3`.
        reward: of `exp3`: the relative fall of the losses over a decision that counts as a full reward.

    Raises:
        InputError: an unknown name, or a value out of its range.
    """

    name: str
    task: str = ""
    updates: int | None = None
    samples: int = 2
    alpha: float = 0.01
    utility: str = "exact"
    normalise: str | None = None
    epsilon: float = 0.0
    floor: float = 0.0
    decay: float = 1.0
    smoothing: float = 0.0
    gamma: float = 0.1
    reward: float = 0.05

    def __post_init__(self) -> None:
        """Check every value now: a phase may begin hours after the start."""
        one_of("schedule", self.name, SCHEDULES)
        one_of("utility", self.utility, UTILITIES)
        if (self.name == "fixed") != bool(self.task):
            raise InputError("fixed needs the task, as in fixed:NAME; the other schedules take none")
        if not 1 <= self.samples <= MOST_SAMPLES:
            raise InputError(f"samples must lie in 1..{MOST_SAMPLES}, got {self.samples}")
        still = FunctionProbe(lambda _: None, lambda _: torch.zeros(()))
        names = dict.fromkeys([self.task or "a", "b"], 1)
        build_scheduler(self, names, dict.fromkeys(names, still), [torch.zeros(1, requires_grad=True)], seed=0)


def parse_schedule(text: str, tasks: Collection[str]) -> Schedule:
    """Read `round-robin`, `fixed:sst` or `utility:alpha=0.05,utility=taylor`; `tasks` are those that may be fixed.

    Raises:
        InputError: an unknown schedule, task or option (with the nearest one), or a value out of its range.

    Example:
        >>> parse_schedule("utility:alpha=0.05,samples=1", ["sst", "para"]).alpha
        0.05
        >>> parse_schedule("fixed:sts", ["sst", "para"])
        Traceback (most recent call last):
        ...
        metapretrain.errors.InputError: ...
    """
    name, _, rest = text.partition(":")
    one_of("schedule", name, SCHEDULES)
    if name == "fixed":
        if not rest:
            raise InputError(f"fixed needs a task: one of {', '.join(f'fixed:{task}' for task in tasks)}")
        return Schedule(name, task=one_of("task of fixed:NAME", rest, tasks))
    changes = list(filter(None, rest.split(",")))
    for change in changes:
        one_of(f"option of {name}", change.partition("=")[0], _OPTIONS.get(name, ("updates",)))
    return override(Schedule(name), changes)


def refuse_two_schedules(schedule: str | None, changes: Sequence[str], setting: str = "scheduler") -> None:
    """Refuse `--schedule` beside a change of the same choice by `--set`, whatever their order.

    Example:
        >>> refuse_two_schedules("exp3", ["epochs=3"])
        >>> refuse_two_schedules("exp3", ["scheduler="])
        Traceback (most recent call last):
        ...
        metapretrain.errors.InputError: --schedule exp3 and --set scheduler= are one choice: give one of them
    """
    for change in changes:
        if schedule is not None and change.partition("=")[0] == setting:
            raise InputError(f"--schedule {schedule} and --set {change} are one choice: give one of them")


def build_scheduler(
    schedule: Schedule,
    sizes: Mapping[str, float],
    probes: Mapping[str, Probe],
    params: Params,
    *,
    targets: Mapping[str, Probe] | None = None,
    target_losses: TargetLosses | None = None,
    seed: int,
) -> BlockScheduler:
    """Return the scheduler that a schedule names.

    Args:
        sizes: of each source task, such as its training rows: what `proportional` draws by.
        probes: of the source tasks, used by `utility` and `exp3` alone.
        params: the module that all losses use; see :class:`metapretrain.scheduling.UtilityScheduler`.
        targets: probes of the tasks that should get better; None: the source tasks themselves.
        target_losses: the losses of all targets at once.
        seed: of all draws.

    Example:
        >>> scheduler = build_scheduler(Schedule("round-robin"), {"sst": 80, "sts": 55}, {}, [], seed=0)
        >>> [scheduler.choose().source for _ in range(3)]
        ['sst', 'sts', 'sst']
    """
    own = {"updates": 1 if schedule.updates is None else schedule.updates, "seed": seed}
    aims = probes if targets is None else targets
    if schedule.name == "utility":
        return UtilityScheduler(
            probes,
            aims,
            params,
            alpha=schedule.alpha,
            samples=schedule.samples,
            updates=schedule.updates,
            epsilon=schedule.epsilon,
            floor=schedule.floor,
            decay=schedule.decay,
            utility=schedule.utility,
            smoothing=schedule.smoothing,
            normalise=schedule.normalise,
            target_losses=target_losses,
            seed=seed,
        )
    if schedule.name == "exp3":
        updates = EXP3_UPDATES if schedule.updates is None else schedule.updates
        return LossExp3(
            sizes,
            aims,
            params,
            samples=schedule.samples,
            reward=schedule.reward,
            gamma=schedule.gamma,
            updates=updates,
            seed=seed,
        )
    if schedule.name == "proportional":
        return Proportional(sizes, **own)
    if schedule.name == "fixed":
        return Fixed(sizes, schedule.task, **own)
    return {"uniform": Uniform, "round-robin": RoundRobin}[schedule.name](sizes, **own)


def row_probe(rows: int, batch_size: int, loss: Callable[[Tensor], Tensor]) -> FunctionProbe:
    """Return a probe of training rows: `loss` gets indices int64 (B,), all different, on the CPU.

    Example:
        >>> row_probe(10, 4, lambda rows: rows.float().mean()).sample(torch.Generator()).shape
        torch.Size([4])
    """
    size = min(rows, batch_size)
    return FunctionProbe(lambda random: torch.randperm(rows, generator=random)[:size], loss)


@contextmanager
def probing(device: str | torch.device, precision: str) -> Iterator[None]:
    """A block for the losses of probes: modules that were compiled run as they are, in the precision of training."""
    with torch.compiler.set_stance("force_eager"), mixed_precision(device, precision):
        yield


def choices_of(stream: Any) -> dict[str, float]:
    """Return what to log of a stream with a scheduler: updates of each task so far, and the last utilities.

    Args:
        stream: a :class:`metapretrain.episodes.TaskStream`.
    """
    found = {f"updates_{name}": float(count) for name, count in stream.counts.items()}
    utilities = getattr(stream.choice, "utilities", {})
    return found | {f"utility_{name}": value for name, value in utilities.items() if math.isfinite(value)}


def spent(scheduler: BlockScheduler) -> dict[str, Any]:
    """Return what a result says of a scheduler: the updates of each task, and what its probes took.

    `probe_share` is their part of the compute, 0..1, counted in forward passes of a batch (an update is three).
    """
    return {
        "updates": dict(scheduler.counts),
        "decisions": scheduler.decisions,
        "probe_share": round(scheduler.share, 4),
        "probe_forwards": scheduler.cost.forwards,
        "probe_backwards": scheduler.cost.backwards,
        "probe_seconds": round(scheduler.cost.seconds, 3),
    }
