"""Is the meta-gradient right? Central differences in float64, parameter by parameter."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from metapretrain.draws import seeded, torch_generator
from metapretrain.errors import InputError
from metapretrain.maml.inner import Named
from metapretrain.maml.learner import pair
from metapretrain.nests import map_tensors

STEPS = (1e-6, 1e-8)  # the smaller one where a ReLU or a max-pool switches within the larger


@dataclass(frozen=True)
class ParameterCheck:
    """One meta-parameter: its gradient's norm, and the largest error over the directions tried.

    The error is relative to the norm, or to a thousandth of the whole gradient's where that is larger.
    """

    name: str
    norm: float
    error: float


@dataclass(frozen=True)
class MetaGradientCheck:
    """What :func:`check_meta_gradient` found; `ok` if every error is at most `tolerance`."""

    parameters: tuple[ParameterCheck, ...]
    tolerance: float

    @property
    def worst(self) -> ParameterCheck:
        """The parameter with the largest error."""
        return max(self.parameters, key=lambda p: p.error)

    @property
    def ok(self) -> bool:
        """Whether the meta-gradient agrees with central differences."""
        return self.worst.error <= self.tolerance

    def __str__(self) -> str:
        width = max(len(p.name) for p in self.parameters)
        lines = [f"{p.name:<{width}}  norm {p.norm:.3e}  error {p.error:.1e}" for p in self.parameters]
        return "\n".join([*lines, "agrees" if self.ok else f"DIFFERS: {self.worst.name}"])


def check_meta_gradient(
    learner: Any, batch: Any, *, tolerance: float = 1e-6, directions: int = 2, seed: int = 0
) -> MetaGradientCheck:
    """Compare a learner's meta-gradient with central differences in float64, on a copy of the learner.

    Each parameter is moved along its gradient and along `directions` random ones of entries -1 and 1. Random numbers
    (dropout) are the same in every evaluation. A first-order learner differs by design, and is reported so.

    Args:
        learner: has `losses(support, query)` and `meta_parameters()`, as MAML and its variants do.
        batch: (support, query) as `losses` takes them, or an object with these attributes.

    Raises InputError: a meta-parameter whose gradient is missing or not finite, by name.

    Example:
        >>> from metapretrain.maml.learner import MAML
        >>> _ = torch.manual_seed(0)
        >>> x, y = torch.randn(2, 4, 3), torch.tensor([[0, 1, 0, 1]] * 2)
        >>> check_meta_gradient(MAML(torch.nn.Linear(3, 2), lr=0.1), ((x, y), (x, y))).ok
        True
    """
    learner = copy.deepcopy(learner).double()
    parts = (batch.support, batch.query) if hasattr(batch, "support") else batch
    support, query = (map_tensors(lambda x: x.double() if x.is_floating_point() else x, pair(part)) for part in parts)
    seeds = torch_generator(seed)

    def mean_loss() -> Tensor:
        with seeded(seed, devices=None):
            losses: Tensor = learner.losses(support, query)
        return losses.mean()

    named: Named = learner.meta_parameters()
    gradients = _gradients(mean_loss(), named)
    whole = max(float(g.norm()) for g in gradients.values())
    checks = []
    for name, gradient in gradients.items():
        norm = float(gradient.norm())
        scale = max(norm, 1e-3 * whole) or 1.0
        tried = [gradient / norm] if norm > 0 else []
        signs = (torch.randint(0, 2, gradient.shape, generator=seeds) * 2 - 1 for _ in range(directions))
        tried += [sign.to(gradient) for sign in signs]
        error = max(_error(mean_loss, named[name], gradient, d, scale, tolerance) for d in tried)
        checks.append(ParameterCheck(name, norm, error))
    return MetaGradientCheck(tuple(checks), tolerance)


def _gradients(loss: Tensor, named: Named) -> Named:
    gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    found = {name: g for name, g in zip(named, gradients, strict=True) if g is not None}
    missing = [name for name in named if name not in found]
    if missing:
        raise InputError(f"no meta-gradient reaches {', '.join(missing)}: the query loss does not use it")
    bad = [name for name, g in found.items() if not bool(g.isfinite().all())]
    if bad:
        raise InputError(f"the meta-gradient of {', '.join(bad)} is not finite; lower lr or the steps")
    return found


def _error(
    loss: Callable[[], Tensor], parameter: Tensor, gradient: Tensor, direction: Tensor, scale: float, tolerance: float
) -> float:
    expected, errors = float((gradient * direction).sum()), []
    start = parameter.detach().clone()
    for step in STEPS:
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter.copy_(start + sign * step * direction)
            values.append(float(loss().detach()))
        with torch.no_grad():
            parameter.copy_(start)
        errors.append(abs((values[0] - values[1]) / (2 * step) - expected) / scale)
        if errors[-1] <= tolerance:
            break
    return min(errors)
