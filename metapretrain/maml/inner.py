"""The inner loop: the loss of the fast weights, its gradient, the update; rates, step numbers, checkpointed steps.

torch's non-reentrant checkpoint computes a segment again for every step in it: 5 times the work at 36 steps, where
twice is enough. This forward pass needs no graph, because the next step takes only a step's own gradient from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from numbers import Real
from threading import Lock
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from metapretrain.errors import InputError, brief
from metapretrain.nests import Nest, named_leaves, rebuild, tensors

V = TypeVar("V")
_step: ContextVar[int] = ContextVar("inner step", default=0)
_any: ContextVar[bool] = ContextVar("recorded for all inner steps", default=False)


def current_step() -> int:
    """Number of inner steps that the parameters in use have taken: 0 outside, `steps` for the query loss.

    Raises InputError inside :func:`any_step`.

    >>> current_step()
    0
    """
    if _any.get():
        raise InputError("a module asks for current_step(): its steps differ and cannot be compiled; leave compile out")
    return _step.get()


@contextmanager
def holding(variable: ContextVar[V], value: V) -> Iterator[None]:
    """Let a context variable have a value inside the block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def at_step(step: int) -> AbstractContextManager[None]:
    """Let :func:`current_step` be `step` inside the block."""
    return holding(_step, step)


def any_step() -> AbstractContextManager[None]:
    """Let :func:`current_step` be an error inside the block, whose computation has to serve for all steps."""
    return holding(_any, True)


class SwitchedOff:
    """Blocks in which a setting of the whole process is off; it is put back where the last of several threads ends."""

    def __init__(self, get: Callable[[], Any], put: Callable[[Any], Any]) -> None:
        self.get, self.put, self.lock = get, put, Lock()
        self.blocks, self.before = 0, None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """A block."""
        with self.lock:
            if not self.blocks:
                self.before = self.get()
                self.put(False)
            self.blocks += 1
        try:
            yield
        finally:
            with self.lock:
                self.blocks -= 1
                if not self.blocks:
                    self.put(self.before)


Rate = float | Tensor
NOT_FINITE = "holds NaN or infinity; give finite rates"
FORMS = "give a number above 0, a tensor, a dict by parameter name, or a list of one of these for each step"


@dataclass(frozen=True)
class Rates:
    """`by_step` holds one rate for all steps, or one for each; a rate is for all parameters or by name."""

    by_step: tuple[Rate | dict[str, Rate], ...]

    def at(self, step: int, name: str) -> Rate:
        """Rate of a parameter in a step."""
        rate = self.by_step[step if len(self.by_step) > 1 else 0]
        return rate[name] if isinstance(rate, dict) else rate

    def uniform(self, step: int) -> float | None:
        """The one plain number that every parameter has in this step, if it is so."""
        rate = self.by_step[step if len(self.by_step) > 1 else 0]
        return rate if isinstance(rate, float) else None

    def tensors(self) -> list[Tensor]:
        """All rates that are tensors, which may be learned."""
        return tensors(self.by_step)

    def replaced(self, values: Iterator[Tensor]) -> Rates:
        """The same rates with other tensors."""
        return Rates(rebuild(self.by_step, values))


def parse_rates(lr: Any, shapes: Mapping[str, Sequence[int]], steps: int) -> Rates:
    """Check rates for the adapted parameters, whose shapes are given by name.

    Raises InputError for a number <= 0 or NaN, a name that is missing or unknown, a tensor that does not broadcast to
    its parameter, or a list whose length is not `steps`.
    """
    if isinstance(lr, Tensor) and lr.ndim == 1 and len(lr) == steps:
        lr = list(lr.unbind())
    if isinstance(lr, (list, tuple)):
        if len(lr) != steps:
            raise InputError(f"lr has {len(lr)} entries for steps={steps}; give one for each step")
        return Rates(tuple(_one(rate, shapes) for rate in lr))
    return Rates((_one(lr, shapes),))


def _one(lr: Any, shapes: Mapping[str, Sequence[int]]) -> Rate | dict[str, Rate]:
    if not isinstance(lr, Mapping):
        return checked_rate("lr", lr, ())
    given = dict(named_leaves(lr))
    missing = [name for name in shapes if name not in given]
    if missing:
        raise InputError(f"lr has no entry for {', '.join(missing)}; it has: {', '.join(given)}")
    return {name: checked_rate(f"lr[{name!r}]", given[name], shape) for name, shape in shapes.items()}


