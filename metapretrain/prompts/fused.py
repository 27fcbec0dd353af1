"""Layers of a frozen language model, fused by inductor: a layer, its derivative and that one's derivative.

torch.compile has no second order, so the three are traced as one graph of the layer's inputs, the gradient of its
output and a direction, and parted by what needs which. Weights are inputs: layers alike are compiled once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from metapretrain.maml.ahead import Ahead, by_inductor, forms_of
from metapretrain.nests import map_tensors, rebuild, tensors

logger = logging.getLogger(__name__)

LAYERS = ("LlamaDecoderLayer", "MT5Block", "T5Block")
BIAS = "relative_attention_bias"  # of T5's first layer, which then gives it to the others
MOST = 16  # forms of rows that are compiled; others run as they are
Tensors = list[Tensor]


class FusedLayers:
    """Within `with fused:`, layers of `model` that are in :data:`LAYERS` run as compiled where gradients are asked for.

    Only inputs of the layers have gradients: weights are frozen. Compiling takes a minute, and is done anew for other
    shapes, types and autocasts. What cannot be compiled runs as it is, with one warning.
    """

    def __init__(self, model: nn.Module, backend: str = "inductor") -> None:
        self.layers = [part for part in model.modules() if type(part).__name__ in LAYERS]
        self.backend, self.pieces, self.possible = backend, dict[Any, _Pieces](), True

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Layers whose forward has been replaced by others stay as they are."""
        own = [layer for layer in self.layers if "forward" not in vars(layer)] if self.possible else []
        try:
            for layer in own:
                layer.forward = partial(self._forward, layer)
            yield
        finally:
            for layer in own:
                vars(layer).pop("forward", None)

    def _forward(self, layer: nn.Module, hidden: Tensor, *given: Any, **named: Any) -> Any:
        plain = type(layer).forward
        if not (self.possible and torch.is_grad_enabled()):
            return plain(layer, hidden, *given, **named)
        if not any(x.requires_grad for x in tensors((hidden, given, named))):
            return plain(layer, hidden, *given, **named)
        try:
            if "T5" in type(layer).__name__ and len(given) > 1 and given[1] is None:
                attention, length = layer.layer[0].SelfAttention, hidden.shape[1]  # type: ignore[union-attr, index]
                given = given[0], attention.compute_bias(length, length, hidden.device).contiguous(), *given[2:]
            call = _Call(layer, hidden, (given, named))
            if (key := call.key()) not in self.pieces:
                if len(self.pieces) >= MOST:
                    return plain(layer, hidden, *given, **named)
                self.pieces[key] = call.compiled(self.backend)
            return call.run(self.pieces[key])
        except Exception as error:  # of any kind: it comes from the layer, the compiler or what the latter calls
            self.possible = False
            logger.warning("layers are not compiled: %s", str(error).strip().partition("\n")[0])
            return plain(layer, hidden, *given, **named)


class _Pieces(NamedTuple):
    """Functions of lists of tensors. `kept` is what the backward needs, `more` what lies between the derivatives.

    The gradients of what is kept go back through the layer together with those of the output.
    """

    forward: Callable[..., Any]  # values: output, kept, also
    last: Callable[..., Any]  # values, kept, gradient: gradients of the asked
    backward: Callable[..., Any]  # the same: gradients of the asked, more
    double: Callable[..., Any]  # values, kept, gradient, more, directions: gradients of the asked, gradient, moving
    merged: Callable[..., Any]  # values, kept, also, gradient, gradients of the moving: gradients of the asked
    kept: int
    moving: list[int]  # which of the kept have a gradient
    asked: list[int]
    casts: list[int]  # weights that are cast before
    result: Callable[[Tensor, Tensors], Any]


