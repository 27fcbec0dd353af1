"""Class centres and the logits of queries against them, without a loop over classes.

The product form ``|a|^2 + |b|^2 - 2ab`` is many times faster than subtracting every pair and needs no (B, C, D) memory,
but is wrong near zero. So it is computed in float64 and rounded to float32; float64 input is subtracted.
"""

from typing import Any

import torch
from torch import Tensor

from metapretrain.checks import number, whole
from metapretrain.errors import InputError, one_of

DISTANCES = ("euclidean", "sqeuclidean", "cosine")

COINCIDENT = 4  # times the rounding of the product form, eps sqrt(D): one to three float32 steps in every coordinate


def wide_dtype(x: Tensor) -> torch.dtype:
    """Float64, or float32 on a device that has no float64."""
    return torch.float32 if x.device.type == "mps" else torch.float64


def result_dtype(x: Tensor) -> torch.dtype:
    """Float64 for float64 input, else float32: half precision is never summed in half precision."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _squared(queries: Tensor, centres: Tensor) -> Tensor:
    """Squared distance of each pair (B, C) by the product form, 0 where only rounding is left; NaN stays."""
    norms = torch.linalg.vecdot(queries, queries)[:, None] + torch.linalg.vecdot(centres, centres)
    squared = torch.addmm(norms.T, centres, queries.T, alpha=-2).T  # this order is the faster one
    rounding = COINCIDENT * torch.finfo(squared.dtype).eps * queries.shape[1] ** 0.5 * norms
    return torch.where((squared <= rounding) & (norms < torch.inf), 0, squared)


class _Distance(torch.autograd.Function):
    """Euclidean distance of each pair (B, C) by the product form; its gradient is 0 where it is 0."""

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
    """Rows over their norms; a row without direction is 0 and gets no gradient."""
    norm = _safe_sqrt(x.square().sum(1, keepdim=True))
    none = norm < 1e-12
    return torch.where(none, 0, x / torch.where(none, 1, norm))


def wide_logits(
    queries: Tensor,
    centres: Tensor,
    distance: str,
    temperature: float | Tensor,
    dtype: torch.dtype,
    paired: bool = False,
) -> Tensor:
    """(B, C) of `dtype` from rows of the wide dtype, subtracted where `dtype` is wide; paired: (B,), row by row."""
    if isinstance(temperature, Tensor):
        temperature = temperature.to(dtype)
    if distance == "cosine":
        q, c = _unit(queries), _unit(centres)
        return (torch.linalg.vecdot(q, c) if paired else q @ c.T).to(dtype) / temperature
    if paired or queries.dtype == dtype:
        apart = (queries - centres if paired else queries[:, None] - centres).square().sum(-1)
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

    The softmax of the logits is the probability of each class (Snell et al., 2017, equation 2; steps 3 and 4 of the
    vision paper). ``"euclidean"`` is the plain norm of both pretraining papers, ``"sqeuclidean"`` its square (Snell et
    al.), ``"cosine"`` the similarity itself, in [-1, 1], over the temperature. The gradient of the norm is 0 where a
    query equals a centre (to within a few steps of float32), of the cosine where a row is 0.

    Args:
        queries, centres: (B, D) floating point and (C, D).
        temperature: above 0; a tensor may be learned.
        present: (C,) bool; the other classes get the lowest finite number, so that they take no probability.

    Returns:
        (B, C) logits, float64 for float64 queries and float32 for all others, also under autocast.

    Raises InputError: unknown distance, temperature not above 0, shapes that do not match.

    Example:
        >>> z = torch.tensor([[0.0, 0.0], [3.0, 4.0]])
        >>> proto_logits(z, z, temperature=5.0).tolist()
        [[-0.0, -1.0], [-1.0, -0.0]]
    """
    one_of("distance", distance, DISTANCES)
    if queries.dim() != 2 or centres.dim() != 2 or queries.shape[1] != centres.shape[1] or queries.shape[1] == 0:
        told = f"queries {tuple(queries.shape)} and centres {tuple(centres.shape)} do not match"
        raise InputError(f"{told}: give (B, D) and (C, D) with the same D, at least 1")
    check_temperature(temperature)
    if present is not None and (not isinstance(present, Tensor) or present.dtype != torch.bool):
        raise InputError("present says of each class whether it takes part: give a bool tensor (C,)")
    if present is not None and present.shape[-1:] != centres.shape[:1]:
        raise InputError(f"present is {tuple(present.shape)} for {len(centres)} centres; give ({len(centres)},)")
    wide = wide_dtype(queries)
    logits = wide_logits(queries.to(wide), centres.to(wide), distance, temperature, result_dtype(queries))
    return logits if present is None else masked(logits, present)


