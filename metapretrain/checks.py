"""Checks of what users give: counts, numbers, names, seeds and paths; and optional packages."""

from __future__ import annotations

import gc
import importlib.util
import logging
import operator
import os
import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from math import inf, isfinite
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metapretrain.errors import InputError, brief, one_of

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)


def user_path(name: str | Path) -> Path:
    """The path with ``~`` as the user's home; an unknown user's stays as it is, for the error that follows to name."""
    return Path(os.path.expanduser(name))


_INSTALL = {"sklearn": "scikit-learn", "PIL": "pillow", "umap": "umap-learn", "onnxscript": "onnx onnxscript"}
_BUILD = '--no-deps --config-settings="--build-option=build_ext"'  # needs a C compiler
_INSTALL["learn2learn"] = f"{_BUILD} learn2learn==0.2.0 && pip install gym requests scipy tqdm"


def install(package: str) -> str:
    """The command that installs what is imported by this name."""
    return f"pip install {_INSTALL.get(package, package.replace('_', '-'))}"


def lacking(module: str, load: bool = True) -> str | None:
    """Which package `import module` lacks, and what installs it; None: none. Without `load` nothing is imported.

    Example:
        >>> lacking("json"), lacking("no_such.part")
        (None, 'no_such, which is not installed: pip install no-such')
    """
    name = module.partition(".")[0]
    try:
        if sys.modules.get(name) is None and importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(name=name)
        if load:
            importlib.import_module(module)
    except Exception as error:  # whatever a damaged package raises
        why = f"cannot be imported ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
        if isinstance(error, ModuleNotFoundError) and error.name and "." not in error.name:
            name, why = error.name, "is not installed"
        return f"{name}, which {why}: {install(name)}"
    return None


def require(module: str, what: str, instead: str = "") -> Any:
    """The module that `what` needs; InputError: it cannot be imported, with what installs it, or what to do instead."""
    if (why := lacking(module)) is not None:
        raise InputError(f"{what} needs {why}{instead}")
    return sys.modules[module]


MOST = 2**62  # above it, sums of two numbers leave the range of int64


def whole(name: str, value: Any, least: int = 0, most: int = MOST) -> int:
    """Return `value` as an int of `least` to `most`.

    Raises InputError: it is a bool, a float, anything else that is no whole number, or out of range.

    Example:
        >>> whole("shots", 0, 1)
        Traceback (most recent call last):
        ...
        metapretrain.errors.InputError: shots is 0; give a whole number of at least 1
    """
    try:
        found = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        found = None
    if found is None or not least <= found <= most:
        open_ended = most >= 2**31 - 1 and (found or 0) <= most
        limits = f"of at least {least}" if open_ended else f"from {least} to {most}"
        raise InputError(f"{name} is {brief(value)}; give a whole number {limits}")
    return found


def number(
    name: str, value: Any, *, least: float = -inf, above: float = -inf, most: float = inf, below: float = inf
) -> float:
    """Return `value` as a finite float within the limits, of which `above` and `below` are themselves left out.

    Raises InputError: it is not.

    Example:
        >>> number("lr", 0, above=0)
        Traceback (most recent call last):
        ...
        metapretrain.errors.InputError: lr is 0; give a number above 0
    """
    real = not isinstance(value, bool) and isinstance(value, Real) and isfinite(value)
    if not (real and least <= value <= most and above < value < below):
        limits = {"of at least": least, "above": above, "at most": most, "below": below}
        said = " and ".join(f"{words} {limit}" for words, limit in limits.items() if isfinite(limit))
        raise InputError(f"{name} is {brief(value)}; give a {f'number {said}' if said else 'finite number'}")
    return float(value)


def check_seed(seed: Any) -> int:
    """Return `seed` if it lies in 0..2**64-1, else raise InputError."""
    return whole("seed", seed, 0, 2**64 - 1)


def check_rank(rank: Any, world_size: Any) -> tuple[int, int]:
    """Return (rank, world_size) if the rank lies in 0..world_size-1, else raise InputError."""
    rank, world_size = whole("rank", rank), whole("world_size", world_size, 1)
    if rank >= world_size:
        raise InputError(f"rank must be below world_size, not rank {rank} of {world_size}")
    return rank, world_size


def check_names(what: str, given: Iterable[str]) -> tuple[str, ...]:
    """The names, which are texts, at least one, and all different, else InputError.

    Example:
        >>> check_names("sources", {"mlm": 1, "order": 2})
        ('mlm', 'order')
    """
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise InputError(f"{what} is {given!r}; give several names, such as {{name: ...}} or [name, ...]")
    names = tuple(given)
    if not names or not all(isinstance(name, str) for name in names):
        raise InputError(f"{what} is {list(names)!r}; give at least one, each under a name that is text")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InputError(f"{what} has {', '.join(twice)} more than once; give different names")
    return names


