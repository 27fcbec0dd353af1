"""Meta-steps whose pieces are compiled: one inner step, the way back through it, and the outer loss.

torch.compile has no second order: the pieces are traced with their derivatives in them. The way back is the derivative
of the inner gradient along one direction (Pearlmutter, 1994). Images lie channels last; convolutions are products.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from weakref import proxy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from metapretrain.errors import InputError, one_of
from metapretrain.graphs import MOST
from metapretrain.maml import engines
from metapretrain.maml.adapt import Options, build, exact_products, state_of
from metapretrain.maml.ahead import Ahead, by_inductor, ends_of, forms_of, later_than, needed, part_of
from metapretrain.maml.inner import Inner, Rates, any_step, at_step, differentiable_twice, leaves_of
from metapretrain.maml.learner import COMPILERS, MAML, RecordedBackward, Reptile, eagerly, learned_by, pair
from metapretrain.maml.meta import check_step_weights, meta_loss
from metapretrain.nests import Nest, layout, map_tensors, named_leaves, rebuild, tensors

logger = logging.getLogger(__name__)

Tensors = list[Tensor]
BY_STEP = (
    "inner rates by step need tensors alike in shape, dtype and requires_grad to be compiled; or leave compile out"
)
ALLOWED = {"optimizer": ("sgd",), "chunk": (None,), "engine": ("auto", "vmap")}


class CompiledMeta:
    """A learner's `backward`, made of pieces that are compiled once for each form of batch and learner.

    Compiling takes a minute or two, and is done anew for other shapes, steps, rates in numbers, training modes, frozen
    parameters or autocasts. On a GPU three processes compile at once, into torch's cache on disk,
    unless TORCHINDUCTOR_COMPILE_THREADS is below 4.
    Gradients agree up to rounding; a parameter that nothing uses gets zeros, not None.

    `learner` is :class:`metapretrain.maml.MAML` or its variants, whose tasks can go through one forward pass (vmap);
    `backend` is "inductor", or "eager" to run the pieces as they are traced.
    Raises InputError: another learner, or one with dropout, chunks, an inner optimizer, or rates by step as numbers.

    Example:
        >>> maml = MAML(nn.Linear(4, 2), lr=0.1)
        >>> x, y = torch.randn(3, 6, 4), torch.tensor([[0, 1] * 3] * 3)
        >>> CompiledMeta(maml, backend="eager").backward((x, y), (x, y)).shape
        torch.Size([3])
    """

    def __init__(self, learner: Any, backend: str = "inductor") -> None:
        if not isinstance(learner, MAML):
            raise InputError(f"only MAML and variants can be compiled, not {type(learner).__name__}; leave compile out")
        for name, allowed in ALLOWED.items():
            if (value := getattr(learner, name)) not in allowed:
                words = " or ".join(map(repr, allowed))
                raise InputError(f"{name}={value!r} cannot be compiled: give {words}, or leave compile out")
        if isinstance(learner, Reptile):
            raise InputError("Reptile has a gradient of its own, which is not compiled; leave compile out")
        if any(isinstance(part, nn.modules.dropout._DropoutNd) and part.p for part in learner.modules()):
            raise InputError("a learner with dropout cannot be compiled; leave compile out")
        self.learner, self.backend = learner, one_of("backend", backend, ("inductor", "eager"))
        self._pieces: dict[Any, _Pieces] = {}

    def backward(self, support: Any, query: Any, step_weights: Tensor | None = None) -> Tensor:
        """Add the gradient of the mean query loss to ``.grad``; return the losses (T,), detached.

        `support`, `query` and `step_weights` are as for :meth:`metapretrain.maml.MAML.backward`. Raises InputError for
        what that refuses, random numbers, a module that asks for `current_step`, or gradients of other tensors than
        the module's parameters and rates.
        """
        learner = self.learner
        support, plain = map_tensors(Tensor.contiguous, learner._stacked(support, query))  # pieces keep the strides
        query = learner._after(support, plain)
        options = {**learner._options(support), "checkpoint": False}
        options.pop("chunk")
        chosen = Options(**options)
        check_step_weights(step_weights, chosen)
        if step_weights is not None and step_weights.requires_grad:
            raise InputError("step_weights that ask for a gradient cannot be compiled: detach() them")
        inner, named = build(learner._task_loss(), learner._values(), support, chosen)
        of_query = learner._of_query(inner.loss_fn, support)
        fast, frozen = inner.split(named)
        inner, rates = _by_step(inner)
        shared = list(frozen.values())
        others = [*shared, *rates[0]]
        key = self._form(inner, support, query, others)
        expected = None
        if key not in self._pieces:
            self._try(support, plain, [*named.values(), *(rate for step in rates for rate in step)])
            apart = [rate.detach().requires_grad_(rate.requires_grad) for rate in rates[0]]  # one may have several uses
            lr = rebuild(inner.rates.by_step[0], iter(apart))
            one = {**options, "steps": 1, "lr": lr, "query_loss": of_query}
            asked = [p for p in (*fast.values(), *shared, *apart) if p.requires_grad]
            with exact_products():
                losses = meta_loss(inner.loss_fn, learner._values(), support, query, **one)
                expected = list(torch.autograd.grad(losses.mean(), asked, allow_unused=True, materialize_grads=True))
        state = [_stacked(p.detach(), options["tasks"]) for p in fast.values()]
        with torch.no_grad():
            if expected is not None:
                last, wanted = replace(inner, loss_fn=of_query), [p.requires_grad for p in others]
                pieces = self._compile(_Sources(inner, last, wanted, support, query), state, others)
                with exact_products():
                    _, *found = _meta_step(pieces, state, shared, rates[:1], support, query, 1)
                _check_same(_wanted([*fast.values(), *others], [*_summed(found[0]), *found[1]]), expected)
                self._pieces[key] = pieces
            pieces = self._pieces[key]
            losses, by_state, rest = _meta_step(pieces, state, shared, rates, support, query, inner.steps, step_weights)
            asked = [*fast.values(), *shared, *(rate for step in rates for rate in step)]
            _add(asked, [*_summed(by_state), *rest])
        return losses

    def _form(self, inner: Inner, support: Nest, query: Nest, others: Tensors) -> tuple[Any, ...]:
        """All that the pieces keep of a call."""
        device = tensors(support)[0].device.type
        cast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
        buffers = tuple(id(buffer) for buffer in self.learner.buffers())  # held by the pieces: no other gets the id
        wanted = tuple(p.requires_grad for p in others)
        chosen = inner.steps, inner.order, inner.adapted, layout(inner.rates.by_step), cast
        return layout((support, query)), chosen, buffers, wanted, state_of(inner.loss_fn)

    def _try(self, support: Nest, query: Nest, known: Tensors) -> None:
        """A meta-step that is not compiled, for what it raises; gradients are left alone."""
        losses = self.learner.losses(support, query)
        if not losses.requires_grad:
            raise InputError("neither the learner's parameters nor lr ask for a gradient; see requires_grad_()")
        own = {id(leaf) for leaf in (*known, *leaves_of(known))}
        if any(id(leaf) not in own for leaf in leaves_of([losses])):
            told = "the loss asks for gradients of other tensors than the module's parameters and rates"
            raise InputError(f"{told}, of a learned loss or of inputs; that cannot be compiled: leave compile out")

    def _compile(self, sources: _Sources, state: Tensors, others: Tensors) -> _Pieces:
        begin, s, q = time.perf_counter(), tensors(sources.support), tensors(sources.query)
        given = [p.detach() for p in others]
        with Ahead(len(_Pieces._fields) if self.backend == "inductor" else 0, state[0].device) as ahead:
            gradient = _traced(sources.gradient, state, given, s, decompose=True)
            both = _traced(sources.both(gradient), state, given, s, state, decompose=True, pure=True)
            first, second = _parted(both, len(state) + len(given) + len(s), len(state))
            traced = first, second, _traced(sources.outer, state, given, q)
            ahead.compile(traced)
        found: list[Any] = []

        def compiled(graph: torch.fx.GraphModule, *parts: Sequence[Tensor]) -> Tensors:
            found.append(self._run(graph, [tensor for part in parts for tensor in part]))
            return _call(found[-1], *parts)

        count = len(state)
        advanced = compiled(traced[0], state, given, s)
        moved, kept = advanced[:count], advanced[count:]
        gradients = compiled(traced[2], moved, given, q)[1 : count + 1]
        compiled(traced[1], state, given, s, gradients, kept)
        pieces = _Pieces(*(found[number] for number in (0, 2, 1)))
        sizes, seconds = [len(graph.graph.nodes) for graph in traced], time.perf_counter() - begin
        logger.info("compiled a meta-step in %.0f s: pieces of %s operations", seconds, sizes)
        return pieces

    def _run(self, graph: torch.fx.GraphModule, given: Tensors) -> Callable[..., Any]:
        return graph if self.backend == "eager" else by_inductor(graph, forms_of(given))


class CompiledIfPossible:
    """A learner's `backward` by :class:`CompiledMeta`, or, from the first time that this fails, as it is."""

    def __init__(self) -> None:
        self.step: CompiledMeta | None = None
        self.possible = True

    def __call__(self, learner: Any, support: Any, query: Any, step_weights: Tensor | None = None) -> Tensor:
        """Add the gradient of the mean query loss to ``.grad``; return the losses (T,), detached."""
        if self.possible:
            try:
                if self.step is None:
                    self.step = CompiledMeta(proxy(learner))
                    logger.warning("compiling the meta-step, once; this takes about a minute and pays in long runs")
                return self.step.backward(support, query, step_weights)
            except Exception as error:  # of any kind: it comes from the learner, the compiler or what the latter calls
                self.possible, self.step = False, None
                logger.info("the meta-step is not compiled: %s", str(error).strip().partition("\n")[0])
        return eagerly(learner, support, query, step_weights)


