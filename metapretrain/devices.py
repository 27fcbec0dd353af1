"""Devices and precisions by name: what may be asked for, and whether this machine has it."""

from __future__ import annotations

import gc
import logging
import re
import sys

from metapretrain.errors import InputError, one_of

log = logging.getLogger(__name__)

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
