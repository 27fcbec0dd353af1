"""The check of a batch's labels where it costs nothing: on the CPU, in the loader."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from metapretrain.errors import InputError, one_of

MODES = ("standard", "query")


def check_labels(
    y: Tensor | Sequence[int] | Any, *, mode: str = "standard", num_classes: int | None = None
) -> Tensor:
    """Check that the prototypical loss can use these labels, and return them as int64 (B,).

    The loss itself never looks at label values, because that would wait for the device.

    Args:
        y: (B,) whole numbers on the CPU: tensor, array or list. With `gather=True`, those of all ranks
            together.
        mode: the loss's mode.
        num_classes: the loss's num_classes; when given, labels are 0..num_classes-1.

    Raises:
        InputError: not one-dimensional, empty, not whole numbers, not on the CPU, outside 0..num_classes-1;
            in query mode, fewer than 2 rows or no class with 2 examples (no query could have a prototype).

    Example:
        >>> check_labels([3, 3, 8], mode="query").tolist()
        [3, 3, 8]
        >>> check_labels([0, 1, 2], mode="query")
        Traceback (most recent call last):
        ...
        metapretrain.errors.InputError: every class of the batch has one example (3 rows, 3 classes), so in \
query mode no query has a prototype; use larger or class-balanced batches, or mode="standard"
    """
    one_of("mode", mode, MODES)
    try:
        labels = torch.as_tensor(y)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"labels are a {type(y).__name__} that makes no tensor; give whole numbers (B,)") from None
    if labels.device.type != "cpu":
        raise InputError(f"labels are on {labels.device}; check them on the CPU, before they are moved")
    if labels.dim() != 1 or labels.numel() == 0:
        raise InputError(f"labels have shape {tuple(labels.shape)}; give (B,) with B at least 1")
    if labels.is_floating_point() or labels.is_complex():
        raise InputError(f"labels are {labels.dtype}; give whole numbers, for example y.long()")
    labels = labels.long()
    if num_classes is not None:
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= num_classes:
            raise InputError(
                f"labels run from {low} to {high} but num_classes={num_classes} allows 0 to "
                f"{num_classes - 1}; raise num_classes, or leave unlabelled rows (-1) out"
            )
    if mode == "query":
        classes = int(torch.unique(labels).numel())
        if classes == len(labels):
            raise InputError(
                f"every class of the batch has one example ({len(labels)} rows, {classes} classes), "
                "so in query mode no query has a prototype; use larger or class-balanced batches, "
                'or mode="standard"'
            )
    return labels
