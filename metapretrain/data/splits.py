"""Fixed stratified splits: the same rows for every seed of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from metapretrain.errors import InputError

Labels = Tensor | Sequence[int] | np.ndarray[Any, Any]


def validation_split(labels: Labels, size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Split the rows of a labelled set into a training and a validation part, stratified by class.

    Each class gives its share of `size` (largest remainders; ties to the lower class), drawn with a generator
    of its own seed, so the part is the same for every seed of a run and never overlaps with training.

    Args:
        labels: integers (N,), none negative.
        size: number of validation rows, 0 <= size < N.
        seed: of the split itself; leave it alone to compare runs.

    Returns:
        (train rows (N - size,), validation rows (size,)), int64, ascending.

    Raises:
        InputError: labels are not integers (N,), have a -1, or `size` leaves nothing (of a class) to train
            on.

    Example:
        >>> train, held = validation_split([0, 0, 0, 1, 1, 1], 2)
        >>> len(train), len(held)
        (4, 2)
    """
    y = labels.cpu().numpy() if isinstance(labels, Tensor) else np.asarray(labels)
    if y.ndim != 1 or not np.issubdtype(y.dtype, np.integer):
        raise InputError(f"labels must be integers (N,), got {y.dtype} {y.shape}")
    if isinstance(size, bool) or not isinstance(size, int | np.integer) or not 0 <= size < max(len(y), 1):
        raise InputError(f"validation size must be an integer from 0 to {max(len(y) - 1, 0)}, got {size!r}")
    if len(y) and y.min() < 0:
        raise InputError(f"cannot split: {int((y < 0).sum())} of {len(y)} rows have no label")
    classes, counts = np.unique(y, return_counts=True)
    quota = size * counts / max(len(y), 1)
    take = np.floor(quota).astype(np.int64)
    largest = np.argsort(-(quota - take), kind="stable")[: size - int(take.sum())]
    take[largest] += 1
    if size and (take >= counts).any():
        bad = classes[np.argmax(take >= counts)]
        raise InputError(
            f"validation size {size} leaves no training row of class {bad}; lower it or add rows"
        )
    random = np.random.Generator(np.random.Philox(seed))
    held = np.zeros(len(y), dtype=bool)
    for label, amount in zip(classes, take, strict=True):
        rows = np.flatnonzero(y == label)
        held[rows[random.random(len(rows)).argsort(kind="stable")[:amount]]] = True
    return torch.from_numpy(np.flatnonzero(~held)), torch.from_numpy(np.flatnonzero(held))