def check_alike(where: object, classes: Iterable[str]) -> None:
    """Refuse classes that are one number, as 1 and 1.0 are; say which differ by capitals alone: they may be one."""
    known: dict[Any, str] = {}
    for name in classes:
        key: Any = name.casefold()
        with suppress(ValueError):
            key = float(name)
        if (other := known.setdefault(key, name)) != name:
            if isinstance(key, float):
                raise InputError(f"{where}: {other!r} and {name!r} are two classes, but one number; write them alike")
            log.warning("%s: %r and %r are two classes; write them alike if they are one", where, other, name)


def parse_value(text: str, kind: Any) -> Any:
    """The value that a text gives for a setting of this type: bool, int, float or str, or one of them or None.

    Example:
        >>> parse_value("0.5", float | None), parse_value("none", float | None), parse_value("true", bool)
        (0.5, None, True)
    """
    options = getattr(kind, "__args__", (kind,))
    if type(None) in options and text.lower() == "none":
        return None
    kind = next(option for option in options if option is not type(None))
    if kind is bool:
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        raise InputError(f"expected true or false, got {text!r}")
    try:
        return kind(text)
    except ValueError:
        expected = {int: "a whole number", float: "a number"}[kind]
        raise InputError(f"expected {expected}, got {text!r}") from None


DEVICES = ("auto", "cpu", "cuda", "mps")
PRECISIONS = ("bf16", "fp16", "fp32")


def check_device_name(name: str) -> str:
    """`name` if it is a device's by its form, ``auto``, ``cpu``, ``mps``, ``cuda`` or ``cuda:N``, else InputError."""
    if re.fullmatch(r"cuda:\d+", name):
        return name
    if name.lower() in ("gpu", "nvidia"):
        raise InputError(f"unknown device {name!r}; did you mean 'cuda'? allowed: {', '.join(DEVICES)}")
    return one_of("device", name, DEVICES)


def check_device(name: str) -> str:
    """The torch device string of `name`; ``auto`` is the first GPU if there is one, else the CPU.

    Raises InputError: the name is unknown or this machine has no such device.
    """
    import torch

    check_device_name(name)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return "cuda" if count else "mps" if torch.backends.mps.is_available() else "cpu"
    if name.startswith("cuda") and not count:
        raise InputError(f"device {name!r} is not available: torch sees no CUDA GPU; try --device auto")
    index = int(name.partition(":")[2] or 0)
    if name.startswith("cuda") and index >= count:
        have = "cuda:0" if count == 1 else f"cuda:0 to cuda:{count - 1}"
        raise InputError(f"device {name!r} is not available: this machine has {have}")
    if name == "mps" and not torch.backends.mps.is_available():
        raise InputError("device 'mps' is not available on this machine; use --device cpu or auto")
    return name


def check_precision(name: str, device: str) -> str:
    """`name` if `device` can compute in it, else InputError: ``fp16`` needs a GPU, ``bf16`` works on the CPU too."""
    one_of("precision", name, PRECISIONS)
    if name == "fp16" and device == "cpu":
        raise InputError("precision 'fp16' needs a GPU; on the CPU use --precision bf16 or fp32")
    if name == "bf16" and device.startswith("cuda"):
        import torch

        if not torch.cuda.is_bf16_supported():
            raise InputError(f"precision 'bf16' is not supported by {device!r}; use --precision fp16 or fp32")
    return name


LARGEST = 1e17  # squared distances of larger numbers leave the range of float32


def out_of_range(z: Tensor) -> Tensor:
    """Which rows of embeddings (N, D) hold NaN, infinity or more than `LARGEST`, bool (N,)."""
    return (~(z.isfinite() & (z.abs() <= LARGEST))).any(1)


def decisive(outputs: Tensor) -> Tensor:
    """Outputs (..., W) or (N,) as they are; InputError where a row has no largest one that is finite."""
    best = outputs.amax(-1) if outputs.ndim > 1 and outputs.shape[-1] else outputs
    if bad := int((~best.isfinite()).sum()):
        raise InputError(f"outputs of {bad} of {best.numel()} inputs are NaN or infinite; try fp32, or train again")
    return outputs


def leave_ranks() -> None:
    """End this process's part in a run of several: all wait for each other, then leave. Alone it does nothing.

    Without it gloo's threads may abort a process whose work is done (https://github.com/pytorch/pytorch/pull/179291).
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return
    try:
        distributed.barrier()
    except RuntimeError as error:
        log.debug("another process has left before: %s", error)
    gc.collect()  # a wrapped model, which holds the group, is a cycle
    distributed.destroy_process_group()
