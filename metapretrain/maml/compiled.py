"""Meta-steps whose pieces are compiled: one inner step, the way back through it, and the outer loss.

torch.compile has no second order, and a meta-step traced as one graph takes minutes to compile with five inner steps.
These pieces are traced with the derivatives in them, compiled once and used for every step. The way back computes a
step anew from the weights that it began with; of each step only these are kept.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from metapretrain.errors import InputError
from metapretrain.graphs import Recorder, add_gradients, own_gradients
from metapretrain.maml import engines
from metapretrain.maml.adapt import Options, build, state_of
from metapretrain.maml.engines import sliced_patches
from metapretrain.maml.inner import Inner, Named, any_step, at_step, differentiable_twice, leaves_of
from metapretrain.maml.learner import MAML, pair
from metapretrain.nests import Nest, layout, named_leaves, rebuild, tensors

logger = logging.getLogger(__name__)

Tensors = list[Tensor]
GRAPH_WARMUPS = 3  # before recording: the engine's probe, lazy buffers and autotuning have to settle
BY_STEP = "inner rates by step cannot be compiled; give one rate, or leave compile out"
ALLOWED = {"batchnorm": ("batch", "frozen"), "optimizer": ("sgd",), "chunk": (None,), "engine": ("auto", "vmap")}


class CompiledMeta:
    """Does what a learner's `backward` does, with pieces compiled once for each form of batch and learner.

    Compiling takes a minute or two, which thousands of meta-steps on a GPU are worth. It is done anew for other shapes,
    steps, rates in numbers, training modes, frozen parameters or autocasts. Gradients agree with the learner's own up
    to rounding; a parameter that nothing uses gets zeros, not None.

    Args:
        learner: :class:`metapretrain.maml.MAML` or its kin, whose tasks can go through one forward pass (vmap).
        backend: of `torch.compile`.

    Raises:
        InputError: another learner, or one with dropout, chunks, an inner optimizer, rates by step, or records of
            each step.

    Example:
        >>> maml = MAML(nn.Linear(4, 2), lr=0.1)
        >>> x, y = torch.randn(3, 6, 4), torch.tensor([[0, 1] * 3] * 3)
        >>> CompiledMeta(maml, backend="eager").backward((x, y), (x, y)).shape
        torch.Size([3])
    """

    def __init__(self, learner: Any, backend: str = "inductor") -> None:
        if not isinstance(learner, MAML):
            raise InputError(f"only MAML and its kin can be compiled, not {type(learner).__name__}; leave compile out")
        for name, allowed in ALLOWED.items():
            if (value := getattr(learner, name)) not in allowed:
                words = " or ".join(map(repr, allowed))
                raise InputError(f"{name}={value!r} cannot be compiled: give {words}, or leave compile out")
        if isinstance(learner.lr, (list, tuple)):
            raise InputError(BY_STEP)
        if any(isinstance(part, nn.modules.dropout._DropoutNd) and part.p for part in learner.modules()):
            raise InputError("a learner with dropout cannot be compiled; leave compile out")
        self.learner, self.backend = learner, backend
        self._pieces: dict[Any, _Pieces] = {}

    def backward(self, support: Any, query: Any) -> Tensor:
        """Add the gradient of the mean query loss to ``.grad``; return the losses (T,), detached.

        Args:
            support, query: (inputs, labels) of T tasks; every tensor is (T, ...).

        Raises:
            InputError: what the learner's `backward` refuses; random numbers, a module that asks for `current_step`, or
                gradients of other tensors than the module's parameters and rates.
        """
        learner, (support, query) = self.learner, self.learner._stacked(support, query)
        options = {**learner._options(support), "checkpoint": False}
        options.pop("chunk")
        inner, named = build(learner._task_loss(), learner._values(), support, Options(**options))
        if len(inner.rates.by_step) > 1:
            raise InputError(BY_STEP)
        fast, frozen = inner.split(named)
        others = [*frozen.values(), *inner.rates.tensors()]
        key = self._form(inner, support, query, others)
        if key not in self._pieces:
            self._try(support, query, [*named.values(), *others])
        state = [p.detach().expand(options["tasks"], *p.shape).contiguous() for p in fast.values()]
        with torch.no_grad():
            if key not in self._pieces:
                self._pieces[key] = self._compile(inner, state, others, support, query)
            losses, by_state, by_others = _meta_step(self._pieces[key], state, others, support, query, inner.steps)
            _add([*fast.values(), *others], [*(grad.sum(0) for grad in by_state), *by_others])
        return losses

    def _form(self, inner: Inner, support: Nest, query: Nest, others: Tensors) -> tuple[Any, ...]:
        """All that the pieces keep of a call."""
        device = tensors(support)[0].device.type
        numbers = [rate for _, rate in named_leaves(inner.rates.by_step) if not isinstance(rate, Tensor)]
        cast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
        buffers = tuple(id(buffer) for buffer in self.learner.buffers())  # held by the pieces: no other gets the id
        wanted = tuple(p.requires_grad for p in others)
        chosen = inner.steps, inner.order, inner.adapted, tuple(numbers), cast
        return layout((support, query)), chosen, buffers, wanted, state_of(inner.loss_fn)

    def _try(self, support: Nest, query: Nest, known: Tensors) -> None:
        """A meta-step that is not compiled, for what it raises; gradients are left alone."""
        losses = self.learner.losses(support, query)
        if not losses.requires_grad:
            raise InputError("neither the learner's parameters nor lr ask for a gradient; see requires_grad_()")
        own = {id(leaf) for leaf in (*known, *leaves_of(known))}
        if any(id(leaf) not in own for leaf in leaves_of([losses])):
            raise InputError(
                "the loss asks for gradients of other tensors than the module's parameters and rates, of a learned "
                "loss or of inputs; that cannot be compiled: leave compile out"
            )

    def _compile(self, inner: Inner, state: Tensors, others: Tensors, support: Nest, query: Nest) -> _Pieces:
        begin = time.perf_counter()
        sources = _Sources(inner, [p.requires_grad for p in others], support, query)
        given, s, q = [p.detach() for p in others], tensors(support), tensors(query)
        traced = (
            _traced(sources.advance, state, given, s),
            _traced(sources.pull, state, given, s, state),
            _traced(sources.outer, state, given, q),
        )
        pieces = _Pieces(*(torch.compile(graph, backend=self.backend, dynamic=False) for graph in traced))
        _meta_step(pieces, state, others, support, query, steps=1)
        sizes, seconds = [len(graph.graph.nodes) for graph in traced], time.perf_counter() - begin
        logger.info("compiled a meta-step in %.0f s: pieces of %s operations", seconds, sizes)
        return pieces


class MetaGraph:
    """Records a learner's `backward` once for each shape of batch and replays it with a single launch.

    On a CPU it is the learner's `backward` as it is. What decides a step beside weights, learned rates and data (steps,
    modes, attributes of the module) is recorded anew when it changes. The learner's parameters must stay where they are
    in memory, as optimizers and `load_state_dict` leave them.

    Args:
        learner: :class:`metapretrain.maml.MAML`, its kin or :class:`metapretrain.protonet.learner.ProtoNet`.
        compile: fuse operations first, on a CPU too; for :class:`metapretrain.maml.CompiledMeta`'s learners.

    Raises:
        InputError: something that is no learner, or a learner that cannot be compiled.

    Example:
        >>> from metapretrain.maml import MAML
        >>> maml = MAML(torch.nn.Linear(4, 2), lr=0.1)
        >>> x, y = torch.randn(3, 6, 4), torch.tensor([[0, 1] * 3] * 3)
        >>> MetaGraph(maml).backward((x, y), (x, y)).shape
        torch.Size([3])
    """

    def __init__(self, learner: Any, compile: bool = False) -> None:
        if not hasattr(learner, "backward"):
            raise InputError(f"a {type(learner).__name__} is no learner: give MAML, its kin or ProtoNet over it")
        self.learner, self.step = learner, CompiledMeta(learner) if compile else learner
        self.recorder = Recorder(self._gradients, plain=0, warmups=GRAPH_WARMUPS, changed=self._buffers)

    def backward(self, support: Any, query: Any) -> Tensor:
        """Add the gradient of the mean query loss to ``.grad``; return the losses (T,), detached.

        Args:
            support, query: (inputs, labels) of T tasks; every tensor is (T, ...).

        Raises:
            InputError: what the learner's `backward` refuses; on a GPU, an lr that is computed from other tensors.
        """
        batch = pair(support), pair(query)
        leaves = tensors(batch)
        if not leaves or not leaves[0].is_cuda:
            losses: Tensor = self.step.backward(*batch)
            return losses
        learned = self._learned()
        form = [*(id(p) for p in learned), state_of(self.learner)]  # recorded anew where it is another
        losses, gradients = self.recorder(*batch, form)
        add_gradients(learned, gradients)
        return losses

    def _learned(self) -> Tensors:
        rates = tensors(getattr(self.learner, "lr", None))  # which are not registered unless they are parameters
        learned = list({id(p): p for p in (*self.learner.parameters(), *rates) if p.requires_grad}.values())
        if not all(p.is_leaf for p in learned):
            raise InputError("lr comes from further computations, which a recorded meta-step would miss; use backward")
        return learned

    def _buffers(self) -> Tensors:
        return list(self.learner.buffers())

    def _gradients(self, support: Nest, query: Nest, _: Nest) -> tuple[Tensor, list[Tensor | None]]:
        with own_gradients(self._learned()) as found:
            losses = self.step.backward(support, query)
        return losses, found


class _Pieces(NamedTuple):
    """Functions of a list: the tasks' weights, what all tasks share (frozen parameters, rates), data, gradients."""

    advance: Callable[..., Tensors]
    pull: Callable[..., Tensors]
    outer: Callable[..., Tensors]