class _Call:
    """A layer with what it is given; `values` are tensors among these, then the layer's weights."""

    def __init__(self, layer: nn.Module, hidden: Tensor, given: Any) -> None:
        self.layer, self.given = layer, (hidden, given)
        self.inputs = tensors(self.given)
        # Hidden states always: those of the first layer of a decoder need none, and would be a form of their own.
        self.asked = [i for i, x in enumerate(self.inputs) if x.requires_grad or i == 0]
        weights = [*layer.named_parameters(), *layer.named_buffers()]
        self.named = {name: tensor for name, tensor in weights if BIAS not in name}
        device = hidden.device.type
        self.dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None

    def key(self) -> Any:
        """All that the pieces keep of a call."""
        known, others = forms_of([*self.inputs, *self.named.values()]), map_tensors(lambda _: None, self.given)
        return type(self.layer), tuple(self.named), repr(known), repr(others), tuple(self.asked), self.dtype

    def values(self, casts: Sequence[int], dtype: torch.dtype | None) -> Tensors:
        """What the pieces take, these weights cast: by few kernels, in each pass, since weights may have changed."""
        weights = list(self.named.values())
        cast = [torch.empty_like(weights[i], dtype=dtype) for i in casts]
        if cast:
            with torch.no_grad():
                torch._foreach_copy_(cast, [weights[i] for i in casts])
        for i, tensor in zip(casts, cast, strict=True):
            weights[i] = tensor
        return [*self.inputs, *weights]

    def run(self, pieces: _Pieces) -> Any:
        found: Any = _Forward.apply(pieces, *self.values(pieces.casts, self.dtype))
        return pieces.result(found[0], self.inputs)

    def compiled(self, backend: str) -> _Pieces:
        begin = time.perf_counter()
        with Ahead(5 if backend == "inductor" else 0, self.inputs[0].device) as ahead:
            graph, result = self._traced()
            count = len(self.inputs)
            casts = _without_casts(graph, count, count + len(self.named), self.dtype)
            parts, kept, moving = _parted(graph, count + len(self.named), self.asked)
            ahead.compile(parts)
        found: list[Callable[..., Any]] = []

        def call(*given: Tensor) -> Tensors:
            """The next part compiled for these tensors, and what it gives: what comes later takes it as it lies."""
            part = parts[len(found)]
            found.append(part if backend == "eager" else by_inductor(part, forms_of(given)))
            return list(found[-1](*given))

        with torch.no_grad():
            values = [tensor.detach() for tensor in self.values(casts, self.dtype)]
            asked = [values[i].contiguous() for i in self.asked]
            out, *rest = call(*values)
            given = *values, *rest[:kept], out.contiguous()
            call(*given)
            more = call(*given)[len(asked) :]
            gradients = call(*given, *more, *asked)[len(asked) + 1 :]
            call(*values, *rest, out.contiguous(), *gradients)
        sizes, seconds = [len(part.graph.nodes) for part in parts], time.perf_counter() - begin
        logger.info("compiled a %s in %.0f s: %s operations", type(self.layer).__name__, seconds, sizes)
        return _Pieces(found[0], found[1], found[2], found[3], found[4], kept, moving, self.asked, casts, result)

    def _traced(self) -> tuple[fx.GraphModule, Callable[[Tensor, Tensors], Any]]:
        """The graph of values and gradient, to output and gradients of the asked; what the layer returns."""
        count, places = len(self.inputs), list[Any]()
        asked = self.asked

        def plain(flat: Sequence[Tensor]) -> Tensor:
            """The layer's output; its other results must be inputs that it hands on."""
            (hidden, (given, named)), weights = rebuild(self.given, iter(flat[:count])), flat[count:]
            own = dict(zip(self.named, weights, strict=True))
            forward = vars(self.layer).pop("forward", None)
            try:
                found = torch.func.functional_call(self.layer, own, (hidden, *given), named, strict=False)
            finally:
                if forward is not None:
                    self.layer.forward = forward
            several = found if isinstance(found, tuple) else (found,)
            numbers = {id(x): i for i, x in enumerate(flat[:count])}
            places[:] = [isinstance(found, tuple), *(None if x is None else numbers[id(x)] for x in several[1:])]
            out: Tensor = several[0]
            return out

        def joint(*flat: Tensor) -> Tensors:
            *values, gradient = _leaves(flat, asked)
            with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
                out = plain(values)
                inputs = [values[i] for i in asked]
                return [out, *torch.autograd.grad(out, inputs, gradient, create_graph=True, materialize_grads=True)]

        values = [tensor.detach() for tensor in (*self.inputs, *self.named.values())]
        gradient = torch.zeros_like(values[0], memory_format=torch.contiguous_format)
        with _bf16_attention():
            graph = _graph(joint, [*values, gradient])
        several, *others = places

        def result(out: Tensor, inputs: Tensors) -> Any:
            return (out, *(None if i is None else inputs[i] for i in others)) if several else out

        return graph, result


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pieces: _Pieces, *values: Tensor) -> tuple[Tensor, ...]:
        out, *rest = pieces.forward(*values)
        kept = rest[: pieces.kept]
        ctx.pieces, ctx.count = pieces, len(values)
        ctx.save_for_backward(*values, *rest)
        ctx.mark_non_differentiable(*(tensor for i, tensor in enumerate(kept) if i not in pieces.moving))
        ctx.set_materialize_grads(False)
        return out, *kept

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None, *of_kept: Tensor | None) -> tuple[Tensor | None, ...]:
        pieces, saved = ctx.pieces, ctx.saved_tensors
        if gradient is None:
            gradient = torch.zeros_like(saved[0])  # of the hidden states, whose form the output has
        gradient, given = gradient.contiguous(), saved[: ctx.count + pieces.kept]
        inner = [of_kept[i] for i in pieces.moving]
        second = any(tensor is not None for tensor in inner)
        if torch.is_grad_enabled() and second:
            raise RuntimeError("compiled layers have no third derivative; leave compile out")
        if torch.is_grad_enabled():
            found = _Backward.apply(pieces, ctx.count, gradient, *given)
        elif second:
            found = pieces.merged(*saved, gradient, *inner)
        else:
            found = pieces.last(*given, gradient)
        return None, *_at(pieces.asked, found, ctx.count)


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pieces: _Pieces, count: int, gradient: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        found = pieces.backward(*given, gradient)
        ctx.pieces, ctx.count, asked = pieces, count, len(pieces.asked)
        ctx.save_for_backward(*given, gradient, *found[asked:])
        return tuple(found[:asked])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *directions: Tensor) -> tuple[Tensor | None, ...]:
        pieces, asked = ctx.pieces, len(ctx.pieces.asked)
        found = pieces.double(*ctx.saved_tensors, *(u.contiguous() for u in directions))
        of_values, of_kept = _at(pieces.asked, found, ctx.count), _at(pieces.moving, found[asked + 1 :], pieces.kept)
        return None, None, found[asked], *of_values, *of_kept


