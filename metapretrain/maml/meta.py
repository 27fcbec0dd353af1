"""The outer loss of MAML over a batch of tasks, and its gradient chunk by chunk (Finn et al., 2017)."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from metapretrain.checks import number, whole
from metapretrain.errors import InputError
from metapretrain.maml.adapt import Options, build, choose, stack_size, task_values
from metapretrain.maml.engines import STACKED
from metapretrain.maml.inner import LossFunction, scalar
from metapretrain.nests import Nest, check_stacked, map_tensors


def meta_loss(
    loss_fn: LossFunction,
    params: Nest,
    support: Nest,
    query: Nest,
    *,
    tasks: int,
    query_loss: LossFunction | None = None,
    **options: Any,
) -> Tensor:
    """Loss of each task's query part under the parameters adapted to its support part, (T,).

    `support` and `query` are nests of tensors (T, ...), T is `tasks`; `chunk` of them are computed at a time (None:
    all, see :func:`meta_backward`). `query_loss` is another function for the query part. `step_weights` (steps,): sum
    the weighted losses after each inner step, see :func:`fading_weights`. `options` and errors as for :func:`adapt`.

    >>> w, x = torch.tensor(3.0, requires_grad=True), torch.tensor([0.0, 1.0])
    >>> meta_loss(lambda w, x: (w - x) ** 2, w, x, x, tasks=2, lr=0.25).tolist()
    [2.25, 1.0]
    """
    return meta_outputs(loss_fn, params, support, query, query_loss_of(loss_fn, query_loss), tasks=tasks, **options)


def fading_weights(steps: int, done: float) -> Tensor:
    """Weights (steps,) of the query losses after each inner step: all equal at `done` 0, the last alone at 1.

    The multi-step loss of MAML++ (Antoniou et al., 2019, section 4), whose weights move linearly with training.

    >>> fading_weights(2, 0.0).tolist(), fading_weights(2, 0.5).tolist(), fading_weights(2, 1.0).tolist()
    ([0.5, 0.5], [0.25, 0.75], [0.0, 1.0])
    """
    weights = torch.full((whole("steps", steps, 1),), (1 - number("done", done, least=0, most=1)) / steps)
    weights[-1] += done
    return weights


def query_loss_of(loss_fn: LossFunction, query_loss: LossFunction | None) -> LossFunction:
    """The loss of the query part, checked to be a scalar."""
    function, name = (loss_fn, "loss_fn") if query_loss is None else (query_loss, "query_loss")
    return lambda values, data: scalar(function(values, data), name)


def meta_outputs(
    loss_fn: LossFunction,
    params: Nest,
    support: Nest,
    query: Nest,
    function: LossFunction,
    *,
    tasks: int,
    chunk: int | None = None,
    step_weights: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """``function(adapted params, query)`` of each task, a tensor of any shape, stacked: (T, ...), as :func:`meta_loss`.

    >>> w, x = torch.tensor(3.0), torch.tensor([0.0, 1.0])
    >>> meta_outputs(lambda w, x: (w - x) ** 2, w, x, x, lambda w, x: w * x, tasks=2, lr=0.25).tolist()
    [0.0, 2.0]
    """
    check_stacked("query", query, whole("tasks", tasks, 1))
    chosen = Options(tasks=tasks, **options)
    check_step_weights(step_weights, chosen)
    inner, named = build(loss_fn, params, support, chosen, query)
    how = chosen.asked, function, step_weights
    parts = [task_values(inner, named, support, query, rows, *how) for rows in _chunks(tasks, chunk)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def meta_backward(
    loss_fn: LossFunction,
    params: Nest,
    support: Nest,
    query: Nest,
    *,
    tasks: int,
    chunk: int | None = None,
    query_loss: LossFunction | None = None,
    step_weights: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Add the gradient of the mean of :func:`meta_loss` to ``.grad``; return the losses (T,), detached.

    Each chunk goes backward before the next one is computed, so memory is that of one chunk; further computations
    behind `params`, rates and batches are gone back through once, at the end. Arguments as for :func:`meta_loss`;
    `chunk` None is all tasks at once for the engines vmap and mixed (as many as a few MiB hold if "auto" took them on a
    CPU), else one task. Raises InputError as :func:`adapt`, or if nothing asks for a gradient.

    >>> w, x = torch.tensor(3.0, requires_grad=True), torch.tensor([0.0, 1.0])
    >>> meta_backward(lambda w, x: (w - x) ** 2, w, x, x, tasks=2, lr=0.25, chunk=1).tolist()
    [2.25, 1.0]
    >>> w.grad.item()  # the mean of 2 (1 - 2 lr)^2 (w - x)
    1.25
    """
    check_stacked("query", query, whole("tasks", tasks, 1))
    chosen, borders = Options(tasks=tasks, **options), _Borders()
    check_step_weights(step_weights, chosen)
    params, support, query, lr = (borders.cut(nest) for nest in (params, support, query, chosen.lr))
    inner, named = build(loss_fn, params, support, replace(chosen, lr=lr), query)
    inner = replace(inner, owned=True)
    function, losses = query_loss_of(loss_fn, query_loss), []
    engine = chosen.asked if chosen.asked != "auto" else choose(inner, named, support, tasks, query, function).engine
    how = engine, function, step_weights
    if chunk is None and engine not in STACKED:
        chunk = 1
    elif chunk is None and chosen.asked == "auto" and next(iter(named.values())).device.type == "cpu":
        chunk = stack_size(inner, named, support, query)
    for rows in _chunks(tasks, chunk):
        part = task_values(inner, named, support, query, rows, *how)
        if not part.requires_grad:
            raise InputError("meta_backward: neither params nor lr ask for a gradient; see requires_grad_()")
        ((part if len(part) == 1 else part.sum()) / tasks).backward()
        losses.append(part.detach())
    borders.backward()
    return torch.cat(losses)