COMPILERS[:] = [CompiledIfPossible]


class MetaGraph:
    """Records a learner's `backward` once for each shape of batch and replays it with a single launch.

    On a CPU it is the learner's `backward` as it is. What decides a step beside weights, learned rates and data (steps,
    modes, attributes of the module, places in memory) is recorded anew when it changes.

    `learner` is :class:`metapretrain.maml.MAML`, a variant, :class:`metapretrain.protonet.learner.ProtoNet`. `compile`
    fuses operations first, on a CPU too; for :class:`metapretrain.maml.CompiledMeta`'s learners.
    Raises InputError: something that is no learner, or a learner that cannot be compiled.

    Example:
        >>> from metapretrain.maml import MAML
        >>> maml = MAML(torch.nn.Linear(4, 2), lr=0.1)
        >>> x, y = torch.randn(3, 6, 4), torch.tensor([[0, 1] * 3] * 3)
        >>> MetaGraph(maml).backward((x, y), (x, y)).shape
        torch.Size([3])
    """

    def __init__(self, learner: Any, compile: bool = False) -> None:
        if not hasattr(learner, "backward"):
            raise InputError(f"a {type(learner).__name__} is no learner: give MAML, its variants or ProtoNet over it")
        step: Any = CompiledMeta(learner) if compile else learner
        own = isinstance(step, MAML) and type(step).backward is MAML.backward
        self.learner, self._eager = learner, step.eager_backward if own else step.backward
        self._recorded = RecordedBackward(learner, lambda _, *parts: self._eager(*parts), plain=0, most=MOST)

    def backward(self, support: Any, query: Any) -> Tensor:
        """Add the gradient of the mean query loss to ``.grad``; return the losses (T,), detached.

        `support` and `query` are (inputs, labels) of T tasks, each tensor (T, ...). Raises InputError for what the
        learner's `backward` refuses and, on a GPU, for an lr computed from other tensors.
        """
        batch = pair(support), pair(query)
        leaves = tensors(batch)
        if not leaves or not leaves[0].is_cuda:
            losses: Tensor = self._eager(*batch)
            return losses
        if not all(p.is_leaf for p in learned_by(self.learner)):
            raise InputError("lr comes from further computations, which a recorded meta-step would miss; use backward")
        return self._recorded.backward(*batch)


