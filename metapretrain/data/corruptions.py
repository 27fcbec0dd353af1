"""Standard corruptions of test images, after Hendrycks and Dietterich (2019), ImageNet-C.

The strengths are the paper's for 224 pixels. Those that are lengths (blur widths) shrink with the image, by
size / 224 (but not below 32 / 224), so that the same share of the picture is lost. The blurs are a Gaussian, a disk and
a straight line without the paper's further smoothing, so figures compare within this package only.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from metapretrain.draws import torch_generator
from metapretrain.errors import InputError, one_of

SEVERITIES = (1, 2, 3, 4, 5)
CHUNK = 256  # images corrupted at a time; the noise depends on it
PAPER_SIZE = 224
SMALLEST_SIZE = 32  # blurs of smaller images are those of this size: shorter than a pixel they would do nothing


def corrupt(images: Tensor, name: str, severity: int, seed: int = 0) -> Tensor:
    """Return corrupted copies of images uint8 (N, 1 or 3, H, W), computed on the CPU.

    `name` is one of :data:`CORRUPTIONS`, `severity` 1 (weak) to 5 (strong), `seed` that of the noise.

    Raises:
        InputError: unknown name (with the nearest), severity not 1..5, or images of another dtype or shape.

    Example:
        >>> grey = torch.full((1, 3, 8, 8), 100, dtype=torch.uint8)
        >>> corrupt(grey, "brightness", 2).unique().tolist()
        [151]
    """
    one_of("corruption", name, CORRUPTIONS)
    if isinstance(severity, bool) or severity not in SEVERITIES:
        raise InputError(f"severity must be an integer from 1 to 5, got {severity!r}")
    if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] not in (1, 3):
        raise InputError(f"corruption takes uint8 images (N, 1 or 3, H, W), got {images.dtype} {tuple(images.shape)}")
    generator = torch_generator(seed)
    result = torch.empty_like(images, device="cpu")
    for start in range(0, len(images), CHUNK):
        x = images[start : start + CHUNK].cpu().float().div_(255)
        y = _CORRUPTIONS[name](x, int(severity) - 1, generator)
        result[start : start + CHUNK] = y.mul_(255).round_().clamp_(0, 255).to(torch.uint8)
    return result.to(images.device)


def _gaussian_noise(x: Tensor, level: int, generator: torch.Generator) -> Tensor:
    return x + (0.08, 0.12, 0.18, 0.26, 0.38)[level] * torch.randn(x.shape, generator=generator)


def _shot_noise(x: Tensor, level: int, generator: torch.Generator) -> Tensor:
    photons = (60, 25, 12, 5, 3)[level]
    return torch.poisson(x * photons, generator=generator) / photons


def _impulse_noise(x: Tensor, level: int, generator: torch.Generator) -> Tensor:
    share = (0.03, 0.06, 0.09, 0.17, 0.27)[level]
    u = torch.rand(x.shape, generator=generator)
    return torch.where(u < share / 2, 0.0, torch.where(u < share, 1.0, x))


def _gaussian_blur(x: Tensor, level: int, generator: torch.Generator) -> Tensor:
    sigma = _pixels(x, (1, 2, 3, 4, 6)[level])
    reach = math.ceil(4 * sigma)
    edges = torch.arange(-reach, reach + 2) - 0.5
    line = torch.special.ndtr(edges / sigma).diff()  # the Gaussian's share of each pixel
    line = line / line.sum()
    return _filter(_filter(x, line.view(1, -1)), line.view(-1, 1))


def _defocus_blur(x: Tensor, level: int, generator: torch.Generator) -> Tensor:
    radius = _pixels(x, (3, 4, 6, 8, 10)[level])
    offsets = torch.arange(-math.ceil(radius), math.ceil(radius) + 1).float()
    distance = torch.hypot(offsets.view(-1, 1), offsets.view(1, -1))
    disk = (radius + 0.5 - distance).clamp(0, 1)  # the rim's pixels count by the part that is covered
    return _filter(x, disk / disk.sum())


def _motion_blur(x: Tensor, level: int, generator: torch.Generator) -> Tensor:
    length = _pixels(x, (10, 15, 20, 25, 30)[level])
    angle = (torch.rand(len(x), 1, 1, generator=generator) - 0.5) * math.pi / 2  # -45..45 degrees
    reach = math.ceil(length / 2)
    offsets = torch.arange(-reach, reach + 1).float()
    along = angle.cos() * offsets + angle.sin() * offsets.view(-1, 1)
    across = angle.cos() * offsets.view(-1, 1) - angle.sin() * offsets
    line = (1 - across.abs()).clamp_min(0) * (length / 2 + 0.5 - along.abs()).clamp(0, 1)
    return _filter(x, line / line.sum((1, 2), keepdim=True))


def _brightness(x: Tensor, level: int, generator: torch.Generator) -> Tensor:
    """Raise HSV's value: hue and saturation stay, so the channels grow in proportion to their maximum."""
    value = x.amax(1, keepdim=True)
    raised = (value + (0.1, 0.2, 0.3, 0.4, 0.5)[level]).clamp_max(1)
    return torch.where(value > 0, x * (raised / value.clamp_min(1e-6)), raised)


