"""Inner steps in segments that are computed again in the backward pass: memory of about sqrt(steps) steps.

torch's non-reentrant checkpoint is exact here too, but the inner gradient unpacks what the segment saved, and
so computes the segment again for every step in it: 5 times the work at 36 steps, where twice is enough. This
forward pass needs no graph at all, because a step's own gradient is all that the next step takes from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from metapretrain.errors import InputError
from metapretrain.maml.inner import Inner, Named, differentiable_twice, leaves_of
from metapretrain.maml.nests import Nest, rebuild, tensors
from metapretrain.maml.steps import repeated

Advance = Callable[[Inner, Named, Named, Nest, int, int], Named]
Run = Callable[[list[Tensor], bool], list[Tensor]]


def unroll(advance: Advance, inner: Inner, fast: Named, frozen: Named, batch: Nest) -> Named:
    """All inner steps of `advance(inner, fast, frozen, batch, first, last)`, checkpointed if asked for."""
    if not (inner.checkpoint and inner.graph):
        return advance(inner, fast, frozen, batch, 0, inner.steps)
    length = math.ceil(math.sqrt(inner.steps))
    others = [*frozen.values(), *tensors(batch), *inner.rates.tensors()]
    for first in range(0, inner.steps, length):
        last = min(first + length, inner.steps)
        run = _segment(advance, inner, tuple(fast), tuple(frozen), batch, first, last)
        moved = _Segment.apply(run, len(fast), *fast.values(), *others)
        fast = dict(zip(fast, moved, strict=True))
    return fast


def _segment(
    advance: Advance,
    inner: Inner,
    names: tuple[str, ...],
    frozen_names: tuple[str, ...],
    batch: Nest,
    first: int,
    last: int,
) -> Run:
    def run(values: list[Tensor], graph: bool) -> list[Tensor]:
        rest = iter(values)
        fast = {name: next(rest) for name in names}
        frozen = {name: next(rest) for name in frozen_names}
        data = rebuild(batch, rest)
        rates = inner.rates.replaced(rest)
        again = replace(inner, rates=rates, graph=graph, order=inner.order if graph else 1)
        with differentiable_twice(inner.order):
            return list(advance(again, again.start(fast), frozen, data, first, last).values())

    return run


class _Segment(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Run, moving: int, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.run, ctx.random, ctx.autocast = run, _RandomState(values), _Autocast(values[0].device.type)
        ctx.save_for_backward(*values)
        with torch.enable_grad():
            moved = run([value.detach() for value in values], False)
        return tuple(value.detach() for value in moved)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[2:]
        values = [v.detach().requires_grad_(need) for v, need in zip(ctx.saved_tensors, needed, strict=True)]
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            stack.enter_context(repeated())
            stack.enter_context(ctx.random.restored())
            stack.enter_context(ctx.autocast.restored())
            moved = ctx.run(values, True)
        _check_hidden(moved, values)
        wanted = [value for value in values if value.requires_grad]
        paired = [(m, g) for m, g in zip(moved, gradients, strict=True) if m.requires_grad]
        found = iter(torch.autograd.grad([m for m, _ in paired], wanted, [g for _, g in paired], allow_unused=True))
        return None, None, *(next(found) if value.requires_grad else None for value in values)


def _check_hidden(moved: list[Tensor], values: list[Tensor]) -> None:
    # Leaves that the steps made themselves, of weights that ask for no gradient, share their memory.
    known = {value.data_ptr() for value in values}
    hidden = [leaf for leaf in leaves_of(moved) if leaf.data_ptr() not in known]
    if hidden:
        shapes = ", ".join(str(tuple(leaf.shape)) for leaf in hidden[:3])
        raise InputError(
            f"checkpoint=True cannot see tensors that loss_fn uses but is not given (shapes {shapes}): "
            "put them into params and choose what adapts with only=..., or into the batch"
        )


class _RandomState:
    """Random numbers as they were, so that dropout drops the same units again."""

    def __init__(self, values: tuple[Tensor, ...]) -> None:
        self.cpu = torch.get_rng_state()
        self.cuda = {v.device.index: torch.cuda.get_rng_state(v.device) for v in values if v.is_cuda}

    def restored(self) -> Any:
        stack = ExitStack()
        stack.enter_context(torch.random.fork_rng(devices=list(self.cuda)))
        torch.set_rng_state(self.cpu)
        for index, state in self.cuda.items():
            torch.cuda.set_rng_state(state, index)
        return stack


class _Autocast:
    """Mixed precision as it was: the backward pass runs outside of the block, in another thread."""

    def __init__(self, device: str) -> None:
        self.device, self.enabled = device, torch.is_autocast_enabled(device)
        self.dtype = torch.get_autocast_dtype(device)

    def restored(self) -> Any:
        return torch.autocast(self.device, self.dtype, self.enabled)
