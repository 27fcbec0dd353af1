"""A set of images in memory with its labels, fixed splits of it, normalisation, and the digits of scikit-learn."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from metapretrain.checks import whole
from metapretrain.draws import philox_generator
from metapretrain.errors import InputError, one_of

Labels = Tensor | Sequence[int] | np.ndarray[Any, Any]


def validation_split(labels: Labels, size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Split the rows of a labelled set into a training and a validation part, stratified by class.

    Each class gives its share of `size` (largest remainders; ties to the lower class). `seed` is of the split itself:
    leave it alone to compare runs. Returns train rows (N - size,) and validation rows (size,), int64, ascending.
    Raises InputError: labels are not integers (N,), have a -1, or `size` leaves nothing (of a class) to train on.
    """
    y = labels.cpu().numpy() if isinstance(labels, Tensor) else np.asarray(labels)
    if y.ndim != 1 or not np.issubdtype(y.dtype, np.integer):
        raise InputError(f"labels must be integers (N,), got {y.dtype} {y.shape}")
    size = whole("validation size", size, 0, max(len(y) - 1, 0))
    if len(y) and y.min() < 0:
        raise InputError(f"cannot split: {int((y < 0).sum())} of {len(y)} rows have no label")
    classes, counts = np.unique(y, return_counts=True)
    quota = size * counts / max(len(y), 1)
    take = np.floor(quota).astype(np.int64)
    largest = np.argsort(-(quota - take), kind="stable")[: size - int(take.sum())]
    take[largest] += 1
    if size and (take >= counts).any():
        bad = classes[np.argmax(take >= counts)]
        raise InputError(f"validation size {size} leaves no training row of class {bad}; lower it or add rows")
    random = philox_generator(seed)
    held = np.zeros(len(y), dtype=bool)
    for label, amount in zip(classes, take, strict=True):
        rows = np.flatnonzero(y == label)
        held[rows[random.random(len(rows)).argsort(kind="stable")[:amount]]] = True
    return torch.from_numpy(np.flatnonzero(~held)), torch.from_numpy(np.flatnonzero(held))


UNLABELLED = -1
LIGHT_ON_DARK = "light-on-dark"  # the polarity of drawings whose ink is 255 and whose paper is 0