def _meta_step(
    pieces: _Pieces, state: Tensors, others: Tensors, support: Nest, query: Nest, steps: int
) -> tuple[Tensor, Tensors, Tensors]:
    """Losses (T,), and the gradients of their mean by the weights of each task and by what they share."""
    given, s, count = [p.detach() for p in others], tensors(support), len(state)
    states = [state]
    with torch.autocast(state[0].device.type, enabled=False):  # the traced pieces hold their casts
        for _ in range(steps):
            states.append(pieces.advance([states[-1], given, s]))
        losses, *found = pieces.outer([states.pop(), given, tensors(query)])
        by_state, by_others = found[:count], found[count:]
        while states:
            found = pieces.pull([states.pop(), given, s, by_state])
            by_state, more = found[:count], found[count:]
            by_others = [a + b for a, b in zip(by_others, more, strict=True)]
    return losses, by_state, by_others


def _add(parameters: Tensors, gradients: Tensors) -> None:
    computed = []
    for p, grad in zip([p for p in parameters if p.requires_grad], gradients, strict=True):
        if p.is_leaf:
            p.grad = grad if p.grad is None else p.grad.add_(grad)
        else:
            computed.append((p, grad))
    if computed:  # rates that come from further computations
        torch.autograd.backward([p for p, _ in computed], [grad for _, grad in computed])


