"""Checkpoints that are never half-written, never loaded when damaged, and hold no pickle."""

import json
import logging
import math
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from metapretrain.checks import whole
from metapretrain.errors import InputError
from metapretrain.files import (
    CheckpointError,
    encode,
    json_bytes,
    no_pickle,
    reason,
    sha256,
    sync_folder,
    write_durably,
)

_log = logging.getLogger(__name__)

SCHEMA = 1
_TENSORS, _STATE, _MANIFEST = "tensors.safetensors", "state.json", "manifest.json"
_FOLDER = re.compile(r"(?P<replaced>\.replaced-)?step-(?P<step>\d{8,})")


@dataclass(frozen=True)
class Checkpoint:
    """What :func:`load_latest` read: the step, the state (tensors on the CPU) and the folder it came from."""

    step: int
    state: Any
    path: Path


def save(folder: str | os.PathLike[str], step: int, state: Any, *, keep: int = 2) -> Path:
    """Write `state` as the newest checkpoint of `folder`, remove all but the last `keep`, return its folder.

    ``tensors.safetensors``, ``state.json`` and ``manifest.json`` (bytes and SHA-256 of the others) are written under a
    temporary name, flushed and renamed to ``step-<step>``. Checkpoints of later steps go too. `step`: updates done;
    `state`: what :func:`pack` takes.
    Raises CheckpointError: it cannot be written (disk full, no permission); those before are untouched; InputError:
    `step` or `keep` is out of range, or `state` holds something else.

    Example:
        >>> import tempfile, torch
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = save(folder, 7, {"w": torch.arange(3), "betas": (0.9, 0.999)})
        ...     path.name, load_latest(folder).state
        ('step-00000007', {'w': tensor([0, 1, 2]), 'betas': (0.9, 0.999)})
    """
    whole("step", step)
    whole("keep", keep, 1)
    folder = Path(folder)
    name = f"step-{step:08d}"
    files = _encode(step, state)
    temporary = folder / f".writing-{name}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for left_by_kill in folder.glob(".writing-*"):
            shutil.rmtree(left_by_kill)
        temporary.mkdir()
        for file, data in files.items():
            write_durably(temporary / file, data)
        sync_folder(temporary)
        _move_into_place(temporary, folder / name)
        sync_folder(folder)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(f"cannot write checkpoint {folder / name}: {reason(error)}; {_last(folder)}") from error
    found = _checkpoints(folder)
    stay = [path for number, path in found if number <= step and not path.name.startswith(".")][:keep]
    for path in (path for _, path in found if path not in stay):
        shutil.rmtree(path, ignore_errors=True)
    return folder / name


def load_latest(folder: str | os.PathLike[str]) -> Checkpoint | None:
    """Read the newest checkpoint of `folder` whose files are all as they were written; None where there is none.

    A checkpoint with a missing, shortened or changed file is passed over with a warning that names the file.
    Raises CheckpointError: there are checkpoints but none is good, or `folder` is a file (a pickle, say).
    """
    folder = Path(folder)
    if folder.is_file():
        raise CheckpointError(f"{folder} is a file; a checkpoint is a folder of step-* folders. {no_pickle(folder)}")
    found = _checkpoints(folder)
    for step, path in found:
        try:
            return Checkpoint(step, _decode(path, step), path)
        except CheckpointError as error:
            _log.warning("%s; trying the checkpoint before it", error)
    if found:
        raise CheckpointError(f"no checkpoint in {folder} can be read (see the warnings); start again in another --out")
    return None


def _encode(step: int, state: Any) -> dict[str, bytes]:
    value, tensors = pack(state)
    text = json.dumps({"schema": SCHEMA, "step": step, "state": value}, allow_nan=False, ensure_ascii=False)
    files = {_TENSORS: encode(tensors, checksum=False), _STATE: text.encode(errors="backslashreplace")}
    sums = {file: {"bytes": len(data), "sha256": sha256(data)} for file, data in files.items()}
    return {**files, _MANIFEST: json_bytes({"schema": SCHEMA, "step": step, "files": sums})}


def _decode(path: Path, step: int) -> Any:
    """Read the checkpoint `path`; what is decoded are the very bytes whose hash was right."""
    written = _read(path / _MANIFEST)
    manifest = _json(path / _MANIFEST, written)
    try:
        if manifest["schema"] != SCHEMA:
            raise CheckpointError(f"{path / _MANIFEST} has schema {manifest['schema']}, this version reads {SCHEMA}")
        if manifest["step"] != step or json_bytes(manifest) != written:  # it holds no checksum of itself
            raise CheckpointError(f"{path / _MANIFEST} is damaged: not the bytes that were written")
        entries = {file: manifest["files"][file] for file in (_TENSORS, _STATE)}
        sums = {file: (entry["bytes"], entry["sha256"]) for file, entry in entries.items()}
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{path / _MANIFEST} is damaged") from error
    data = {}
    for file, (size, digest) in sums.items():
        data[file] = _read(path / file)
        if len(data[file]) != size:
            raise CheckpointError(f"{path / file} is damaged: {len(data[file])} bytes, {size} were written")
        if sha256(data[file]) != digest:
            raise CheckpointError(f"{path / file} is damaged: its SHA-256 is not the one of the manifest")
    stored = _json(path / _STATE, data[_STATE])
    if stored.get("step") != step:
        raise CheckpointError(f"{path / _STATE} is of step {stored.get('step')}, the folder's name says {step}")
    try:
        return unpack(stored["state"], safetensors.torch.load(data[_TENSORS]))
    except (SafetensorError, KeyError, ValueError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"{path} was written by another version: {error}") from error


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {reason(error)}") from error


