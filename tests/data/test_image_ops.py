"""Each batched operation against torchvision's function on each image with the same parameter."""

from __future__ import annotations

import math

import pytest
import torch
from torchvision.transforms.v2 import functional as reference

from metapretrain.data import augment


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
    result = getattr(augment, name)(images.clone(), factors)
    torch.testing.assert_close(result, expected, atol=2e-3, rtol=0)


@pytest.mark.parametrize("name", ["brightness", "contrast"])
def test_one_channel_is_torchvisions_too(name: str, images: torch.Tensor) -> None:
    function, factors = COLOR[name]
    grey = images[:, :1].contiguous()
    expected = torch.stack([function(x / 255, float(f)) * 255 for x, f in zip(grey, factors, strict=True)])
    torch.testing.assert_close(getattr(augment, name)(grey, factors), expected, atol=2e-3, rtol=0)


def test_hue_in_a_full_turn_comes_back_and_keeps_extremes(images: torch.Tensor) -> None:
    shift = torch.full((5,), 0.3)
    turned = augment.hue(images, shift)
    torch.testing.assert_close(turned.amax(1), images.amax(1), atol=1e-3, rtol=0)
    torch.testing.assert_close(turned.amin(1), images.amin(1), atol=1e-3, rtol=0)
    torch.testing.assert_close(augment.hue(turned, -shift), images, atol=2e-3, rtol=0)


def test_grayscale_replaces_only_the_chosen(images: torch.Tensor) -> None:
    chosen = torch.tensor([True, False, True, False, False])
    result = augment.grayscale(images, chosen)
    expected = reference.rgb_to_grayscale(images, 3)
    torch.testing.assert_close(result[chosen], expected[chosen], atol=1e-3, rtol=0)
    assert torch.equal(result[~chosen], images[~chosen])


@pytest.mark.parametrize("kernel_size", [3, 9])
def test_blur_is_torchvisions_for_each_sigma(kernel_size: int, images: torch.Tensor) -> None:
    sigma = torch.tensor([0.1, 0.5, 1.0, 1.7, 2.0])
    expected = torch.stack(
        [reference.gaussian_blur(x, [kernel_size] * 2, [float(s)] * 2) for x, s in zip(images, sigma, strict=True)]
    )
    result = augment.gaussian_blur(images, sigma, kernel_size)
    torch.testing.assert_close(result, expected, atol=2e-3, rtol=0)


def test_a_tiny_sigma_does_not_blur(images: torch.Tensor) -> None:
    assert torch.equal(augment.gaussian_blur(images, torch.full((5,), 0.02), 9), images)


def test_box_mask_is_torchvisions_erase() -> None:
    starts, extents = [(2, 5), (-3, 20), (18, -2), (0, 0)], [(4, 6), (8, 9), (9, 5), (0, 7)]
    mask = augment.box_mask(torch.tensor(starts), torch.tensor(extents), (20, 24))
    for row, ((top, left), (height, width)) in enumerate(zip(starts, extents, strict=True)):
        first, start = max(top, 0), max(left, 0)
        rows, columns = min(top + height, 20) - first, min(left + width, 24) - start
        erased = reference.erase(torch.ones(1, 20, 24), first, start, rows, columns, torch.zeros(1, 1, 1))
        assert torch.equal(mask[row], erased == 0)


def test_crop_is_torchvisions_resized_crop_and_mirror(images: torch.Tensor) -> None:
    start = torch.tensor([[0, 0], [3, 4], [10, 0], [19, 23], [0, 12]])
    extent = torch.tensor([[20, 24], [9, 17], [10, 3], [1, 1], [20, 12]])
    flip = torch.tensor([False, True, False, False, True])
    whole = torch.tensor([20.0, 24.0])
    result = augment.crop_resize(images, start / whole, extent / whole, flip, 16)
    for row, x in enumerate(images):
        box = [*start[row].tolist(), *extent[row].tolist()]
        expected = reference.resized_crop(x, *box, [16, 16], antialias=False)
        expected = reference.horizontal_flip(expected) if flip[row] else expected
        torch.testing.assert_close(result[row], expected, atol=2e-2, rtol=0)


def _whole(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The box that is the whole image, not mirrored."""
    return torch.zeros(count, 2), torch.ones(count, 2), torch.zeros(count, dtype=torch.bool)


def test_the_whole_box_is_the_image_itself(images: torch.Tensor) -> None:
    square = images[..., :20].contiguous()
    same = augment.crop_resize(square, *_whole(5), 20)
    torch.testing.assert_close(same, square, atol=1e-2, rtol=0)
    turned = augment.crop_rotate(square, *_whole(5), torch.zeros(5), 20)
    torch.testing.assert_close(turned, square, atol=1e-2, rtol=0)


def test_without_an_angle_both_crops_agree_inside(images: torch.Tensor) -> None:
    start, extent = torch.full((5, 2), 0.2), torch.tensor([0.5, 0.7]).expand(5, 2)
    flip = torch.tensor([True, False, True, False, True])
    plain = augment.crop_resize(images, start, extent, flip, 9)
    turned = augment.crop_rotate(images, start, extent, flip, torch.zeros(5), 9)
    torch.testing.assert_close(plain, turned, atol=1e-2, rtol=0)


def test_rotation_is_torchvisions_inside_the_image(images: torch.Tensor) -> None:
    degrees = torch.tensor([0.0, 10.0, -25.0, 90.0, 180.0])
    square = images[..., :20].contiguous()
    result = augment.crop_rotate(square, *_whole(5), torch.deg2rad(degrees), 20)
    rows, columns = torch.meshgrid(torch.arange(20.0), torch.arange(20.0), indexing="ij")
    inside = (rows - 9.5).square() + (columns - 9.5).square() < 9**2  # away from the filled corners
    for row, x in enumerate(square):
        bilinear = reference.InterpolationMode.BILINEAR
        expected = reference.rotate(x, float(degrees[row]), interpolation=bilinear)
        torch.testing.assert_close(result[row][:, inside], expected[:, inside], atol=5e-2, rtol=0)


def test_a_rotation_of_a_wide_image_is_a_rotation_in_pixels() -> None:
    x = torch.zeros(1, 1, 21, 41)
    x[0, 0, 10, 28] = 1.0  # eight pixels right of the centre
    x = augment.gaussian_blur(x, torch.ones(1), 7)
    start, extent = torch.tensor([[0.0, 10 / 41]]), torch.tensor([[1.0, 21 / 41]])
    flip, angle = torch.zeros(1, dtype=torch.bool), torch.full((1,), math.pi / 2)
    result = augment.crop_rotate(x, start, extent, flip, angle, 21)[0, 0]
    assert divmod(int(result.argmax()), 21) == (2, 10)  # eight pixels above


def test_a_shift_out_of_the_image_continues_it_by_reflection() -> None:
    x = torch.arange(8.0).expand(1, 1, 8, 8).contiguous()
    start, extent, flip = _whole(1)
    result = augment.crop_rotate(x, start - torch.tensor([0, 0.25]), extent, flip, torch.zeros(1), 8)
    torch.testing.assert_close(result[0, 0, 3], torch.tensor([1.0, 0, 0, 1, 2, 3, 4, 5]), atol=1e-4, rtol=0)


def test_mirroring_is_of_the_rotated_result(images: torch.Tensor) -> None:
    square = images[..., :20].contiguous()
    start, extent, flip = _whole(5)
    result = augment.crop_rotate(square, start, extent, ~flip, torch.full((5,), math.pi / 2), 20)
    torch.testing.assert_close(result, torch.rot90(square, 1, (2, 3)).flip(3), atol=2e-2, rtol=0)