class _Pieces(NamedTuple):
    """Functions of tensors: the tasks' weights, what all tasks share, data; gradients after a step, what was kept."""

    advance: Callable[..., Any]
    pull: Callable[..., Any]
    outer: Callable[..., Any]


def _call(piece: Callable[..., Any], *parts: Sequence[Tensor]) -> Tensors:
    return list(piece(*(tensor for part in parts for tensor in part)))


def _by_step(inner: Inner) -> tuple[Inner, list[Tensors]]:
    """`inner` with the rates of the first step alone, and the rates that are tensors, of all steps or of each.

    Raises InputError for steps whose rates differ in more than the numbers that such tensors hold.
    """
    by_step = inner.rates.by_step
    if len(by_step) < 2:
        return (inner if by_step else replace(inner, rates=Rates((1.0,)))), [tensors(by_step)]
    rates = [tensors(rate) for rate in by_step]
    forms = {(layout(rate), tuple(r.requires_grad for r in tensors(rate))) for rate in by_step}
    if len(forms) > 1 or any(not isinstance(leaf, Tensor) for _, leaf in named_leaves(by_step)):
        raise InputError(BY_STEP)
    return replace(inner, rates=Rates(by_step[:1])), rates


def _meta_step(
    pieces: _Pieces,
    state: Tensors,
    frozen: Tensors,
    rates: list[Tensors],
    support: Nest,
    query: Nest,
    steps: int,
    step_weights: Tensor | None = None,
) -> tuple[Tensor, Tensors, Tensors]:
    """Losses (T,), and the gradients of their mean by the weights of each task, and by what they share and ask for.

    `rates` are those of all steps, alone in their list, or those of each step.
    """
    given, s, count = [[p.detach() for p in (*frozen, *step)] for step in rates], tensors(support), len(state)
    passed: list[tuple[Tensors, Tensors]] = []

    def weighted(state: Tensors) -> Tensors:
        """The losses of the queries, and gradients, times the weight of the step that led there."""
        found = _call(pieces.outer, state, given[-1], tensors(query))
        return found if step_weights is None else [step_weights[len(passed) - 1].to(found[0]) * x for x in found]

    with torch.autocast(state[0].device.type, enabled=False):  # the traced pieces hold their casts
        for step in range(steps):
            found = _call(pieces.advance, state, given[step % len(given)], s)
            passed.append((state, found[count:]))
            state = found[:count]
        losses, *found = weighted(state)
        end = len(found) - sum(rate.requires_grad for rate in rates[-1])  # of the gradients by what is frozen
        by_state, by_frozen, by_rates = found[:count], found[count:end], [found[end:] for _ in rates]
        while passed:
            before, kept = passed.pop()
            step = len(passed) % len(given)
            found = _call(pieces.pull, before, given[step], s, by_state, kept)
            by_state = found[:count]
            by_frozen, by_rates[step] = _sums(by_frozen, found[count:end]), _sums(by_rates[step], found[end:])
            if step_weights is not None and passed:
                more, *found = weighted(before)
                losses = losses + more
                by_state, by_frozen = _sums(by_state, found[:count]), _sums(by_frozen, found[count:end])
    return losses, by_state, [*by_frozen, *(grad for step in by_rates for grad in step)]


