"""Utilities of source tasks: Algorithm 1 of the scheduling paper, and its first-order approximation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from metapretrain.errors import InputError
from metapretrain.scheduling.choice import Cost
from metapretrain.scheduling.draws import generator, key
from metapretrain.scheduling.probes import Probe, loss_of, losses_of
from metapretrain.scheduling.weights import Weights

UTILITIES = ("exact", "taylor")
NORMALISATIONS = ("relative",)

Batches = dict[str, list[Any]]
TargetLosses = Callable[[Mapping[str, Sequence[Any]]], Mapping[str, Tensor]]
Gradients = list[Tensor | None]


def probe_units(
    sources: int, targets: int, samples: int, utility: str = "exact", normalise: str | None = None, *,
    passes: tuple[int, int] = (1, 2),
) -> int:  # fmt: skip
    """What a decision costs, in forward passes of a batch, if a backward pass costs two.

    S sources, T targets, M samples: exact takes S M (3 + M T), and M T more for normalise="relative"; Taylor
    takes 3 M (S + T).

    Args:
        passes: what one loss and its backward pass cost, where that is not 1 and 2.

    Example:
        >>> probe_units(5, 4, 2), probe_units(5, 4, 2, "taylor")
        (110, 54)
    """
    forward, backward = passes
    if utility == "taylor":
        return (forward + backward) * samples * (sources + targets)
    base = samples * targets * forward if normalise else 0
    return sources * samples * ((1 + samples * targets) * forward + backward) + base


@dataclass(frozen=True)
class Draw:
    """The subtasks of one decision: M batches of each source and of each target.

    `gone` names the sources that had none left; `name` is what random numbers inside losses depend on.
    """

    sources: Batches
    targets: Batches
    gone: tuple[str, ...]
    name: tuple[int | str, ...]


@dataclass(frozen=True)
class Scores:
    """Utilities by source, their cost, targets with a loss that is not finite, sources that move nothing."""

    utilities: dict[str, float]
    cost: Cost
    bad_targets: tuple[str, ...]
    unmoved: tuple[str, ...]


class Prober:
    """Draws subtasks and computes utilities from them; the model is left as it was.

    Args:
        weights: what probes move.
        sources, targets: probes by name.
        alpha: rate of the probes' step of gradient descent.
        samples: M.
        normalise: None or "relative".
        target_losses: all targets' batches {name: M batches} to their losses {name: (M,)}.
    """

    def __init__(
        self,
        weights: Weights,
        sources: Mapping[str, Probe],
        targets: Mapping[str, Probe],
        *,
        alpha: float,
        samples: int,
        normalise: str | None,
        target_losses: TargetLosses | None,
    ) -> None:
        self.weights, self.sources, self.targets = weights, dict(sources), dict(targets)
        self.alpha, self.samples, self.normalise = alpha, samples, normalise
        if target_losses is not None and not callable(target_losses):
            raise InputError(f"target_losses is {target_losses!r}; give a function or None")
        self.joint = target_losses

    def draw(self, names: Sequence[str], *name: int | str) -> Draw:
        """Lines 3 and 5: fresh subtasks of all targets and of the named sources.

        Raises:
            InputError: a target has run out.
        """
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
        """Utilities of the sources drawn.

        Raises:
            InputError: no source's loss depends on the weights, or a loss that is no scalar.
        """
        self._passes, self._unmoved = [0, 0], set[str]()
        with self.weights.untouched():
            values, targets = (self._exact if utility == "exact" else self._taylor)(draw)
            utilities = dict(zip(draw.sources, values.tolist(), strict=True))
        if draw.sources and self._unmoved >= draw.sources.keys():
            raise InputError(
                f"no loss of the sources {', '.join(draw.sources)} has a gradient by params: give the module (or the "
                "parameters) that these losses use, and do not compute them under torch.no_grad()"
            )
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
                gradients = self._gradients(draw, source, [i])
                with self.weights.moved(gradients, self.alpha), torch.no_grad():
                    losses.append(self._target_losses(draw))
                del gradients
        stacked = torch.stack(losses).cpu().double()  # (S M, T, M)
        by_target = stacked.sum(2) if scale is None else stacked.sum(2) * scale.cpu().double()
        return -by_target.sum(1).view(len(draw.sources), -1).sum(1), stacked.sum((0, 2))

    def _taylor(self, draw: Draw) -> tuple[Tensor, Tensor]:
        """The same to first order in alpha: L(theta - alpha g) = L(theta) - alpha g . grad L."""
        sums, levels, ascent = self._jointly(draw) if self.joint else self._one_by_one(draw)
        gains = []
        for source, batches in draw.sources.items():
            groups = self._together(self.sources[source], len(batches))
            gains.append(sum(_inner(self._gradients(draw, source, rows), ascent, sums[0]) for rows in groups))
        level = levels.cpu().double().sum()
        gain = torch.stack([torch.as_tensor(g) for g in gains]).cpu().double()
        return -self.samples * level + self.alpha * gain, sums.cpu()

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

    def _gradients(self, draw: Draw, source: str, rows: list[int]) -> Gradients:
        """Gradient of the sum of some of a source's losses; None for what they do not use."""
        gradients = self._backward(self._losses(draw, "source", source, rows).sum(), len(rows))
        if all(g is None for g in gradients):
            self._unmoved.add(source)
        return gradients

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
            return torch.stack([self._one_target(draw, name) for name in draw.targets])
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

    def _one_target(self, draw: Draw, name: str) -> Tensor:
        groups = self._together(self.targets[name], self.samples)
        return torch.cat([self._losses(draw, "target", name, rows) for rows in groups])

    @staticmethod
    def _together(probe: Probe, batches: int) -> list[list[int]]:
        """Which batches go through the model at once."""
        if hasattr(probe, "loss_many"):
            return [list(range(batches))]
        return [[i] for i in range(batches)]


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
    found = [y if x is None else x for x, y in zip(a, b, strict=True)]
    both = [i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x is not None and y is not None]
    if both:  # one launch for many tensors
        sums = torch._foreach_add(_at(a, both), _at(b, both))
        for i, value in zip(both, sums, strict=True):
            found[i] = value
    return found


def _at(gradients: Gradients, places: Sequence[int]) -> list[Tensor]:
    return [g for g in (gradients[i] for i in places) if g is not None]


def _inner(a: Gradients, b: Gradients, like: Tensor) -> Tensor:
    dtype = torch.promote_types(like.dtype, torch.float32)  # products of half precision are not summed in it
    pairs = [(x, y) for x, y in zip(a, b, strict=True) if x is not None and y is not None]
    products = [torch.dot(x.reshape(-1), y.reshape(-1)).to(dtype) for x, y in pairs]
    return torch.stack(products).sum() if products else torch.zeros_like(like, dtype=dtype)
