"""Tensors as the bytes of a safetensors file with a checksum, and back."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

import torch
from torch import Tensor

from metapretrain.errors import InputError

_SUM = "sha256"


def tensor_sum(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of names, types, shapes and values, whatever the order of the names.

    Example:
        >>> tensor_sum({"w": torch.zeros(2)}) == tensor_sum({"w": torch.zeros(1, 2)})
        False
    """
    whole = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].contiguous()
        whole.update(json.dumps([name, str(value.dtype), list(value.shape)]).encode())
        whole.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return whole.hexdigest()


def encode(tensors: dict[str, Tensor], *, checksum: bool = True) -> bytes:
    """Return CPU tensors as a safetensors file, whose metadata holds a checksum that other readers pass over.

    Raises:
        InputError: they are of a type that it cannot hold.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save

    metadata = {_SUM: tensor_sum(tensors)} if checksum else None  # one entry: safetensors shuffles several
    try:
        return bytes(save(tensors, metadata))
    except (SafetensorError, KeyError, ValueError) as error:
        kinds = sorted({str(tensor.dtype) for tensor in tensors.values()})
        raise InputError(f"safetensors cannot hold these tensors ({', '.join(kinds)}): {error}") from error


def decode(data: bytes) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, of any maker.

    Raises:
        InputError: it is none, or not the one that was written (where it has a checksum).

    Example:
        >>> decode(encode({"w": torch.ones(2)}))
        {'w': tensor([1., 1.])}
        >>> decode(encode({"w": torch.ones(2)})[:-1] + b"!")
        Traceback (most recent call last):
        ...
        metapretrain.errors.InputError: damaged: its tensors are not those that were written
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors = load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        written = header.get("__metadata__", {}).get(_SUM)
    except (SafetensorError, ValueError, KeyError) as error:
        raise InputError("not a whole safetensors file") from error
    if written is not None and written != tensor_sum(tensors):
        raise InputError("damaged: its tensors are not those that were written")
    return tensors
