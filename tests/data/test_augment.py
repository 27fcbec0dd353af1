"""Batch augmentation: the chain against torchvision, its randomness, what capture and compile need."""

from __future__ import annotations

import math

import pytest
import torch
from torchvision.transforms.v2 import functional as reference

from metapretrain.data.augment import AUGMENTATIONS, BatchAugment, make_augmentation
from metapretrain.data.images import normalize
from metapretrain.errors import InputError

MEAN, STD = (0.45, 0.44, 0.41), (0.26, 0.25, 0.27)


def _images(batch: int = 6, channels: int = 3, size: int = 32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (batch, channels, size, size), generator=generator, dtype=torch.uint8)


def _everything(**changes: object) -> BatchAugment:
    settings = {
        "crop_scale": (0.4, 1.0),
        "flip": True,
        "color_jitter": (0.4, 0.4, 0.4, 0.1),
        "jitter_prob": 0.8,
        "grayscale_prob": 0.5,
        "blur_prob": 0.5,
        "cutout": 10,
    }
    return BatchAugment(24, mean=MEAN, std=STD, **(settings | changes))


def _one_image(x: torch.Tensor, p: dict[str, list[float]], box: list[int], augment: BatchAugment) -> torch.Tensor:
    """The chain for one image, one torchvision call after the other; box is (top, left, height, width)."""
    x = reference.resized_crop(x.float() / 255, *box, [augment.size] * 2, antialias=False)
    x = reference.horizontal_flip(x) if p["flip"][0] < 0.5 else x
    x = reference.adjust_brightness(x, p["jitter"][0])
    x = reference.adjust_contrast(x, p["jitter"][1])
    x = reference.adjust_saturation(x, p["jitter"][2])
    x = reference.adjust_hue(x, p["jitter"][3])
    x = reference.rgb_to_grayscale(x, 3) if p["grey"][0] < augment.grayscale_prob else x
    if p["blurred"][0] < augment.blur_prob:
        x = reference.gaussian_blur(x, [augment.kernel_size] * 2, p["sigma"] * 2)
    x = reference.normalize(x, list(MEAN), list(STD))
    top, left = (int(share * augment.size) - augment.cutout // 2 for share in p["cut"])
    x[:, max(top, 0) : max(top + augment.cutout, 0), max(left, 0) : max(left + augment.cutout, 0)] = 0
    return x


@pytest.mark.parametrize("full", [(32, 32), (32, 40)])
def test_the_chain_is_torchvisions_one_image_at_a_time(full: tuple[int, int]) -> None:
    images, augment = _images(16, size=40)[..., : full[0], : full[1]].contiguous(), _everything()
    torch.manual_seed(3)
    drawn = augment.draw(images)
    for name, share in [("flip", 0.5), ("grey", 0.5), ("blurred", 0.5), ("jittered", 0.8)]:
        assert 0 < int((drawn[name] < share).sum()) < 16, f"the seed tries only one branch of {name}"
    # torchvision crops whole pixels: choose boxes that are.
    height = torch.arange(31.0, 15.0, -1)
    width = (height * 1.1).round().clamp(max=full[1])
    room = torch.tensor(full) - torch.stack([height, width], 1)
    corner = (room * drawn["corner"]).round()
    drawn["area"] = (height * width / (full[0] * full[1])).unsqueeze(1)
    drawn["half_log_ratio"] = ((width / height).log() / 2).unsqueeze(1)
    drawn["corner"] = corner / room.clamp_min(1)
    result = augment.apply_parameters(images, drawn)
    for row, x in enumerate(images):
        box = [*corner[row].int().tolist(), int(height[row]), int(width[row])]
        expected = _one_image(x, {name: value[row].tolist() for name, value in drawn.items()}, box, augment)
        torch.testing.assert_close(result[row], expected, atol=2e-3, rtol=0)


@pytest.mark.parametrize("name", AUGMENTATIONS)
@pytest.mark.parametrize("channels", [1, 3])
def test_presets_keep_shape_dtype_and_are_drawn_per_image(name: str, channels: int) -> None:
    images = _images(1, channels).expand(32, -1, -1, -1)
    augment = make_augmentation(name, 32, channels, MEAN[:channels], STD[:channels])
    torch.manual_seed(0)
    first, second = augment(images), augment(images)
    torch.manual_seed(0)
    assert torch.equal(augment(images), first)
    assert first.shape == (32, channels, 32, 32) and first.dtype == torch.float32
    if name == "none":
        assert torch.equal(first, normalize(images, MEAN[:channels], STD[:channels]))
    else:
        assert not torch.equal(first, second)
        assert len(first.flatten(1).unique(dim=0)) == 32


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_small_grey_digits_pass(name: str) -> None:
    result = make_augmentation(name, 8, 1, [0.3], [0.4])(_images(5, 1, 8))
    assert result.shape == (5, 1, 8, 8) and bool(result.isfinite().all())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_as_one_graph_with_the_same_result(backend: str) -> None:
    augment = _everything(rotate=10.0, shift=0.1)
    images = _images()
    compiled = torch.compile(augment, fullgraph=True, backend=backend)
    torch.manual_seed(5)
    expected = augment(images)
    torch.manual_seed(5)
    torch.testing.assert_close(compiled(images), expected)


def test_neither_autocast_nor_memory_format_changes_the_result() -> None:
    augment, images = _everything(), _images()
    torch.manual_seed(5)
    expected = augment(images)
    torch.manual_seed(5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(augment(images), expected)
    torch.manual_seed(5)
    result = _everything(channels_last=True)(images.contiguous(memory_format=torch.channels_last))
    assert result.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(result, expected, atol=1e-4, rtol=0)


def test_no_python_number_is_read_from_the_batch() -> None:
    """On the meta device .item(), bool() and data-dependent shapes raise: what would synchronise on a GPU."""
    augment, images = _everything(rotate=5.0).to("meta"), _images().to("meta")
    assert augment.apply_parameters(images, augment.draw(images)).shape == (6, 3, 24, 24)


def test_drawn_parameters_cover_their_ranges() -> None:
    augment = _everything(rotate=20.0, shift=0.25, crop_scale=(0.3, 0.9))
    torch.manual_seed(0)
    drawn = augment.draw(_images(1).expand(20000, -1, -1, -1))
    half = math.log(4 / 3) / 2
    ranges = {
        "area": (0.3, 0.9),
        "half_log_ratio": (-half, half),
        "angle": (-math.radians(20), math.radians(20)),
        "shift": (-0.25, 0.25),
        "sigma": (0.1, 2.0),
        "corner": (0.0, 1.0),
    }
    for name, (low, high) in ranges.items():
        value = drawn[name]
        assert low - 1e-6 <= float(value.min()) < low + 0.01 * (high - low)
        assert high - 0.01 * (high - low) < float(value.max()) <= high + 1e-6
        assert abs(float(value.mean()) - (low + high) / 2) < 0.02 * (high - low)
    assert len(drawn["corner"].unique(dim=0)) > 19000 < len(drawn["shift"].unique(dim=0))
    factors = drawn["jitter"]
    neutral, strength = torch.tensor([1.0, 1.0, 1.0, 0.0]), torch.tensor([0.4, 0.4, 0.4, 0.1])
    same = factors == neutral
    assert bool((same.any(1) == same.all(1)).all()), "an image is jittered in all four ways or in none"
    assert abs(float(same[:, 0].float().mean()) - 0.2) < 0.02  # jitter_prob 0.8
    torch.testing.assert_close(factors.amax(0), neutral + strength, atol=2e-3, rtol=0)
    torch.testing.assert_close(factors.amin(0), neutral - strength, atol=2e-3, rtol=0)


def test_flip_happens_to_half_and_only_mirrors() -> None:
    images = _images(1).expand(400, -1, -1, -1)
    torch.manual_seed(0)
    result = BatchAugment(32, flip=True, mean=MEAN, std=STD)(images)
    plain = normalize(images[:1], MEAN, STD)
    same = (result - plain).abs().amax((1, 2, 3)) < 1e-3
    mirrored = (result - plain.flip(3)).abs().amax((1, 2, 3)) < 1e-3
    assert bool((same ^ mirrored).all())
    assert 160 < int(same.sum()) < 240


def test_cutout_sets_a_square_to_the_mean() -> None:
    images = torch.zeros(200, 3, 32, 32, dtype=torch.uint8)
    torch.manual_seed(0)
    cut = BatchAugment(32, cutout=12, mean=MEAN, std=STD)(images) == 0
    assert torch.equal(cut[:, 0], cut[:, 2])
    area = cut[:, 0].sum((1, 2))
    assert int(area.max()) == 144 and int(area.min()) >= 36
    assert bool(cut[:, 0].any(0).all()), "every pixel can be cut, the corners too"


def test_another_size_is_resized_without_randomness() -> None:
    images = _images(2, 3, 32)
    result = make_augmentation("none", 16, 3, MEAN, STD)(images)
    expected = reference.resize(images.float() / 255, [16, 16], antialias=False)
    torch.testing.assert_close(result, reference.normalize(expected, list(MEAN), list(STD)), atol=1e-4, rtol=0)


def test_normalize_is_torchvisions() -> None:
    images = _images()
    expected = reference.normalize(images.float() / 255, list(MEAN), list(STD))
    torch.testing.assert_close(normalize(images, MEAN, STD), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"crop_scale": (0.0, 1.0)}, r"crop_scale's low is 0.0; give a number above 0"),
        ({"crop_scale": (0.5, 1.5)}, "crop_scale"),
        ({"crop_ratio": (2.0, 1.0)}, "crop_ratio"),
        ({"color_jitter": (0.4, 0.4, 0.4, 0.6)}, "hue at most 0.5"),
        ({"color_jitter": (0.4, 0.4)}, "four strengths"),
        ({"jitter_prob": 1.5}, "jitter_prob is 1.5; give a number"),
        ({"blur_prob": float("nan")}, "blur_prob"),
        ({"blur_sigma": (0.0, 1.0)}, "blur_sigma"),
        ({"cutout": -1}, "cutout"),
        ({"cutout": 2.5}, "cutout"),
        ({"rotate": -5.0}, "rotate"),
        ({"shift": 2.0}, "shift"),
    ],
)
def test_settings_out_of_range_are_one_line(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        _everything(**changes)
    assert "\n" not in str(error.value)


def test_bad_names_sizes_and_statistics_are_one_line() -> None:
    with pytest.raises(InputError, match="did you mean 'strong'"):
        make_augmentation("stong", 8, 3, MEAN, STD)
    with pytest.raises(InputError, match="did you mean 'cutout'"):
        make_augmentation("strong", 8, 3, MEAN, STD, cutuot=3)
    with pytest.raises(InputError, match="mean must have 1 values"):
        make_augmentation("strong", 8, 1, MEAN, STD)
    with pytest.raises(InputError, match="size is 0; give a whole number"):
        BatchAugment(0, mean=MEAN, std=STD)
    with pytest.raises(InputError, match="std must be positive"):
        BatchAugment(8, mean=MEAN, std=(1.0, 0.0, 1.0))
    with pytest.raises(InputError, match="1 or 3 values, got 2 and 3"):
        normalize(_images(), (0.1, 0.2), STD)


def test_batches_that_do_not_fit_are_one_line() -> None:
    augment = make_augmentation("plain", 8, 3, MEAN, STD)
    with pytest.raises(InputError, match=r"uint8 images \(B, 3, H, W\), got torch.float32"):
        augment(torch.rand(2, 3, 8, 8))
    with pytest.raises(InputError, match=r"got torch.uint8 \(6, 1, 32, 32\)"):
        augment(_images(channels=1))
    with pytest.raises(InputError, match=r"images are on meta, the augmentation on cpu: move it with .to"):
        augment(_images().to("meta"))


def test_a_box_that_does_not_fit_is_narrowed() -> None:
    images, augment = _images(1), BatchAugment(32, crop_scale=(1.0, 1.0), mean=MEAN, std=STD)
    half = torch.tensor([[math.log(32 / 28)]])  # 28 high and 32 * 32 / 28 wide
    drawn = {"area": torch.ones(1, 1), "half_log_ratio": half, "corner": torch.tensor([[0.5, 0.5]])}
    result = augment.apply_parameters(images, drawn)[0]
    expected = reference.resized_crop(images[0].float() / 255, 2, 0, 28, 32, [32, 32], antialias=False)
    torch.testing.assert_close(result, reference.normalize(expected, list(MEAN), list(STD)), atol=2e-3, rtol=0)


def test_a_shift_moves_the_picture_down_and_right() -> None:
    images, augment = _images(1), BatchAugment(32, shift=0.5, mean=MEAN, std=STD)
    drawn = {"angle": torch.zeros(1, 1), "shift": torch.tensor([[4 / 32, 8 / 32]])}
    result = augment.apply_parameters(images, drawn)
    expected = normalize(images, MEAN, STD)[:, :, :-4, :-8]
    torch.testing.assert_close(result[:, :, 4:, 8:], expected, atol=2e-3, rtol=0)


@pytest.mark.parametrize(("size", "kernel"), [(8, 3), (32, 3), (64, 7), (96, 9), (224, 23)])
def test_the_blur_is_a_tenth_of_the_image_wide(size: int, kernel: int) -> None:
    assert make_augmentation("simclr", size, 3, MEAN, STD).kernel_size == kernel


def test_a_padded_crop_is_torchvisions_at_whole_pixels() -> None:
    augment, images = BatchAugment(32, pad=4, flip=True, mean=MEAN, std=STD), _images(64)
    torch.manual_seed(0)
    drawn = augment.draw(images)
    found = augment.apply_parameters(images, drawn)
    corners = (drawn["pad"] * 9).long()
    for x, (top, left), flip, z in zip(images, corners.tolist(), drawn["flip"], found, strict=True):
        expected = reference.crop(reference.pad(x, [4] * 4), top, left, 32, 32)
        expected = reference.horizontal_flip(expected) if flip < 0.5 else expected
        torch.testing.assert_close(z, reference.normalize(expected / 255, list(MEAN), list(STD)))
    assert corners.unique().tolist() == list(range(9)) and 0 < int((drawn["flip"] < 0.5).sum()) < 64
    assert found.is_contiguous(memory_format=torch.channels_last)
    turned = BatchAugment(32, pad=4, rotate=10.0, flip=True, mean=MEAN, std=STD)(images)
    assert turned.shape == images.shape and bool(turned.isfinite().all())
    with pytest.raises(InputError, match="pad is -1"):
        BatchAugment(32, pad=-1, mean=MEAN, std=STD)
