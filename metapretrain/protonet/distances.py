"""Logits of queries against class centres, right also where a query lies on a centre.

The product form ``|a|^2 + |b|^2 - 2ab`` is many times faster than subtracting every pair and needs no (B, C,
D) memory, but in float32 (or TF32) it is wrong near zero. Here it is computed in float64 and rounded once,
which is more accurate than subtracting in float32. Float64 input, for which no wider type exists, is
subtracted pair by pair.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from metapretrain.errors import InputError, one_of

DISTANCES = ("euclidean", "sqeuclidean", "cosine")

# Relative squared distance below which two float32 rows are one point: above the float64 rounding of the
# product form (about 1e-14), below what one float32 step in every coordinate amounts to.
_COINCIDENT = 1e-13


def wide_dtype(x: Tensor) -> torch.dtype:
    """Float64, or float32 on a device that has no float64."""
    return torch.float32 if x.device.type == "mps" else torch.float64


def result_dtype(x: Tensor) -> torch.dtype:
    """Float64 for float64 input, else float32: half precision is never summed in half precision."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _squared(queries: Tensor, centres: Tensor) -> Tensor:
    """Squared distance of each pair (B, C) by the product form, 0 where rounding is all that is left of it."""
    norms = torch.linalg.vecdot(queries, queries)[:, None] + torch.linalg.vecdot(centres, centres)
    squared = torch.addmm(norms.T, centres, queries.T, alpha=-2).T  # this order is the faster one
    return torch.where(squared > _COINCIDENT * norms, squared, 0)


class _Distance(torch.autograd.Function):
    """Euclidean distance of each pair (B, C) by the product form; its gradient is 0 where it is 0.

    torch would differentiate the product, both norms, the root and the masks one by one: twice the time on a CPU.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(queries: Tensor, centres: Tensor) -> Tensor:
        return _squared(queries, centres).sqrt_()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)
        ctx.save_for_forward(*inputs, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        # d|q - c|/dq = (q - c) / |q - c|. The inner `where` is for second derivatives.
        queries, centres, distance = ctx.saved_tensors
        zero = distance == 0
        scaled = torch.where(zero, 0, grad / torch.where(zero, 1, distance))
        to_queries = to_centres = None
        if ctx.needs_input_grad[0]:
            to_queries = torch.addmm(queries * scaled.sum(1)[:, None], scaled, centres, alpha=-1)
        if ctx.needs_input_grad[1]:
            to_centres = torch.addmm(centres * scaled.sum(0)[:, None], scaled.T, queries, alpha=-1)
        return to_queries, to_centres

    @staticmethod
    def jvp(ctx: Any, of_queries: Tensor, of_centres: Tensor) -> Tensor:
        # d|q - c| = (q - c) . (dq - dc) / |q - c|.
        queries, centres, distance = ctx.saved_tensors
        zero = distance == 0
        own = torch.linalg.vecdot(queries, of_queries)[:, None] + torch.linalg.vecdot(centres, of_centres)
        product = own - of_queries @ centres.T - queries @ of_centres.T
        return torch.where(zero, 0, product / torch.where(zero, 1, distance))


def _safe_sqrt(squared: Tensor) -> Tensor:
    """Square root whose gradient at zero is 0; the inner `where` keeps infinity out of the backward pass."""
    zero = squared == 0
    return torch.where(zero, 0, torch.where(zero, 1, squared).sqrt())


def _unit(x: Tensor) -> Tensor:
    return x / _safe_sqrt(x.square().sum(1, keepdim=True)).clamp_min(1e-12)


def wide_logits(
    queries: Tensor, centres: Tensor, distance: str, temperature: float | Tensor, dtype: torch.dtype
) -> Tensor:
    """(B, C) of `dtype` from rows of the wide dtype; pairs are subtracted where `dtype` is the wide one."""
    if isinstance(temperature, Tensor):
        temperature = temperature.to(dtype)
    if distance == "cosine":
        return (_unit(queries) @ _unit(centres).T).to(dtype) / temperature
    if queries.dtype == dtype:
        apart = (queries[:, None] - centres[None]).square().sum(-1)
        apart = _safe_sqrt(apart) if distance == "euclidean" else apart
    else:
        # Compiled, the function above would get no gradient at all by torch 2.11, without a word.
        compiling = torch.compiler.is_compiling()
        apart = _safe_sqrt(_squared(queries, centres)) if compiling else _Distance.apply(queries, centres)
        apart = apart if distance == "euclidean" else apart.square()
    return apart.to(dtype) / -temperature


def masked(logits: Tensor, present: Tensor) -> Tensor:
    """The logits, with the lowest finite number for the classes that are not present."""
    return torch.where(present, logits, torch.finfo(logits.dtype).min)


def proto_logits(
    queries: Tensor,
    centres: Tensor,
    distance: str = "euclidean",
    temperature: float | Tensor = 1.0,
    present: Tensor | None = None,
) -> Tensor:
    """Logit of every query for every class: minus its distance to the centre, over the temperature.

    The softmax of the logits is the probability of each class (Snell et al., 2017, equation 2; steps 3 and 4
    of the vision paper). ``"euclidean"`` is the plain norm of both pretraining papers, ``"sqeuclidean"`` its
    square (Snell et al.), ``"cosine"`` the similarity itself, in [-1, 1], over the temperature. The gradient
    of the norm is 0 where a query equals a centre.

    Args:
        queries: (B, D) floating point.
        centres: (C, D).
        distance: one of :data:`DISTANCES`.
        temperature: above 0; a tensor may be learned.
        present: (C,) bool; the other classes get the lowest finite number, so that they take no probability.

    Returns:
        (B, C) logits, float64 for float64 queries and float32 for all others, also under autocast.

    Raises:
        InputError: unknown distance, temperature not above 0, shapes that do not match.

    Example:
        >>> z = torch.tensor([[0.0, 0.0], [3.0, 4.0]])
        >>> proto_logits(z, z, temperature=5.0).tolist()
        [[-0.0, -1.0], [-1.0, -0.0]]
    """
    one_of("distance", distance, DISTANCES)
    if queries.dim() != 2 or centres.dim() != 2 or queries.shape[1] != centres.shape[1] or queries.shape[1] == 0:
        raise InputError(
            f"queries {tuple(queries.shape)} and centres {tuple(centres.shape)} do not match: "
            "give (B, D) and (C, D) with the same D, at least 1"
        )
    check_temperature(temperature)
    wide = wide_dtype(queries)
    logits = wide_logits(queries.to(wide), centres.to(wide), distance, temperature, result_dtype(queries))
    return logits if present is None else masked(logits, present)


def check_temperature(temperature: float | Tensor) -> None:
    """Raise InputError for a number that is not finite and above 0; a tensor is not read."""
    if isinstance(temperature, Tensor):
        return
    number = isinstance(temperature, (int, float)) and not isinstance(temperature, bool)
    if not number or not 0 < temperature < float("inf"):
        raise InputError(f"temperature is {temperature!r}; give a finite number above 0, for example 1.0")
