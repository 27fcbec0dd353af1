"""Which engine `auto` takes: the fastest that is right for the loss function and the device."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metapretrain.maml.engines import vmap
from metapretrain.maml.inner import Inner, Named, differentiable_twice
from metapretrain.maml.nests import Nest, map_tensors, tensors
from metapretrain.maml.problem import cuda_devices, modules_of, task_of
from metapretrain.maml.steps import at_step, repeated

logger = logging.getLogger(__name__)

# On a CPU, a task whose forward pass has more multiplications than this keeps the cores busy by itself, and
# grouped convolutions only lose; below, the cost of starting operations counts, and a stack of tasks shares
# it. Larger networks lose by stacking their weights. Measured on two cores (docs/maml.md); a rule and not a
# timing, so that a run that is continued takes the engine that it had.
BUSY = 5.5e7
LARGE = 5e5


class Choice(NamedTuple):
    """An engine and the reason for it."""

    engine: str
    why: str


_probed: dict[Any, str | None] = {}
_said: set[Any] = set()


def choose(inner: Inner, named: Named, batch: Nest, tasks: int | None, query: Nest = None) -> Choice:
    """The engine for `engine="auto"`; says at debug level which and why, once for each loss and shape."""
    choice = _choose(inner, named, batch, tasks, query)
    seen = _key(inner, named, batch), choice
    if seen not in _said:
        _said.add(seen)
        logger.debug("engine %s: %s", choice.engine, choice.why)
    return choice


def _choose(inner: Inner, named: Named, batch: Nest, tasks: int | None, query: Nest) -> Choice:
    if inner.optimizer is not None:
        return Choice("higher", "the only engine with optimizers other than SGD")
    if tasks is None or tasks == 1:
        return Choice("loop", "a single task")
    device = next(iter(named.values())).device.type
    if device == "cpu" and is_busy(named, batch):
        return Choice("loop", "a task keeps this CPU busy by itself")
    key = _key(inner, named, batch)
    if key not in _probed:
        _probed[key] = _probe(inner, named, batch)
    reason = _probed[key]
    if reason is not None:
        return Choice("loop", reason)
    if device == "cpu" and query is not None and is_busy(named, query):
        return Choice("mixed", "small support parts are stacked, a query part keeps this CPU busy by itself")
    return Choice("vmap", f"all tasks in one forward pass on {device}")


def is_busy(named: Named, batch: Nest) -> bool:
    """Whether one task of the batch is better computed by itself on a CPU."""
    return sum(p.numel() for p in named.values()) > LARGE or work(named, batch) > BUSY


def work(named: Named, batch: Nest) -> float:
    """Rough count of multiplications of one task's forward pass.

    Convolution weights are used at every position of the images, which are taken to halve twice a layer.
    """
    examples = [leaf for leaf in tensors(batch) if leaf.ndim >= 2]
    rows = max((leaf.shape[1] for leaf in examples), default=1)
    positions = max((math.prod(leaf.shape[3:]) for leaf in examples if leaf.ndim >= 5), default=1.0)
    total = 0.0
    for parameter in named.values():
        if parameter.ndim > 2:
            total += parameter.numel() * rows * positions
            positions = max(1.0, positions / 4)
        else:
            total += parameter.numel() * rows
    return total


def _key(inner: Inner, named: Named, batch: Nest) -> Any:
    function: Any = getattr(inner.loss_fn, "__func__", inner.loss_fn)
    function = getattr(function, "__code__", None) or type(function)
    shapes = tuple((name, p.shape, p.dtype, p.device.type) for name, p in named.items())
    return function, shapes, inner.adapted, tuple((t.ndim, t.dtype) for t in tensors(batch))


def _probe(inner: Inner, named: Named, batch: Nest) -> str | None:
    """Try one step on two tasks by vmap; None if it gives what the loop gives, else the reason.

    Random numbers, what modules keep for each step, and the buffers of modules that the loss function closes over
    are left as they were.
    """
    buffers = [buffer for module in modules_of(inner.loss_fn) for buffer in module.buffers()]
    kept = [buffer.clone() for buffer in buffers]
    try:
        return _gradient_by_vmap(inner, named, batch)
    finally:
        with torch.no_grad():
            for buffer, value in zip(buffers, kept, strict=True):
                buffer.copy_(value)


def _gradient_by_vmap(inner: Inner, named: Named, batch: Nest) -> str | None:
    two = map_tensors(lambda t: t[:2].detach(), batch)
    detached = {name: p.detach() for name, p in named.items()}
    inner = replace(inner, graph=True, order=1, rates=inner.rates.detached())
    devices = cuda_devices(named)
    with (
        torch.random.fork_rng(devices=devices), repeated(), at_step(0), differentiable_twice(2), exact_products(),
    ):  # fmt: skip
        before = _random_states(devices)
        looped = [_one_gradient(inner, detached, task_of(two, task)) for task in range(2)]
        random = not all(map(torch.equal, before, _random_states(devices)))
        try:
            mapped = _stacked_gradient(inner, detached, two)
        except Exception as error:  # of any kind: it may come from the user's loss
            line = str(error).strip().partition("\n")[0]
            return f"vmap is not possible ({type(error).__name__}: {line})"
    return None if random else _difference(looped, mapped)  # dropout differs between the two by right


@contextmanager
def exact_products() -> Iterator[None]:
    """No TF32: its rounding alone is larger than the difference that the probe looks for."""
    backends: tuple[Any, ...] = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [backend.allow_tf32 for backend in backends]
    for backend in backends:
        backend.allow_tf32 = False
    try:
        yield
    finally:
        for backend, value in zip(backends, before, strict=True):
            backend.allow_tf32 = value


def _random_states(devices: list[int]) -> list[Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)]


def _one_gradient(inner: Inner, named: Named, batch: Nest) -> list[Tensor | None]:
    fast, frozen = inner.split(named)
    fast = inner.start(fast)
    return inner.gradient(0, inner.loss({**frozen, **fast}, batch), fast)


def _stacked_gradient(inner: Inner, named: Named, batch: Nest) -> list[Tensor | None]:
    fast, frozen = inner.split(named)
    fast = inner.start({name: p.expand(2, *p.shape) for name, p in fast.items()})
    return inner.gradient(0, vmap.over_tasks(inner.loss, fast, frozen, batch).sum(), fast)


def _difference(looped: list[list[Tensor | None]], mapped: list[Tensor | None]) -> str | None:
    gap = size = 0.0
    exact = True
    for number, stack in enumerate(mapped):
        for task, gradients in enumerate(looped):
            one = gradients[number]
            if one is None or stack is None:
                continue
            gap += float((one - stack[task]).double().square().sum())
            size += float(one.double().square().sum())
            exact = exact and one.dtype == torch.float64
    if gap**0.5 <= (1e-8 if exact else 2e-2) * size**0.5:
        return None
    return f"by vmap the gradient differs by {(gap / size) ** 0.5:.0e} from that of one task at a time"
