"""Splitting a labelled batch into a support and a query part."""

from __future__ import annotations

from typing import Any

import torch

from metapretrain.errors import InputError


def split_support_query(
    labels: Any,
    query_fraction: float = 0.25,
    generator: torch.Generator | None = None,
    *,
    stratified: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Split the rows of a batch at random: labels (B,) -> support rows and query rows.

    Both are int64, ascending and on the CPU. The random split takes the nearest number to `query_fraction` of
    the batch; the stratified one does so in each class, which has at least one row on each side if it has
    two. Neither side is ever empty.

    Source: query prototypical pretraining, 1/4 query and 3/4 support (vision poster, "Experiments").

    Raises:
        InputError: the fraction is not between 0 and 1, the labels are not integers (B,), there are fewer
            than two rows, or the split is stratified and no class has two.

    Example:
        >>> support, query = split_support_query(torch.zeros(8, dtype=torch.int64))
        >>> len(support), len(query)
        (6, 2)
    """
    y = _integers(labels)
    if not isinstance(query_fraction, (int, float)):
        raise InputError(f"query_fraction must be a number between 0 and 1, not {query_fraction!r}")
    if not 0 < query_fraction < 1:  # also NaN, and True as 1
        raise InputError(f"query_fraction must lie between 0 and 1, both excluded, not {query_fraction}")
    if len(y) < 2:
        raise InputError(f"a batch needs at least 2 rows to have a support and a query part, not {len(y)}")
    order = torch.randperm(len(y), generator=generator, device=generator.device if generator else None).cpu()
    if stratified:
        is_query = _stratified(y, order, query_fraction)
    else:
        queries = min(max(round(query_fraction * len(y)), 1), len(y) - 1)
        is_query = torch.zeros(len(y), dtype=torch.bool)
        is_query[order[:queries]] = True
    return (~is_query).nonzero().flatten(), is_query.nonzero().flatten()


def _stratified(y: torch.Tensor, order: torch.Tensor, query_fraction: float) -> torch.Tensor:
    _, code, count = torch.unique(y, return_inverse=True, return_counts=True)
    if int(count.max()) < 2:
        raise InputError(
            f"every class of this batch of {len(y)} has one example, so no query can have a prototype;"
            " use larger batches or fewer classes"
        )
    wanted = torch.round(count * query_fraction).long().clamp(min=1)
    wanted = torch.minimum(wanted, count - 1)
    by_class = order[torch.argsort(code[order], stable=True)]  # random order within each class
    start = torch.cumsum(count, 0) - count
    sorted_code = code[by_class]
    rank = torch.arange(len(y)) - start[sorted_code]
    is_query = torch.empty(len(y), dtype=torch.bool)
    is_query[by_class] = rank < wanted[sorted_code]
    return is_query


def _integers(labels: Any) -> torch.Tensor:
    try:
        y = torch.as_tensor(labels).detach().cpu()
    except (TypeError, ValueError) as error:
        raise InputError(f"labels must be integers (B,), not {type(labels).__name__}: {error}") from None
    if y.ndim != 1:
        raise InputError(f"labels must be one-dimensional (B,), not of shape {tuple(y.shape)}")
    if len(y) and (y.is_floating_point() or y.is_complex()):
        raise InputError(f"labels must be integers, not {str(y.dtype).removeprefix('torch.')}")
    return y.long()
