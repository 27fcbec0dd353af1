"""A recipe: every choice of an image experiment but the method and the seed; `name=value` changes one of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar, get_type_hints

from metapretrain.checks import number, parse_value, whole
from metapretrain.data.augment import AUGMENTATIONS
from metapretrain.errors import InputError, one_of
from metapretrain.models import ENCODERS, STEMS
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
            >>> settings = Phase(lr=0.1, ema=0.9).settings(20, device="cpu")
            >>> settings.lr, settings.ema, settings.steps, settings.device
            (0.1, 0.9, 20, 'cpu')
        """
        terms = {term.name for term in dataclasses.fields(TrainSettings)} & vars(self).keys()
        return TrainSettings(steps=steps, **{term: getattr(self, term) for term in terms}, **options)


@dataclass(frozen=True)
class Phase(PhaseTerms):
    """How one phase of training is done; the terms are those of :class:`metapretrain.training.TrainSettings`.

    `augment` names a preset of :data:`metapretrain.data.augment.AUGMENTATIONS`.
    """

    lr: float
    augment: str = "none"
    optimizer: str = "sgd"
    weight_decay: float = 5e-4
    schedule: str = "cosine"
    warmup: float = 0.05
    label_smoothing: float = 0.0
    ema: float | None = None

    def __post_init__(self) -> None:
        """Check every value."""
        super().__post_init__()
        one_of("augmentation", self.augment, AUGMENTATIONS)


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


@dataclass(frozen=True)
class Recipe:
    """Choices of an image experiment.

    Args:
        epochs: the budget: encoder passes a training image, pretraining and fine-tuning together.
        pretrain_share: share of the budget that pretraining gets, in (0, 1).
        batch_size: images a batch.
        encoder: name for :func:`metapretrain.models.build_encoder`.
        stem: of a ResNet.
        validation: images of the training set that no seed trains on.
        balanced: the same number of images of each class in a batch.
        supervised, prl, simclr: the phase of each objective; `frozen` and `unfrozen`: of fine-tuning.
        proto: of the prototypical loss.
        simclr_temperature: of the contrastive loss.
        scheduler: of rows whose encoder is pretrained by several objectives, one an update: see
            :func:`metapretrain.scheduling.parse_schedule`.

    Raises:
        InputError: a value outside its range, or an unknown name (with the nearest one).
    """

    epochs: int
    pretrain_share: float
    batch_size: int
    encoder: str
    supervised: Phase
    prl: Phase
    simclr: Phase
    frozen: Phase
    unfrozen: Phase
    proto: Proto = field(default_factory=Proto)
    stem: str = "standard"
    validation: int = 500
    balanced: bool = False
    simclr_temperature: float = 0.5
    scheduler: str = ""

    def __post_init__(self) -> None:
        """Check every value."""
        one_of("encoder", self.encoder, ENCODERS)
        one_of("stem", self.stem, STEMS)
        for name, least in (("epochs", 1), ("batch_size", 2), ("validation", 0)):
            whole(name, getattr(self, name), least)
        number("pretrain_share", self.pretrain_share, above=0, below=1)
        number("simclr_temperature", self.simclr_temperature, above=0)


def override(recipe: R, changes: Sequence[str]) -> R:
    """Return the recipe with changes such as `["epochs=10", "prl.lr=0.2"]`.

    Raises:
        InputError: a change without `=`, an unknown name (with the nearest one), or a value of the wrong type or
            outside its range.

    Example:
        >>> phase = Phase(lr=0.1)
        >>> recipe = Recipe(1, 0.8, 8, "mlp", phase, phase, phase, phase, phase)
        >>> override(recipe, ["prl.lr=0.2"]).prl.lr
        0.2
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
