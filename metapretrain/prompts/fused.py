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
    """Functions of lists of tensors, and the numbers of weights that are cast; `result` is a nest with places."""

    forward: Callable[..., Any]  # values: output, kept
    backward: Callable[..., Any]  # values, kept, gradient: gradients of the asked, kept
    last: Callable[..., Any]  # as backward, for when it is not differentiated: keeps nothing
    double: Callable[..., Any]  # values, kept, gradient, kept, directions: gradients of the asked, and of the gradient
    asked: list[int]
    casts: list[int]
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
        """What the pieces take, these weights cast: by few kernels, and in each pass, since weights may have changed."""
        weights = list(self.named.values())
        cast = [torch.empty_like(weights[i], dtype=dtype) for i in casts]
        if cast:
            with torch.no_grad():
                torch._foreach_copy_(cast, [weights[i] for i in casts])
        for i, tensor in zip(casts, cast, strict=True):
            weights[i] = tensor
        return [*self.inputs, *weights]

    def run(self, pieces: _Pieces) -> Any:
        found: Tensor = _Forward.apply(pieces, *self.values(pieces.casts, self.dtype))  # type: ignore[no-untyped-call]
        return pieces.result(found, self.inputs)

    def compiled(self, backend: str) -> _Pieces:
        begin = time.perf_counter()
        with Ahead(4 if backend == "inductor" else 0, self.inputs[0].device) as ahead:
            graph, result = self._traced()
            count = len(self.inputs)
            casts = _without_casts(graph, count, count + len(self.named), self.dtype)
            parts = _parted(graph, count + len(self.named), len(self.asked))
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
            out, *kept = call(*values)
            gradient = out.contiguous()
            more = call(*values, *kept, gradient)[len(asked) :]
            call(*values, *kept, gradient)
            call(*values, *kept, gradient, *more, *asked)
        sizes, seconds = [len(part.graph.nodes) for part in parts], time.perf_counter() - begin
        logger.info("compiled a %s in %.0f s: %s operations", type(self.layer).__name__, seconds, sizes)
        return _Pieces(*found, self.asked, casts, result)

    def _traced(self) -> tuple[fx.GraphModule, Callable[[Tensor, Tensors], Any]]:
        """The graph of values, gradient and directions, and what the layer returns."""
        from torch._decomp import get_decompositions
        from torch._functorch.compile_utils import fx_graph_cse
        from torch.fx.experimental.proxy_tensor import make_fx

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
            return several[0]

        def joint(*flat: Tensor) -> list[Tensor | None]:
            values, (gradient, *directions) = list(flat[: -1 - len(asked)]), flat[-1 - len(asked) :]
            for i in asked:
                values[i] = values[i].detach().requires_grad_()
            inputs, gradient = [values[i] for i in asked], gradient.detach().requires_grad_()
            with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
                out = plain(values)
                first = torch.autograd.grad(out, inputs, gradient, create_graph=True, materialize_grads=True)
                pairs = [(f, u) for f, u in zip(first, directions, strict=True) if f.requires_grad]
                given, by = zip(*pairs, strict=True)
                second = torch.autograd.grad(given, [*inputs, gradient], by, allow_unused=True)
            return [out, *first, *second]

        values = [tensor.detach() for tensor in (*self.inputs, *self.named.values())]
        gradients = [torch.zeros_like(values[i], memory_format=torch.contiguous_format) for i in (0, *asked)]
        aten, fake = torch.ops.aten, {"tracing_mode": "fake", "_allow_non_fake_inputs": True}
        table = get_decompositions([aten._softmax, aten._softmax_backward_data])
        # Each token sees some token, so that the plain one, in two passes over the scores, is as safe.
        table[aten._safe_softmax.default] = lambda scores, dim, dtype=None: torch.softmax(scores, dim, dtype=dtype)
        with _bf16_attention():
            graph = make_fx(joint, **fake)(*values, *gradients)
        graph = make_fx(torch.func.functionalize(graph), decomposition_table=table, **fake)(*values, *gradients)
        _without_zeros(graph)
        graph = fx.GraphModule(graph, fx_graph_cse(graph.graph))
        several, *others = places

        def result(out: Tensor, inputs: Tensors) -> Any:
            return (out, *(None if i is None else inputs[i] for i in others)) if several else out

        return graph, result


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pieces: _Pieces, *values: Tensor) -> Tensor:
        out, *kept = pieces.forward(*values)
        ctx.pieces, ctx.count = pieces, len(values)
        ctx.save_for_backward(*values, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gradient = gradient.contiguous()
        if torch.is_grad_enabled():
            found = _Backward.apply(ctx.pieces, ctx.count, gradient, *ctx.saved_tensors)  # type: ignore[no-untyped-call]
        else:
            found = ctx.pieces.last(*ctx.saved_tensors, gradient)
        return None, *_at(ctx.pieces.asked, found, ctx.count)


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pieces: _Pieces, count: int, gradient: Tensor, *saved: Tensor) -> tuple[Tensor, ...]:
        found = pieces.backward(*saved, gradient)
        ctx.pieces, ctx.count, asked = pieces, count, len(pieces.asked)
        ctx.save_for_backward(*saved, gradient, *found[asked:])
        ctx.rest = len(saved) - count
        return tuple(found[:asked])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *directions: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, gradient = ctx.pieces.double(*ctx.saved_tensors, *(u.contiguous() for u in directions))
        return None, None, gradient, *_at(ctx.pieces.asked, inputs, ctx.count), *[None] * ctx.rest


