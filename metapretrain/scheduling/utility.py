"""Utilities of source tasks (Algorithm 1 of the scheduling paper), and the schedulers that follow them."""

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from metapretrain.checks import number, whole
from metapretrain.draws import generator, key, pick, uniform
from metapretrain.errors import InputError, one_of
from metapretrain.files import plain
from metapretrain.scheduling.probes import Params, Probe, Weights, check_probes, loss_of, losses_of
from metapretrain.scheduling.schedulers import MOST_SAMPLES, BlockScheduler, Choice, Cost, none_to_nan


class Agreement(NamedTuple):
    """How well approximate utilities agree with exact ones."""

    rank_correlation: float  # Spearman's; NaN if all are equal on one side
    regret: float  # best exact utility minus that of the source which the approximate ones put first; 0 is best


def agreement(exact: Mapping[str, float], approximate: Mapping[str, float]) -> Agreement:
    """Compare two sets of utilities of the same sources, as :meth:`UtilityScheduler.compare` gives.

    Raises InputError: other sources on one side, or utilities that are not finite.

    Example:
        >>> agreement({"a": -1.0, "b": -2.0, "c": -4.0}, {"a": 0.1, "b": 0.2, "c": 0.0})
        Agreement(rank_correlation=0.5, regret=1.0)
    """
    if exact.keys() != approximate.keys() or not exact:
        raise InputError(f"utilities of {', '.join(exact)} against {', '.join(approximate)}; give the same sources")
    if not all(map(math.isfinite, [*exact.values(), *approximate.values()])):
        raise InputError("a utility is NaN or infinite: leave out the sources that are passed over")
    names = list(exact)
    chosen = max(names, key=lambda name: approximate[name])
    correlation = math.nan  # if all are equal, where scipy would warn
    if len(set(exact.values())) > 1 < len(set(approximate.values())):
        from scipy.stats import spearmanr  # not at import: scipy.stats costs half a second

        correlation = float(spearmanr([exact[name] for name in names], [approximate[name] for name in names]).statistic)
    return Agreement(correlation, max(exact.values()) - exact[chosen])


UTILITIES = ("exact", "taylor", "cosine")
STEPS = ("sgd", "optimizer")
NORMALISATIONS = ("relative",)

Batches = dict[str, list[Any]]
TargetLosses = Callable[[Mapping[str, Sequence[Any]]], Mapping[str, Tensor]]
Gradients = list[Tensor | None]


def probe_units(
    sources: int,
    targets: int,
    samples: int,
    utility: str = "exact",
    normalise: str | None = None,
    *,
    passes: tuple[int, int] = (1, 2),
) -> int:
    """What a decision costs, in forward passes of a batch; `passes` are what a loss and its backward pass cost.

    S sources, T targets, M samples: exact takes S M (3 + M T), normalise="relative" M T more; the others 3 M (S + T).

    Example:
        >>> probe_units(5, 4, 2), probe_units(5, 4, 2, "taylor")
        (110, 54)
    """
    forward, backward = passes
    if utility != "exact":
        return (forward + backward) * samples * (sources + targets)
    base = samples * targets * forward if normalise else 0
    return sources * samples * ((1 + samples * targets) * forward + backward) + base


