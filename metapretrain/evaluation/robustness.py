"""Test images corrupted after Hendrycks and Dietterich (2019), ImageNet-C, and how much accuracy models lose on them.

The strengths are the paper's for 224 pixels. Those that are lengths (blur widths) shrink with the image, by
size / 224 (but not below 32 / 224), so that the same share of the picture is lost. The blurs are a Gaussian, a disk and
a straight line without the paper's further smoothing, so figures compare within this package only.
"""

import io
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from metapretrain.checks import whole
from metapretrain.data.images import ImageSet
from metapretrain.draws import torch_generator
from metapretrain.errors import InputError, one_of
from metapretrain.evaluation.metrics import reliability
from metapretrain.evaluation.representation import accuracy, subsample
from metapretrain.files import json_bytes, read_json, write_file
from metapretrain.nests import evaluation_mode

CHUNK = 256  # images corrupted at a time; the noise depends on it
PAPER_SIZE = 224
SMALLEST_SIZE = 32  # blurs of smaller images are those of this size: shorter than a pixel they would do nothing


def corrupt(images: Tensor, name: str, severity: int, seed: int = 0) -> Tensor:
    """Return corrupted copies of images uint8 (N, 1 or 3, H, W), computed on the CPU.

    `name` is one of :data:`CORRUPTIONS`, `severity` 1 (weak) to 5 (strong), `seed` that of the noise.
    Raises InputError: unknown name (with the nearest), severity not 1..5, or images of another dtype or shape.

    Example:
        >>> grey = torch.full((1, 3, 8, 8), 100, dtype=torch.uint8)
        >>> corrupt(grey, "brightness", 2).unique().tolist()
        [151]
    """
    one_of("corruption", name, CORRUPTIONS)
    whole("severity", severity, 1, 5)
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


SEVERITIES = (1, 3, 5)
MOST = 1000  # test images that are corrupted, a part fixed by the seed where there are more

Predict = Callable[[Tensor], Tensor]


class CorruptedImages:
    """Every corruption, in `severities` of 1..5, of at most `most` images; made once: 1 GB for 1,000 of STL-10."""

    def __init__(
        self, images: ImageSet, severities: Sequence[int] = SEVERITIES, most: int = MOST, seed: int = 0
    ) -> None:
        images.require_labels()
        if not len(images) or not severities:
            raise InputError(f"corruption needs images and severities, got {len(images)} and {list(severities)}")
        self.clean = images.subset(subsample(len(images), most, seed))
        self.severities, self.seed = tuple(severities), seed
        self._made: dict[tuple[str, int], Tensor] = {}

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name of a corruption and its images uint8 (N, C, H, W), once per severity."""
        for name in CORRUPTIONS:
            for severity in self.severities:
                if (name, severity) not in self._made:
                    self._made[name, severity] = corrupt(self.clean.images, name, severity, self.seed)
                yield name, self._made[name, severity]

    def score(self, predict: Predict) -> dict[str, float]:
        """Return accuracies (0..1) of `predict`, uint8 (N, C, H, W) to classes (N,).

        `corrupt_<name>_accuracy` is the mean over severities, `corrupt_accuracy` the mean of those over corruptions,
        `corrupt_clean_accuracy` that of the same images as they are.
        """
        labels = self.clean.labels
        shares: dict[str, list[float]] = {}
        with evaluation_mode(predict):
            for name, images in self:
                shares.setdefault(name, []).append(accuracy(predict(images), labels))
            clean = accuracy(predict(self.clean.images), labels)
        means = {name: sum(values) / len(values) for name, values in shares.items()}
        scores = {f"corrupt_{name.replace('-', '_')}_accuracy": value for name, value in means.items()}
        return {"corrupt_accuracy": sum(means.values()) / len(means), "corrupt_clean_accuracy": clean, **scores}


def corrupt_runs(
    root: Path | str, images: Callable[[str, int], ImageSet], device: str | torch.device = "cpu"
) -> Iterator[tuple[Path, dict[str, float]]]:
    """Add accuracies under corruption and calibration to the result of every finished run below `root` without them.

    `images` gives the test images of a dataset in a size in pixels. Yields each run's folder and its new metrics.
    Raises InputError: no finished run, a damaged one, or one whose data or classes are not those of the images.
    """
    from metapretrain.models.saved import load

    runs = sorted(path.parent for path in Path(root).rglob("result.json"))
    results = {run: read_json(run / "result.json") or {} for run in runs}
    rows = [run for run, result in results.items() if result.get("kind", "row") == "row"]
    if not rows:
        raise InputError(f"no finished run in {root}; name a run's folder or one with runs below it")
    tests: dict[tuple[str, int], ImageSet] = {}
    corrupted: dict[tuple[str, int], CorruptedImages] = {}
    for run in rows:
        result: dict[str, Any] = results[run]
        if {"corrupt_accuracy", "calibration_error"} <= result.get("metrics", {}).keys():
            continue
        model = load(run, device)
        key = (result["dataset"], model.image_size)
        if key not in corrupted:
            tests[key] = images(*key)
            corrupted[key] = CorruptedImages(tests[key])
        part, test = corrupted[key], tests[key]
        tested, read = result.get("data") or {}, part.clean.files
        other = [name for name in sorted(tested.keys() & read.keys()) if tested[name]["md5"] != read[name]["md5"]]
        if other:
            raise InputError(f"{run}: was tested on another {other[0]} than the one given now (checksums differ)")
        if part.clean.classes != model.classes:
            raise InputError(f"{run}: trained on classes {model.classes}, the images have {part.clean.classes}")
        model.polarity = None  # these images have that of the training; fog on a drawing may look like paper
        bins = reliability(model.probabilities(test.images).cpu(), test.labels.cpu())
        scores = part.score(model.predict)
        scores["calibration_error"] = float(abs(bins[1] - bins[2]).sum() / bins[0].sum())
        result["reliability"] = dict(zip(("rows", "confidence", "right"), bins.tolist(), strict=True))
        result["metrics"] |= scores
        result["corrupt"] = {"images": len(part.clean), "severities": list(part.severities), "seed": part.seed}
        write_file(run / "result.json", json_bytes(result))
        yield run, scores
