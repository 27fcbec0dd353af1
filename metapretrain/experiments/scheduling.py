"""Schedulers in an experiment: probes of training rows, what to log of choices, and one place for `--schedule`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from metapretrain.errors import InputError
from metapretrain.scheduling import SCHEDULERS, FunctionProbe
from metapretrain.training.devices import mixed_precision


def schedule_names(task: str) -> str:
    """The schedulers for the help of an option; `task` is what the sources are.

    Example:
        >>> schedule_names("TASK")
        'uniform, proportional, round-robin, utility, exp3 or fixed:TASK'
    """
    return f"{', '.join(name for name in SCHEDULERS if name != 'fixed')} or fixed:{task}"


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
    """What to log of a `TaskStream` with a scheduler: updates of each task so far, and the last utilities."""
    found = {f"updates_{name}": float(count) for name, count in stream.counts.items()}
    utilities = getattr(stream.choice, "utilities", {})
    return found | {f"utility_{name}": value for name, value in utilities.items() if math.isfinite(value)}
