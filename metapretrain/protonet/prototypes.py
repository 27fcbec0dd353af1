"""Class centres and dense class ids, without a loop over classes and without reading anything back."""

from __future__ import annotations

import torch
from torch import Tensor

from metapretrain.errors import InputError
from metapretrain.protonet.distances import result_dtype, wide_dtype

MOST = (1 << 31) - 1  # classes
LARGE = 1 << 24  # rows times classes: a one-hot matrix of 128 MiB in float64


def check_shapes(z: Tensor, y: Tensor) -> None:
    """Raise InputError unless `z` is floating (B, D) and `y` whole numbers (B,), B and D at least 1."""
    for what, given in (("embeddings", z), ("labels", y)):
        if not isinstance(given, Tensor):
            raise InputError(f"{what} must be a torch tensor, got {type(given).__name__}")
    if z.dim() != 2 or y.dim() != 1 or z.shape[0] != y.shape[0] or z.shape[0] == 0:
        raise InputError(
            f"embeddings {tuple(z.shape)} and labels {tuple(y.shape)} do not match: "
            "give (B, D) and (B,) with the same B, at least 1"
        )
    if z.shape[1] == 0:
        raise InputError(f"embeddings {tuple(z.shape)} have no features; give (B, D) with D at least 1")
    if not z.is_floating_point():
        raise InputError(f"embeddings are {z.dtype}; give floating point numbers")
    if y.is_floating_point() or y.is_complex():
        raise InputError(f"labels are {y.dtype}; give whole numbers, for example y.long()")


def dense_ids(y: Tensor) -> Tensor:
    """Number the distinct labels 0, 1, ... in ascending order.

    Args:
        y: (B,) whole numbers, any values.

    Returns:
        (B,) int64 in 0..B-1. Equals the inverse of `torch.unique`, but its shape does not depend on the
        values, so the device is never waited for.

    Example:
        >>> dense_ids(torch.tensor([300, -7, 300])).tolist()
        [1, 0, 1]
    """
    ordered, order = torch.sort(y.long(), stable=True)
    starts = torch.cat([torch.zeros_like(ordered[:1]), (ordered[1:] != ordered[:-1]).long()])
    return torch.zeros_like(order).scatter(0, order, starts.cumsum(0))


def class_ids(y: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Labels as int64 with C for every label outside 0..C-1, and which are inside: both (B,)."""
    ids = y.long()
    inside = (ids >= 0) & (ids < num_classes)
    return torch.where(inside, ids, num_classes), inside


def class_sums(z: Tensor, ids: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Sum and count of each class's rows: (C, D) and (C,) of z's dtype.

    `ids` (B,) int64 are 0..C, of which C belongs to no class. A GPU gives the same bits every time, because nothing is
    added atomically. Give it the wide dtype, which TF32 and autocast leave alone.
    """
    if z.device.type == "cpu":
        return _by_rows(z, ids, num_classes)
    return (_by_segments if len(ids) * num_classes > LARGE else _by_product)(z, ids, num_classes)


def _by_rows(z: Tensor, ids: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """One row after the other: for a CPU, where the product takes four times as long."""
    sums = z.new_zeros(num_classes + 1, z.shape[1]).index_add(0, ids, z)
    counts = z.new_zeros(num_classes + 1).index_add(0, ids, z.new_ones(len(ids)))
    return sums[:num_classes], counts[:num_classes]


def _by_product(z: Tensor, ids: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Product with the one-hot ids."""
    one_hot = (ids[:, None] == torch.arange(num_classes, device=ids.device)).to(z.dtype)
    return one_hot.T @ z, one_hot.sum(0)


def _by_segments(z: Tensor, ids: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """For sets of rows, not batches: rows in the order of their classes, each class one segment."""
    counts = torch.zeros(num_classes + 1, dtype=torch.int64, device=z.device).scatter_add(0, ids, torch.ones_like(ids))
    ordered = z[ids.argsort(stable=True)]
    sums = torch.segment_reduce(ordered, "sum", lengths=counts, initial=0.0, unsafe=True)  # unsafe: no check, no wait
    return sums[:num_classes], counts[:num_classes].to(z.dtype)


def prototypes(z: Tensor, y: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Mean embedding of each class (equation of step 2 of the vision paper; Snell et al., 2017, equation 1).

    Args:
        z: (B, D) floating point.
        y: (B,) whole numbers; a row whose label is outside 0..C-1 belongs to no prototype.
        num_classes: C, at least 1.

    Returns:
        centres (C, D), float64 for float64 input and else float32; present (C,) bool, False for a class
        without examples, whose centre is 0 and must not be used (see `present` of :func:`proto_logits`).

    Raises:
        InputError: shapes or dtypes that do not match, num_classes below 1.

    Example:
        >>> centres, present = prototypes(torch.tensor([[1.0], [3.0], [5.0]]), torch.tensor([0, 0, 2]), 3)
        >>> centres.squeeze(1).tolist(), present.tolist()
        ([2.0, 0.0, 5.0], [True, False, True])
    """
    check_shapes(z, y)
    check_num_classes(num_classes)
    sums, counts = class_sums(z.to(wide_dtype(z)), class_ids(y, num_classes)[0], num_classes)
    return (sums / counts.clamp_min(1)[:, None]).to(result_dtype(z)), counts > 0


def check_num_classes(num_classes: int) -> None:
    """Raise InputError unless it is a whole number of at least 1 within what memory could hold."""
    if not isinstance(num_classes, int) or isinstance(num_classes, bool) or num_classes < 1:
        raise InputError(f"num_classes is {num_classes!r}; give a whole number of at least 1")
    if num_classes > MOST:
        raise InputError(f"num_classes is {num_classes}; give at most {MOST}, since each class has a prototype")