@dataclass(frozen=True)
class ImageSet:
    """Images of one split with labels, class names and the checksums of the files they came from.

    Attributes:
        images: uint8 (N, C, H, W).
        labels: int64 (N,), 0..len(classes)-1, or -1 for a row without label.
        polarity: :data:`LIGHT_ON_DARK` for drawings that a model is always to see so; None: as they are.
        names: of the images' files below the folder; empty where there are none.
        files: ``{name: {"bytes": int, "md5": str, "official": True | False | None}}``; None: no official checksum.

    Raises InputError: wrong dtype or shape, another number of labels than images, or a label outside the classes.

    Example:
        >>> rows = ImageSet(torch.zeros(2, 1, 8, 8, dtype=torch.uint8), torch.tensor([0, 1]), ["a", "b"])
        >>> len(rows), rows.channels, rows.image_size, len(rows.subset([1]))
        (2, 1, 8, 1)
    """

    images: Tensor
    labels: Tensor
    classes: list[str]
    name: str = "images"
    split: str = "train"
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    polarity: str | None = None
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        images, labels = (f"{given.dtype} {tuple(given.shape)}" for given in (self.images, self.labels))
        if self.images.dtype != torch.uint8 or self.images.ndim != 4:
            raise InputError(f"{self.name}: images must be uint8 (N, C, H, W), got {images}")
        if self.labels.dtype != torch.int64 or self.labels.ndim != 1:
            raise InputError(f"{self.name}: labels must be int64 (N,), got {labels}")
        if len(self.images) != len(self.labels):
            raise InputError(f"{self.name}: {len(self.images)} images but {len(self.labels)} labels")
        if self.labels.device.type == "cpu" and len(self.labels):
            low, high = int(self.labels.min()), int(self.labels.max())
            if low < UNLABELLED or high >= len(self.classes):
                allowed = f"0..{len(self.classes) - 1} (or -1 for no label)"
                raise InputError(f"{self.name}: labels must lie in {allowed}, got {low}..{high}")

    def __len__(self) -> int:
        return len(self.images)

    @property
    def channels(self) -> int:
        return self.images.shape[1]

    @property
    def image_size(self) -> int:
        return self.images.shape[2]

    def to(self, device: torch.device | str) -> ImageSet:
        return replace(self, images=self.images.to(device), labels=self.labels.to(device))

    def subset(self, index: Tensor | Sequence[int] | np.ndarray[Any, Any]) -> ImageSet:
        rows = torch.as_tensor(index, device=self.images.device)
        if rows.dtype != torch.bool:
            rows = rows.long()
        names = tuple(np.array(self.names)[rows.cpu().numpy()].tolist()) if self.names else ()
        return replace(self, images=self.images[rows], labels=self.labels[rows], names=names)

    def require_labels(self) -> ImageSet:
        """Return the set itself, or raise InputError where a row has no label (-1)."""
        missing = int((self.labels == UNLABELLED).sum())
        if missing:
            told = f"{self.name} {self.split}: {missing} of {len(self)} images have no label"
            raise InputError(f"{told}; use a labelled split for labelled training")
        return self

    def statistics(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return (mean, std) of each channel in 0..1 units, over all pixels of all images."""
        if not len(self):
            raise InputError(f"{self.name} {self.split}: an empty set has no mean")
        total = torch.zeros(self.channels, dtype=torch.float64, device=self.images.device)
        squares = torch.zeros_like(total)
        for part in self.images.chunk(max(1, len(self.images) // 256)):
            values = part.float().div_(255)
            total += values.sum((0, 2, 3), dtype=torch.float64)
            squares += values.square_().sum((0, 2, 3), dtype=torch.float64)
        count = self.images.numel() / self.channels
        mean = total / count
        std = (squares / count - mean.square()).clamp_min(0).sqrt()
        return tuple(mean.tolist()), tuple(std.tolist())


def light_on_dark(images: Tensor) -> Tensor:
    """Images uint8 (N, C, H, W), those of dark ink on light paper inverted; paper is the median of the border."""
    border = torch.cat([images[..., 0, :], images[..., -1, :], images[..., 0], images[..., -1]], -1)
    border, mean = border.flatten(1).float().sort(1).values, images.flatten(1).float().mean(1)
    paper = border[:, (border.shape[1] - 1) // 2]  # the lower median; ONNX has a sort and no median
    light = (paper > mean) | ((paper == mean) & (paper > 127))  # bright or dim, and blank paper too
    return torch.where(light.view(-1, 1, 1, 1), 255 - images, images)


def resize(images: Tensor, image_size: int) -> Tensor:
    """Return uint8 images (N, C, H, W), cut to a square about the centre, at `image_size`: bilinear, antialiased."""
    whole("image size", image_size, 1)
    height, width = images.shape[-2:]
    if height == width == image_size:
        return images
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    images = images[..., top : top + side, left : left + side]
    if side == image_size:
        return images
    if not len(images):
        return images.new_empty((0, images.shape[1], image_size, image_size))
    shape = (image_size, image_size)
    parts = [
        torch.nn.functional.interpolate(part.float(), shape, mode="bilinear", antialias=True)
        for part in images.chunk(max(1, len(images) // 512))
    ]
    return torch.cat([part.round_().clamp_(0, 255).to(torch.uint8) for part in parts])


def resized(images: ImageSet, image_size: int | None) -> ImageSet:
    """Return the set with its images at `image_size` pixels (None: as they are)."""
    return images if image_size is None else replace(images, images=resize(images.images, image_size))


def file_record(path: Path, official_md5: str | None) -> dict[str, Any]:
    """Return ``{"bytes", "md5", "official"}`` of a file; official is None without an official checksum."""
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as stream:
        while block := stream.read(1 << 22):
            digest.update(block)
    md5 = digest.hexdigest()
    return {"bytes": path.stat().st_size, "md5": md5, "official": None if official_md5 is None else md5 == official_md5}


def normalize(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Return uint8 images (B, C, H, W) as float32, (x / 255 - mean) / std: the transform of evaluation.

    Raises InputError: mean or std do not have C values, or a std is not positive.
    """
    scale, offset = normalisation(mean, std)
    if images.ndim != 4 or images.shape[1] != len(scale):
        raise InputError(f"images (B, {len(scale)}, H, W) expected for this mean, got {tuple(images.shape)}")
    return torch.addcmul(offset.to(images.device), images.float(), scale.to(images.device))


def normalisation(mean: Sequence[float], std: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Return (scale, offset), each (C, 1, 1), that take 0..255 to normalised values in one multiply-add."""
    if len(mean) != len(std) or len(mean) not in (1, 3):
        raise InputError(f"mean and std must both have 1 or 3 values, got {len(mean)} and {len(std)}")
    if not all(value > 0 and math.isfinite(value) for value in std):
        raise InputError(f"std must be positive, got {tuple(std)}")
    if not all(math.isfinite(value) for value in mean):
        raise InputError(f"mean must be finite, got {tuple(mean)}")
    deviation = torch.tensor(std, dtype=torch.float64).view(-1, 1, 1)
    centre = torch.tensor(mean, dtype=torch.float64).view(-1, 1, 1)
    return (1 / (255 * deviation)).float(), (-centre / deviation).float()


DIGITS_SPLITS = ("train", "test")
DIGITS_TEST = 450


def load_digits_images(split: str) -> ImageSet:
    """Return the digits as images uint8 (N, 1, 8, 8) with labels 0..9; no file or network is needed.

    The 1,797 digits are divided once and for all into 1,347 training and 450 test images, stratified by class. The
    source's grey levels 0..16 are stretched to 0..255.

    Example:
        >>> digits = load_digits_images("test")
        >>> len(digits), tuple(digits.images.shape[1:]), digits.classes[:2]
        (450, (1, 8, 8), ['0', '1'])
    """
    from sklearn.datasets import load_digits

    one_of("split", split, DIGITS_SPLITS)
    source = load_digits()
    pixels = np.round(source.images * (255 / 16)).astype(np.uint8)[:, None]
    labels = torch.from_numpy(source.target.astype(np.int64))
    rows = validation_split(labels, DIGITS_TEST)[DIGITS_SPLITS.index(split)]
    classes = [str(name) for name in source.target_names]
    images = torch.from_numpy(pixels)[rows]
    return ImageSet(images, labels[rows], classes, "digits", split, polarity=LIGHT_ON_DARK)