def checked_rate(what: str, rate: Any, shape: Sequence[int]) -> Rate:
    """The rate of a parameter of this shape; a tensor may hold numbers below 0, since learned rates may turn negative.

    Raises InputError for what is neither a number above 0 nor a tensor of real numbers that broadcasts to `shape`, and
    for one on the CPU that holds NaN or infinity: reading one on a GPU would wait for it.
    """
    if isinstance(rate, Tensor):
        if rate.is_complex() or rate.dtype == torch.bool:
            raise InputError(f"{what} is of {rate.dtype}; {FORMS}")
        sizes = zip(reversed(rate.shape), reversed(shape), strict=False)
        if rate.ndim > len(shape) or any(a not in (1, b) for a, b in sizes):
            raise InputError(f"{what} has shape {tuple(rate.shape)}, which does not fit {tuple(shape)}")
        if rate.is_cpu and not torch._C._functorch.is_batchedtensor(rate) and not rate.isfinite().all():
            raise InputError(f"{what} {NOT_FINITE}")
        return rate
    if isinstance(rate, bool) or not isinstance(rate, Real) or not 0 < float(rate) < math.inf:
        raise InputError(f"{what} is {brief(rate)}; {FORMS}")
    return float(rate)


def check_finite(what: str, rates: Iterable[Tensor]) -> None:
    """Raise InputError for rates that hold NaN or infinity; it waits for their device."""
    if not all(bool(rate.isfinite().all()) for rate in rates):
        raise InputError(f"{what} {NOT_FINITE}")


def first_rate(lr: Any) -> float:
    """The number above 0 that learned rates start at, given as one or as a tensor of one; raises InputError else."""
    return float(checked_rate("lr", lr.item() if isinstance(lr, Tensor) and not lr.ndim else lr, ()))


LossFunction = Callable[[Nest, Nest], Tensor]
Named = dict[str, Tensor]
OptimizerFactory = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


class HiddenWeights(Exception):
    """The loss depends on tensors that want a gradient, though neither params nor lr nor batch do."""


