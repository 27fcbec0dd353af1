"""A few-shot learner on the disk, and what it becomes by a few examples of each class: a classifier."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from metapretrain.errors import InputError
from metapretrain.maml import ANIL, FOMAML, MAML, MetaSGD, ProtoNet, functional
from metapretrain.models.backbones import Backbone, build_backbone
from metapretrain.models.inputs import as_uint8, check_tensor

LEARNER = "learner.safetensors"
KINDS: dict[str, Callable[..., MAML]] = {"maml": MAML, "fomaml": FOMAML, "anil": ANIL, "metasgd": MetaSGD}


def make_learner(choices: Mapping[str, Any], net: nn.Module, ways: int) -> MAML | ProtoNet:
    """The learner that a run's choices name, over a backbone.

    Args:
        choices: `learner`, and for MAML and its kin `inner_lr`, `inner_steps`, `test_steps`, `batchnorm`, `chunk`,
            and `adapt_norms` (True where it is not there).
        ways: classes of a training episode.

    Example:
        >>> make_learner({"learner": "protonet"}, nn.Identity(), ways=5).ways
        5
    """
    kind = KINDS.get(choices["learner"])
    if kind is None:
        return ProtoNet(net, ways=ways)
    adapted = {} if choices.get("adapt_norms", True) or kind is ANIL else {"only": without_norms(net)}
    return kind(
        net, choices["inner_lr"], steps=choices["inner_steps"], test_steps=choices["test_steps"],
        batchnorm=choices["batchnorm"], chunk=choices["chunk"], **adapted,
    )  # fmt: skip


def without_norms(net: nn.Module) -> list[str]:
    """Names of the parameters but for the scales and shifts of normalisation layers.

    Example:
        >>> without_norms(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
        ['0.weight', '0.bias']
    """
    norms = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
    left_out = {id(p) for part in net.modules() if isinstance(part, norms) for p in part.parameters()}
    return [name for name, p in net.named_parameters() if id(p) not in left_out]


def is_transductive(learner: nn.Module) -> bool:
    """Whether the prediction for a query depends on the other queries of its episode, through BatchNorm."""
    normalised = any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in learner.modules())
    return normalised and isinstance(learner, MAML) and learner.batchnorm == "batch"


@dataclass(frozen=True)
class FewShotClassifier:
    """A learner with the support examples that it goes by: what `load(run).adapt(images, labels)` returns.

    `classes` (W,) are the labels that were given, in sorted order. The inner loop of MAML runs in every call.
    """

    learner: Any
    prepare: Callable[[Tensor], Tensor]
    support: Tensor
    codes: Tensor
    classes: Tensor

    def logits(self, images: Tensor) -> Tensor:
        """Return logits (N, W), in the order of `classes`."""
        x = self.prepare(images)
        query = x[None], torch.zeros(1, len(x), dtype=torch.int64, device=x.device)
        logits: Tensor = self.learner.logits((self.support[None], self.codes[None]), query)[0]
        return logits[:, : len(self.classes)]

    def predict(self, images: Tensor) -> Tensor:
        """Return the label of each image, (N,)."""
        return self.classes[self.logits(images).argmax(1)]


def few_shot_classifier(
    learner: Any, prepare: Callable[[Tensor], Tensor], images: Tensor, labels: Tensor
) -> FewShotClassifier:
    """Note the support examples: images (S, C, H, W) and their labels, integers (S,).

    Raises:
        InputError: labels that are no integers, or not as many as the images.
    """
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.ndim != 1 or not len(labels):
        raise InputError("labels must be a tensor of integers (S,), one for each support image")
    x = prepare(images)
    if len(x) != len(labels):
        raise InputError(f"got {len(x)} support images and {len(labels)} labels; give one label for each image")
    classes, codes = labels.to(x.device).unique(return_inverse=True)
    return FewShotClassifier(learner, prepare, x, codes, classes)


class SavedLearner(nn.Module):
    """A few-shot learner with its weights, as :func:`metapretrain.load` returns it.

    Images are uint8 (N, C, H, W), or float in 0..1; any size (they are resized), grey or colour. `classes` are those
    that it was trained on: new ones come by :meth:`adapt`.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        model, tested = config["model"], config["tested"]["ways"]
        self.classes: list[str] = list(model["classes"])
        self.channels, self.image_size = int(model["channels"]), int(model["image_size"])
        self.mean, self.std = tuple(model["mean"]), tuple(model["std"])
        self.ways = min(tested if isinstance(tested, int) else tested[-1], len(self.classes))
        headless = config["choices"]["learner"] not in KINDS
        net = build_backbone(
            config["backbone"], ways=None if headless else self.ways, channels=self.channels,
            image_size=self.image_size, mean=self.mean, std=self.std,
        )  # fmt: skip
        self.learner = make_learner(config["choices"], net, self.ways)
        if isinstance(self.learner, ProtoNet):
            self.learner.ways = None  # of any number of classes

    def prepare(self, images: Tensor) -> Tensor:
        """Return uint8 images (N, C, image_size, image_size) on the model's device.

        Raises:
            InputError: see :func:`metapretrain.models.inputs.as_uint8`.
        """
        return as_uint8(images, self.channels, self.image_size).to(next(self.learner.parameters()).device)

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        """Return features float32 (N, D) by the weights that adaptation starts from.

        Where :func:`is_transductive`, batch normalisation takes the statistics of the images given.
        """
        net: Any = self.learner.module
        if isinstance(self.learner, ProtoNet):
            return torch.cat([net(self.prepare(part)).flatten(1).float() for part in check_tensor(images).split(256)])
        body = Backbone(net.encoder, None, self.mean, self.std).to(net.scale.device)
        apply, params, buffers = functional(body, self.learner.batchnorm, steps=self.learner.steps)
        if self.learner.batchnorm == "per-step":
            buffers = {**buffers, **self.learner.records.named()}
        z: Tensor = apply(params, buffers, self.prepare(images))
        return z.flatten(1).float()

    def adapt(self, images: Tensor, labels: Tensor) -> FewShotClassifier:
        """Learn new classes from support images (S, C, H, W) and their labels, any integers (S,).

        Raises:
            InputError: labels that do not fit the images, or of more classes than the learner has outputs.
        """
        found = few_shot_classifier(self.learner, self.prepare, images, labels)
        if isinstance(self.learner, MAML) and len(found.classes) > self.ways:
            raise InputError(f"labels have {len(found.classes)} classes; this run has learned {self.ways}-way tasks")
        return found

    def logits(self, images: Tensor) -> Tensor:
        """Refuse, see :meth:`predict`."""
        raise InputError("a few-shot learner has no classes yet: load(run).adapt(images, labels).predict(images)")

    def predict(self, images: Tensor) -> Tensor:
        """Refuse: there are no classes before :meth:`adapt`.

        Raises:
            InputError: always.
        """
        return self.logits(images)
