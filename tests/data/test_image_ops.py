"""Each batched operation against torchvision's function on each image with the same parameter."""

from __future__ import annotations

import math

import pytest
import torch
from torchvision.transforms.v2 import functional as reference

from metapretrain.data import image_ops


@pytest.fixture
def images() -> torch.Tensor:
    """Random colours, with grey, black, white and saturated pixels (the corners of HSV) in each image."""
    x = torch.rand(5, 3, 20, 24, generator=torch.Generator().manual_seed(0)) * 255
    x[:, :, 0, :4] = 128.0
    x[:, :, 1, :4] = 0.0
    x[:, :, 2, :4] = 255.0
    x[:, :, 3, :6] = 255 * torch.tensor([[1, 0, 0, 1, 1, 0], [0, 1, 0, 1, 0, 1], [0, 0, 1, 0, 1, 1.0]])
    return x


FACTORS = torch.tensor([0.0, 0.4, 1.0, 1.3, 2.5])
COLOR = {
    "brightness": (reference.adjust_brightness, FACTORS),
    "contrast": (reference.adjust_contrast, FACTORS),
    "saturation": (reference.adjust_saturation, FACTORS),
    "hue": (reference.adjust_hue, torch.tensor([-0.5, -0.1, 0.0, 0.2, 0.5])),
}


@pytest.mark.parametrize("name", COLOR)
def test_color_steps_are_torchvisions_for_each_image(name: str, images: torch.Tensor) -> None:
    function, factors = COLOR[name]
    expected = torch.stack([function(x / 255, float(f)) * 255 for x, f in zip(images, factors, strict=True)])
    result = getattr(image_ops, name)(images.clone(), factors)
    torch.testing.assert_close(result, expected, atol=2e-3, rtol=0)


@pytest.mark.parametrize("name", ["brightness", "contrast"])
def test_one_channel_is_torchvisions_too(name: str, images: torch.Tensor) -> None:
    function, factors = COLOR[name]
    grey = images[:, :1].contiguous()
    expected = torch.stack([function(x / 255, float(f)) * 255 for x, f in zip(grey, factors, strict=True)])
    torch.testing.assert_close(getattr(image_ops, name)(grey, factors), expected, atol=2e-3, rtol=0)


def test_hue_in_a_full_turn_comes_back_and_keeps_extremes(images: torch.Tensor) -> None:
    shift = torch.full((5,), 0.3)
    turned = image_ops.hue(images, shift)
    torch.testing.assert_close(turned.amax(1), images.amax(1), atol=1e-3, rtol=0)
    torch.testing.assert_close(turned.amin(1), images.amin(1), atol=1e-3, rtol=0)
    torch.testing.assert_close(image_ops.hue(turned, -shift), images, atol=2e-3, rtol=0)


def test_grayscale_replaces_only_the_chosen(images: torch.Tensor) -> None:
    chosen = torch.tensor([True, False, True, False, False])
    result = image_ops.grayscale(images, chosen)
    expected = reference.rgb_to_grayscale(images, 3)
    torch.testing.assert_close(result[chosen], expected[chosen], atol=1e-3, rtol=0)
    assert torch.equal(result[~chosen], images[~chosen])


@pytest.mark.parametrize("kernel_size", [3, 9])
def test_blur_is_torchvisions_for_each_sigma(kernel_size: int, images: torch.Tensor) -> None:
    sigma = torch.tensor([0.1, 0.5, 1.0, 1.7, 2.0])
    expected = torch.stack(
        [
            reference.gaussian_blur(x, [kernel_size] * 2, [float(s)] * 2)
            for x, s in zip(images, sigma, strict=True)
        ]
    )
    result = image_ops.gaussian_blur(images, sigma, kernel_size)
    torch.testing.assert_close(result, expected, atol=2e-3, rtol=0)


def test_a_tiny_sigma_does_not_blur(images: torch.Tensor) -> None:
    assert torch.equal(image_ops.gaussian_blur(images, torch.full((5,), 0.02), 9), images)


