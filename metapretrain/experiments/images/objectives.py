"""What an image encoder is pretrained by: each objective draws a batch by its row indices.

To add one, write a subclass of :class:`Objective` and :func:`register` it.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Generic, TypeVar, cast, get_type_hints

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metapretrain.checks import number
from metapretrain.draws import seeded
from metapretrain.errors import InputError, one_of
from metapretrain.experiments.base import Machine
from metapretrain.experiments.images.data import ImageData, Images, images_of
from metapretrain.experiments.images.recipe import ImagePhase, ImageRecipe
from metapretrain.models import Encoder, build_head, projection
from metapretrain.protonet import ProtoLoss, check_labels, gather_rows

T = TypeVar("T", bound=nn.Module)  # a kind of objective


class Objective(nn.Module, ABC):
    """A loss for image encoders; `views`: encoder passes per image, `labelled`: labels are read.

    `imports`: modules of other packages that it imports when it is built; they are looked for before any run starts.
    """

    views = 1
    labelled = True
    imports: Sequence[str] = ()

    def __init__(self, images: Images) -> None:
        super().__init__()
        self.images = images

    @classmethod
    def build(cls, parts: Parts) -> Objective:
        """Make it for an encoder and its data; what is random is drawn from torch's default generator."""
        return cls(parts.images)

    @abstractmethod
    def loss(self, encoder: nn.Module, rows: Tensor) -> Tensor:
        """Return the scalar loss of the images at `rows` (B,)."""

    def check_batch(self, rows: Tensor) -> None:
        """Refuse a batch of `rows` (B,) that the loss cannot use; called before training, on the CPU."""


class Supervised(Objective):
    """Cross entropy of a head, features (B, D) to logits (B, C), over the encoder's features.

    With `proto`, `weight` (0..1) of the loss is the prototypical loss of the same features, the rest cross entropy.
    """

    def __init__(
        self,
        images: Images,
        head: nn.Module,
        label_smoothing: float = 0.0,
        proto: ProtoLoss | None = None,
        weight: float = 0.5,
    ) -> None:
        super().__init__(images)
        self.head, self.label_smoothing, self.proto, self.weight = head, label_smoothing, proto, weight

    @classmethod
    def build(cls, parts: Parts) -> Supervised:
        head = build_head("linear", parts.features, parts.classes)
        return cls(parts.images, head, parts.phase.label_smoothing)

    def loss(self, encoder: nn.Module, rows: Tensor) -> Tensor:
        z, y = encoder(self.images.view(rows)), self.images.labels[rows]
        loss = F.cross_entropy(self.head(z).float(), y, label_smoothing=self.label_smoothing)
        return loss if self.proto is None else (1 - self.weight) * loss + self.weight * self.proto(z, y)


def proto_loss(mode: str, classes: int, recipe: ImageRecipe, phase: ImagePhase, seed: int, gather: bool) -> ProtoLoss:
    """The prototypical loss of a recipe, smoothed as the phase says."""
    options = {"seed": seed, "label_smoothing": phase.label_smoothing, **asdict(recipe.proto)}
    return ProtoLoss(mode, num_classes=classes, gather=gather, **options)


class PRL(Objective):
    """Prototypical representation learning: the prototypical loss of the pooled features, without a projection.

    Steps 1 to 4 of the vision paper; its two variants are modes of :class:`metapretrain.protonet.ProtoLoss`.
    """

    def __init__(self, images: Images, proto: ProtoLoss) -> None:
        super().__init__(images)
        self.proto = proto

    @classmethod
    def build(cls, parts: Parts, mode: str = "query") -> PRL:
        proto = proto_loss(mode, parts.classes, parts.recipe, parts.phase, parts.seed, parts.gather)
        return cls(parts.images, proto)

    def check_batch(self, rows: Tensor) -> None:
        check_labels(self.images.labels[rows], mode=self.proto.mode)

    def loss(self, encoder: nn.Module, rows: Tensor) -> Tensor:
        loss: Tensor = self.proto(encoder(self.images.view(rows)), self.images.labels[rows])
        return loss


class SimCLR(Objective):
    """Contrast of two views of each image by the normalised temperature-scaled cross entropy.

    Chen et al. (2020), equation 1, algorithm 1. Labels are not read; negatives are those of all ranks, with gradients.
    """

    views = 2
    labelled = False
    imports = ("pytorch_metric_learning.losses",)

    def __init__(self, images: Images, projection: nn.Module, temperature: float = 0.5) -> None:
        super().__init__(images)
        from pytorch_metric_learning.losses import NTXentLoss

        number("temperature", temperature, above=0)
        self.projection = projection
        self.contrast = NTXentLoss(temperature=temperature)
        self.pairs: dict[tuple[int, torch.device], tuple[Tensor, Tensor, Tensor, Tensor]] = {}

    @classmethod
    def build(cls, parts: Parts) -> SimCLR:
        return cls(parts.images, projection(parts.features), parts.recipe.simclr_temperature)

    def loss(self, encoder: nn.Module, rows: Tensor) -> Tensor:
        x = self.images.view(torch.cat([rows, rows]))
        z = gather_rows(self.projection(encoder(x)).float())
        ranks = len(z) // (2 * len(rows))
        # rank after rank, each with its first and its second views: image i of rank r is 2 * r * B + i, + B
        key = (len(z), z.device)
        if key not in self.pairs:
            image = torch.arange(len(rows) * ranks, device=z.device).view(ranks, 1, -1)
            self.pairs[key] = contrast_pairs(image.expand(ranks, 2, len(rows)).reshape(-1))
        loss: Tensor = self.contrast(z, indices_tuple=self.pairs[key])
        return loss