def _contrast(x: Tensor, level: int, generator: torch.Generator) -> Tensor:
    mean = x.mean((2, 3), keepdim=True)
    return mean + (0.4, 0.3, 0.2, 0.1, 0.05)[level] * (x - mean)


def _fog(x: Tensor, level: int, generator: torch.Generator) -> Tensor:
    """Add a cloud (fractal noise, scaled to 0..1) and bring the brightest pixel back to where it was."""
    thickness, roughness = ((1.5, 2), (2.0, 2), (2.5, 1.7), (2.5, 1.5), (3.0, 1.4))[level]
    cloud = torch.zeros(len(x), 1, *x.shape[2:])
    cells = 1
    while cells < max(x.shape[2:]):
        cells *= 2
        octave = torch.rand(len(x), 1, cells, cells, generator=generator)
        smooth = functional.interpolate(octave, x.shape[2:], mode="bilinear")
        cloud += smooth * roughness ** (1 - math.log2(cells))
    low, high = cloud.amin((2, 3), keepdim=True), cloud.amax((2, 3), keepdim=True)
    cloud = (cloud - low) / (high - low).clamp_min(1e-6)
    brightest = x.amax((1, 2, 3), keepdim=True)
    return (x + thickness * cloud) * brightest / (brightest + thickness)


def _pixelate(x: Tensor, level: int, generator: torch.Generator) -> Tensor:
    from PIL import Image

    share = (0.6, 0.5, 0.4, 0.3, 0.25)[level]
    full = (x.shape[3], x.shape[2])
    small = (max(1, int(full[0] * share)), max(1, int(full[1] * share)))
    box = Image.Resampling.BOX
    return _with_pillow(x, lambda image: image.resize(small, box).resize(full, box))


def _jpeg(x: Tensor, level: int, generator: torch.Generator) -> Tensor:
    from PIL import Image

    def compress(image: Any) -> Any:
        stream = io.BytesIO()
        image.save(stream, "JPEG", quality=(25, 18, 15, 10, 7)[level])
        return Image.open(stream, formats=["JPEG"])

    return _with_pillow(x, compress)


def _with_pillow(x: Tensor, change: Callable[[Any], Any]) -> Tensor:
    from PIL import Image

    def changed(pixels: Any) -> Tensor:
        image = Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)
        return torch.from_numpy(np.array(change(image)).reshape(pixels.shape))

    pixels = x.mul(255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous().numpy()
    with ThreadPoolExecutor() as pool:
        return torch.stack(list(pool.map(changed, pixels))).permute(0, 3, 1, 2).float().div_(255)


def _pixels(x: Tensor, length: float) -> float:
    """A length at the paper's size in pixels of these images."""
    return length * max(SMALLEST_SIZE, x.shape[2], x.shape[3]) / PAPER_SIZE


def _filter(x: Tensor, kernel: Tensor) -> Tensor:
    """Correlate each image with a kernel (h, w), or one an image (N, h, w); borders are replicated."""
    batch, channels = x.shape[:2]
    height, width = kernel.shape[-2:]
    weight = kernel.expand(batch, height, width).repeat_interleave(channels, 0).unsqueeze(1)
    padded = functional.pad(x, (width // 2, width // 2, height // 2, height // 2), mode="replicate")
    planes = padded.reshape(1, batch * channels, *padded.shape[2:])
    return functional.conv2d(planes, weight, groups=batch * channels).view(x.shape)


_CORRUPTIONS: dict[str, Callable[[Tensor, int, torch.Generator], Tensor]] = {
    "gaussian-noise": _gaussian_noise,
    "shot-noise": _shot_noise,
    "impulse-noise": _impulse_noise,
    "gaussian-blur": _gaussian_blur,
    "defocus-blur": _defocus_blur,
    "motion-blur": _motion_blur,
    "brightness": _brightness,
    "contrast": _contrast,
    "fog": _fog,
    "pixelate": _pixelate,
    "jpeg": _jpeg,
}
CORRUPTIONS: tuple[str, ...] = tuple(_CORRUPTIONS)
