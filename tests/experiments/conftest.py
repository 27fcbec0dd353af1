"""Small images with classes that can be told apart, and a recipe of seconds."""

from __future__ import annotations

import pytest
import torch

from metapretrain.data.images import ImageSet
from metapretrain.experiments.images.data import ImageData
from metapretrain.experiments.recipe import Phase, Proto, Recipe

PLAIN = Phase(lr=0.02)
RECIPE = Recipe(
    epochs=4,
    pretrain_share=0.5,
    batch_size=12,
    encoder="small-conv",
    validation=12,
    supervised=PLAIN,
    prl=PLAIN,
    simclr=Phase(lr=0.02, augment="plain"),
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
def recipe() -> Recipe:
    return RECIPE
