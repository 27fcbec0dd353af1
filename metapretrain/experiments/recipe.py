"""What the recipes of all experiments share: phases, changes by name and probes of rows; values out of their range, and
unknown names (with the nearest one), are an InputError."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar, get_type_hints

import torch
from torch import Tensor

from metapretrain.checks import number, parse_value
from metapretrain.errors import InputError, one_of
from metapretrain.experiments.base import Machine
from metapretrain.protonet import ProtoLoss
from metapretrain.scheduling import FunctionProbe, Probe
from metapretrain.training import TrainSettings
from metapretrain.training.environment import mixed_precision

R = TypeVar("R")


class PhaseTerms:
    """Base of the dataclasses of a phase: fields named as in :class:`metapretrain.training.TrainSettings` reach it."""

    label_smoothing: float

    def __post_init__(self) -> None:
        self.settings(1)
        number("label_smoothing", self.label_smoothing, least=0, below=1)

    def settings(self, steps: int, **options: Any) -> TrainSettings:
        """Return the settings of `steps` updates; `options` are those that no phase chooses, such as `device`."""
        terms = {term.name for term in dataclasses.fields(TrainSettings)} & vars(self).keys()
        return TrainSettings(steps=steps, **{term: getattr(self, term) for term in terms}, **options)


@dataclass(frozen=True)
class Proto:
    """Options of :class:`metapretrain.protonet.ProtoLoss` that a recipe chooses."""

    distance: str = "euclidean"
    temperature: float = 1.0
    learn_temperature: bool = False
    query_fraction: float = 0.25
    stratified: bool = False
    memory: str | None = None

    def __post_init__(self) -> None:
        ProtoLoss(num_classes=2, **asdict(self))


def override(recipe: R, changes: Sequence[str]) -> R:
    """Return the recipe with changes such as `["epochs=10", "prl.lr=0.2"]`.

    InputError: a change without `=`, an unknown name (with the nearest one), or a value that is not allowed.

    Example:
        >>> override(Proto(), ["temperature=8", "stratified=true"]).temperature
        8.0
    """
    for change in changes:
        name, equals, text = change.partition("=")
        if not equals:
            raise InputError(f"a change of the recipe is name=value, such as prl.lr=0.1; got {change!r}")
        try:
            recipe = _replaced(recipe, name.split("."), text)
        except InputError as error:
            raise InputError(f"{change}: {error}") from None
    return recipe


def _replaced(node: Any, path: list[str], text: str) -> Any:
    kinds = get_type_hints(type(node))
    key = one_of("recipe setting", path[0], kinds)
    inner, nested = getattr(node, key), dataclasses.is_dataclass(getattr(node, key))
    if len(path) > 1 and nested:
        return dataclasses.replace(node, **{key: _replaced(inner, path[1:], text)})
    if len(path) > 1 or nested:
        parts = [f"{key}.{field.name}" for field in dataclasses.fields(inner)] if nested else [key]
        raise InputError(f"not a single value; allowed here: {', '.join(parts)}")
    return dataclasses.replace(node, **{key: parse_value(text, kinds[key])})


def row_probes(
    rows: Mapping[str, tuple[int, int]], loss: Callable[[str, Tensor], Tensor], machine: Machine
) -> dict[str, Probe]:
    """Probes of training rows for {task: (rows, batch size)}, in the precision of training, uncompiled.

    `loss(task, rows)` gets the indices of different rows, int64 (B,), on the CPU.
    """

    def probe(task: str, count: int, size: int) -> Probe:
        def loss_of(rows: Tensor) -> Tensor:
            with torch.compiler.set_stance("force_eager"), mixed_precision(machine.device, machine.precision):
                return loss(task, rows).float()

        return FunctionProbe(lambda random: torch.randperm(count, generator=random)[:size], loss_of)

    return {task: probe(task, *sizes) for task, sizes in rows.items()}


def choices_of(stream: Any) -> dict[str, float]:
    """What to log of a `TaskStream` with a scheduler: updates of each task so far, and the last utilities."""
    found = {f"updates_{name}": float(count) for name, count in stream.counts.items()}
    utilities = getattr(stream.choice, "utilities", {})
    return found | {f"utility_{name}": value for name, value in utilities.items() if math.isfinite(value)}