def _at(places: Sequence[int], found: Sequence[Tensor | None], count: int) -> list[Tensor | None]:
    by_place = dict(zip(places, found, strict=False))
    return [by_place.get(i) for i in range(count)]


def _leaves(flat: Sequence[Tensor], asked: Sequence[int]) -> Tensors:
    return [x.detach().requires_grad_() if i in asked else x for i, x in enumerate(flat)]


def _graph(function: Callable[..., Any], given: Sequence[Tensor]) -> fx.GraphModule:
    """The graph of a function of tensors, without what is done in place or twice, and zeros."""
    from torch._functorch.compile_utils import fx_graph_cse
    from torch.fx.experimental.proxy_tensor import make_fx

    options: dict[str, Any] = {"tracing_mode": "fake", "_allow_non_fake_inputs": True}
    # Each token sees some token, so that the plain one is as safe.
    table = {torch.ops.aten._safe_softmax.default: lambda x, dim, dtype=None: torch.softmax(x, dim, dtype=dtype)}
    graph = make_fx(function, **options)(*given)
    graph = make_fx(torch.func.functionalize(graph), decomposition_table=table, **options)(*given)
    _simplified(graph)
    return fx.GraphModule(graph, fx_graph_cse(graph.graph))


@contextmanager
def _bf16_attention() -> Iterator[None]:
    """Attention's products in the type of its inputs, as all others: the math kernel would do them in float32."""
    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        yield
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(before)


