"""Devices, precisions and ranks by name, and the line of a training that ran out of memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from metapretrain.checks import check_device, check_precision
from metapretrain.errors import InputError

GIB = 2**30


def out_of_memory(where: str, step: int, free: int, total: int, reserved: int) -> str:
    """Return one line: where memory ran out, what this process and others hold, and what to do.

    `free`, `total`, `reserved`: bytes that no process holds, that the device has (0: unknown), that this process holds.

    Example:
        >>> out_of_memory("cuda", 400, 1 * GIB, 80 * GIB, 19 * GIB).partition(":")[0]
        'out of memory on cuda at step 400 (19.0 of 80.0 GiB are held by this process, about 60.0 by others)'
    """
    smaller = "lower the batch size (batch_size), or accumulate over smaller batches (accumulate)"
    line = f"out of memory on {where} at step {step}"
    if not total:
        return f"{line}: {smaller}"
    others = max(0, total - free - reserved)
    held = f"{reserved / GIB:.1f} of {total / GIB:.1f} GiB are held by this process"
    if others < GIB:
        return f"{line} ({held}): {smaller}"
    return (
        f"{line} ({held}, about {others / GIB:.1f} by others): start it again with --resume when these have ended, or "
        f"{smaller}"
    )


def memory_held(device: torch.device) -> tuple[int, int, int]:
    """Free and total bytes of a GPU, and those that this process reserved; zeros where torch cannot tell."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return 0, 0, 0
    try:
        return (*torch.cuda.mem_get_info(device), torch.cuda.memory_reserved(device))
    except RuntimeError:  # the query itself may need memory
        return 0, 0, 0


def make_accelerator(device: str, precision: str, *, unused_parameters: bool = False) -> Any:
    """Return an `accelerate.Accelerator` for a device name (`auto`, `cpu`, `cuda`, `cuda:N`, `mps`) and a precision.

    `unused_parameters`: some update leaves some parameters without a gradient (one task a step).
    Raises InputError: a device that is not there, or a precision that it cannot compute in.
    """
    from accelerate import Accelerator, DistributedDataParallelKwargs
    from accelerate.state import AcceleratorState

    # Its default arguments are the group of all ranks. Loaded after that is made, it would hold the group for good, and
    # `leave_ranks` could not end its threads.
    if torch.distributed.is_available():
        from torch.distributed.nn import functional  # noqa: F401

    device = check_device(device)
    check_precision(precision, device)
    if device.startswith("cuda:"):
        torch.cuda.set_device(device)
    # accelerate keeps one state a process; a second phase may want another precision or device
    grouped = torch.distributed.is_available() and torch.distributed.is_initialized()
    AcceleratorState._reset_state(reset_partial_state=not grouped)
    found = Accelerator(
        cpu=device == "cpu",
        mixed_precision="no" if precision == "fp32" else precision,
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=unused_parameters)],
    )
    if device != "auto" and found.device.type != device.partition(":")[0]:
        raise InputError(f"the processes compute on {found.device.type} already; for {device} start them anew")
    return found


def mixed_precision(device: str | torch.device, precision: str) -> torch.autocast:
    """Return the context of a forward pass outside the training loop, in the precision that the loop computes in.

    Example:
        >>> with mixed_precision("cpu", "bf16"):
        ...     nn.Linear(2, 2)(torch.ones(2)).dtype
        torch.bfloat16
    """
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[precision]
    return torch.autocast(torch.device(device).type, dtype=dtype, enabled=precision != "fp32")


def compile_parts(module: nn.Module) -> int:
    """Compile, in place, every submodule that says `compilable = True`; return how many there were."""
    parts = [part for part in module.modules() if getattr(part, "compilable", False)]
    for part in parts:
        part.compile()
    return len(parts)


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """Return the state of the default generators of the CPU and, if `device` is one, the GPU."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: Mapping[str, torch.Tensor]) -> None:
    """Go back to a state that :func:`random_state` returned."""
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
