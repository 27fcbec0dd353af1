"""The line of a training that ran out of memory, with who held it."""

from __future__ import annotations

import torch

GIB = 2**30


def out_of_memory(where: str, step: int, free: int, total: int, reserved: int) -> str:
    """Return one line: where memory ran out, what this process and others hold, and what to do.

    A process's CUDA context counts among the others' memory, so that less than 1 GiB of it is nobody else's.

    Args:
        where: name of the device.
        step: updates done.
        free: bytes that no process holds, of `total`; 0 of 0 where that is not known.
        total: bytes of the device.
        reserved: bytes that PyTorch's allocator holds in this process.

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
    """Free and total bytes of a GPU, and those that this process reserved; zeros where torch cannot tell.

    Example:
        >>> memory_held(torch.device("cpu"))
        (0, 0, 0)
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return 0, 0, 0
    try:
        return (*torch.cuda.mem_get_info(device), torch.cuda.memory_reserved(device))
    except RuntimeError:  # the query itself may need memory
        return 0, 0, 0
