"""Rows of all ranks, with gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group, ctx.rows = group, len(x)
        return _all_rows(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _OwnRowsOfSum.apply(grad, ctx.group, ctx.rows), None


class _OwnRowsOfSum(torch.autograd.Function):
    """The gradient of :class:`_GatherRows`, whose own gradient is that again."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, group: Any, rows: int) -> Tensor:
        ctx.group = group
        total = grad.contiguous().clone()
        dist.all_reduce(total, group=group)
        start = dist.get_rank(group) * rows
        return total[start : start + rows]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _GatherRows.apply(grad, ctx.group), None, None


def _all_rows(x: Tensor, group: Any) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts)


def gather_rows(x: Tensor, group: Any = None) -> Tensor:
    """Concatenate every rank's rows, in rank order; without a process group, return `x` as it is.

    The gradient is that of the sum of all ranks' losses. So when every rank computes the loss of the whole
    batch and the parameters' gradients are averaged over ranks, as DDP does, the result is the gradient of
    one process that holds the whole batch. (Without averaging it is that gradient times the number of
    ranks.) So are gradients of gradients.

    Args:
        x: (B, ...); every rank gives the same shape and dtype.
        group: a process group; None is the default one.

    Returns:
        (B * world size, ...).

    Example:
        >>> gather_rows(torch.ones(2, 3)).shape
        torch.Size([2, 3])
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) == 1:
        return x
    if not x.is_floating_point():
        return _all_rows(x, group)
    gathered: Tensor = _GatherRows.apply(x, group)
    return gathered