def _sums(first: Tensors, second: Tensors) -> Tensors:
    return [a + b for a, b in zip(first, second, strict=True)]


LAST = 0, 3, 4, 2, 1  # filters (T, O, C, h, w) lie as (T, h, w, C, O), as products of patches want them


def _laid(stack: Tensor) -> Tensor:
    """The stack as all pieces take it and give it: each is compiled for these strides."""
    return stack.permute(LAST).contiguous().permute(0, 4, 3, 1, 2) if stack.ndim == 5 else stack.contiguous()


def _stacked(p: Tensor, tasks: int) -> Tensor:
    """The weights of each task, (T, ...), from those that all begin with."""
    return _laid(p.expand(tasks, *p.shape))


def _summed(gradients: Tensors) -> Tensors:
    """Their sums over tasks, by one kernel for all."""
    if not gradients:
        return []
    laid = [g.permute(LAST) if g.ndim == 5 else g for g in gradients]
    total = torch.cat([g.flatten(1) if g.ndim > 1 else g[:, None] for g in laid], 1).sum(0)
    parts = [part.view(g.shape[1:]) for part, g in zip(total.split([g[0].numel() for g in laid]), laid, strict=True)]
    return [p.permute(3, 2, 0, 1).contiguous() if g.ndim == 5 else p for p, g in zip(parts, gradients, strict=True)]


def _wanted(parameters: Tensors, gradients: Tensors) -> list[tuple[Tensor, Tensor]]:
    """The parameters that ask for a gradient, each with its own."""
    return list(zip([p for p in parameters if p.requires_grad], gradients, strict=True))


