"""Small images with classes that can be told apart, and a recipe of seconds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from metapretrain.data.images import ImageSet
from metapretrain.experiments.base import Context, Machine
from metapretrain.experiments.images import training
from metapretrain.experiments.images.data import ImageData
from metapretrain.experiments.images.recipe import ImagePhase, ImageRecipe
from metapretrain.experiments.images.training import ImageMethod
from metapretrain.experiments.recipe import Proto
from metapretrain.models import Encoder
from metapretrain.training import loop

PLAIN = ImagePhase(lr=0.02)
RECIPE = ImageRecipe(
    epochs=4,
    pretrain_share=0.5,
    batch_size=12,
    encoder="small-conv",
    validation=12,
    supervised=PLAIN,
    prl=PLAIN,
    simclr=ImagePhase(lr=0.02, augment="plain"),
    frozen=PLAIN,
    unfrozen=PLAIN,
    proto=Proto(query_fraction=0.5),
)


def make_images(n: int, classes: int = 3, size: int = 6, channels: int = 1, seed: int = 0) -> ImageSet:
    """Noise, brighter from class to class; labels in turn."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % classes
    noise = torch.randint(0, 120, (n, channels, size, size), generator=generator)
    images = (noise + 40 * labels[:, None, None, None]).clamp(0, 255).to(torch.uint8)
    return ImageSet(images, labels, [f"class {c}" for c in range(classes)], "small", "train")


@pytest.fixture
def data() -> ImageData:
    return ImageData.of(make_images(72), make_images(30, seed=1), 12)


@pytest.fixture
def recipe() -> ImageRecipe:
    return RECIPE


def pretrain(objective: str, data: ImageData, recipe: ImageRecipe, seed: int, machine: Machine) -> tuple[Encoder, Any]:
    """Pretrain a new encoder, without a run folder."""
    method = ImageMethod(objective, head=None)
    encoder, job = training.pretraining(Context("pretrain", method, seed, recipe, data, machine, shared=True))
    return encoder, loop.train(**vars(job))


def finetune(
    encoder: Encoder, method: ImageMethod, data: ImageData, recipe: ImageRecipe, seed: int, machine: Machine
) -> tuple[nn.Module, Any]:
    """Train a new head on an encoder, without a run folder."""
    head, job = training.finetuning(Context("row", method, seed, recipe, data, machine), encoder)
    return head, loop.train(**vars(job))