def _json(file: Path, data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is damaged: not JSON") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} is damaged: not a JSON object")
    return value


def _checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Return (step, path), newest first; one set aside for a new one of its step comes after that one."""
    if not folder.is_dir():
        return []
    found = [(match, path) for path in folder.iterdir() if (match := _FOLDER.fullmatch(path.name)) and path.is_dir()]
    found.sort(key=lambda pair: (int(pair[0]["step"]), pair[0]["replaced"] is None), reverse=True)
    return [(int(match["step"]), path) for match, path in found]


def _move_into_place(temporary: Path, final: Path) -> None:
    if not final.exists():
        os.rename(temporary, final)
        return
    aside = final.with_name(f".replaced-{final.name}")
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(final, aside)
    try:
        os.rename(temporary, final)
    except OSError:
        os.rename(aside, final)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _last(folder: Path) -> str:
    try:
        found = _checkpoints(folder)
    except OSError:
        found = []
    before = f"the last checkpoint, {found[0][1].name}, is untouched" if found else "there is no checkpoint before it"
    return f"{before}; make room or choose another --out, then continue with --resume"


_TAG = "$"
_LAYOUTS = (("channels_last", torch.channels_last, 4), ("channels_last_3d", torch.channels_last_3d, 5))


def pack(state: Any) -> tuple[Any, dict[str, Tensor]]:
    """Split `state` into a value that JSON holds exactly and the tensors that it refers to by name.

    Dicts (any mix of str, int, float, bool and None keys, order kept), lists, tuples, None, bools, ints, floats (NaN
    and infinities too), text, tensors of any shape and device, NumPy arrays and scalars. What JSON has no word for is
    written as an object with the key ``"$"``. The tensors are contiguous copies on the CPU.
    Raises InputError: something else is in the nest; its place is named.

    Example:
        >>> value, tensors = pack({"betas": (0.9, 0.999), "w": torch.ones(2)})
        >>> value
        {'betas': {'$': 'tuple', 'items': [0.9, 0.999]}, 'w': {'$': 'tensor', 'name': 'w'}}
        >>> tensors
        {'w': tensor([1., 1.])}
    """
    tensors: dict[str, Tensor] = {}
    return _pack(state, (), tensors), tensors


def unpack(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the nest that :func:`pack` split."""
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
        forms = [memory_format for layout, memory_format, _ in _LAYOUTS if layout == value.get("layout")]
        return tensors[value["name"]].contiguous(memory_format=forms[0]) if forms else tensors[value["name"]]
    raise KeyError(f"unknown kind {kind!r}")


def _pack(value: Any, place: tuple[str, ...], tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_TAG: "float", "value": repr(float(value))}
    if isinstance(value, Tensor):
        return _pack_tensor(value, place, tensors)
    if isinstance(value, np.ndarray):
        try:
            array = torch.from_numpy(np.ascontiguousarray(value).reshape(value.shape))
        except TypeError as error:
            raise InputError(f"a checkpoint cannot hold an array of {value.dtype} ({_said(place)})") from error
        return {_TAG: "array", "name": _keep(array, place, tensors)}
    if isinstance(value, Mapping):
        return _pack_dict(value, place, tensors)
    if isinstance(value, (list, tuple)):
        items = [_pack(item, (*place, str(i)), tensors) for i, item in enumerate(value)]
        return {_TAG: "tuple", "items": items} if isinstance(value, tuple) else items
    told = f"a checkpoint cannot hold a {type(value).__name__} ({_said(place)})"
    raise InputError(f"{told}; give tensors, numbers, text, lists, tuples and dicts")


def _pack_dict(value: Mapping[Any, Any], place: tuple[str, ...], tensors: dict[str, Tensor]) -> Any:
    if all(type(key) is str for key in value) and _TAG not in value:
        return {key: _pack(item, (*place, key), tensors) for key, item in value.items()}
    items = []
    for key, item in value.items():
        if not (key is None or isinstance(key, (str, int, float))):
            raise InputError(f"a checkpoint's dict keys are text or numbers, not {type(key).__name__} ({_said(place)})")
        items.append([_pack(key, place, tensors), _pack(item, (*place, str(key)), tensors)])
    return {_TAG: "dict", "items": items}


def _pack_tensor(value: Tensor, place: tuple[str, ...], tensors: dict[str, Tensor]) -> dict[str, str]:
    if value.layout != torch.strided or value.device.type == "meta" or value.is_quantized:
        raise InputError(f"checkpoints hold dense tensors with values; {_said(place)} is sparse, quantised or on meta")
    packed = {_TAG: "tensor", "name": _keep(value, place, tensors)}
    if not value.is_contiguous():
        for layout, memory_format, ndim in _LAYOUTS:
            if value.ndim == ndim and value.is_contiguous(memory_format=memory_format):
                packed["layout"] = layout
    return packed


def _keep(value: Tensor, place: tuple[str, ...], tensors: dict[str, Tensor]) -> str:
    name = base = ".".join(place) or "state"
    number = 1
    while name in tensors:
        number += 1
        name = f"{base}#{number}"
    copy = torch.empty(value.shape, dtype=value.dtype)
    tensors[name] = copy.copy_(value.detach())
    return name


def _said(place: tuple[str, ...]) -> str:
    return f"at {'.'.join(place)}" if place else "as the whole state"