def _check_same(found: list[tuple[Tensor, Tensor]], expected: Tensors) -> None:
    gap = sum(float((a - b).double().square().sum()) for (_, a), b in zip(found, expected, strict=True)) ** 0.5
    size = sum(float(own.double().square().sum()) for own in expected) ** 0.5
    exact = all(p.dtype == torch.float64 for p, _ in found)
    cast = any(torch.is_autocast_enabled(p.device.type) for p, _ in found)
    if not size < float("inf"):
        raise InputError("the first gradient is not finite, so none is compared with it: see inputs, weights and rates")
    if not gap <= (1e-8 if exact else 0.5 if cast else 2e-2) * size:
        told = f"the compiled gradient differs by {gap:.0e} from that of backward, of norm {size:.0e}"
        raise InputError(f"{told}, as where a loss cuts gradients off by no_grad(); leave compile out")


def _add(parameters: Tensors, gradients: Tensors) -> None:
    computed = []
    for p, grad in _wanted(parameters, gradients):
        if p.is_leaf:
            p.grad = grad if p.grad is None else p.grad.add_(grad)
        else:
            computed.append((p, grad))
    if computed:  # rates that come from further computations
        torch.autograd.backward([p for p, _ in computed], [grad for _, grad in computed])


def _traced(
    function: Callable[..., Tensors], *given: Sequence[Tensor], decompose: bool = False, pure: bool = False
) -> torch.fx.GraphModule:
    """The graph of a function of lists of tensors, which takes the tensors one after the other.

    `decompose`: into operations with a derivative along a direction; `pure`: nothing in place, no gradients asked.
    """
    from torch._decomp import core_aten_decompositions, get_decompositions
    from torch._functorch.compile_utils import fx_graph_cse
    from torch._guards import TracingContext, tracing
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    def run(*flat: Tensor) -> Tensors:
        rest = iter(flat)
        return function(*([next(rest) for _ in part] for part in given))

    aten = torch.ops.aten
    statistics = [aten.native_batch_norm, aten.native_layer_norm, aten.native_group_norm]  # theirs have no derivative
    table = {**core_aten_decompositions(), **get_decompositions(statistics)} if decompose else None
    copies = [tensor.clone() for part in given for tensor in part]  # tracing knows tensors by identity
    shapes = TracingContext(FakeTensorMode())  # one for all operations: each would make its own, which is slow
    with any_step(), engines.written(partial(engines.Written, WRITTEN)), tracing(shapes):
        graph = make_fx(torch.func.functionalize(run) if pure else run, decomposition_table=table)(*copies)
    tags = [tag for node in graph.graph.nodes for tag in getattr(node.target, "tags", ())]
    if torch.Tag.nondeterministic_seeded in tags:
        raise InputError("a step that draws random numbers, as dropout does, cannot be compiled; leave compile out")
    graph.graph.eliminate_dead_code()
    graph = torch.fx.GraphModule(graph, fx_graph_cse(graph.graph))
    for node in graph.graph.nodes:
        if node.target is aten.index_put.default and node.args[0].target is aten.expand.default:
            with graph.graph.inserting_before(node):  # inductor of torch 2.11 adds into one number for a whole row
                options: Any = {"memory_format": torch.contiguous_format}
                node.update_arg(0, graph.graph.call_function(aten.clone.default, node.args[:1], options))
    graph.recompile()
    return graph


def _parted(
    graph: torch.fx.GraphModule, inputs: int, outputs: int
) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """Two graphs: of the first `outputs`, which need the first `inputs` alone; and of the others.

    The first also returns what the second needs of it, as its last inputs; cheaper operations are done in both.
    """
    given, wanted = ends_of(graph)
    kept = needed(wanted[outputs:], later_than(given[inputs:]))
    return part_of(graph, given[:inputs], [*wanted[:outputs], *kept]), part_of(graph, [*given, *kept], wanted[outputs:])


