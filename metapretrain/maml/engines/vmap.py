"""Engine `vmap`: all tasks in one forward pass, and ordinary autograd for the stack of their weights.

``vmap(grad(...))`` differentiated once more is silently wrong through BatchNorm, LayerNorm and InstanceNorm
with adapted weights (functorch#534). So only the forward pass is mapped. A task's loss depends on its own
weights alone: the gradient of the summed losses by the stacked weights is the stack of the tasks' gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from metapretrain.maml.checkpointed import unroll
from metapretrain.maml.convolutions import MatmulConvolutions
from metapretrain.maml.inner import Inner, Named, differentiable_twice
from metapretrain.maml.nests import Nest, rebuild, tensors
from metapretrain.maml.steps import at_step

Function = Callable[[Named, Nest], Tensor]


def adapt_stack(inner: Inner, params: Named, batch: Nest, tasks: int) -> tuple[Named, Named]:
    """(adapted parameters (T, ...), the others, shared) after the inner steps, by name."""
    fast, frozen = inner.split(params)
    stacked = {name: p.expand(tasks, *p.shape) for name, p in fast.items()}
    stacked = unroll(advance, inner, inner.start(stacked), frozen, batch)
    return inner.finish(stacked), frozen


def over_tasks(function: Function, fast: Named, frozen: Named, batch: Nest) -> Tensor:
    """`function` of each task's parameters and batch, (T, ...); random numbers differ between tasks."""

    def one(stacked: list[Tensor], shared: list[Tensor], data: list[Tensor]) -> Tensor:
        params = {**dict(zip(frozen, shared, strict=True)), **dict(zip(fast, stacked, strict=True))}
        return function(params, rebuild(batch, iter(data)))

    mapped = torch.vmap(one, in_dims=(0, None, 0), randomness="different")
    on_cpu = next(iter(fast.values())).device.type == "cpu"
    # the CPU's fused attention has no rule for vmap either
    with differentiable_twice(2 if on_cpu else 1), _convolutions(fast, on_cpu), _no_fast_path():
        return mapped(list(fast.values()), list(frozen.values()), tensors(batch))


def _convolutions(fast: Named, on_cpu: bool) -> AbstractContextManager[object]:
    """Matrix products on a GPU, if filters (T, O, C, h, w) are among the weights of each task's own."""
    return nullcontext() if on_cpu or all(p.ndim != 5 for p in fast.values()) else MatmulConvolutions()


@contextmanager
def _no_fast_path() -> Iterator[None]:
    """Transformer layers of torch in evaluation mode cannot see, under vmap, that a gradient is wanted."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def advance(inner: Inner, fast: Named, frozen: Named, batch: Nest, first: int, last: int) -> Named:
    for step in range(first, last):
        with at_step(step):
            losses = over_tasks(inner.loss, fast, frozen, batch)
        fast = inner.update(step, fast, inner.gradient(step, losses.sum(), fast))
    return fast
