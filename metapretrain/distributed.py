"""Several processes: rows gathered over ranks with gradients, means over ranks, BatchNorm over the rows of all."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.rows = len(x)
        return _all_rows(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        own: Tensor = _OwnRowsOfSum.apply(grad, ctx.rows)
        return own


class _OwnRowsOfSum(torch.autograd.Function):
    """The gradient of :class:`_GatherRows`, whose own gradient is that again."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, rows: int) -> Tensor:
        total = grad.contiguous().clone()
        dist.all_reduce(total)
        start = dist.get_rank() * rows
        return total[start : start + rows]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _GatherRows.apply(grad), None


def _all_rows(x: Tensor) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts)


def gather_rows(x: Tensor) -> Tensor:
    """Concatenate every rank's rows (B, ...), in rank order; without a process group, return `x` as it is.

    Every rank gives the same shape and dtype. The gradient, of any order, is that of the sum of all ranks' losses: if
    each has the whole batch's loss and gradients are averaged, as by DDP, it is that of one process with the batch.
    """
    if not _several_ranks():
        return x
    gathered: Tensor = _GatherRows.apply(x) if x.is_floating_point() else _all_rows(x)
    return gathered


def wait_for_all(world: int) -> None:
    """Wait until every rank is here; does nothing for one process."""
    if world > 1:
        dist.barrier()


def mean_over_ranks(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the mean of each tensor over all processes, the same bits in each; one message for all of them."""
    if not (dist.is_available() and dist.is_initialized()) or not tensors:
        return list(tensors)
    widest = torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
    flat = torch.cat([tensor.detach().reshape(-1).to(widest) for tensor in tensors])
    dist.all_reduce(flat)
    parts = (flat / dist.get_world_size()).split([tensor.numel() for tensor in tensors])
    return [part.view_as(tensor).to(tensor.dtype) for part, tensor in zip(parts, tensors, strict=True)]


class _OverRanks(nn.modules.batchnorm._BatchNorm):
    """BatchNorm over all ranks' rows in training, with their gradients, as `nn.SyncBatchNorm`, but on a CPU too."""

    process_group = None
    _check_non_zero_input_channels = nn.SyncBatchNorm._check_non_zero_input_channels

    def forward(self, input: Tensor) -> Tensor:
        """Normalised rows (B, C, ...) of this rank, in the type of `input`."""
        if not (self.training and _several_ranks()):
            return super().forward(input)
        if input.is_cuda:
            synchronised: Tensor = nn.SyncBatchNorm.forward(self, input)  # type: ignore[arg-type]
            return synchronised
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        if input.shape[1] != self.num_features:
            raise ValueError(f"expected {self.num_features} channels, got input of shape {tuple(input.shape)}")
        values = input if input.dtype == torch.float64 else input.float()
        variance, mean = torch.var_mean(values, [0, *range(2, input.dim())], correction=0)
        count = torch.full_like(mean, values.numel() / len(mean))
        variances, means, counts = _gather()(torch.stack([variance, mean, count])[None]).unbind(1)  # (ranks, C) each
        total = counts.sum(0)
        share = counts / total
        mean = (share * means).sum(0)
        variance = (share * (variances + (means - mean).square())).sum(0)
        self._track(mean, variance, total)
        shape = (-1, *[1] * (input.dim() - 2))
        scale = (variance + self.eps).rsqrt()
        if self.affine:
            scale = scale * self.weight
        normalised: Tensor = (values - mean.view(shape)) * scale.view(shape)
        if self.affine:
            normalised = normalised + self.bias.view(shape)
        return normalised.to(input.dtype)

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        share: Any = 0.0 if self.momentum is None else self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            share = 1 / self.num_batches_tracked if self.momentum is None else share
        for kept, new in ((self.running_mean, mean), (self.running_var, variance * (count / (count - 1)))):
            if kept is not None:
                kept.add_((new.to(kept.dtype) - kept) * share)


class SharedBatchNorm1d(_OverRanks, nn.BatchNorm1d):
    """:class:`torch.nn.BatchNorm1d` over the rows of all ranks."""


class SharedBatchNorm2d(_OverRanks, nn.BatchNorm2d):
    """:class:`torch.nn.BatchNorm2d` over the rows of all ranks."""


class SharedBatchNorm3d(_OverRanks, nn.BatchNorm3d):
    """:class:`torch.nn.BatchNorm3d` over the rows of all ranks."""


SHARED: dict[type[nn.Module], type[nn.Module]] = {
    nn.BatchNorm1d: SharedBatchNorm1d,
    nn.BatchNorm2d: SharedBatchNorm2d,
    nn.BatchNorm3d: SharedBatchNorm3d,
}


def share_norms(module: nn.Module) -> nn.Module:
    """Let every BatchNorm of a module take the rows of all ranks in training, in place, and return it.

    Names and values stay. Subclasses of torch's BatchNorm are left alone: they compute something else.
    """
    for part in module.modules():
        if type(part) in SHARED:
            part.__class__ = SHARED[type(part)]
    return module


@cache
def _gather() -> Any:
    return torch.compiler.disable(gather_rows)  # messages between processes are left out of compiled code


def _several_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