def contrast_pairs(image: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (anchor, positive, anchor, negative) row indices, given which image each row shows (N,)."""
    same = image[:, None] == image[None, :]
    anchor, positive = torch.where(same & ~torch.eye(len(image), dtype=torch.bool, device=image.device))
    other, negative = torch.where(~same)
    return anchor, positive, other, negative


class WeightedLosses(nn.Module, Generic[T]):
    """An encoder and the objectives that share it, with a weight each: what steps have in common.

    `objectives` have the names of the stream's batches; `weights` are 1 where not named.
    """

    def __init__(
        self, model: nn.Module, objectives: Mapping[str, T], weights: Mapping[str, float] | None = None
    ) -> None:
        super().__init__()
        self.model = model
        self.objectives = nn.ModuleDict(objectives)
        self.weights = dict(weights or {})
        for name in self.weights:
            if name not in self.objectives:
                raise InputError(f"weight for {name!r}, but the objectives are {', '.join(self.objectives)}")

    def objective(self, name: str) -> T:
        return cast(T, self.objectives[name])  # a ModuleDict forgets what kind of module it holds

    def start_epoch(self, name: str) -> None:
        """Forget the prototypes of the last epoch, where the objective `name` keeps any."""
        for part in self.objectives[name].modules():
            if isinstance(part, ProtoLoss):
                part.reset_epoch()


class ImageStep(WeightedLosses[Objective]):
    """The losses of one update: an encoder and the objectives that share it."""

    def forward(self, batches: Mapping[str, Tensor]) -> dict[str, Tensor]:
        losses = {name: self.objective(name).loss(self.model, rows) for name, rows in batches.items()}
        return {name: self.weights.get(name, 1.0) * loss for name, loss in losses.items()}


@dataclass(frozen=True)
class Parts:
    """What an objective is built of: augmented training images, D, C, its phase of the recipe.

    `seed`: of its own generators; `gather`: whether rows of all ranks count.
    """

    images: Images
    features: int
    classes: int
    recipe: ImageRecipe
    phase: ImagePhase
    seed: int
    gather: bool


@dataclass(frozen=True)
class Entry:
    """An objective of :data:`OBJECTIVES`: its class, its phase of a recipe, and what makes it.

    `scheduled`: its name where a scheduler chooses between objectives, None: it is none of these.
    """

    kind: type[Objective]
    phase: str
    build: Callable[[Parts], Objective]
    scheduled: str | None = None


OBJECTIVES = {
    "supervised": Entry(Supervised, "supervised", Supervised.build, scheduled="supervised"),
    "prl-standard": Entry(PRL, "prl", partial(PRL.build, mode="standard"), scheduled="prl"),
    "prl-query": Entry(PRL, "prl", PRL.build),
    "prl-loo": Entry(PRL, "prl", partial(PRL.build, mode="leave-one-out")),
    "simclr": Entry(SimCLR, "simclr", SimCLR.build, scheduled="simclr"),
}
_OURS = frozenset(OBJECTIVES)


def register(name: str, kind: type[Objective], *, phase: str = "supervised") -> None:
    """Add an objective of your own: a method of that name in `run_stl10.py`, whose encoder gets a linear head then.

    Args:
        kind: a subclass of :class:`Objective`; its `build` gets :class:`Parts`.
        phase: of the recipe, whose learning rate, optimizer and augmentation it is trained with.

    InputError: a name of another form or that is taken, no subclass, or a phase that recipes do not have.

    Example:
        >>> class Brightness(Objective):
        ...     def loss(self, encoder, rows):
        ...         x = self.images.view(rows)
        ...         return F.mse_loss(encoder(x).mean(1), x.mean((1, 2, 3)))
        >>> register("brightness", Brightness, phase="simclr")
        >>> own_objectives()
        ['brightness']
        >>> del OBJECTIVES["brightness"]
    """
    if re.fullmatch(r"[a-z][a-z0-9-]*", name) is None:
        raise InputError(f"an objective's name has lower-case letters, digits and hyphens, got {name!r}")
    if not (isinstance(kind, type) and issubclass(kind, Objective)):
        raise InputError(f"objective {name} is {kind!r}; give a subclass of Objective")
    if name in OBJECTIVES and OBJECTIVES[name].kind.__qualname__ != kind.__qualname__:
        raise InputError(f"there is an objective {name} already; take another name")
    phases = [name for name, hint in get_type_hints(ImageRecipe).items() if hint is ImagePhase]
    one_of("phase of a recipe", phase, phases)
    OBJECTIVES[name] = Entry(kind, phase, kind.build)


def own_objectives() -> list[str]:
    """The names that :func:`register` added."""
    return [name for name in OBJECTIVES if name not in _OURS]


def sources() -> dict[str, str]:
    """Return the objectives between which a scheduler chooses, `{its name there: its name}`."""
    return {entry.scheduled: name for name, entry in OBJECTIVES.items() if entry.scheduled is not None}


def build_objectives(
    names: Iterable[str], encoder: Encoder, data: ImageData, recipe: ImageRecipe, seed: int, machine: Machine
) -> dict[str, Objective]:
    """Build objectives of :data:`OBJECTIVES` for an encoder; their weights are a function of `seed` and of `names`."""
    built = {}
    with seeded(seed + 1):
        for name in names:
            phase = getattr(recipe, OBJECTIVES[name].phase)
            labelled, classes = OBJECTIVES[name].kind.labelled, len(data.train.classes)
            images = images_of(data, phase, machine, labelled)
            parts = Parts(images, encoder.features, classes, recipe, phase, seed, machine.world > 1)
            built[name] = OBJECTIVES[name].build(parts)
    return built
