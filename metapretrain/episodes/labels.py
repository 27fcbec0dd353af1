"""Labels and groups in all the forms they come in, as dense integer codes."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from metapretrain.episodes.draws import Ints
from metapretrain.errors import InputError


@dataclass(frozen=True)
class Labels:
    """Codes (N,) in 0..C-1 and the C label values they stand for, in sorted order."""

    codes: Ints
    names: tuple[Any, ...]


def read_labels(source: Any, what: str = "labels") -> Labels:
    """Read one label a row from a sequence, an array, a tensor or a data set.

    A data set gives its `.targets` or `.labels` (torchvision), or its `.indices_to_labels` (learn2learn's
    `MetaDataset`). Labels are integers or strings and need not be 0..C-1.

    Raises:
        InputError: there are none, they are not one-dimensional, not integers or strings, or not as many as
            the data set has rows.

    Example:
        >>> read_labels([7, 3, 7]).names
        (3, 7)
        >>> read_labels(torch.tensor([0.0, 1.0]))
        Traceback (most recent call last):
        ...
        metapretrain.errors.InputError: labels must be integers or strings, not float32
    """
    values = _as_array(_column(source, what), what)
    if values.ndim != 1:
        raise InputError(f"{what} must be one-dimensional, one a row, not of shape {values.shape}")
    if not values.size:
        raise InputError(f"{what} are empty: give one label for each row of the data set")
    if values.dtype.kind not in "iubU":
        raise InputError(f"{what} must be integers or strings, not {values.dtype}")
    if values.dtype.kind == "b":
        values = values.astype(np.int64)
    names, codes = np.unique(values, return_inverse=True)
    return Labels(codes.reshape(-1).astype(np.int64), tuple(names.tolist()))


def read_groups(source: Any, rows: int) -> Labels:
    """Read one group (domain, cluster, alphabet) a row; None puts all rows into one group.

    Raises:
        InputError: as :func:`read_labels`, or there are not `rows` of them.

    Example:
        >>> read_groups(None, 3).names
        (None,)
    """
    if source is None:
        return Labels(np.zeros(rows, dtype=np.int64), (None,))
    groups = read_labels(source, "groups")
    if len(groups.codes) != rows:
        raise InputError(f"groups must be one a label: got {len(groups.codes)} groups and {rows} labels")
    return groups


def _column(source: Any, what: str) -> Any:
    if isinstance(source, (torch.Tensor, np.ndarray)) or (
        isinstance(source, Sequence) and not isinstance(source, (str, bytes))
    ):
        return source
    by_index = getattr(source, "indices_to_labels", None)
    if by_index is not None:
        return [by_index[i] for i in range(len(source))]
    for name in ("targets", "labels"):
        column = getattr(source, name, None)
        if column is not None:
            if isinstance(source, Sized) and len(column) != len(source):
                raise InputError(
                    f"{what} must be one a row: {type(source).__name__} has {len(source)} rows"
                    f" and {len(column)} {name}"
                )
            return column
    raise InputError(
        f"{what} must be a list, an array, a tensor, or a data set with .targets or .labels,"
        f" not {type(source).__name__}"
    )


def _as_array(column: Any, what: str) -> Any:
    if isinstance(column, torch.Tensor):
        return column.detach().cpu().numpy()
    try:
        values = np.asarray(column)
    except ValueError:
        raise InputError(
            f"{what} must be one-dimensional, one a row, not nested lists of unequal length"
        ) from None
    if values.dtype.kind == "U" and not all(isinstance(value, str) for value in column):
        raise InputError(f"{what} must be all integers or all strings, not a mixture")
    return values