@dataclass(frozen=True)
class Inner:
    """What every engine needs to know of the inner loop, apart from parameters and data.

    `nest` is the user's params, `adapted` names the leaves that move, `graph`: the result carries a gradient, `owned`:
    nobody else has the params, so that a gradient can be taken of them as they are.
    """

    loss_fn: LossFunction
    nest: Nest
    names: tuple[str, ...]
    adapted: tuple[str, ...]
    rates: Rates
    steps: int
    order: int
    graph: bool
    allow_unused: bool = False
    checkpoint: bool = False
    optimizer: OptimizerFactory | None = None
    owned: bool = False

    @property
    def twice(self) -> bool:
        """Whether the gradients are themselves differentiated."""
        return self.order == 2 and self.graph

    def split(self, params: Named) -> tuple[Named, Named]:
        """(those that are adapted, the others)."""
        fast = {n: params[n] for n in self.adapted}
        return fast, {n: p for n, p in params.items() if n not in fast}

    def begin(self, params: Named, tasks: int | None = None) -> tuple[Named, Named]:
        """(parameters to adapt, of each of `tasks` where it is given: (T, ...); the others)."""
        fast, frozen = self.split(params)
        return self.start(fast if tasks is None else {n: p.expand(tasks, *p.shape) for n, p in fast.items()}), frozen

    def start(self, fast: Named) -> Named:
        """Weights that a gradient can be taken of, each by itself: detached leaves where no graph is wanted."""
        if self.graph:  # a view each: the loss may hold a tensor too, as it was, or it may have two names
            given = fast if self.owned else {n: p.view_as(p) for n, p in fast.items()}
            return {n: p if p.requires_grad else p.detach().requires_grad_() for n, p in given.items()}
        return {n: p.detach().requires_grad_() for n, p in fast.items()}

    def call(self, function: LossFunction, params: Named, batch: Nest) -> Tensor:
        """`function` of the parameters in the user's nest."""
        return function(rebuild(self.nest, iter([params[name] for name in self.names])), batch)

    def loss(self, params: Named, batch: Nest) -> Tensor:
        """The inner loss of one task, checked to be a scalar."""
        return scalar(self.call(self.loss_fn, params, batch), "loss_fn")

    def check_loss(self, step: int, loss: Tensor, fast: Named) -> None:
        """Raise for a loss that gradients cannot be taken of as planned.

        InputError: no gradient, or a wrong one by :func:`check_operators`. HiddenWeights: one by tensors that adapt was
        not given, and no graph was planned for.
        """
        if not loss.requires_grad:
            told = "the loss of the inner loop has no gradient: it does not depend on params, or loss_fn works under"
            raise InputError(f"{told} torch.no_grad() or on detached tensors; use the params that loss_fn is given")
        if step == 0:
            check_operators(loss, fast.values(), twice=self.twice)
        if self.order == 2 and not self.graph and step == 0:
            known = {id(p) for p in fast.values()}
            if any(id(leaf) not in known for leaf in leaves_of([loss])):
                raise HiddenWeights

    def checked(self, gradients: Sequence[Tensor | None], loss: Tensor) -> list[Tensor | None]:
        """The gradients of the loss, or an error that names the parameters that have none; as :func:`check_moves`."""
        check_moves(loss, gradients)
        unused = [name for name, g in zip(self.adapted, gradients, strict=True) if g is None]
        if unused and not self.allow_unused:
            told = f"unused in the inner loop: {', '.join(unused)}; leave them out with only=..."
            raise InputError(f"{told}, or pass allow_unused=True to keep them as they are")
        return list(gradients)

    def update(self, step: int, fast: Named, gradients: Sequence[Tensor | None]) -> Named:
        """Gradient descent: equation 1 of Finn et al., 2017, with a rate for each parameter and step."""
        uniform = self.rates.uniform(step)
        on_cpu = next(iter(fast.values())).device.type == "cpu"
        if uniform is not None and self.graph and on_cpu:  # _foreach_add would keep the weights and the gradients
            updated = {
                name: p if g is None else torch.add(p, g, alpha=-uniform)
                for (name, p), g in zip(fast.items(), gradients, strict=True)
            }
        elif uniform is not None and all(g is not None for g in gradients):
            moved = torch._foreach_add(list(fast.values()), list(gradients), alpha=-uniform)  # type: ignore[arg-type]
            updated = dict(zip(fast, moved, strict=True))
        else:
            updated = {
                name: p if g is None else p - self.rates.at(step, name) * g
                for (name, p), g in zip(fast.items(), gradients, strict=True)
            }
        if self.graph:
            return updated
        return {name: p.detach().requires_grad_() for name, p in updated.items()}

    def finish(self, fast: Named) -> Named:
        """The result: without a graph it asks for no gradient either."""
        return fast if self.graph else {name: p.detach() for name, p in fast.items()}


def scalar(loss: Any, what: str) -> Tensor:
    """Return `loss`; raises InputError if it is not a floating point tensor without dimensions."""
    if not isinstance(loss, Tensor):
        raise InputError(f"{what} returned a {type(loss).__name__}; it must return a scalar tensor")
    if loss.ndim:
        raise InputError(f"{what} returned shape {tuple(loss.shape)}; it must return a scalar: take its mean or sum")
    return loss


def check_moves(loss: Tensor, gradients: Iterable[Tensor | None]) -> None:
    """Raise InputError for a loss that is NaN and its gradients are not, on a CPU: it would adapt nothing."""
    plain = torch._C._functorch.maybe_current_level() is None  # in torch.func's vmap there is no value to read
    nan = loss.is_cpu and plain and math.isnan(loss.item())
    if nan and all(g is None or bool(g.isfinite().all()) for g in gradients):
        told = "the loss is NaN but its gradient is not, as where all labels of a task are ignored (-100)"
        raise InputError(f"{told}: that would adapt nothing; leave such tasks out")


@contextmanager
def differentiable_twice(order: int) -> Iterator[None]:
    """Attention by the math kernel in second order: the fused kernels have no double backward."""
    if order == 1:
        yield
        return
    with sdpa_kernel(SDPBackend.MATH):
        yield


def nodes_of(outputs: Iterable[Tensor], ends: Iterable[Tensor] = ()) -> Iterator[Any]:
    """The steps that a gradient of `outputs` would take back, up to those that made `ends`."""
    seen = {None, *(end.grad_fn for end in ends)}
    waiting: list[Any] = [output.grad_fn for output in outputs]
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            yield node
            waiting += [following for following, _ in node.next_functions]


def leaves_of(outputs: Iterable[Tensor]) -> list[Tensor]:
    """The leaf tensors that a gradient of `outputs` would reach."""
    return [node.variable for node in nodes_of(outputs) if hasattr(node, "variable")]


