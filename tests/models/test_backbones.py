"""Backbones of few-shot learning: what goes in, what comes out, and what is refused."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from metapretrain.errors import InputError
from metapretrain.models.encoders import LEARN2LEARN, DropBlock, build_backbone, build_encoder, conv4


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
    with pytest.raises(InputError, match=r"l2l-cnn4 needs learn2learn, which is not installed: .* take conv4"):
        build_backbone("l2l-cnn4", ways=5, channels=1, image_size=28)


def test_omniglot_cnn_refuses_colour() -> None:
    with pytest.raises(InputError, match="grey images of 28 pixels, not 3 channels of 84"):
        build_backbone("l2l-omniglot-cnn", ways=5, channels=3, image_size=84)


@pytest.mark.parametrize(("size", "features"), [(28, 64), (32, 256), (84, 1600)])
def test_conv4_is_the_fields(size: int, features: int) -> None:
    encoder = conv4(channels=3, image_size=size)
    kinds = [type(part).__name__ for part in encoder.backbone]
    assert kinds == ["Conv2d", "BatchNorm2d", "ReLU", "MaxPool2d"] * 4 + ["Flatten"]
    convolutions = [part for part in encoder.backbone if isinstance(part, nn.Conv2d)]
    assert {(part.out_channels, part.kernel_size, part.padding) for part in convolutions} == {(64, (3, 3), (1, 1))}
    assert encoder.features == features and encoder(torch.zeros(2, 3, size, size)).shape == (2, features)


def test_resnet12_has_metaoptnets_size_and_shapes() -> None:
    """12,424,320 parameters; 2,560 and 16,000 features without pooling (Lee et al., 2019, table 3)."""
    net = build_encoder("resnet12", image_size=84)
    assert sum(p.numel() for p in net.parameters()) == 12_424_320
    assert net.features == 640 and net(torch.zeros(1, 3, 84, 84)).shape == (1, 640)
    for size, features in ((32, 2_560), (84, 16_000)):
        flat = build_encoder("resnet12-flat", image_size=size)
        assert flat.features == features and flat(torch.zeros(1, 3, size, size)).shape == (1, features)
    block, x = net.backbone[0].eval(), torch.randn(2, 3, 6, 6)
    z = x
    for place in (0, 3, 6):
        z = block.layers[place + 1](block.layers[place](z))
        z = F.leaky_relu(z, 0.1) if place < 6 else z
    expected = F.max_pool2d(F.leaky_relu(z + block.shortcut(x), 0.1), 2)
    torch.testing.assert_close(block(x), expected)


def test_dropping_is_in_all_four_blocks_and_only_where_asked_for() -> None:
    drops = [block.last[-1] for block in build_encoder("resnet12", image_size=32, drop=0.1).backbone[:4]]
    assert [type(drop) for drop in drops] == [nn.Dropout, nn.Dropout, DropBlock, DropBlock]
    assert {drop.size for drop in drops[2:]} == {2}
    assert build_encoder("resnet12", image_size=84, drop=0.1).backbone[3].last[-1].size == 5
    assert not [part for part in build_encoder("resnet12").modules() if isinstance(part, (nn.Dropout, DropBlock))]
    with pytest.raises(InputError, match="conv4 drops no units"):
        build_encoder("conv4", image_size=32, drop=0.1)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_dropblock_drops_squares_keeps_the_sum_and_grows(size: int) -> None:
    torch.manual_seed(0)
    drop, x = DropBlock(0.2, size, ramp=4), torch.ones(256, 32, 11, 11)
    shares = []
    for _ in range(6):
        z = drop(x)
        dropped = z == 0
        shares.append(float(dropped.float().mean()))
        assert float(z.mean()) == pytest.approx(1.0, abs=1e-4)
        covered = F.max_pool2d(F.pad(-F.max_pool2d(-dropped.float(), size, 1), (size - 1,) * 4), size, 1)
        assert torch.equal(covered.bool(), dropped)  # what is dropped are squares of this size, and nothing else
    # squares that overlap drop a little less than the rate
    expected = [0.05, 0.1, 0.15, 0.2, 0.2, 0.2]
    for share, rate in zip(shares, expected, strict=True):
        assert 0.8 * rate < share < 1.08 * rate
    assert torch.equal(drop.eval()(x), x) and int(drop.seen) == 6


def test_the_schedule_of_dropblock_goes_on_after_loading() -> None:
    first, other = (build_encoder("resnet12", image_size=16, channels=1, drop=0.3) for _ in range(2))
    first(torch.randn(2, 1, 16, 16))
    other.load_state_dict(first.state_dict())
    assert [int(part.seen) for part in other.modules() if isinstance(part, DropBlock)] == [1, 1]
