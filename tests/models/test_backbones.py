"""Backbones of few-shot learning: what goes in, what comes out, and what is refused."""

from __future__ import annotations

import sys

import pytest
import torch

from metapretrain.errors import InputError
from metapretrain.models.encoders import LEARN2LEARN, build_backbone, conv4


def test_images_are_normalised_inside() -> None:
    torch.manual_seed(0)
    net = build_backbone("mlp", ways=3, channels=1, image_size=4, mean=(0.25,), std=(0.5,))
    images = torch.randint(0, 256, (6, 1, 4, 4), dtype=torch.uint8)
    assert net.head is not None
    expected = net.head(net.encoder((images / 255 - 0.25) / 0.5))
    torch.testing.assert_close(net(images), expected)


@pytest.mark.parametrize(("size", "features"), [(28, 64), (84, 1600)])
def test_conv4_has_the_features_of_the_papers(size: int, features: int) -> None:
    encoder = conv4(channels=3, image_size=size)
    assert encoder.features == features == encoder(torch.zeros(2, 3, size, size)).shape[1]


def test_conv4_strided_halves_four_times_and_takes_the_mean() -> None:
    net = build_backbone("conv4-strided", ways=5, channels=1, image_size=28)
    maps = net.encoder.backbone[:-2](torch.zeros(2, 1, 28, 28))
    assert maps.shape == (2, 64, 2, 2)
    assert net(torch.zeros(2, 1, 28, 28, dtype=torch.uint8)).shape == (2, 5)
    assert sum(p.numel() for p in net.encoder.parameters()) == 9 * 64 + 3 * 9 * 64 * 64 + 8 * 64


def test_conv4_says_which_images_are_too_small() -> None:
    with pytest.raises(InputError, match="16 pixels or more, got 8"):
        build_backbone("conv4", ways=5, channels=1, image_size=8)


@pytest.mark.parametrize("name", LEARN2LEARN)
def test_learn2learns_networks_keep_their_parts(name: str) -> None:
    pytest.importorskip("learn2learn")
    images = torch.randint(0, 256, (4, 1, 28, 28), dtype=torch.uint8)
    net = build_backbone(name, ways=5, channels=1, image_size=28)
    assert net(images).shape == (4, 5)
    assert build_backbone(name, ways=None, channels=1, image_size=28)(images).shape == (4, 64)


def test_learn2learn_missing_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("learn2learn", "learn2learn.vision", "learn2learn.vision.models"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InputError, match=r"l2l-cnn4 needs learn2learn, which is not installed .* take conv4"):
        build_backbone("l2l-cnn4", ways=5, channels=1, image_size=28)


def test_omniglot_cnn_refuses_colour() -> None:
    with pytest.raises(InputError, match="grey images of 28 pixels, these have 3 channels of 84"):
        build_backbone("l2l-omniglot-cnn", ways=5, channels=3, image_size=84)
