"""The inner loop of MAML with one signature (Finn et al., 2017)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from metapretrain.maml.choice import Choice, choose
from metapretrain.maml.engines import higher, learn2learn, loop, vmap
from metapretrain.maml.inner import HiddenWeights, Inner, LossFunction, Named, differentiable_twice
from metapretrain.maml.layouts import channels_last
from metapretrain.maml.nests import Nest, map_tensors, rebuild
from metapretrain.maml.problem import Options, build, stack_results, task_of
from metapretrain.maml.steps import at_step

ONE_TASK: dict[str, Callable[[Inner, Named, Nest], Named]] = {
    "higher": higher.adapt_one,
    "learn2learn": learn2learn.adapt_one,
    "loop": loop.adapt_one,
}


def adapt(
    loss_fn: LossFunction,
    params: Nest,
    batch: Nest,
    *,
    lr: Any,
    steps: int = 1,
    order: int = 2,
    engine: str = "auto",
    tasks: int | None = None,
    only: Any = None,
    checkpoint: bool = False,
    allow_unused: bool = False,
    optimizer: Any = "sgd",
) -> Nest:
    """Parameters after `steps` of gradient descent on a task, differentiable by what they started from.

    Args:
        loss_fn: ``loss_fn(params, batch)`` returns a scalar; it must use the params that it is given.
        params: a tensor, or (nested) dicts of tensors. If neither they nor `lr` nor `batch` (nor tensors that
            loss_fn holds) ask for a gradient, the result is detached and no graph is kept: give detached
            params at evaluation.
        batch: any nest of dicts, lists, tuples and dataclasses of tensors.
        lr: the inner rate: a number above 0; a tensor, which can be learned; a dict by parameter name of
            either (Meta-SGD), of the parameter's shape or broadcast to it; or a list of these, one for each
            step.
        steps: 0 returns the parameters.
        order: 2 differentiates through the inner gradients (MAML), 1 takes them as constants (FOMAML).
        engine: "loop" (one task at a time), "vmap" (all tasks in one forward pass), "mixed" (vmap, but loop
            for the query part), "higher", "learn2learn", or "auto".
        tasks: T, if every tensor of the batch has a leading dimension (T, ...); the result's leaves have it
            too.
        only: which parameters adapt: names, prefixes up to a dot, patterns with ``*``, or a function of the
            name. The others are passed to loss_fn as they are, and keep their meta-gradient.
        checkpoint: compute the steps again in the backward pass, in segments: memory of about 2 sqrt(steps)
            steps for one more forward and backward pass a step.
        allow_unused: leave parameters that the loss does not use as they are, instead of an error.
        optimizer: "sgd", or with engine "higher" also "momentum" (0.9), "adam", or a function from parameter
            groups to a torch optimizer; its rate is `lr`.

    Raises:
        InputError: a bad value, a loss that is not a scalar, unused parameters, gradients switched off, a
            compiled function in second order, an engine that is not installed.

    Example:
        >>> w = torch.tensor(3.0, requires_grad=True)
        >>> fast = adapt(lambda w, x: (w - x) ** 2 / 2, w, torch.tensor([0.0, 1.0]), lr=0.1, tasks=2)
        >>> fast.tolist(), torch.autograd.grad(fast.sum(), w)[0].item()  # d(w - 0.1 (w - x))/dw = 0.9
        ([2.7..., 2.79...], 1.7...)
    """
    options = Options(lr, steps, order, engine, tasks, only, checkpoint, allow_unused, optimizer)
    inner, named = build(loss_fn, params, batch, options)
    if steps == 0:
        results = named if tasks is None else {n: p.expand(tasks, *p.shape) for n, p in named.items()}
    else:
        results = _with_graph_if_needed(_adapted, inner, named, batch, tasks, options.asked)
    return rebuild(params, iter([results[name] for name in named]))


def engine_for(
    loss_fn: LossFunction, params: Nest, batch: Nest, query: Nest = None, *, lr: Any, **options: Any
) -> Choice:
    """The engine that :func:`adapt`, or with `query` :func:`meta_loss`, takes: ``Choice(engine, why)``.

    Example:
        >>> engine_for(lambda w, x: (w - x) ** 2, torch.tensor(1.0), torch.tensor(0.0), lr=0.1)
        Choice(engine='loop', why='a single task')
    """
    chosen = Options(lr, **options)
    inner, named = build(loss_fn, params, batch, chosen)
    if chosen.asked != "auto":
        return Choice(chosen.asked, "asked for")
    return choose(inner, named, batch, chosen.tasks, query)


def evaluate(
    inner: Inner,
    named: Named,
    support: Nest,
    query: Nest,
    tasks: int,
    engine: str,
    function: LossFunction,
) -> Tensor:
    """`function(adapted params, query)` of each task, stacked to (T, ...)."""
    values: Tensor = _with_graph_if_needed(_evaluated, inner, named, support, tasks, engine, query, function)
    return values


def _with_graph_if_needed(
    run: Callable[..., Any], inner: Inner, named: Named, batch: Nest, tasks: int | None, *rest: Any
) -> Any:
    engine, *others = rest
    if engine == "auto":
        engine = choose(inner, named, batch, tasks, *others[:1]).engine
    try:
        return run(inner, named, batch, tasks, engine, *others)
    except HiddenWeights:
        return run(replace(inner, graph=True), named, batch, tasks, engine, *others)


def _adapted(inner: Inner, named: Named, batch: Nest, tasks: int | None, engine: str) -> Named:
    with differentiable_twice(inner.order):
        if engine in ("vmap", "mixed"):
            stacked = map_tensors(lambda t: t[None], batch) if tasks is None else batch
            fast, frozen = vmap.adapt_stack(inner, named, stacked, tasks or 1)
            if tasks is None:
                return {**frozen, **{name: p[0] for name, p in fast.items()}}
            return {**{name: p.expand(tasks, *p.shape) for name, p in frozen.items()}, **fast}
        if tasks is None:
            return ONE_TASK[engine](inner, named, batch)
        return stack_results([ONE_TASK[engine](inner, named, task_of(batch, t)) for t in range(tasks)])


def _evaluated(
    inner: Inner, named: Named, support: Nest, tasks: int, engine: str, query: Nest, function: LossFunction
) -> Tensor:
    def call(params: Named, data: Nest) -> Tensor:
        return inner.call(function, params, data)

    if engine in ("vmap", "mixed"):
        with differentiable_twice(inner.order):
            fast, frozen = vmap.adapt_stack(inner, named, support, tasks)
        if engine == "mixed":
            each = zip(*(stack.unbind() for stack in fast.values()), strict=True)
            adapted = ({**frozen, **dict(zip(fast, values, strict=True))} for values in each)
            return _one_by_one(inner, call, adapted, query, engine)
        with at_step(inner.steps):
            return vmap.over_tasks(call, fast, frozen, query)

    def one_task(task: int) -> Named:
        with differentiable_twice(inner.order):
            return ONE_TASK[engine](inner, named, task_of(support, task))

    return _one_by_one(inner, call, map(one_task, range(tasks)), query, engine)


def _one_by_one(
    inner: Inner, call: Callable[[Named, Nest], Tensor], adapted: Iterable[Named], query: Nest, engine: str
) -> Tensor:
    values = []
    for task, params in enumerate(adapted):
        data = task_of(query, task)
        layout: AbstractContextManager[object] = nullcontext()
        if engine in ("loop", "mixed"):
            params, data, layout = channels_last(params, data)
        with at_step(inner.steps), layout:
            values.append(call(params, data))
    return torch.stack(values)
