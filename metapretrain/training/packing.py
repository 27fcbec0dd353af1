"""A nest of tensors and numbers as named tensors and one JSON value, and back without loss."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from metapretrain.errors import InputError

_TAG = "$"


def pack(state: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Split `state` into a value that JSON holds exactly and the tensors that it refers to by name.

    Dicts (any mix of str, int, float, bool and None keys, order kept), lists, tuples, None, bools, ints,
    floats (NaN and infinities too), text, tensors of any shape and device, NumPy arrays and scalars. What
    JSON has no word for is written as an object with the key ``"$"``.

    Args:
        state: the nest.

    Returns:
        (value, tensors): tensors are contiguous, on the CPU and share no memory with `state`.

    Raises:
        InputError: something else is in the nest; its place is named.

    Example:
        >>> value, tensors = pack({"betas": (0.9, 0.999), "w": torch.ones(2)})
        >>> value
        {'betas': {'$': 'tuple', 'items': [0.9, 0.999]}, 'w': {'$': 'tensor', 'name': 'w'}}
        >>> tensors
        {'w': tensor([1., 1.])}
    """
    tensors: dict[str, torch.Tensor] = {}
    return _pack(state, (), tensors), tensors


def unpack(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the nest that :func:`pack` split.

    Raises:
        KeyError: a tensor or a word is missing.

    Example:
        >>> unpack(*pack({0: (float("inf"), None), "x": [True]}))
        {0: (inf, None), 'x': [True]}
    """
    if isinstance(value, list):
        return [unpack(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: unpack(item, tensors) for key, item in value.items()}
    kind = value[_TAG]
    if kind == "float":
        return float(value["value"])
    if kind == "tuple":
        return tuple(unpack(item, tensors) for item in value["items"])
    if kind == "dict":
        return {unpack(key, tensors): unpack(item, tensors) for key, item in value["items"]}
    if kind == "array":
        return tensors[value["name"]].numpy()
    if kind == "tensor":
        return _with_layout(tensors[value["name"]], value.get("layout"))
    raise KeyError(f"unknown kind {kind!r}")


def _pack(value: Any, place: tuple[str, ...], tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_TAG: "float", "value": repr(float(value))}
    if isinstance(value, torch.Tensor):
        return _pack_tensor(value, place, tensors)
    if isinstance(value, np.ndarray):
        return {_TAG: "array", "name": _keep(_from_array(value, place), place, tensors)}
    if isinstance(value, Mapping):
        return _pack_dict(value, place, tensors)
    if isinstance(value, (list, tuple)):
        items = [_pack(item, (*place, str(i)), tensors) for i, item in enumerate(value)]
        return {_TAG: "tuple", "items": items} if isinstance(value, tuple) else items
    raise InputError(
        f"a checkpoint cannot hold a {type(value).__name__} ({_said(place)}); give tensors, numbers, text, "
        "lists, tuples and dicts"
    )


def _pack_dict(value: Mapping[Any, Any], place: tuple[str, ...], tensors: dict[str, torch.Tensor]) -> Any:
    if all(type(key) is str for key in value) and _TAG not in value:
        return {key: _pack(item, (*place, key), tensors) for key, item in value.items()}
    items = []
    for key, item in value.items():
        if not (key is None or isinstance(key, (str, int, float))):
            raise InputError(
                f"a checkpoint's dict keys are text or numbers, not {type(key).__name__} ({_said(place)})"
            )
        items.append([_pack(key, place, tensors), _pack(item, (*place, str(key)), tensors)])
    return {_TAG: "dict", "items": items}


def _pack_tensor(
    value: torch.Tensor, place: tuple[str, ...], tensors: dict[str, torch.Tensor]
) -> dict[str, str]:
    if value.layout != torch.strided or value.device.type == "meta" or value.is_quantized:
        raise InputError(
            f"a checkpoint holds dense tensors with values; {_said(place)} is sparse, quantised or on meta"
        )
    packed = {_TAG: "tensor", "name": _keep(value, place, tensors)}
    if not value.is_contiguous():
        for layout, memory_format, ndim in _LAYOUTS:
            if value.ndim == ndim and value.is_contiguous(memory_format=memory_format):
                packed["layout"] = layout
    return packed


_LAYOUTS = (("channels_last", torch.channels_last, 4), ("channels_last_3d", torch.channels_last_3d, 5))


def _with_layout(tensor: torch.Tensor, layout: str | None) -> torch.Tensor:
    for name, memory_format, _ in _LAYOUTS:
        if layout == name:
            return tensor.contiguous(memory_format=memory_format)
    return tensor


def _keep(value: torch.Tensor, place: tuple[str, ...], tensors: dict[str, torch.Tensor]) -> str:
    name = base = ".".join(place) or "state"
    number = 1
    while name in tensors:
        number += 1
        name = f"{base}#{number}"
    copy = torch.empty(value.shape, dtype=value.dtype)
    tensors[name] = copy.copy_(value.detach())
    return name


def _from_array(value: np.ndarray[Any, Any], place: tuple[str, ...]) -> torch.Tensor:
    try:
        return torch.from_numpy(np.ascontiguousarray(value).reshape(value.shape))
    except TypeError as error:
        raise InputError(f"a checkpoint cannot hold an array of {value.dtype} ({_said(place)})") from error


def _said(place: tuple[str, ...]) -> str:
    return f"at {'.'.join(place)}" if place else "as the whole state"
