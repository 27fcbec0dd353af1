"""What a row of run_speed.py is made of: contenders, their clock, and the kernels that one call starts."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class Missing(Exception):
    """A peer or a device that is not there; the message says what is needed."""


@dataclass(frozen=True)
class Contender:
    """Work to time: `make()` returns a function that does `n` calls of it, or raises Missing.

    `each` is how many of the row's units one call does. `difference()` is how far its gradient (or what else it is
    for) is from the reference, relative, in float64. With `count`, the kernels and the waits of one call are counted.
    `note()` is what else a reader must know, shown beside the name. `flop` is the arithmetic that one call needs.
    """

    name: str
    make: Callable[[], Callable[[int], None]]
    ours: bool = False
    clock: Callable[[], float] = time.thread_time
    difference: Callable[[], float] | None = None
    each: int = 1
    count: bool = False
    note: Callable[[], str] | None = None
    flop: float = 0.0


def plain_jax() -> tuple[Any, Any]:
    """(jax, jax.numpy) with products of full precision and float64; raises Missing where it is not installed."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    try:
        import jax
        import jax.numpy as jnp
    except ImportError:
        raise Missing("jax (pip install jax)") from None
    jax.config.update("jax_default_matmul_precision", "highest")
    jax.config.update("jax_enable_x64", True)
    return jax, jnp


def count_kernels(call: Callable[[], object]) -> tuple[int, int | None]:
    """What one call starts: kernels, and how often it waits for the GPU; without a GPU, operations and None."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler tells each start and stop on stderr
    import torch
    from torch.profiler import ProfilerActivity, profile

    cuda = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * cuda]) as seen:
        call()
    names = [event.name for event in seen.events()]
    if cuda:
        launches = [name for name in names if name.startswith(("cuda", "cu")) and "Launch" in name]
        waits = [name for name in names if name.startswith("cuda") and "Synchronize" in name]
        return len(launches), len(waits)
    # An operation that calls others is counted with them: views and allocations are left out of neither library.
    return sum(name.startswith("aten::") for name in names), None


def engine_of(step: Any, accelerator: Any, settings: Any) -> Any:
    """What runs updates of a step as training does: recorded on a GPU, unless `settings.cuda_graph` is False."""
    from metapretrain.training.engine import Engine, build_optimizer, over_ranks

    step.to(accelerator.device).train()
    optimizer = accelerator.prepare_optimizer(build_optimizer(step, settings, accelerator.device))
    return Engine(over_ranks(step, accelerator, settings), optimizer, accelerator, settings)


def device_clock() -> Callable[[], float]:
    """Wall time if work runs elsewhere than in this thread, else the thread's own time."""
    import torch

    alone = torch.get_num_threads() == 1 and not torch.cuda.is_available()
    return time.thread_time if alone else time.perf_counter


def here(on_cpu: Any, on_cuda: Any) -> Any:
    import torch

    return on_cuda if torch.cuda.is_available() else on_cpu


def wait() -> None:
    """Wait for the GPU, if there is one."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def float32_limit(size: int = 8192) -> float:
    """Operations a second of one large float32 product on the GPU, without TF32."""
    import torch

    a = torch.randn(size, size, device="cuda")
    before, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, False
    try:
        a @ a
        wait()
        begin = time.perf_counter()
        for _ in range(5):
            a @ a
        wait()
        return 5 * 2 * size**3 / (time.perf_counter() - begin)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