def step_of(optimizer: Optimizer, tensors: Sequence[Tensor], gradients: Gradients, clip: float | None) -> Gradients:
    """What gradients add to an optimizer's steps, at rate 1: g / (sqrt(v) + eps) for Adam and AdamW, else g.

    v is the second moment once it has g, without its bias. Momentum and weight decay are left out, which are the same
    whatever the source; with `clip` the norm of all gradients is cut first, and what is not trained gets None.

    Source: Kingma and Ba (2015), Algorithm 1; Loshchilov and Hutter (2019), Algorithm 2.
    """
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    places = [i for i, (p, g) in enumerate(zip(tensors, gradients, strict=True)) if g is not None and id(p) in groups]
    steps = [g for i in places if (g := gradients[i]) is not None]
    if clip is not None and steps:
        norm = torch.stack(torch._foreach_norm(steps)).norm()
        steps = list(torch._foreach_mul(steps, (clip / (norm + 1e-6)).clamp(max=1)))
    if isinstance(optimizer, torch.optim.Adam) and steps:  # AdamW is one
        own = [groups[id(tensors[i])] for i in places]
        states = [optimizer.state.get(tensors[i], {}) for i in places]
        done = torch.stack([torch.as_tensor(state.get("step", 0.0)).float() for state in states]).tolist()
        betas = [group["betas"][1] for group in own]
        before = [state["exp_avg_sq"] if state else torch.zeros_like(g) for g, state in zip(steps, states, strict=True)]
        squares = list(torch._foreach_mul(steps, steps))
        torch._foreach_mul_(squares, [1 - beta for beta in betas])
        torch._foreach_add_(squares, torch._foreach_mul(before, betas))
        torch._foreach_div_(squares, [1 - beta ** (n + 1) for beta, n in zip(betas, done, strict=True)])
        roots = torch._foreach_sqrt(squares)
        torch._foreach_add_(roots, [group["eps"] for group in own])
        steps = list(torch._foreach_div(steps, roots))
    found: Gradients = [None] * len(gradients)
    for i, step in zip(places, steps, strict=True):
        found[i] = step
    return found


@dataclass(frozen=True)
class Draw:
    """The subtasks of one decision: M batches of each source and of each target."""

    sources: Batches
    targets: Batches
    gone: tuple[str, ...]  # sources that had no batches left
    name: tuple[int | str, ...]  # what random numbers inside losses depend on


@dataclass(frozen=True)
class Scores:
    """Utilities by source, their cost, targets with a loss that is not finite, sources that move nothing."""

    utilities: dict[str, float]
    cost: Cost
    bad_targets: tuple[str, ...]
    unmoved: tuple[str, ...]


