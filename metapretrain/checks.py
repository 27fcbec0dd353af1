"""Checks of what users give: counts, numbers, names, seeds and paths; and optional packages."""

from __future__ import annotations

import gc
import logging
import math
import operator
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from metapretrain.errors import InputError, one_of

log = logging.getLogger(__name__)


def user_path(name: str | Path) -> Path:
    """The path with ``~`` as the user's home; an unknown user's stays as it is, for the error that follows to name.

    Example:
        >>> user_path("~/data") == Path.home() / "data", str(user_path("~no-such-user-here/data"))
        (True, '~no-such-user-here/data')
    """
    return Path(os.path.expanduser(name))


_NEEDS = "pip install gym requests scipy tqdm"
INSTALL = f'pip install --no-deps --config-settings="--build-option=build_ext" learn2learn==0.2.0 && {_NEEDS}'


def import_learn2learn(what: str = "learn2learn") -> Any:
    """The module learn2learn; `what` begins the error's line.

    Raises:
        InputError: it is not installed, or what it imports is not.
    """
    try:
        import learn2learn
    except ImportError as error:
        if error.name not in (None, "learn2learn"):
            raise InputError(f"{what} cannot be imported: {error}; {_NEEDS}") from None
        raise InputError(f"{what} is not installed: {INSTALL} (needs a C compiler)") from None
    return learn2learn


MOST = 2**62


def whole(what: str, given: Any, minimum: int = 0) -> int:
    """Return `given` as an int of at least `minimum`.

    Raises:
        InputError: it is a bool, a float, any other non-integer, or below `minimum` or above 2**62 (a seed: see
            :func:`check_seed`).

    Example:
        >>> whole("shots", 5, 1)
        5
    """
    try:
        if isinstance(given, bool):
            raise TypeError
        number = operator.index(given)
    except TypeError:
        raise InputError(f"{what} must be an integer of at least {minimum}, not {given!r}") from None
    if number < minimum:
        raise InputError(f"{what} must be at least {minimum}, not {number}")
    if number > MOST and what != "seed":
        raise InputError(f"{what} must be at most {MOST}, not {number}")
    return number


def check_seed(seed: Any) -> int:
    """Return `seed` if it lies in 0..2**64-1.

    Raises:
        InputError: it does not.

    Example:
        >>> check_seed(7)
        7
    """
    number = whole("seed", seed)
    if number >= 2**64:
        raise InputError(f"seed must be below 2**64, not {number}")
    return number


def check_rank(rank: Any, world_size: Any) -> tuple[int, int]:
    """Return (rank, world_size) if the rank lies in 0..world_size-1.

    Raises:
        InputError: it does not.

    Example:
        >>> check_rank(1, 4)
        (1, 4)
    """
    rank, world_size = whole("rank", rank), whole("world_size", world_size, 1)
    if rank >= world_size:
        raise InputError(f"rank must be below world_size, not rank {rank} of {world_size}")
    return rank, world_size


def check_names(what: str, given: Iterable[str]) -> tuple[str, ...]:
    """The names, which are texts, at least one, and all different.

    Raises:
        InputError: they are not.

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


def check_number(
    what: str, given: Any, low: float, high: float = math.inf, *, above: bool = False, below: bool = False
) -> float:
    """Return `given` as a finite float of [low, high], without `low` if `above`, without `high` if `below`.

    Raises:
        InputError: it is not.

    Example:
        >>> check_number("epsilon", 1, 0, 1)
        1.0
    """
    right = isinstance(given, int | float) and not isinstance(given, bool) and math.isfinite(given)
    if not right or given < low or given > high or (above and given == low) or (below and given == high):
        limits = f"{'above' if above else 'of at least'} {low:g}"
        if high < math.inf:
            limits += f" and {'below' if below else 'at most'} {high:g}"
        raise InputError(f"{what} is {given!r}; give a number {limits}")
    return float(given)


def check_whole(what: str, given: Any, low: int) -> int:
    """Return `given`, a whole number of at least `low`.

    Raises:
        InputError: it is not.

    Example:
        >>> check_whole("samples", 2, 1)
        2
    """
    if not isinstance(given, int) or isinstance(given, bool) or given < low:
        raise InputError(f"{what} is {given!r}; give a whole number of at least {low}")
    return given


DEVICES = ("auto", "cpu", "cuda", "mps")


PRECISIONS = ("bf16", "fp16", "fp32")


def check_device_name(name: str) -> str:
    """`name` if it is a device's by its form: ``auto``, ``cpu``, ``mps``, ``cuda`` or ``cuda:N``.

    Raises:
        InputError: it is not; the line has the nearest one.

    Example:
        >>> check_device_name("cuda:1")
        'cuda:1'
    """
    if re.fullmatch(r"cuda:\d+", name):
        return name
    if name.lower() in ("gpu", "nvidia"):
        raise InputError(f"unknown device {name!r}; did you mean 'cuda'? allowed: {', '.join(DEVICES)}")
    return one_of("device", name, DEVICES)


def check_device(name: str) -> str:
    """The torch device string of `name`; ``auto`` is the first GPU if there is one, else the CPU.

    Raises:
        InputError: the name is unknown or this machine has no such device.

    Example:
        >>> check_device("cpu")
        'cpu'
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
    """`name` if `device` can compute in it: ``fp16`` needs a GPU, ``bf16`` works on the CPU too.

    Raises:
        InputError: the name is unknown, or the device cannot.

    Example:
        >>> check_precision("bf16", "cpu")
        'bf16'
    """
    one_of("precision", name, PRECISIONS)
    if name == "fp16" and device == "cpu":
        raise InputError("precision 'fp16' needs a GPU; on the CPU use --precision bf16 or fp32")
    if name == "bf16" and device.startswith("cuda"):
        import torch

        if not torch.cuda.is_bf16_supported():
            raise InputError(f"precision 'bf16' is not supported by {device!r}; use --precision fp16 or fp32")
    return name


def leave_ranks() -> None:
    """End this process's part in a run of several: all wait for each other, then leave. Alone it does nothing.

    A process that ends without it may be aborted in Python's last moments (exit status 134), though its work is done:
    gloo's threads then still hold tensors (https://github.com/pytorch/pytorch/pull/179291). They end with the group,
    which ends with the last that holds it.

    Example:
        >>> leave_ranks()
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