def _without_casts(graph: fx.GraphModule, first: int, end: int, dtype: torch.dtype | None) -> list[int]:
    """Take the casts of these inputs to `dtype` out of the graph, where it uses nothing else of them; from `first`."""
    given, found = [node for node in graph.graph.nodes if node.op == "placeholder"], []
    for number in range(first, end if dtype is not None else first):
        weight, uses = given[number], list(given[number].users)
        same = all(_name(use) == "_to_copy" and use.kwargs["dtype"] == dtype for use in uses)
        if uses and same and weight.meta["val"].dtype != dtype:
            weight.meta["val"] = weight.meta["val"].to(dtype)
            for use in uses:
                use.replace_all_uses_with(weight)
                graph.graph.erase_node(use)
            found.append(number - first)
    return found


def _parted(graph: fx.GraphModule, count: int, asked: Sequence[int]) -> tuple[list[fx.GraphModule], int, list[int]]:
    """The parts of :class:`_Pieces` from the graph of values and gradient; how many are kept, and which are moving.

    The derivatives of the backward, by values and kept apart, and of the forward are traced from these two.
    """
    given, (out, *first) = _ends(graph)
    kept = list(_needed(first, _after(given[count:])))
    forward = _part(graph, given[:count], [out, *kept])
    last = _part(graph, [*given[:count], *kept, given[count]], first)
    size, ways, of_asked = count + len(kept) + 1, len(asked), _after([given[i] for i in asked])
    places = [i for i, node in enumerate(kept) if node in of_asked]
    ends = [*asked, size - 1, *(count + i for i in places)]
    values = [node.meta["val"] for node in (*given[:count], *kept, given[count])]
    like = [torch.empty_like(values[i], memory_format=torch.contiguous_format) for i in asked]

    def derived(*flat: Tensor) -> list[Tensor | None]:
        leaves = _leaves(flat[:size], ends)
        with torch.enable_grad():
            found = last(*leaves)
            pairs = [(f, u) for f, u in zip(found, flat[size:], strict=True) if f.requires_grad]
            of, by = zip(*pairs, strict=True)
            return [*found, *torch.autograd.grad(of, [leaves[i] for i in ends], by, allow_unused=True)]

    second = _graph(derived, [*values, *like])
    given, outputs = _ends(second)
    wanted = outputs[ways:]
    more = list(_needed(wanted, _after(given[size:])))
    backward = _part(second, given[:size], [*outputs[:ways], *more])
    moving = [i for i, node in zip(places, wanted[ways + 1 :], strict=True) if node is not None]
    wanted = [*wanted[: ways + 1], *(node for node in wanted[ways + 1 :] if node is not None)]
    double = _part(second, [*given[:size], *more, *given[size:]], wanted)

    def pulled(*flat: Tensor) -> Tensors:
        leaves = _leaves(flat[:count], asked)
        with torch.enable_grad():
            out, *inner = forward(*leaves)
            pairs = zip([out, *(inner[i] for i in moving)], flat[count:], strict=True)
            of, by = zip(*((f, u) for f, u in pairs if f.requires_grad), strict=True)
            return [out, *inner, *torch.autograd.grad(of, [leaves[i] for i in asked], by, materialize_grads=True)]

    whole = _graph(pulled, [*values[:count], values[-1], *(torch.empty_like(values[count + i]) for i in moving)])
    given, (out, *inner) = _ends(whole)
    inner, first = inner[: len(kept)], inner[len(kept) :]
    inner += [node for node in _needed(first, _after(given[count:])) if node not in inner]
    forward, merged = _part(whole, given[:count], [out, *inner]), [*given[:count], *inner, *given[count:]]
    return [forward, last, backward, double, _part(whole, merged, first)], len(kept), moving


def _ends(graph: fx.GraphModule) -> tuple[list[fx.Node], list[fx.Node]]:
    *nodes, last = graph.graph.nodes
    return [node for node in nodes if node.op == "placeholder"], list(last.args[0])