def _at(places: Sequence[int], found: Sequence[Tensor | None], count: int) -> list[Tensor | None]:
    by_place = dict(zip(places, found, strict=False))
    return [by_place.get(i) for i in range(count)]


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


def _parted(graph: fx.GraphModule, count: int, asked: int) -> list[fx.GraphModule]:
    """The layer, its derivative with and without what the next one needs, and that one, as parts of the graph."""
    *nodes, last = graph.graph.nodes
    given = [node for node in nodes if node.op == "placeholder"]
    values, gradient, directions = given[:count], given[count], given[count + 1 :]
    late = {gradient: 1, **dict.fromkeys(directions, 2)}
    for node in nodes:  # in the order in which they are computed
        late.setdefault(node, max((late[other] for other in node.all_input_nodes), default=0))
    out, first, second = last.args[0][:1], last.args[0][1 : 1 + asked], last.args[0][1 + asked :]
    of_second = _needed(second, late, 2)
    early = [node for node in of_second if late[node] == 0]
    of_first = [node for node in of_second if late[node] == 1]
    kept = _needed([*first, *of_first], late, 1) | dict.fromkeys(early)
    return [
        _part(graph, values, [*out, *kept]),
        _part(graph, [*values, *kept, gradient], [*first, *of_first]),
        _part(graph, [*values, *kept, gradient], first),
        _part(graph, [*values, *kept, gradient, *of_first, *directions], second),
    ]


def _needed(wanted: Sequence[fx.Node | None], late: dict[fx.Node, int], stage: int) -> dict[fx.Node, None]:
    """What the nodes need that earlier stages compute: what lies in memory there, or is not cheap to compute again."""
    found, seen = dict[fx.Node, None](), set[fx.Node]()
    waiting = [node for node in wanted if node is not None]
    while waiting:
        node = waiting.pop()
        if node in seen or node.op == "placeholder":
            continue
        seen.add(node)
        if late[node] >= stage or _is_view(node) or (_is_cheap(node) and not _is_read(node, late, stage)):
            waiting += node.all_input_nodes
        else:
            found[node] = None
    return found


def _is_read(node: fx.Node, late: dict[fx.Node, int], stage: int) -> bool:
    """Whether a product of an earlier stage reads it, as it is."""
    users = [user for user in node.users if late[user] < stage]
    return any(_name(user) in PRODUCTS or (_is_view(user) and _is_read(user, late, stage)) for user in users)


def _without_zeros(graph: fx.GraphModule) -> None:
    """Leave out what zeros are multiplied with or added to: the second derivative of a ReLU goes through all layers."""
    zeros = set[fx.Node]()
    for node in graph.graph.nodes:
        name, inputs = _name(node), node.all_input_nodes
        zero = [other in zeros for other in inputs]
        if name == "zeros_like" or (any(zero) and (name in LINEAR or _is_view(node))):
            zeros.add(node)
        elif name == "add" and zero in ([True, False], [False, True]) and not node.kwargs:
            other = inputs[zero.index(False)]
            if _form(other) == _form(node):
                node.replace_all_uses_with(other)
    graph.graph.eliminate_dead_code()


PRODUCTS = ("addmm", "baddbmm", "bmm", "mm")
LINEAR = (*PRODUCTS[2:], "_to_copy", "clone", "mul", "neg", "sum", "threshold_backward")
CHEAP = ("constant_pad_nd", "full", "full_like", "scalar_tensor", "_to_copy", "zeros_like", "ones_like", "arange")


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
            known[node] = part.node_copy(node, known.__getitem__)
    part.output([None if node is None else known[node] for node in wanted])
    return fx.GraphModule(graph, part)
