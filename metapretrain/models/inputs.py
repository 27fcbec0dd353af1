"""Images in the forms that users have them, as the models take them."""

from __future__ import annotations

import torch
from torch import Tensor

from metapretrain.data.images import resize
from metapretrain.errors import InputError


def as_uint8(images: Tensor, channels: int, image_size: int) -> Tensor:
    """Return uint8 images (N, channels, image_size, image_size); colour becomes grey or the other way round.

    Args:
        images: uint8 (N, 1 or 3, H, W), or float in 0..1.

    Raises:
        InputError: another shape or type, or float outside 0..1.

    Example:
        >>> as_uint8(torch.ones(2, 3, 8, 8), channels=1, image_size=4).unique().tolist()
        [255]
    """
    if check_tensor(images).ndim != 4 or images.shape[1] not in (1, 3) or not min(images.shape[2:]):
        raise InputError(f"images must be (N, 1 or 3, H, W), got {tuple(images.shape)}")
    if images.is_floating_point():
        if not bool(((images >= 0) & (images <= 1)).all()):
            raise InputError("float images must lie in 0..1, without NaN; give 0..255 as uint8")
        images = (images * 255).round().clamp(0, 255).to(torch.uint8)
    if images.dtype != torch.uint8:
        raise InputError(f"images must be uint8 in 0..255 or float in 0..1, got {images.dtype}")
    if images.shape[1] != channels:
        images = images.expand(-1, 3, -1, -1) if channels == 3 else _grey(images)
    return resize(images, image_size)


def check_tensor(images: Tensor) -> Tensor:
    """Return `images`.

    Raises:
        InputError: it is not a tensor.
    """
    if not isinstance(images, Tensor):
        raise InputError(f"images must be a torch tensor (N, 1 or 3, H, W), got {type(images).__name__}")
    return images


def _grey(images: Tensor) -> Tensor:
    weights = torch.tensor([0.299, 0.587, 0.114], device=images.device).view(1, 3, 1, 1)
    return (images.float() * weights).sum(1, keepdim=True).round().to(torch.uint8)