@dataclass
class Prober:
    """Draws subtasks and computes utilities from them; arguments are those of :class:`UtilityScheduler`."""

    weights: Weights
    sources: dict[str, Probe]
    targets: dict[str, Probe]
    alpha: float
    samples: int
    normalise: str | None
    joint: TargetLosses | None
    step: Callable[[Sequence[Tensor], Gradients], Gradients] | None = None  # from gradients to steps at rate 1

    def draw(self, names: Sequence[str], *name: int | str) -> Draw:
        """Lines 3 and 5: fresh subtasks of all targets, which must not have run out, and of the named sources."""
        with self.weights.untouched():
            self.weights.reset(key(*name, "draw"))
            targets = {}
            for target, probe in self.targets.items():
                batches = _take(probe, self.samples, generator(*name, "target", target))
                if batches is None:
                    raise InputError(f"the target {target!r} has run out; targets must go on giving batches")
                targets[target] = batches
            taken = {s: _take(self.sources[s], self.samples, generator(*name, "source", s)) for s in names}
        sources = {source: batches for source, batches in taken.items() if batches is not None}
        return Draw(sources, targets, tuple(s for s in names if s not in sources), name)

    def score(self, draw: Draw, utility: str) -> Scores:
        """Utilities of the sources drawn, of which one at least must have a loss that depends on the weights."""
        self._passes, self._unmoved = [0, 0], set[str]()
        with self.weights.untouched():
            values, targets = self._exact(draw) if utility == "exact" else self._first_order(draw, utility)
            utilities = dict(zip(draw.sources, values.tolist(), strict=True))
        if draw.sources and self._unmoved >= draw.sources.keys():
            told = f"no loss of the sources {', '.join(draw.sources)} has a gradient by params: give the module (or the"
            raise InputError(f"{told} parameters) that these losses use, and do not compute them under torch.no_grad()")
        finite = targets.isfinite().tolist()
        bad = tuple(name for name, good in zip(self.targets, finite, strict=True) if not good)
        unmoved = tuple(source for source in draw.sources if source in self._unmoved)
        return Scores(utilities, Cost(*self._passes), bad, unmoved)

    def _exact(self, draw: Draw) -> tuple[Tensor, Tensor]:
        """Lines 4 to 9: utilities (S,), and the losses of each target summed over all candidates (T,)."""
        with torch.no_grad():
            scale = _scale(self._target_losses(draw)) if self.normalise else None
        losses = []
        for source, batches in draw.sources.items():
            for i in range(len(batches)):
                step = self._step(draw, source, [[i]])
                with self.weights.moved(step, self.alpha), torch.no_grad():
                    losses.append(self._target_losses(draw))
                del step
        stacked = torch.stack(losses).cpu().double()  # (S M, T, M)
        by_target = stacked.sum(2) if scale is None else stacked.sum(2) * scale.cpu().double()
        return -by_target.sum(1).view(len(draw.sources), -1).sum(1), stacked.sum((0, 2))

    def _first_order(self, draw: Draw, utility: str) -> tuple[Tensor, Tensor]:
        """The same to first order in alpha: L(theta - alpha g) = L(theta) - alpha g . grad L; or the cosine of both."""
        sums, levels, ascent = self._jointly(draw) if self.joint else self._one_by_one(draw)
        gains = []
        for source, batches in draw.sources.items():
            groups = self._together(self.sources[source], len(batches))
            step = self._step(draw, source, groups)
            gain = _inner(step, ascent, sums[0])
            if utility == "cosine":
                lengths = _inner(step, step, sums[0]) * _inner(ascent, ascent, sums[0])
                gain = torch.where(lengths > 0, gain / lengths.sqrt(), 0.0 * gain)
            gains.append(gain)
        gain = torch.stack(gains).cpu().double()
        if utility == "cosine":
            return gain, sums.cpu()
        return -self.samples * levels.cpu().double().sum() + self.alpha * gain, sums.cpu()

    def _jointly(self, draw: Draw) -> tuple[Tensor, Tensor, Gradients]:
        """Of the targets' losses: their sums (T,), these as they count (T,), and the gradient of what counts."""
        losses = self._target_losses(draw)
        sums = losses.sum(1)
        levels = sums * _scale(losses.detach()) if self.normalise else sums
        return sums.detach(), levels.detach(), self._backward(levels.sum(), losses.numel())

    def _one_by_one(self, draw: Draw) -> tuple[Tensor, Tensor, Gradients]:
        """The same, a target after the other."""
        ascent: Gradients = [None] * len(self.weights.tensors)
        sums, levels = [], []
        for target, batches in draw.targets.items():
            summed: Gradients = [None] * len(ascent)
            losses = []
            for rows in self._together(self.targets[target], len(batches)):
                loss = self._losses(draw, "target", target, rows)
                summed = _added(summed, self._backward(loss.sum(), len(rows)))
                losses.append(loss.detach())
            of_target = torch.cat(losses)
            sums.append(of_target.sum())
            levels.append(sums[-1])
            if self.normalise:
                scale = _scale(of_target)
                levels[-1] = sums[-1] * scale
                summed = [g if g is None else g * scale.to(g) for g in summed]
            ascent = _added(ascent, summed)
        return torch.stack(sums), torch.stack(levels), ascent

    def _step(self, draw: Draw, source: str, groups: list[list[int]]) -> Gradients:
        """The sum of a source's steps at rate 1 on some batches, an optimizer's from their mean gradient."""
        summed: Gradients = [None] * len(self.weights.tensors)
        for rows in groups:
            summed = _added(summed, self._backward(self._losses(draw, "source", source, rows).sum(), len(rows)))
        if all(g is None for g in summed):
            self._unmoved.add(source)
        if self.step is None:
            return summed
        count = sum(map(len, groups))
        step = self.step(self.weights.tensors, [g if g is None else g / count for g in summed])
        return [g if g is None else g * count for g in step]

    def _backward(self, loss: Tensor, batches: int) -> Gradients:
        tensors = self.weights.tensors
        if not loss.requires_grad:
            return [None] * len(tensors)
        self._passes[1] += batches
        return list(torch.autograd.grad(loss, tensors, allow_unused=True))

    def _losses(self, draw: Draw, role: str, name: str, rows: list[int]) -> Tensor:
        probe = (self.sources if role == "source" else self.targets)[name]
        batches = [(draw.sources if role == "source" else draw.targets)[name][i] for i in rows]
        self._passes[0] += len(rows)
        self.weights.reset(key(*draw.name, role, name, rows[0]))
        return loss_of(name, probe, batches[0])[None] if len(rows) == 1 else losses_of(name, probe, batches)

    def _target_losses(self, draw: Draw) -> Tensor:
        """Losses (T, M) at the weights of the moment: the same random numbers for all candidates."""
        if self.joint is None:
            groups = {name: self._together(self.targets[name], self.samples) for name in draw.targets}
            of_target = [[self._losses(draw, "target", name, rows) for rows in groups[name]] for name in groups]
            return torch.stack([torch.cat(losses) for losses in of_target])
        self._passes[0] += len(draw.targets) * self.samples
        self.weights.reset(key(*draw.name, "targets"))
        given = self.joint(draw.targets)
        if not isinstance(given, Mapping):
            raise InputError(f"target_losses gave a {type(given).__name__}; it must give {{target: losses (M,)}}")
        found = {name: loss for name, loss in given.items() if isinstance(loss, Tensor)}
        wrong = [name for name in draw.targets if name not in found or found[name].shape != (self.samples,)]
        if wrong:
            raise InputError(f"target_losses gave no tensor of losses ({self.samples},) for {', '.join(wrong)}")
        return torch.stack([found[name] for name in draw.targets])

    @staticmethod
    def _together(probe: Probe, batches: int) -> list[list[int]]:
        """Which batches go through the model at once."""
        together = getattr(probe, "loss_many", None) is not None
        return [list(range(batches))] if together else [[i] for i in range(batches)]


