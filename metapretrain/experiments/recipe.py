"""What recipes share: a phase of training, the prototypical loss, and `name=value`, which changes one choice."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar, get_type_hints

from metapretrain.checks import parse_value
from metapretrain.errors import InputError, one_of
from metapretrain.protonet import ProtoLoss
from metapretrain.training import TrainSettings

R = TypeVar("R")


class PhaseTerms:
    """Base of the dataclasses of a phase: fields named as in :class:`metapretrain.training.TrainSettings` reach it."""

    label_smoothing: float

    def __post_init__(self) -> None:
        """Check every value now: a phase may begin hours after the start."""
        self.settings(1)
        if not 0 <= self.label_smoothing < 1:
            raise InputError(f"label_smoothing must lie in [0, 1), got {self.label_smoothing}")

    def settings(self, steps: int, **options: Any) -> TrainSettings:
        """Return the settings of `steps` updates; `options` are those that no phase chooses, such as `device`.

        Raises:
            InputError: a value out of its range.

        Example:
            >>> from metapretrain.experiments.images.recipe import Phase
            >>> settings = Phase(lr=0.1, ema=0.9).settings(20, device="cpu")
            >>> settings.lr, settings.ema, settings.steps, settings.device
            (0.1, 0.9, 20, 'cpu')
        """
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
        """Check every value."""
        ProtoLoss(num_classes=2, **asdict(self))


def override(recipe: R, changes: Sequence[str]) -> R:
    """Return the recipe with changes such as `["epochs=10", "prl.lr=0.2"]`.

    Raises:
        InputError: a change without `=`, an unknown name (with the nearest one), or a value of the wrong type or
            outside its range.

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
    inner = getattr(node, key)
    if len(path) > 1 and dataclasses.is_dataclass(inner):
        return dataclasses.replace(node, **{key: _replaced(inner, path[1:], text)})
    if len(path) > 1 or dataclasses.is_dataclass(inner):
        parts = (
            [f"{key}.{field.name}" for field in dataclasses.fields(inner)] if dataclasses.is_dataclass(inner) else [key]
        )
        raise InputError(f"not a single value; allowed here: {', '.join(parts)}")
    return dataclasses.replace(node, **{key: parse_value(text, kinds[key])})
