"""Gradient surgery between tasks, and how much their gradients conflict.

Yu et al. (2020), "Gradient surgery for multi-task learning" (PCGrad), algorithm 1. Every projected gradient is a sum of
the tasks' gradients, so that all projections are done on the T x T matrix of their dot products.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from metapretrain.training.devices import mean_over_ranks


def task_gradients(losses: Sequence[Tensor], shared: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return the gradient of each loss for each shared parameter; the graph is kept.

    Example:
        >>> w = torch.ones(2, requires_grad=True)
        >>> task_gradients([w.sum(), 2 * w.sum()], [w])
        [[tensor([1., 1.])], [tensor([2., 2.])]]
    """
    return [
        [
            torch.zeros_like(parameter) if gradient is None else gradient
            for parameter, gradient in zip(
                shared, torch.autograd.grad(loss, shared, retain_graph=True, allow_unused=True), strict=True
            )
        ]
        for loss in losses
    ]


def dot_products(gradients: Sequence[Sequence[Tensor]]) -> Tensor:
    """Return the float32 matrix (T, T) of the dot products of T gradients."""
    flat = [torch.cat([part.flatten().float() for part in gradient]) for gradient in gradients]
    return torch.stack([torch.stack([(a * b).sum() for b in flat]) for a in flat])


def cosines(products: Tensor) -> Tensor:
    """Return the cosines (T, T) of gradients from their dot products; 0 beside a gradient that vanishes.

    Example:
        >>> cosines(torch.tensor([[4.0, -2.0], [-2.0, 1.0]]))[0]
        tensor([ 1., -1.])
    """
    norms = products.diagonal().clamp_min(0).sqrt()
    scale = norms[:, None] * norms[None, :]
    return torch.where(scale > 0, products / scale.clamp_min(torch.finfo(products.dtype).tiny), 0)


def projection_weights(products: Tensor, order: Tensor) -> Tensor:
    """Return how much of each task's gradient PCGrad's sum holds, (T,).

    Each task's gradient g_i meets the others in its own order; where g_i . g_j < 0, it loses its part along g_j.

    Args:
        products: dot products of the tasks' gradients (T, T).
        order: row i the order, a permutation of 0..T-1, in which task i meets the others; int64 (T, T).

    Example:
        >>> gradients = torch.tensor([[1.0, 0.0], [-1.0, 1.0]])
        >>> projection_weights(gradients @ gradients.T, torch.tensor([[0, 1], [0, 1]]))
        tensor([2.0000, 1.5000])
    """
    tasks = torch.arange(len(products), device=products.device)
    mixed = torch.eye(len(products), dtype=products.dtype, device=products.device)
    for met in order.unbind(1):
        dots = ((mixed @ products) * torch.nn.functional.one_hot(met, len(products))).sum(1)
        norms = products.diagonal()[met]
        conflict = (dots < 0) & (met != tasks) & (norms > 0)
        share = torch.where(conflict, dots / norms.clamp_min(torch.finfo(products.dtype).tiny), 0)
        mixed = mixed - share[:, None] * torch.nn.functional.one_hot(met, len(products))
    return mixed.sum(0)


def pcgrad(losses: Mapping[str, Tensor], shared: Sequence[Tensor], order: Tensor | None = None) -> dict[str, Tensor]:
    """Return losses of the same values whose summed gradient is PCGrad's for the shared parameters.

    All other parameters, the heads, keep their own gradient. Over ranks, whose gradients are averaged afterwards, the
    projections are those of the gradients of the whole batch.

    Args:
        losses: scalar loss of each task.
        shared: the parameters that the tasks share.
        order: see :func:`projection_weights`; None: random.

    Example:
        >>> w = torch.zeros(2, requires_grad=True)
        >>> losses = pcgrad({"a": w[0] + 7, "b": w[1] - w[0]}, [w])
        >>> sum(losses.values()).backward()
        >>> losses["a"].item(), w.grad  # (0.5, 0.5) of the first task and (0, 1) of the second
        (7.0, tensor([0.5000, 1.5000]))
    """
    gradients = [mean_over_ranks(own) for own in task_gradients(list(losses.values()), shared)]
    products = dot_products(gradients)
    if order is None:
        # The ranks draw different numbers: the order of their means is as random, and the same for all.
        order = mean_over_ranks([torch.rand(products.shape, device=products.device)])[0].argsort(1)
    change = projection_weights(products, order) - 1
    correction = torch.zeros((), device=products.device)
    for parameter, parts in zip(shared, zip(*gradients, strict=True), strict=True):
        difference = sum(weight * part for weight, part in zip(change, parts, strict=True))
        correction = correction + (parameter * difference).sum()
    first = next(iter(losses))
    return {**losses, first: losses[first] + correction - correction.detach()}