def _take(probe: Probe, samples: int, randomness: torch.Generator) -> list[Any] | None:
    try:
        return [probe.sample(randomness) for _ in range(samples)]
    except StopIteration:
        return None


def _scale(losses: Tensor) -> Tensor:
    """One over each target's mean loss (T,), from losses (T, M); 0 for a target without loss."""
    mean = losses.mean(-1).abs()
    return torch.where(mean > 0, 1 / mean, 0.0)


def _added(a: Gradients, b: Gradients) -> Gradients:
    pairs = [(x, y) for x, y in zip(a, b, strict=True) if x is not None and y is not None]
    sums = iter(torch._foreach_add([x for x, _ in pairs], [y for _, y in pairs]) if pairs else ())  # one launch
    return [y if x is None else x if y is None else next(sums) for x, y in zip(a, b, strict=True)]


def _inner(a: Gradients, b: Gradients, like: Tensor) -> Tensor:
    dtype = torch.promote_types(like.dtype, torch.float32)  # products of half precision are not summed in it
    pairs = [(x, y) for x, y in zip(a, b, strict=True) if x is not None and y is not None]
    products = [torch.dot(x.reshape(-1), y.reshape(-1)).to(dtype) for x, y in pairs]
    return torch.stack(products).sum() if products else torch.zeros_like(like, dtype=dtype)


_log = logging.getLogger(__name__)