class _Sources(NamedTuple):
    """The pieces as written, for tracing; `last` has the queries' loss, `wanted` tells which others want a gradient."""

    inner: Inner
    last: Inner
    wanted: list[bool]
    support: Nest
    query: Nest

    def gradient(self, state: Tensors, others: Tensors, data: Tensors) -> Tensors:
        """Gradients of the tasks' summed support losses by their weights, and by the others."""
        state, others = self._leaves(state, others)
        with torch.enable_grad(), at_step(0):
            losses = self._losses(self.inner, state, others, self.support, data)
            return self._gradients(losses.sum(), state, others)

    def both(self, gradient: Callable[..., Any]) -> Callable[..., Tensors]:
        """The weights after an inner step; and gradients before it of what has gradients `after` it."""
        inner, twice = self.inner, self.inner.order == 2

        def step(state: Tensors, others: Tensors, data: Tensors, after: Tensors) -> Tensors:
            rates = self._rates(others)
            uniform = inner.rates.uniform(0)
            scaled = after if uniform else [_laid(r * g) for r, g in zip(rates, after, strict=True)]  # as the weights

            def of(*weights: Tensor) -> tuple[Tensor, ...]:
                return tuple(gradient(*weights, *others, *data))

            if twice:
                found, along = torch.func.jvp(of, tuple(state), tuple(scaled))  # type: ignore[misc]
            else:
                found = of(*state)
                along = tuple(torch.zeros_like(g) for g in found)
            moved = [_laid(p - r * g) for p, r, g in zip(state, rates, found, strict=False)]
            back = [-(uniform or 1.0) * g for g in along] if twice else list(along)
            before = [_laid(g + b) for g, b in zip(after, back, strict=False)] if twice else [g.clone() for g in after]
            frozen = back[len(state) :]
            products = [-(g * d) for g, d in zip(after, found, strict=False)]
            return [*moved, *before, *frozen, *self._by_rates(products, others)]

        return step

    def outer(self, state: Tensors, others: Tensors, data: Tensors) -> Tensors:
        """The query losses (T,), and the gradients of their mean."""
        state, others = self._leaves(state, others)
        with torch.enable_grad(), at_step(self.inner.steps):
            losses = self._losses(self.last, state, others, self.query, data)
            frozen = self._gradients(losses.mean(), state, others)
            rates = [torch.zeros_like(p) for p in others[self._frozen :] if p.requires_grad]
            return [losses.detach(), *frozen, *rates]

    @property
    def _frozen(self) -> int:
        """How many of the others are parameters that do not adapt; the rest are rates."""
        return len(self.inner.names) - len(self.inner.adapted)

    def _losses(self, inner: Inner, state: Tensors, others: Tensors, batch: Nest, data: Tensors) -> Tensor:
        fast = dict(zip(inner.adapted, state, strict=True))
        frozen = dict(zip([name for name in inner.names if name not in fast], others, strict=False))
        with differentiable_twice(2):
            return engines.over_tasks(inner.loss, fast, frozen, rebuild(batch, iter(data)))

    def _leaves(self, state: Tensors, others: Tensors) -> tuple[Tensors, Tensors]:
        others = [p.detach().requires_grad_(wanted) for p, wanted in zip(others, self.wanted, strict=True)]
        return [p.detach().requires_grad_() for p in state], others

    def _gradients(self, output: Tensor, state: Tensors, others: Tensors) -> Tensors:
        wanted = [*state, *(p for p in others[: self._frozen] if p.requires_grad)]
        found = torch.autograd.grad(output, wanted, allow_unused=True, materialize_grads=True)
        return [*map(_laid, found[: len(state)]), *found[len(state) :]]

    def _rates(self, others: Tensors) -> list[Any]:
        rates = self.inner.rates.replaced(iter(others[self._frozen :]))
        return [rates.at(0, name) for name in self.inner.adapted]

    def _by_rates(self, products: Tensors, others: Tensors) -> Tensors:
        """Gradients by the rates that ask for one, from those by each task's own rates."""
        found = []
        for number in range(self._frozen, len(others)):
            if self.wanted[number]:
                rate = others[number]
                uses = [p for p, own in zip(products, self._rates(others), strict=True) if own is rate]
                found.append(torch.stack([use.sum_to_size(rate.shape) for use in uses]).sum(0))
        return found


def _cut(*_: Any, **__: Any) -> None:
    raise InputError("a loss that cuts its gradient off, by detach(), cannot be compiled; leave compile out")


def _of_patches(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: tuple[int, int], padding: tuple[int, int]
) -> Tensor | None:
    if _casts(x):
        x, weight = (tensor.to(torch.get_autocast_dtype(x.device.type)) for tensor in (x, weight))
        bias = None if bias is None else bias.to(weight.dtype)
    out, _, height, width = weight.shape
    patches = _Patches.apply(x.permute(0, 2, 3, 1), (height, width), stride, padding)
    if patches.numel() > PATCHES:
        return None
    images, rows, columns = patches.shape[:3]
    inputs = patches.reshape(images, rows * columns, -1)
    filters = weight.permute(2, 3, 1, 0).reshape(-1, out)
    few = len(filters) <= FEW and inputs.shape[:2].numel() <= SHORT
    y: Tensor = _Taps.apply(inputs, filters) if few else _many(inputs, filters)
    if bias is not None:
        y = _Shifted.apply(y, bias)
    return y.reshape(images, rows, columns, out).permute(0, 3, 1, 2)


