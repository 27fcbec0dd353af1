"""Inner steps whose gradient is clipped, task by task: far from a good prompt it can be many times its usual norm."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from metapretrain.maml.inner import differentiable_twice

TINY = 1e-30  # of a squared norm: where the gradient is 0, its norm still has a derivative


def clipped(gradient: Tensor, most: float | None) -> Tensor:
    """Gradients (K, L, D), those of a norm above `most` scaled down to it; None leaves them as they are.

    Example:
        >>> clipped(torch.tensor([[[3.0, 4.0]], [[0.3, 0.4]]]), 1.0).squeeze()
        tensor([[0.6000, 0.8000],
                [0.3000, 0.4000]])
    """
    if most is None:
        return gradient
    norm = (gradient.square().sum((1, 2), keepdim=True) + TINY).sqrt()
    return gradient * (most / norm).clamp(max=1.0)


def clipped_steps(
    loss: Callable[[Tensor], Tensor], stack: Tensor, rate: float | Tensor, *, steps: int, order: int, most: float
) -> Tensor:
    """Prompts (K, L, D) after steps of gradient descent with the clipped gradient of each.

    Args:
        loss: the sum of the tasks' losses under a stack of prompts.
        order: 2 differentiates through gradient and clipping, 1 takes them as constants.
        most: norm of a task's gradient.
    """
    learned = isinstance(rate, Tensor) and rate.requires_grad
    graph = torch.is_grad_enabled() and (stack.requires_grad or learned)
    fast = stack if stack.requires_grad else stack.detach().requires_grad_()
    with torch.enable_grad(), differentiable_twice(order if graph else 1):
        for _ in range(steps):
            (gradient,) = torch.autograd.grad(loss(fast), fast, create_graph=graph and order == 2)
            fast = fast - rate * clipped(gradient, most)
            if not graph:
                fast = fast.detach().requires_grad_()
    return fast if graph else fast.detach()
