"""Normalisation of uint8 images by the mean and standard deviation of each channel."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from metapretrain.errors import InputError


def normalize(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Return uint8 images (B, C, H, W) as float32, (x / 255 - mean) / std: the transform of evaluation.

    Raises:
        InputError: mean or std do not have C values, or a std is not positive.

    Example:
        >>> normalize(torch.full((1, 1, 1, 1), 0, dtype=torch.uint8), [0.5], [0.25]).item()
        -2.0
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
