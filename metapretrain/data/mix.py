"""MixUp (Zhang et al., 2018) and CutMix (Yun et al., 2019) of a batch on its device."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from metapretrain.data.image_ops import box_mask, per_image
from metapretrain.errors import InputError, one_of

KINDS = ("mixup", "cutmix")


def mix(x: Tensor, y: Tensor, alpha: float, kind: str = "mixup") -> tuple[Tensor, Tensor]:
    """Mix each image and its label with another of the batch, with a share of its own.

    An image keeps the share lambda ~ Beta(alpha, alpha). MixUp: lambda * x + (1 - lambda) * partner. CutMix:
    a box of (1 - lambda) of the area, centred anywhere and cut off at the border, is taken from the partner,
    and the label's share is the area that is really kept. Partners are a random permutation. Static shapes,
    no synchronisation, randomness from the device's default generator.

    Args:
        x: float images (B, C, H, W).
        y: float labels (B, classes), one-hot or soft.
        alpha: > 0; 1 draws lambda uniformly.
        kind: "mixup" or "cutmix".

    Returns:
        mixed images (B, C, H, W) and soft labels (B, classes), whose rows keep their sum.

    Raises:
        InputError: unknown kind, alpha not positive, or x and y that do not fit together.

    Example:
        >>> x, y = mix(torch.rand(4, 3, 8, 8), torch.eye(4), 1.0, "cutmix")
        >>> x.shape, y.sum(1).round(decimals=4).tolist()
        (torch.Size([4, 3, 8, 8]), [1.0, 1.0, 1.0, 1.0])
    """
    one_of("mix", kind, KINDS)
    if not (math.isfinite(alpha) and alpha > 0):
        raise InputError(f"mix alpha must be a positive number, got {alpha!r}")
    if (
        x.ndim != 4
        or y.ndim != 2
        or len(x) != len(y)
        or not (x.is_floating_point() and y.is_floating_point())
    ):
        raise InputError(
            "mix takes float images (B, C, H, W) and float labels (B, classes), "
            f"got {x.dtype} {tuple(x.shape)} and {y.dtype} {tuple(y.shape)}"
        )
    uniform = torch.rand(3, len(x), device=x.device)
    partner = uniform[0].argsort()
    # Two gammas of one rate give the Beta share; torch's own Beta cannot be compiled.
    shape = torch.full((2, len(x)), float(alpha), device=x.device)
    first, second = torch.distributions.Gamma(shape, torch.ones_like(shape), validate_args=False).sample()
    kept = first / (first + second)
    if kind == "mixup":
        mixed = torch.lerp(x[partner], x, per_image(kept).to(x.dtype))
    else:
        mask = cutmix_mask(kept, uniform[1:].T, (x.shape[2], x.shape[3]))
        mixed = torch.where(mask, x[partner], x)
        kept = 1 - mask.float().mean((1, 2, 3))
    return mixed, torch.lerp(y[partner], y, kept.unsqueeze(1).to(y.dtype))


def cutmix_mask(kept: Tensor, centre: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return CutMix's bool mask (B, 1, H, W), True where the partner is pasted.

    Args:
        kept: share of the area (B,) that is kept when the box lies inside.
        centre: of the box (B, 2), row and column as shares 0..1 of the image.
        shape: (H, W) in pixels.
    """
    # The lengths are made on the device: copying two numbers to it would synchronise.
    lengths = torch.linspace(shape[0], shape[1], 2, device=kept.device)
    extent = ((1 - kept).clamp_min(0).sqrt().unsqueeze(1) * lengths).floor()
    start = (centre * lengths).floor() - (extent / 2).floor()
    return box_mask(start, extent, shape)
