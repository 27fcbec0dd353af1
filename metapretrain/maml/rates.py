"""Inner learning rates: one number, learned, by parameter, by step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from metapretrain.errors import InputError
from metapretrain.maml.nests import map_tensors, named_leaves, rebuild, tensors

Rate = float | Tensor
FORMS = "give a number above 0, a tensor, a dict by parameter name, or a list of one of these for each step"


@dataclass(frozen=True)
class Rates:
    """`by_step` holds one rate for all steps, or one for each; a rate is for all parameters or by name."""

    by_step: tuple[Rate | dict[str, Rate], ...]

    def at(self, step: int, name: str) -> Rate:
        """Rate of a parameter in a step."""
        rate = self.by_step[step if len(self.by_step) > 1 else 0]
        return rate[name] if isinstance(rate, dict) else rate

    def uniform(self, step: int) -> float | None:
        """The one plain number that every parameter has in this step, if it is so."""
        rate = self.by_step[step if len(self.by_step) > 1 else 0]
        return rate if isinstance(rate, float) else None

    def tensors(self) -> list[Tensor]:
        """All rates that are tensors, which may be learned."""
        return tensors(self.by_step)

    def replaced(self, values: Iterator[Tensor]) -> Rates:
        """The same rates with other tensors."""
        return Rates(rebuild(self.by_step, values))

    def detached(self) -> Rates:
        """The same rates without gradient."""
        return Rates(map_tensors(Tensor.detach, self.by_step))


def parse_rates(lr: Any, shapes: Mapping[str, Sequence[int]], steps: int) -> Rates:
    """Check rates for the adapted parameters, whose shapes are given by name.

    Raises:
        InputError: a number <= 0 or NaN, a name that is missing or unknown, a tensor that does not broadcast to
            its parameter, a list whose length is not `steps`.
    """
    if isinstance(lr, Tensor) and lr.ndim == 1 and len(lr) == steps:
        lr = list(lr.unbind())
    if isinstance(lr, (list, tuple)):
        if len(lr) != steps:
            raise InputError(f"lr has {len(lr)} entries for steps={steps}; give one for each step")
        return Rates(tuple(_one(rate, shapes) for rate in lr))
    return Rates((_one(lr, shapes),))


def _one(lr: Any, shapes: Mapping[str, Sequence[int]]) -> Rate | dict[str, Rate]:
    if not isinstance(lr, Mapping):
        return checked_rate("lr", lr, ())
    given = dict(named_leaves(lr))
    missing = [name for name in shapes if name not in given]
    if missing:
        raise InputError(f"lr has no entry for {', '.join(missing)}; it has: {', '.join(given)}")
    return {name: checked_rate(f"lr[{name!r}]", given[name], shape) for name, shape in shapes.items()}


def checked_rate(what: str, rate: Any, shape: Sequence[int]) -> Rate:
    """The rate of a parameter of this shape; a tensor's values are free, since learned rates may turn negative.

    Raises:
        InputError: neither a number above 0 nor a tensor that broadcasts to `shape`.
    """
    if isinstance(rate, Tensor):
        sizes = zip(reversed(rate.shape), reversed(shape), strict=False)
        if rate.ndim > len(shape) or any(a not in (1, b) for a, b in sizes):
            raise InputError(f"{what} has shape {tuple(rate.shape)}, which does not fit {tuple(shape)}")
        return rate
    if isinstance(rate, bool) or not isinstance(rate, (int, float)):
        raise InputError(f"{what} is {rate!r}; {FORMS}")
    if not (rate > 0 and math.isfinite(rate)):
        raise InputError(f"{what} is {rate!r}; {FORMS}")
    return float(rate)