FEW, SHORT = 32, 4096  # inputs of a filter, and positions, up to which sums are as fast as products
LONG, PART, MOST_PARTS = 1300, 600, 64  # rows of a product that is taken in parts, and of a part at least
LARGEST = 128 * 128  # pixels of images whose patches are written
PATCHES = 2**27  # numbers in a task's patches up to which they are written: 512 MiB in float32, kept for the way back
SMALL, OUTPUTS = 400_000, 32  # multiplications and outputs of a product that is a sum


def _many(x: Tensor, w: Tensor) -> Tensor:
    images, positions, inputs = x.shape
    if spare := -inputs % 4:  # kernels read four numbers at a time
        x, w = F.pad(x, (0, spare)), F.pad(w, (0, 0, 0, spare))
    rows = images * positions
    parts = [n for n in range(1, MOST_PARTS + 1) if rows % n == 0 and rows // n >= PART]
    count = max(parts, default=1) if rows > LONG else 1
    found: Tensor = _Product.apply(x.flatten(0, 1), w, count)
    return found.reshape(images, positions, -1)


def _normalised(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor | None:
    if running_mean is not None or running_var is not None or not training or x.ndim != 4:
        return None
    images, channels, height, width = x.shape
    exact = torch.promote_types(x.dtype, torch.float32)
    laid = x.permute(0, 2, 3, 1).reshape(images, height * width, channels).to(exact)
    weight = laid.new_ones(channels) if weight is None else weight
    bias = laid.new_zeros(channels) if bias is None else bias
    y: Tensor = _Normalised.apply(laid, weight, bias, eps)[0].to(x.dtype)
    return y.reshape(images, height, width, channels).permute(0, 3, 1, 2)


def _small_product(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    if input.ndim != 2 or weight.ndim != 2 or len(weight) > OUTPUTS or _casts(input):
        return None
    if len(input) * weight.numel() > SMALL:
        return None
    y = (input[:, None] * weight).sum(-1)
    return y if bias is None else y + bias


def _casts(x: Tensor) -> bool:
    return torch.is_autocast_enabled(x.device.type)


def _rectified(x: Tensor, inplace: bool = False) -> Tensor | None:
    return None if inplace or x.ndim != 4 else torch.relu(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def _pooled(
    input: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, *a: Any, **b: Any
) -> Any:
    kernel = engines.pair_of(kernel_size)
    apart = [engines.pair_of(n) for n in (stride or kernel, padding, dilation)] == [kernel, (0, 0), (1, 1)]
    plain = input.ndim == 4 and apart and not any(a) and not any(b.values()) and kernel[0] * kernel[1] <= 9
    return _Pooled.apply(input.permute(0, 2, 3, 1), kernel)[0].permute(0, 3, 1, 2) if plain else None


WRITTEN: dict[Any, Callable[..., Tensor | None]] = {  # for images that lie channels last
    **dict.fromkeys((F.conv2d, torch.conv2d), partial(engines.convolution, _of_patches, LARGEST)),
    F.linear: _small_product,
    F.batch_norm: _normalised,
    F.relu: _rectified,
    **dict.fromkeys((F.max_pool2d, torch.max_pool2d), _pooled),
    **dict.fromkeys((Tensor.detach, torch.detach, Tensor.detach_, Tensor.data.__get__), _cut),  # type: ignore[attr-defined]
}


class _Once(torch.autograd.Function):
    """A function with a first derivative of its own; that of the derivative is taken of the traced graph."""

    generate_vmap_rule = True


class _Patches(_Once):
    """The patches (N, H', W', h, w, C) of x (N, H, W, C)."""

    @staticmethod
    def forward(x: Tensor, kernel: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int]) -> Tensor:
        x = F.pad(x, (0, 0, padding[1], padding[1], padding[0], padding[0]))
        return x.unfold(1, kernel[0], stride[0]).unfold(2, kernel[1], stride[1]).permute(0, 1, 2, 4, 5, 3)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.size, ctx.stride, ctx.padding = inputs[0].shape[1:3], inputs[2], inputs[3]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        """Sum what overlaps, as many shifted blocks of the stride's size as one patch touches."""
        (down, right), (above, left), (height, width) = ctx.stride, ctx.padding, ctx.size
        n, _, _, h, w, c = g.shape
        a, b = -(-h // down), -(-w // right)
        g = F.pad(g, (0, 0, 0, b * right - w, 0, a * down - h)).reshape(*g.shape[:3], a, down, b, right, c)
        blocks = [
            F.pad(g[:, :, :, i, :, j], (0, 0, 0, 0, 0, 0, j, b - 1 - j, i, a - 1 - i))
            for i in range(a)
            for j in range(b)
        ]
        x = sum(blocks[1:], blocks[0])
        rows, columns = x.shape[1] * down, x.shape[2] * right
        x = x.permute(0, 1, 3, 2, 4, 5).reshape(n, rows, columns, c)
        x = F.pad(x, (0, 0, 0, max(0, left + width - columns), 0, max(0, above + height - rows)))
        return x[:, above : above + height, left : left + width], None, None, None


class _Product(_Once):
    """x (R, K) @ w (K, O), whose gradient by w is summed over `parts` of the rows."""

    @staticmethod
    def forward(x: Tensor, w: Tensor, parts: int) -> Tensor:
        return x @ w

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.parts = inputs[2]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        a, b = (tensor.reshape(ctx.parts, -1, tensor.shape[-1]) for tensor in (x, g))
        by_w = x.T @ g if ctx.parts == 1 else (a.transpose(1, 2) @ b).sum(0)
        return (g @ w.T if ctx.needs_input_grad[0] else None), by_w, None


class _Taps(_Once):
    """x (N, R, K) @ w (K, O) as a sum over K."""

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        terms = [x[..., k, None] * w[k] for k in range(len(w))]
        return sum(terms[1:], terms[0])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        by_w = torch.stack([(x[..., k, None] * g).sum(1) for k in range(len(w))], 1).sum(0)
        return (g @ w.T if ctx.needs_input_grad[0] else None), by_w


class _Shifted(_Once):
    """x (N, R, O) + bias (O,)."""

    @staticmethod
    def forward(x: Tensor, bias: Tensor) -> Tensor:
        return x + bias

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is needed."""

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g, g.sum(1).sum(0)


class _Normalised(_Once):
    """x (N, R, C) by the mean and variance of each channel: algorithm 1 of Ioffe and Szegedy, 2015."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        within, means = torch.var_mean(x, 1, correction=0)
        among, mean = torch.var_mean(means, 0, correction=0)
        scale = (within.mean(0) + among + eps).rsqrt()
        return (x - mean) * (scale * weight) + bias, mean, scale

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:2], *output[1:])
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_: Any) -> Any:
        x, weight, mean, scale = ctx.saved_tensors
        z = (x - mean) * scale
        by_bias, by_weight = g.sum(1).sum(0), (g * z).sum(1).sum(0)
        share = 1 / (x.shape[0] * x.shape[1])
        return (g - by_bias * share - z * (by_weight * share)) * (scale * weight), by_weight, by_bias, None


class _Pooled(_Once):
    """The first maximum of each window of x (N, H, W, C), and its number: inductor cannot derive torch's twice."""

    @staticmethod
    def forward(x: Tensor, kernel: tuple[int, int]) -> tuple[Tensor, Tensor]:
        (h, w), rows, columns = kernel, x.shape[1] // kernel[0], x.shape[2] // kernel[1]
        windows = x[:, : rows * h, : columns * w].unflatten(1, (rows, h)).unflatten(3, (columns, w))
        best, place = windows[:, :, 0, :, 0], x.new_zeros((len(x), rows, columns, x.shape[3]), dtype=torch.int8)
        for number in range(1, h * w):
            value = windows[:, :, number // w, :, number % w]
            larger = (value > best) | value.isnan()
            best, place = torch.where(larger, value, best), torch.where(larger, number, place)
        return best, place

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(output[1])
        ctx.mark_non_differentiable(output[1])
        ctx.kernel, ctx.size = inputs[1], inputs[0].shape[1:3]

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_: Any) -> Any:
        (place,), (h, w), (height, width) = ctx.saved_tensors, ctx.kernel, ctx.size
        parts = torch.stack([torch.where(place == number, g, 0.0) for number in range(h * w)], 2)
        x = parts.unflatten(2, (h, w)).transpose(3, 4).flatten(3, 4).flatten(1, 2)
        return F.pad(x, (0, 0, 0, width - x.shape[2], 0, height - x.shape[1])), None