class UtilityScheduler(BlockScheduler):
    """Chooses by utility: Algorithm 1 of Luo et al., "Meta-learning for downstream aware and agnostic pretraining".

    The utility of a source is summed over M of its subtasks (batches) i: minus the sum of the losses of M batches of
    each target at ``theta - alpha * gradient of subtask i's loss``, each step from the weights of the moment. All
    sources meet the same target batches and random numbers. Probes leave no trace; the updates are the caller's.

    Args:
        sources, targets: a :class:`Probe` for each task to choose from, and for each that should get better; the same
            mapping for both is the downstream-agnostic setting.
        params: the module that holds all that the losses use, or its parameters (see :class:`Weights`).
        alpha: rate of a probe's step, above 0. Choices by "taylor" and "cosine" do not depend on it.
        samples: M, 1 to 100 batches of each source and each target in a decision.
        updates: N, until the next decision. None: :func:`probe_units`: probes take a quarter of all compute at most.
        epsilon, floor, decay: probability that a decision draws a source at random, without probes; what it decays to;
            what it is multiplied by after each decision, in (0, 1].
        utility: "exact"; "taylor" for its first order in alpha, from inner products of gradients; or "cosine" of the
            source's step and the gradient of the targets' losses.
        step: "sgd", or "optimizer": :func:`step_of` the optimizer that `follow` was told of.
        smoothing: in [0, 1): weight of the past in a moving average of a source's utility above its decision's mean.
        normalise: None is the paper's sum of losses; "relative" divides each target's by their mean before the step.
        target_losses: a function from all targets' batches ``{name: [M batches]}`` to ``{name: losses (M,)}``.

    Raises InputError: bad probes, weights or numbers; from `choose`, utilities that are NaN for all sources, a target
    or all sources that have run out, losses that do not depend on params.

    Example:
        >>> from metapretrain.scheduling import FunctionProbe
        >>> w, probes = torch.zeros(2, requires_grad=True), {}
        >>> for name, goal in (("helps", 1.0), ("harms", -1.0)):
        ...     probes[name] = FunctionProbe(lambda _, goal=goal: goal, lambda batch: (w - batch).square().sum())
        >>> UtilityScheduler(probes, {"goal": probes["helps"]}, [w], alpha=0.1).choose().source
        'helps'
    """

    def __init__(
        self,
        sources: Mapping[str, Probe],
        targets: Mapping[str, Probe],
        params: Params,
        *,
        alpha: float = 0.01,
        samples: int = 2,
        updates: int | None = None,
        epsilon: float = 0.0,
        floor: float = 0.0,
        decay: float = 1.0,
        utility: str = "exact",
        step: str = "sgd",
        smoothing: float = 0.0,
        normalise: str | None = None,
        target_losses: TargetLosses | None = None,
        seed: int = 0,
    ) -> None:
        sources, targets = check_probes("sources", sources), check_probes("targets", targets)
        self.samples = whole("samples", samples, 1, MOST_SAMPLES)
        self.utility, self.step = one_of("utility", utility, UTILITIES), one_of("step", step, STEPS)
        self.normalise = normalise if normalise is None else one_of("normalise", normalise, NORMALISATIONS)
        units = probe_units(len(sources), len(targets), self.samples, utility, normalise)
        super().__init__(sources, updates=units if updates is None else updates, seed=seed)
        self.units = units
        self.alpha = number("alpha", alpha, above=0, most=1e30)
        self.epsilon = number("epsilon", epsilon, least=0, most=1)
        self.floor = number("floor", floor, least=0, most=1)
        self.decay = number("decay", decay, above=0, most=1)
        self.smoothing = number("smoothing", smoothing, least=0, below=1)
        if floor > epsilon:
            raise InputError(f"floor is {floor}, above epsilon {epsilon}; epsilon decays to it from above")
        if target_losses is not None and not callable(target_losses):
            raise InputError(f"target_losses is {target_losses!r}; give a function or None")
        own = self._optimizer_step if step == "optimizer" else None
        self._prober = Prober(Weights(params), sources, targets, alpha, samples, normalise, target_losses, own)
        self._smoothed: dict[str, float] = {}
        self._unmoved: set[str] = set()
        self._warned_of_ties = False

    def compare(self) -> dict[str, dict[str, float]]:
        """Exact and Taylor utilities of the next decision's subtasks; the decisions to come stay as they are."""
        kept = self._positions()
        draw = self._prober.draw(self.active, self.seed, self.decisions)
        self._go_to(kept)
        return {utility: self._prober.score(draw, utility).utilities for utility in UTILITIES[:2]}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "smoothed": plain(self._smoothed), "positions": self._positions()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._smoothed = none_to_nan(state["smoothed"])
        self._go_to(state["positions"])

    def _identity(self) -> dict[str, Any]:
        names = ("alpha", "samples", "epsilon", "floor", "decay", "utility", "smoothing", "normalise")
        own = {name: getattr(self, name) for name in names} | ({} if self.step == "sgd" else {"step": self.step})
        return {**super()._identity(), "targets": list(self._prober.targets), **own}

    def _decide(self) -> Choice:
        place = (self.seed, self.decisions)
        names = self.active
        epsilon = max(self.floor, self.epsilon * self.decay**self.decisions)
        if uniform(*place, "explore") < epsilon:
            return Choice(pick(names, None, *place, "explored"), self.updates, explored=True)
        if len(names) == 1:
            return Choice(names[0], self.updates)
        utilities, finite, cost = self._look()
        values = self._smooth(finite)
        best = max(values.values())
        tied = [name for name, value in values.items() if value == best]
        return Choice(pick(tied, None, *place, "tie"), self.updates, False, utilities, cost)

    def _look(self) -> tuple[dict[str, float], dict[str, float], Cost]:
        """Utilities of the sources that are left, those of them that are finite, and what they cost."""
        for device in self._prober.weights.devices:
            torch.cuda.synchronize(device)  # work that is not the probes' does not count as theirs
        if self.decisions == 0 and self.every < self.units:
            _log.info(
                "probes take %.0f%% of the compute: %d updates a decision, %d would make it a quarter",
                100 * self.units / (self.units + 3 * self.every),
                self.every,
                self.units,
            )
        start = time.perf_counter()
        draw = self._prober.draw(self.active, self.seed, self.decisions)
        for name in draw.gone:
            self.drop(name)
        self._require_active()
        scores = self._prober.score(draw, self.utility)
        cost = dataclasses.replace(scores.cost, seconds=time.perf_counter() - start)
        for name in set(scores.unmoved) - self._unmoved:
            _log.warning("the loss of source %r does not depend on the weights: its steps change nothing", name)
        self._unmoved.update(scores.unmoved)
        finite = self._finite(scores.utilities, scores.bad_targets)
        self._warn_of_ties(finite)
        return scores.utilities, finite, cost

    def _optimizer_step(self, tensors: Sequence[Tensor], gradients: Gradients) -> Gradients:
        if self._followed is None:
            raise InputError("step=optimizer needs the optimizer: call follow(optimizer) first, or give step=sgd")
        return step_of(self._followed, tensors, gradients, self._clip)

    def _finite(self, utilities: dict[str, float], bad_targets: tuple[str, ...]) -> dict[str, float]:
        """The utilities of sources that can be chosen."""
        finite = {name: value for name, value in utilities.items() if math.isfinite(value)}
        if not finite:
            blame = f"; losses of target {', '.join(bad_targets)} are not finite" if bad_targets else ""
            told = f"the utilities of all sources ({', '.join(utilities)}) are NaN or infinite{blame}"
            raise InputError(f"{told}: look at the weights and the losses, or lower alpha")
        for name, value in utilities.items():
            if name not in finite:
                _log.warning("source %r is passed over in decision %d: its utility is %s", name, self.decisions, value)
        return finite

    def _warn_of_ties(self, utilities: dict[str, float]) -> None:
        if len(utilities) > 1 and len(set(utilities.values())) == 1 and not self._warned_of_ties:
            _log.warning(
                "all utilities are equal in decision %d (%s), so one is drawn at random: see that the losses of the "
                "targets (%s) depend on the weights, and that steps of alpha=%s are not lost to rounding",
                *(self.decisions, ", ".join(utilities), ", ".join(self._prober.targets), self._prober.alpha),
            )
            self._warned_of_ties = True

    def _smooth(self, utilities: dict[str, float]) -> dict[str, float]:
        """Moving averages of the utilities above their mean: the common level falls as training goes on."""
        if not self.smoothing:
            return utilities
        mean = sum(utilities.values()) / len(utilities)
        for name, value in utilities.items():
            before = self._smoothed.get(name, value - mean)
            self._smoothed[name] = self.smoothing * before + (1 - self.smoothing) * (value - mean)
        return {name: self._smoothed[name] for name in utilities}

    def _positions(self) -> dict[str, dict[str, Any]]:
        return {
            role: {name: probe.position() for name, probe in probes.items() if hasattr(probe, "position")}
            for role, probes in self._roles()
        }

    def _go_to(self, positions: Mapping[str, Mapping[str, Any]]) -> None:
        for role, probes in self._roles():
            for name, position in positions[role].items():
                probes[name].go_to(position)  # type: ignore[attr-defined]

    def _roles(self) -> tuple[tuple[str, dict[str, Probe]], ...]:
        return ("sources", self._prober.sources), ("targets", self._prober.targets)