def check_temperature(temperature: float | Tensor) -> None:
    """Raise InputError for a number out of 1e-30 to 1e30, or several; the value of a tensor is not read."""
    if isinstance(temperature, Tensor):
        if temperature.numel() != 1:
            raise InputError(f"temperature is {tuple(temperature.shape)} numbers; give one for all classes")
    elif number("temperature", temperature, above=0, most=1e30) < 1e-30:
        raise InputError(f"temperature is {temperature}, so that logits overflow; give a number of at least 1e-30")


MOST = (1 << 31) - 1  # classes
LARGE = 1 << 24  # rows times classes: a one-hot matrix of 128 MiB in float64


def check_shapes(z: Tensor, y: Tensor) -> None:
    """Raise InputError unless `z` is floating (B, D) and `y` whole numbers (B,), B and D at least 1."""
    for what, given in (("embeddings", z), ("labels", y)):
        if not isinstance(given, Tensor):
            raise InputError(f"{what} must be a torch tensor, got {type(given).__name__}")
    if z.dim() != 2 or y.dim() != 1 or z.shape[0] != y.shape[0] or z.shape[0] == 0:
        told = f"embeddings {tuple(z.shape)} and labels {tuple(y.shape)} do not match"
        raise InputError(f"{told}: give (B, D) and (B,) with the same B, at least 1")
    if z.shape[1] == 0:
        raise InputError(f"embeddings {tuple(z.shape)} have no features; give (B, D) with D at least 1")
    if not z.is_floating_point():
        raise InputError(f"embeddings are {z.dtype}; give floating point numbers")
    if y.is_floating_point() or y.is_complex():
        raise InputError(f"labels are {y.dtype}; give whole numbers, for example y.long()")


IGNORED = -100  # the label of a row without a loss, in torch


def unlabelled(y: Tensor) -> Tensor:
    """Which rows have no label: the package's mark is -1, torch's is -100."""
    return (y == -1) | (y == IGNORED)


def dense_ids(y: Tensor) -> Tensor:
    """Number the distinct labels (B,) 0, 1, ... in ascending order, as int64 (B,).

    Equals the inverse of `torch.unique`, but its shape does not depend on the values: the device is never waited for.

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

    `z` is (B, D) floating point, `y` (B,) whole numbers (rows outside 0..C-1 are left out), C is at least 1.

    Returns:
        centres (C, D), float64 for float64 input and else float32; present (C,) bool, False for a class without
        examples, whose centre is 0 and must not be used (see `present` of :func:`proto_logits`).

    Raises InputError: shapes or dtypes that do not match, num_classes below 1.

    Example:
        >>> centres, present = prototypes(torch.tensor([[1.0], [3.0], [5.0]]), torch.tensor([0, 0, 2]), 3)
        >>> centres.squeeze(1).tolist(), present.tolist()
        ([2.0, 0.0, 5.0], [True, False, True])
    """
    check_shapes(z, y)
    whole("num_classes", num_classes, 1, MOST)
    sums, counts = class_sums(z.to(wide_dtype(z)), class_ids(y, num_classes)[0], num_classes)
    return (sums / counts.clamp_min(1)[:, None]).to(result_dtype(z)), counts > 0