def test_box_mask_is_torchvisions_erase() -> None:
    top, left = torch.tensor([2, -3, 18, 0]), torch.tensor([5, 20, -2, 0])
    height, width = torch.tensor([4, 8, 9, 0]), torch.tensor([6, 9, 5, 7])
    mask = image_ops.box_mask(top, left, height, width, (20, 24))
    for row in range(4):
        first, start = max(int(top[row]), 0), max(int(left[row]), 0)
        rows = min(int(top[row] + height[row]), 20) - first
        columns = min(int(left[row] + width[row]), 24) - start
        erased = reference.erase(torch.ones(1, 20, 24), first, start, rows, columns, torch.zeros(1, 1, 1))
        assert torch.equal(mask[row], erased == 0)


def test_crop_is_torchvisions_resized_crop_and_mirror(images: torch.Tensor) -> None:
    top, left = torch.tensor([0, 3, 10, 19, 0]), torch.tensor([0, 4, 0, 23, 12])
    height, width = torch.tensor([20, 9, 10, 1, 20]), torch.tensor([24, 17, 3, 1, 12])
    flip = torch.tensor([False, True, False, False, True])
    result = image_ops.crop_resize(images, top.float(), left.float(), height.float(), width.float(), flip, 16)
    for row, x in enumerate(images):
        box = [int(v[row]) for v in (top, left, height, width)]
        expected = reference.resized_crop(x, *box, [16, 16], antialias=False)
        expected = reference.horizontal_flip(expected) if flip[row] else expected
        torch.testing.assert_close(result[row], expected, atol=2e-2, rtol=0)


def test_the_whole_box_is_the_image_itself(images: torch.Tensor) -> None:
    square = images[..., :20].contiguous()
    zero, full = torch.zeros(5), torch.full((5,), 20.0)
    same = image_ops.crop_resize(square, zero, zero, full, full, zero > 0, 20)
    torch.testing.assert_close(same, square, atol=1e-2, rtol=0)
    turned = image_ops.crop_rotate(square, zero, zero, full, full, zero > 0, zero, 20)
    torch.testing.assert_close(turned, square, atol=1e-2, rtol=0)


def test_rotation_is_torchvisions_inside_the_image(images: torch.Tensor) -> None:
    square = images[..., :20].contiguous()
    degrees = torch.tensor([0.0, 10.0, -25.0, 90.0, 180.0])
    zero, full = torch.zeros(5), torch.full((5,), 20.0)
    result = image_ops.crop_rotate(square, zero, zero, full, full, zero > 0, torch.deg2rad(degrees), 20)
    rows, columns = torch.meshgrid(torch.arange(20.0), torch.arange(20.0), indexing="ij")
    inside = (rows - 9.5).square() + (columns - 9.5).square() < 9**2  # away from the filled corners
    for row, x in enumerate(square):
        expected = reference.rotate(
            x, float(degrees[row]), interpolation=reference.InterpolationMode.BILINEAR
        )
        torch.testing.assert_close(result[row][:, inside], expected[:, inside], atol=5e-2, rtol=0)


def test_a_shift_out_of_the_image_continues_it_by_reflection() -> None:
    x = torch.arange(8.0).expand(1, 1, 8, 8).contiguous()
    zero, full = torch.zeros(1), torch.full((1,), 8.0)
    result = image_ops.crop_rotate(x, zero, zero - 2, full, full, zero > 0, zero, 8)
    torch.testing.assert_close(result[0, 0, 3], torch.tensor([1.0, 0, 0, 1, 2, 3, 4, 5]), atol=1e-4, rtol=0)


def test_mirroring_is_of_the_rotated_result(images: torch.Tensor) -> None:
    square = images[..., :20].contiguous()
    zero, full = torch.zeros(5), torch.full((5,), 20.0)
    angle = torch.full((5,), math.pi / 2)
    result = image_ops.crop_rotate(square, zero, zero, full, full, zero == 0, angle, 20)
    expected = torch.rot90(square, 1, (2, 3)).flip(3)
    torch.testing.assert_close(result, expected, atol=2e-2, rtol=0)
