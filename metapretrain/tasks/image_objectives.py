"""What an image encoder can be pretrained by, by name: a new objective is its class and an entry in this table."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

import torch

from metapretrain.models import Encoder, build_head, projection
from metapretrain.protonet import ProtoLoss
from metapretrain.tasks.image_data import ImageData, images_of
from metapretrain.tasks.machine import Machine
from metapretrain.tasks.objectives import PRL, Images, Objective, SimCLR, Supervised
from metapretrain.tasks.recipes import Phase, Recipe


@dataclass(frozen=True)
class Parts:
    """What an objective is built of.

    Args:
        images: of training, augmented as the objective's phase says.
        features: D of the encoder.
        classes: C.
        recipe: the experiment's.
        phase: the objective's phase of it.
        seed: of its own generators.
        gather: whether rows of all ranks count.
    """

    images: Images
    features: int
    classes: int
    recipe: Recipe
    phase: Phase
    seed: int
    gather: bool


@dataclass(frozen=True)
class Entry:
    """An objective of :data:`OBJECTIVES`.

    Args:
        kind: its class.
        phase: the phase of a recipe that it is trained with.
        build: makes it; what is random is drawn from the default generator.
        scheduled: its name where a scheduler chooses between objectives, None: it is none of these.
    """

    kind: type[Objective]
    phase: Callable[[Recipe], Phase]
    build: Callable[[Parts], Objective]
    scheduled: str | None = None


def _supervised(parts: Parts) -> Supervised:
    head = build_head("linear", parts.features, parts.classes)
    return Supervised(parts.images, head, parts.phase.label_smoothing)


def _prl(mode: str) -> Callable[[Parts], PRL]:
    def build(parts: Parts) -> PRL:
        proto = ProtoLoss(
            mode, num_classes=parts.classes, gather=parts.gather, seed=parts.seed,
            label_smoothing=parts.phase.label_smoothing, **asdict(parts.recipe.proto),
        )  # fmt: skip
        return PRL(parts.images, proto)

    return build


def _simclr(parts: Parts) -> SimCLR:
    return SimCLR(parts.images, projection(parts.features), parts.recipe.simclr_temperature)


OBJECTIVES = {
    "supervised": Entry(Supervised, lambda recipe: recipe.supervised, _supervised, scheduled="supervised"),
    "prl-standard": Entry(PRL, lambda recipe: recipe.prl, _prl("standard"), scheduled="prl"),
    "prl-query": Entry(PRL, lambda recipe: recipe.prl, _prl("query")),
    "simclr": Entry(SimCLR, lambda recipe: recipe.simclr, _simclr, scheduled="simclr"),
}


def sources() -> dict[str, str]:
    """Return the objectives between which a scheduler chooses, `{its name there: its name}`.

    Example:
        >>> sources()
        {'supervised': 'supervised', 'prl': 'prl-standard', 'simclr': 'simclr'}
    """
    return {entry.scheduled: name for name, entry in OBJECTIVES.items() if entry.scheduled is not None}


def build_objectives(
    names: Iterable[str], encoder: Encoder, data: ImageData, recipe: Recipe, seed: int, machine: Machine
) -> dict[str, Objective]:
    """Build objectives of :data:`OBJECTIVES` for an encoder; their weights are a function of `seed` and of `names`."""
    built = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed + 1)
        for name in names:
            phase = OBJECTIVES[name].phase(recipe)
            images, classes = images_of(data, phase, machine), len(data.train.classes)
            parts = Parts(images, encoder.features, classes, recipe, phase, seed, machine.world > 1)
            built[name] = OBJECTIVES[name].build(parts)
    return built