def _after(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """The nodes and all that depends on them."""
    found, waiting = set(nodes), list(nodes)
    while waiting:
        new = [user for user in waiting.pop().users if user not in found]
        found.update(new)
        waiting += new
    return found


def _needed(wanted: Sequence[fx.Node | None], late: set[fx.Node]) -> dict[fx.Node, None]:
    """What the nodes need of those that are not `late`: what lies in memory then, or is not cheap to compute again."""
    found, seen = dict[fx.Node, None](), set[fx.Node]()
    waiting = [node for node in wanted if node is not None]
    while waiting:
        node = waiting.pop()
        if node in seen or node.op == "placeholder":
            continue
        seen.add(node)
        if node in late or _is_view(node) or (_is_cheap(node) and not _is_read(node, late)):
            waiting += node.all_input_nodes
        else:
            found[node] = None
    return found


def _is_read(node: fx.Node, late: set[fx.Node]) -> bool:
    """Whether a product that is not `late` reads it, as it is."""
    users = [user for user in node.users if user not in late]
    return any(_name(user) in PRODUCTS or (_is_view(user) and _is_read(user, late)) for user in users)


def _simplified(graph: fx.GraphModule) -> None:
    """Leave out copies in name, and what zeros are multiplied with or added to, such as a ReLU's second derivative."""
    zeros = set[fx.Node]()
    for node in graph.graph.nodes:
        name, inputs = _name(node), node.all_input_nodes
        zero = [other in zeros for other in inputs]
        if name in ("alias", "detach"):  # derivatives are those of the graph: nothing is cut off in it
            node.replace_all_uses_with(inputs[0])
        elif name == "zeros_like" or (any(zero) and (name in LINEAR or _is_view(node))):
            zeros.add(node)
        elif name == "add" and zero in ([True, False], [False, True]) and not node.kwargs:
            other = inputs[zero.index(False)]
            if _form(other) == _form(node):
                node.replace_all_uses_with(other)
    last = next(iter(reversed(graph.graph.nodes)))
    last.args = ([None if node in zeros else node for node in last.args[0]],)
    graph.graph.eliminate_dead_code()


PRODUCTS = ("addmm", "baddbmm", "bmm", "mm")
LINEAR = (*PRODUCTS[2:], "_to_copy", "clone", "mul", "neg", "sum", "threshold_backward")
CHEAP = (
    "constant_pad_nd",
    "fill",
    "full",
    "full_like",
    "scalar_tensor",
    "_to_copy",
    "zeros_like",
    "ones_like",
    "arange",
)


def _name(node: fx.Node) -> str:
    target: Any = node.target
    return target.overloadpacket.__name__ if isinstance(target, torch._ops.OpOverload) else ""


def _form(node: fx.Node) -> tuple[Any, ...]:
    value = node.meta.get("val")
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else ()


def _is_view(node: fx.Node) -> bool:
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return target._schema.name == "aten::_unsafe_view" or any(r.alias_info is not None for r in target._schema.returns)


def _is_cheap(node: fx.Node) -> bool:
    """Inputs, views and what is computed number by number."""
    if node.op in ("placeholder", "get_attr") or _is_view(node):
        return True
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) or _name(node) in CHEAP


def _part(graph: fx.GraphModule, given: Sequence[fx.Node], wanted: Sequence[fx.Node | None]) -> fx.GraphModule:
    """The graph from `given` to `wanted`."""
    needed, waiting, part = set(given), [node for node in wanted if node is not None], fx.Graph()
    known = {node: part.placeholder(node.name) for node in given}
    for node, own in known.items():
        own.meta = dict(node.meta)
    while waiting:
        if (node := waiting.pop()) not in needed:
            needed.add(node)
            waiting += node.all_input_nodes
    for node in graph.graph.nodes:
        if node in needed and node not in known:
            known[node] = copy = part.node_copy(node, known.__getitem__)
            if _name(node) in ("view", "_unsafe_view"):  # what it is given may lie otherwise in a derivative's graph
                copy.target = torch.ops.aten.reshape.default
    part.output([None if node is None else known[node] for node in wanted])
    return fx.GraphModule(graph, part)