def check_operators(loss: Tensor, ends: Iterable[Tensor], *, twice: bool = False, mapped: bool = False) -> None:
    """Refuse operators with wrong derivatives, up to `ends`: second ones (`twice`), or those under vmap (`mapped`).

    Raises InputError for an embedding whose gradient is sparse, scaled by frequency or, by vmap, has padding; weight
    norm as torch has it; grid_sample by vmap.
    """
    for node in nodes_of([loss], ends):
        name = node.name()
        if name.startswith(FAULTY) and (fault := _fault(node, name, twice, mapped)) is not None:
            raise InputError(fault)


FAULTY = ("Embedding", "GridSampler", "WeightNorm")  # how the names in _fault begin


def _fault(node: Any, name: str, twice: bool, mapped: bool) -> str | None:
    if name.startswith("Embedding") and node._saved_sparse:
        return "an embedding has sparse=True, whose gradients cannot be adapted by; leave it out"
    if twice and name.startswith("EmbeddingBag"):
        return "torch has no second derivative of EmbeddingBag; use nn.Embedding and a mean, or order=1 (first_order)"
    if twice and name.startswith("Embedding") and node._saved_scale_grad_by_freq:
        return "torch's second derivative with scale_grad_by_freq is wrong; leave it out, or use order=1 (first_order)"
    if twice and name.startswith("WeightNorm"):
        return (
            "torch's second derivative of weight norm is wrong; use torch.nn.utils.parametrizations.weight_norm in the "
            "module that you give to functional() or a learner, or order=1 (first_order)"
        )
    if mapped and name == "EmbeddingBackward0" and node._saved_padding_idx < 2**63:  # none is saved as 2**64 - 1
        return (
            "vmap takes F.embedding's padding_idx for the first task only; use engine='loop', or nn.Embedding in the "
            "module that you give to functional() or a learner"
        )
    if mapped and name.startswith("GridSampler"):
        return "vmap mixes up the tasks and images of F.grid_sample; use engine='loop'"
    return None


Run = Callable[[list[Tensor], bool], list[Tensor]]


def in_segments(engine: Any, inner: Inner, fast: Named, frozen: Named, batch: Nest) -> Named:
    """The adapted parameters after all inner steps, which the backward pass computes again, a segment at a time."""
    length = max(1, math.ceil(math.sqrt(inner.steps)))
    others = [*frozen.values(), *tensors(batch), *inner.rates.tensors()]
    for first in range(0, inner.steps, length):
        steps = range(first, min(first + length, inner.steps))
        run = _segment(engine, inner, [*fast, *frozen], batch, steps)
        moved = _Segment.apply(run, len(fast), *fast.values(), *others)
        fast = dict(zip(fast, moved, strict=True))
    return fast


def _segment(engine: Any, inner: Inner, names: list[str], batch: Nest, steps: range) -> Run:
    def run(values: list[Tensor], graph: bool) -> list[Tensor]:
        rest = iter(values)
        params = {name: next(rest) for name in names}
        data = rebuild(batch, rest)
        rates, order = inner.rates.replaced(rest), inner.order if graph else 1
        again = replace(inner, rates=rates, graph=graph, order=order, checkpoint=False)
        with differentiable_twice(inner.order):
            return list(engine(again, params, data, steps=steps)[0].values())

    return run


class _Segment(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Run, moving: int, *values: Tensor) -> tuple[Tensor, ...]:
        device = values[0].device.type  # the backward pass runs outside of a block of autocast, in another thread
        ctx.cast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        ctx.run, ctx.gpus = run, sorted({v.device.index for v in values if v.is_cuda})
        ctx.random = torch.get_rng_state(), [torch.cuda.get_rng_state(gpu) for gpu in ctx.gpus]
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
            stack.enter_context(torch.random.fork_rng(devices=ctx.gpus))
            torch.set_rng_state(ctx.random[0])  # dropout drops the same units again
            for gpu, state in zip(ctx.gpus, ctx.random[1], strict=True):
                torch.cuda.set_rng_state(state, gpu)
            stack.enter_context(torch.autocast(*ctx.cast))
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
        told = f"checkpoint=True cannot see tensors that loss_fn uses but is not given (shapes {shapes})"
        raise InputError(f"{told}: put them into params and choose what adapts with only=..., or into the batch")
