"""Corruptions: each does what its name says, more at a higher severity, and the same on every call."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms.v2 import functional as reference

from metapretrain.errors import InputError
from metapretrain.evaluation.robustness import CHUNK, CORRUPTIONS, corrupt


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    """Smooth blobs of colour with some edges, like photographs."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(8, 3, 6, 6, generator=generator)
    x = torch.nn.functional.interpolate(coarse, (48, 48), mode="bicubic")
    for row in range(40):
        top, left = torch.randint(0, 40, (2,), generator=generator).tolist()
        x[row % 8, :, top : top + 7, left : left + 5] = torch.rand(3, 1, 1, generator=generator)
    return (x.clamp(0, 1) * 255).to(torch.uint8)


def _error(result: torch.Tensor, images: torch.Tensor, name: str) -> float:
    """Mean squared error; for fog, which adds light of its own, the share of contrast that it hides."""
    x, y = images.float(), result.float()
    if name == "fog":
        centred = x - x.mean((1, 2, 3), keepdim=True)
        return float(100 * (1 - (centred * y).sum() / centred.square().sum()))
    return float((x - y).square().mean())


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_severity_grows_and_the_seed_decides(name: str, images: torch.Tensor) -> None:
    before = images.clone()
    results = [corrupt(images, name, severity) for severity in range(1, 6)]
    errors = [_error(result, images, name) for result in results]
    assert errors == sorted(errors) and errors[0] > 0.05 and len(set(errors)) == 5
    assert torch.equal(images, before) and results[0].dtype == torch.uint8
    assert results[0].shape == images.shape
    assert torch.equal(corrupt(images, name, 3), results[2])
    random = {"gaussian-noise", "shot-noise", "impulse-noise", "motion-blur", "fog"}
    assert torch.equal(corrupt(images, name, 3, seed=1), results[2]) == (name not in random)


@pytest.mark.parametrize("name", CORRUPTIONS)
@pytest.mark.parametrize(("channels", "size"), [(1, 8), (3, 20)])
def test_small_and_grey_images_pass(name: str, channels: int, size: int) -> None:
    x = torch.randint(0, 256, (3, channels, size, size), generator=torch.Generator().manual_seed(0))
    result = corrupt(x.to(torch.uint8), name, 5)
    assert result.shape == x.shape
    assert not torch.equal(result.long(), x)


def test_noise_has_the_published_strength() -> None:
    grey = torch.full((CHUNK + 8, 3, 16, 16), 128, dtype=torch.uint8)
    noisy = corrupt(grey, "gaussian-noise", 1).float() / 255
    assert abs(float(noisy.std()) - 0.08) < 0.001 and abs(float(noisy.mean()) - 128 / 255) < 0.001
    shot = corrupt(grey, "shot-noise", 1).float() / 255
    assert abs(float(shot.var()) - 128 / 255 / 60) < 0.0005  # Poisson: mean over the number of photons
    impulse = corrupt(grey, "impulse-noise", 5)
    assert abs(float((impulse == 0).float().mean()) - 0.135) < 0.005
    assert abs(float((impulse == 255).float().mean()) - 0.135) < 0.005
    assert len(noisy.flatten(1).unique(dim=0)) == len(grey), "the second chunk repeats the first's noise"


def test_gaussian_blur_is_torchvisions_inside(images: torch.Tensor) -> None:
    large = torch.nn.functional.interpolate(images[:2].float(), 224).to(torch.uint8)
    expected = reference.gaussian_blur(large.float(), [33, 33], [4.0, 4.0])
    inner = (slice(None), slice(None), slice(20, -20), slice(20, -20))
    result = corrupt(large, "gaussian-blur", 4).float()
    torch.testing.assert_close(result[inner], expected[inner], atol=0.8, rtol=0)


def test_defocus_spreads_a_point_to_a_disk_and_motion_to_a_line() -> None:
    point = torch.zeros(4, 1, 224, 224, dtype=torch.uint8)
    point[:, :, 102:122, 102:122] = 255
    flat = torch.full_like(point, 77)
    for name in ("gaussian-blur", "defocus-blur", "motion-blur"):
        assert torch.equal(corrupt(flat, name, 5), flat), "a filter must sum to one"
        blurred = corrupt(point, name, 5).float()
        assert abs(float(blurred.sum() / point.float().sum()) - 1) < 0.01
    disk = corrupt(point, "defocus-blur", 5)[0, 0] > 0
    assert disk[112].sum() == disk[:, 112].sum() == 40  # 20 and twice the radius of 10
    line = corrupt(point, "motion-blur", 5)[:, 0] > 0
    assert bool((line.sum((1, 2)) < 20 * 20 + 55 * 30).all()) and int(line.any(1).sum(1).max()) > 35


def test_brightness_keeps_the_hue_and_contrast_the_mean(images: torch.Tensor) -> None:
    brighter = corrupt(images, "brightness", 1)
    value = images.amax(1).float()
    expected = (value + 25.5).clamp(max=255)
    torch.testing.assert_close(brighter.amax(1).float(), expected, atol=1.0, rtol=0)
    ratio = brighter.float() / brighter.amax(1, keepdim=True) - images.float() / images.amax(1, keepdim=True)
    assert float(ratio[value.unsqueeze(1).expand_as(ratio) > 60].abs().max()) < 0.02
    weak = corrupt(images, "contrast", 3).float()
    mean = images.float().mean((2, 3), keepdim=True)
    torch.testing.assert_close(weak, mean + 0.2 * (images.float() - mean), atol=0.51, rtol=0)
    black = torch.zeros(1, 3, 8, 8, dtype=torch.uint8)
    assert corrupt(black, "brightness", 1).unique().tolist() == [26]


def test_pixelate_has_few_blocks_and_jpeg_is_pillows(images: torch.Tensor) -> None:
    blocks = corrupt(images, "pixelate", 2)
    assert len(blocks[0, 0, 0].unique_consecutive()) <= 24
    expected = torch.nn.functional.avg_pool2d(images.float(), 2).round()
    assert (blocks[:, :, ::2, ::2].float() - expected).abs().max() <= 1
    stream = io.BytesIO()
    Image.fromarray(images[3].permute(1, 2, 0).numpy()).save(stream, "JPEG", quality=10)
    decoded = torch.from_numpy(np.array(Image.open(stream))).permute(2, 0, 1)
    assert torch.equal(corrupt(images, "jpeg", 4)[3], decoded)


def test_bad_arguments_are_one_line(images: torch.Tensor) -> None:
    with pytest.raises(InputError, match="unknown corruption 'gausian-noise'; did you mean 'gaussian-noise'"):
        corrupt(images, "gausian-noise", 1)
    for severity in (0, 6, 2.5, True, None):
        with pytest.raises(InputError, match=r"severity is .*; give a whole number from 1 to 5"):
            corrupt(images, "jpeg", severity)
    with pytest.raises(InputError, match="takes uint8 images"):
        corrupt(images.float(), "jpeg", 1)
    assert corrupt(images[:0], "jpeg", 1).shape == (0, 3, 48, 48)
