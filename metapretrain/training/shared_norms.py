"""BatchNorm over the rows of all processes, so that several train as one does."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from metapretrain.protonet import gather_rows

BatchNorm = nn.modules.batchnorm._BatchNorm
_gathered: Any = torch.compiler.disable(gather_rows)  # messages between processes are left out of compiled code


class SharedBatchNorm(BatchNorm):
    """BatchNorm whose mean and variance in training are those of all ranks' rows, with their gradients.

    Every rank gives as many rows. In evaluation, and in a single process, it is torch's. `nn.SyncBatchNorm` is the same
    for GPUs; this one also runs on a CPU, where it is tested against one process.

    Example:
        >>> norm = share_norms(nn.Sequential(nn.BatchNorm2d(3)))[0]
        >>> norm(torch.randn(4, 3, 5, 5)).mean().abs().item() < 1e-6, norm.running_var.shape
        (True, torch.Size([3]))
    """

    def _check_input_dim(self, input: Tensor) -> None:
        pass  # the class that it was did so

    def forward(self, input: Tensor) -> Tensor:
        """Normalised rows (B, C, ...) of this rank, in the type of `input`."""
        if not (self.training and _several_ranks()):
            return super().forward(input)
        values = input if input.dtype == torch.float64 else input.float()
        places = [0, *range(2, input.dim())]
        own = torch.stack(torch.var_mean(values, places, correction=0))
        variances, means = _gathered(own[None]).unbind(1)  # (ranks, C) each
        mean = means.mean(0)
        variance = (variances + (means - mean).square()).mean(0)
        if self.track_running_stats:
            self._track(mean, variance, len(means) * values.numel() // values.shape[1])
        scale = (variance + self.eps).rsqrt()
        shift = -mean * scale
        if self.affine:
            scale, shift = scale * self.weight, shift * self.weight + self.bias
        shape = (-1, *[1] * (input.dim() - 2))
        normalised: Tensor = values * scale.view(shape) + shift.view(shape)
        return normalised.to(input.dtype)

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor, count: int) -> None:
        assert self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        share = 1 / self.num_batches_tracked if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_((variance * (count / (count - 1))).to(self.running_var.dtype), share)


def share_norms(module: nn.Module) -> nn.Module:
    """Make every BatchNorm of a module a :class:`SharedBatchNorm`, in place, and return it; names and values stay."""
    for part in module.modules():
        if isinstance(part, BatchNorm):
            part.__class__ = SharedBatchNorm
    return module


def _several_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