def _traced(function: Callable[..., Tensors], *given: Tensors) -> torch.fx.GraphModule:
    from torch.fx.experimental.proxy_tensor import make_fx

    def run(given: list[Tensors]) -> Tensors:
        return function(*given)

    copies = [[tensor.clone() for tensor in part] for part in given]  # tracing knows tensors by identity
    with any_step(), sliced_patches():
        graph: torch.fx.GraphModule = make_fx(run)(copies)
    tags = [tag for node in graph.graph.nodes for tag in getattr(node.target, "tags", ())]
    if torch.Tag.nondeterministic_seeded in tags:
        raise InputError("a step that draws random numbers, as dropout does, cannot be compiled; leave compile out")
    return graph


class _Sources(NamedTuple):
    """The pieces as they are written, for tracing; `wanted` tells which of the others ask for a gradient."""

    inner: Inner
    wanted: list[bool]
    support: Nest
    query: Nest

    def advance(self, state: Tensors, others: Tensors, data: Tensors) -> Tensors:
        """The tasks' weights after one inner step."""
        inner = replace(self.inner, graph=False, order=1)
        return [value.detach().contiguous() for value in self._moved(inner, state, others, data)]

    def pull(self, state: Tensors, others: Tensors, data: Tensors, gradients: Tensors) -> Tensors:
        """Gradients by the weights before a step, and by the others, of a function with `gradients` after it."""
        state, others = self._leaves(state, others)
        moved = self._moved(replace(self.inner, graph=True), state, others, data)
        return self._gradients(moved, gradients, state, others)

    def outer(self, state: Tensors, others: Tensors, data: Tensors) -> Tensors:
        """The query losses (T,), and the gradients of their mean."""
        state, others = self._leaves(state, others)
        inner, fast, frozen = self._named(self.inner, state, others)
        with torch.enable_grad(), at_step(inner.steps):
            losses = engines.over_tasks(inner.loss, fast, frozen, rebuild(self.query, iter(data)))
            return [losses.detach(), *self._gradients([losses.mean()], [torch.ones_like(losses[0])], state, others)]

    def _moved(self, inner: Inner, state: Tensors, others: Tensors, data: Tensors) -> Tensors:
        inner, fast, frozen = self._named(inner, state, others)
        with torch.enable_grad(), differentiable_twice(inner.order):
            batch = rebuild(self.support, iter(data))
            return list(engines.ENGINES["vmap"](inner, {**frozen, **fast}, batch, steps=range(1))[0].values())

    def _named(self, inner: Inner, state: Tensors, others: Tensors) -> tuple[Inner, Named, Named]:
        rest = iter(others)
        frozen = {name: next(rest) for name in inner.names if name not in set(inner.adapted)}
        return replace(inner, rates=inner.rates.replaced(rest)), dict(zip(inner.adapted, state, strict=True)), frozen

    def _leaves(self, state: Tensors, others: Tensors) -> tuple[Tensors, Tensors]:
        others = [p.detach().requires_grad_(wanted) for p, wanted in zip(others, self.wanted, strict=True)]
        return [p.detach().requires_grad_() for p in state], others

    def _gradients(self, outputs: Tensors, gradients: Tensors, state: Tensors, others: Tensors) -> Tensors:
        wanted = [*state, *(p for p in others if p.requires_grad)]
        with torch.enable_grad():
            found = torch.autograd.grad(outputs, wanted, gradients, allow_unused=True, materialize_grads=True)
        return [gradient.contiguous() for gradient in found]  # the next piece was traced with these strides
