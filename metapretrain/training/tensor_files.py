"""Tensors in one safetensors file with a checksum, never a pickle."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch

from metapretrain.errors import InputError
from metapretrain.tensors import decode, encode
from metapretrain.training.files import reason, write_whole
from metapretrain.training.packing import pack


class CheckpointError(InputError):
    """A checkpoint that cannot be written, or one that cannot be trusted."""


def save_tensors(file: str | os.PathLike[str], tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a plain state dict as one safetensors file, whole or not at all.

    Its metadata holds a checksum of the tensors, which other readers pass over.

    Raises:
        CheckpointError: it cannot be written; an older file of that name is untouched.
    """
    _, copies = pack(dict(tensors))
    try:
        write_whole(Path(file), encode(copies))
    except OSError as error:
        raise CheckpointError(f"cannot write {file}: {reason(error)}") from error


def load_tensors(file: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """Read a plain safetensors file as a state dict on the CPU.

    Raises:
        CheckpointError: the file is missing, damaged (where it has a checksum: in any bit) or not safetensors; a
            pickle is never run.
    """
    path = Path(file)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {reason(error)}") from error
    try:
        return decode(data)
    except InputError as error:
        raise CheckpointError(f"{path} is {error}. {no_pickle(path)}") from error


def no_pickle(file: Path) -> str:
    """Return what to do about a file that is not ours."""
    if file.suffix in {".pt", ".pth", ".pkl", ".pickle", ".bin", ".ckpt"}:
        return "Pickles can run any code and are never loaded; convert it to safetensors where you trust it"
    return "Give a file or folder that metapretrain wrote"
