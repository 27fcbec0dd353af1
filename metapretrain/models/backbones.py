"""Backbones of few-shot learning: uint8 images in, class scores or embeddings out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from metapretrain.data.normalise import normalisation
from metapretrain.errors import InputError, one_of
from metapretrain.models.encoders import ENCODERS, build_encoder

LEARN2LEARN = {"l2l-cnn4": "CNN4", "l2l-omniglot-cnn": "OmniglotCNN"}
BACKBONES = (*ENCODERS, *LEARN2LEARN)


class Backbone(nn.Module):
    """An encoder of raw images, with a linear head or without one.

    Images are normalised inside, so that a learner takes uint8 images (N, C, H, W) and data stay small.

    Args:
        encoder: normalised images to features (N, D).
        head: features to logits (N, W), or None.
        mean, std: of each channel, in 0..1 units.

    Example:
        >>> net = build_backbone("conv4", ways=5, channels=1, image_size=28)
        >>> net(torch.zeros(2, 1, 28, 28, dtype=torch.uint8)).shape
        torch.Size([2, 5])
    """

    scale: Tensor
    offset: Tensor

    def __init__(self, encoder: nn.Module, head: nn.Module | None, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = head
        for name, value in zip(("scale", "offset"), normalisation(mean, std), strict=True):
            self.register_buffer(name, value, persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (N, W), or features (N, D) without a head."""
        z: Tensor = self.encoder(torch.addcmul(self.offset, images.float(), self.scale))
        return z if self.head is None else self.head(z)


def build_backbone(
    name: str,
    *,
    ways: int | None,
    channels: int,
    image_size: int,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> Backbone:
    """Build a backbone by name: an encoder of :func:`build_encoder`, or learn2learn's CNN4 or OmniglotCNN.

    Args:
        ways: outputs of the head; None: no head, embeddings.
        channels, image_size: of the images.
        mean, std: of each channel, in 0..1 units; None: 0 and 1.

    Raises:
        InputError: unknown name, learn2learn is not installed, or images that the network is not made for.

    Example:
        >>> build_backbone("conv4", ways=None, channels=1, image_size=28).head is None
        True
    """
    mean, std = mean or (0.0,) * channels, std or (1.0,) * channels
    one_of("backbone", name, BACKBONES)
    if name not in LEARN2LEARN:
        encoder = build_encoder(name, channels=channels, image_size=image_size)
        return Backbone(encoder, None if ways is None else nn.Linear(encoder.features, ways), mean, std)
    if name == "l2l-omniglot-cnn" and (channels, image_size) != (1, 28):
        raise InputError(
            f"{name} takes grey images of 28 pixels, these have {channels} channels of {image_size} pixels"
        )
    net = _learn2learn(name, 1 if ways is None else ways, channels, image_size)
    if ways is None:
        return Backbone(net.features, None, mean, std)
    return Backbone(net.features, net.classifier, mean, std)


def _learn2learn(name: str, outputs: int, channels: int, image_size: int) -> Any:
    try:
        from learn2learn.vision import models
    except ImportError as error:
        raise InputError(
            f"backbone {name} needs learn2learn, which is not installed ({error}); see extra learn2learn in setup.py, "
            "or take conv4"
        ) from None
    if name == "l2l-omniglot-cnn":
        return models.OmniglotCNN(outputs)
    size = 64 * (image_size // 16) ** 2
    return models.CNN4(outputs, hidden_size=64, channels=channels, embedding_size=size)