def check_step_weights(weights: Tensor | None, chosen: Options) -> None:
    """Raise InputError unless there is a weight for each step, and the inner loop can be stopped after each."""
    if weights is None:
        return
    given = tuple(weights.shape) if isinstance(weights, Tensor) else f"a {type(weights).__name__}"
    if given != (chosen.steps,) or not chosen.steps:
        raise InputError(f"step_weights are {given} for steps={chosen.steps}; give one for each step, in a tensor")
    if chosen.checkpoint or chosen.asked in ("higher", "learn2learn"):
        raise InputError("step_weights need engine 'loop', 'vmap' or 'mixed', without checkpoint: leave them out")


def _chunks(tasks: int, chunk: int | None) -> list[range]:
    size = tasks if chunk is None else whole("chunk", chunk, 1)
    return [range(first, min(first + size, tasks)) for first in range(0, tasks, size)]


class _Borders:
    """Tensors cut off from where they come from, and the way back for their gradients."""

    def __init__(self) -> None:
        self.pairs: list[tuple[Tensor, Tensor]] = []

    def cut(self, nest: Nest) -> Nest:
        """The nest with detached tensors; those that ask for a gradient collect it."""
        return map_tensors(self._cut, nest)

    def _cut(self, tensor: Tensor) -> Tensor:
        if not tensor.requires_grad:
            return tensor
        inside = tensor.detach().requires_grad_()
        self.pairs.append((tensor, inside))
        return inside

    def backward(self) -> None:
        """Hand the gradients that were collected to the tensors outside."""
        found = [(outside, inside.grad) for outside, inside in self.pairs if inside.grad is not None]
        if found:
            _Handed.apply([grad for _, grad in found], *(outside for outside, _ in found)).backward()


class _Handed(torch.autograd.Function):
    """A zero whose gradients are given: `torch.autograd.backward(tensors, gradients)` imports 40 MiB of sympy."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *outside: Tensor) -> Tensor:
        ctx.gradients = gradients
        return outside[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Any, ...]:
        return None, *ctx.gradients