class SoftmaxUtility(UtilityScheduler):
    """Draws the source of each update from a softmax of smoothed utilities, which probes renew every few updates.

    After a probe with utilities u_s of mean m and standard deviation d over the sources, averages a_s and e become
    ``smoothing a_s + (1 - smoothing) (u_s - m)`` and the same of d; a_s begins at 0, e at the first d. A source is
    drawn with ``p_s = (1 - epsilon) softmax(a / (temperature e))_s + epsilon / S``: no scale of utilities matters,
    and utilities that are noise average to a uniform draw.
    `every`: updates from probe to probe, None for :func:`probe_units`: a quarter of all compute at most. The other
    arguments are those of :class:`UtilityScheduler`, and so are the errors.
    """

    def __init__(
        self,
        sources: Mapping[str, Probe],
        targets: Mapping[str, Probe],
        params: Params,
        *,
        alpha: float = 0.01,
        samples: int = 1,
        every: int | None = None,
        temperature: float = 0.25,
        epsilon: float = 0.2,
        utility: str = "cosine",
        step: str = "optimizer",
        smoothing: float = 0.9,
        normalise: str | None = None,
        target_losses: TargetLosses | None = None,
        seed: int = 0,
    ) -> None:
        self.temperature = number("temperature", temperature, above=0)
        looks: dict[str, Any] = {"utility": utility, "step": step, "smoothing": smoothing, "normalise": normalise}
        more: dict[str, Any] = {"epsilon": epsilon, "target_losses": target_losses, "seed": seed}
        super().__init__(sources, targets, params, alpha=alpha, samples=samples, updates=1, **looks, **more)
        self.every = whole("every", self.units if every is None else every, 1)
        self._spread = 0.0

    def probabilities(self) -> dict[str, float]:
        """How likely each source that has not run out is to be drawn next."""
        names, scale = self.active, self.temperature * self._spread
        logits = np.array([self._smoothed.get(name, 0.0) / (scale or math.inf) for name in names])
        shares = np.exp(logits - logits.max())
        mixed = (1 - self.epsilon) * shares / shares.sum() + self.epsilon / len(names)
        return dict(zip(names, mixed.tolist(), strict=True))

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "spread": self._spread}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._spread = state["spread"]

    def _identity(self) -> dict[str, Any]:
        return {**super()._identity(), "temperature": self.temperature, "every": self.every}

    def _decide(self) -> Choice:
        utilities, cost = dict[str, float](), Cost()
        if self.decisions % self.every == 0 and len(self.active) > 1:
            utilities, finite, cost = self._look()
            values, s = np.array(list(finite.values())), self.smoothing
            for name, above in zip(finite, (values - values.mean()).tolist(), strict=True):
                self._smoothed[name] = s * self._smoothed.get(name, 0.0) + (1 - s) * above
            self._spread = s * (self._spread or float(values.std())) + (1 - s) * float(values.std())
        names, shares = zip(*self.probabilities().items(), strict=True)
        return Choice(pick(names, shares, self.seed, self.decisions, "softmax"), 1, False, utilities, cost)
