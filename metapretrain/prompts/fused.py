"""Layers of a frozen language model, compiled by inductor with their first and second derivatives.

torch.compile has no second order. So a layer is traced together with its derivative, and what comes of that with its
own; the graphs are cut into the five :class:`Pieces`. Weights are inputs of these: layers alike are compiled once.
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

from metapretrain.errors import InputError
from metapretrain.maml import ahead
from metapretrain.nests import map_tensors, rebuild, tensors

logger = logging.getLogger(__name__)

LAYERS = ("LlamaDecoderLayer", "MT5Block", "T5Block")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
BIAS = "relative_attention_bias"  # of T5's first layer, which hands what it makes of it to the others
OWN = ("has_relative_attention_bias", "layer_idx")  # in which layers that do the same differ
MOST = 16  # forms that are compiled
Tensors = list[Tensor]


class FusedLayers:
    """Within `with fused(form):`, the layers of `model` named in :data:`LAYERS` run compiled.

    Each form (shapes and types of a layer's inputs, autocast, the `form` given) is compiled at its first pass, which
    takes 20 to 60 seconds on a GPU, and compared with the plain layer. T5 has two kinds of layers, its encoder's and
    its decoder's, and Llama one. On a CPU, with 20 to 40 seconds, steps gain less than a tenth: it does not pay there.

    Plain layers run in passes without gradients, where a layer is in training mode or has hooks, a forward of its own,
    parts that are not of torch or transformers (such as PEFT's) or weights that take gradients, and, with a warning,
    after anything has failed, and for forms beyond :data:`MOST` or that are new when a CUDA graph is recorded.
    Copies and pickles compile anew.

    `model` is of transformers; `backend` is "inductor", or "eager" to run the pieces as they are traced.
    Raises InputError: no layer of the model is of a known kind; in a backward pass: a third derivative is asked for.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "vocab_size": 9}
        >>> model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **sizes)).requires_grad_(False).eval()
        >>> fused, x = FusedLayers(model, backend="eager"), torch.ones(1, 3, 8, requires_grad=True)
        >>> with fused():
        ...     logits = model(inputs_embeds=x, use_cache=False).logits
        >>> logits.shape, len(fused.pieces)  # both layers are alike
        (torch.Size([1, 3, 9]), 1)
    """

    def __init__(self, model: nn.Module, backend: str = "inductor") -> None:
        self.layers = [part for part in model.modules() if type(part).__name__ in LAYERS]
        if not self.layers:
            told = f"layers of a {type(model).__name__} cannot be compiled, only those of Llama, T5 and MT5"
            raise InputError(f"{told}; leave compile out")
        self.backend, self.pieces, self.form = backend, dict[Any, Pieces](), None
        self.possible, self.told = True, False

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "pieces": {}}  # compiled functions cannot be pickled

    @contextmanager
    def __call__(self, form: Any = None) -> Iterator[None]:
        """`form` is what the model's attention depends on beside the inputs of its layers."""
        own = [layer for layer in self.layers if _is_plain(layer)] if self.possible else []
        before, self.form = self.form, form
        try:
            for layer in own:
                layer.forward = partial(self._forward, layer)
            yield
        finally:
            self.form = before
            for layer in own:
                vars(layer).pop("forward", None)

    def _forward(self, layer: nn.Module, hidden: Tensor, *given: Any, **named: Any) -> Any:
        plain = partial(type(layer).forward, layer, hidden, *given, **named)
        asked = torch.is_grad_enabled() and any(x.requires_grad for x in tensors((hidden, given, named)))
        if not (self.possible and asked):
            return plain()
        try:
            call = _Call(layer, hidden, (_with_bias(layer, hidden, given), named))
            if (key := (self.form, *call.key())) in self.pieces:
                return call.run(self.pieces[key])
            if len(self.pieces) < MOST and not _is_recorded(hidden):
                pieces = call.compiled(self.backend)
                found = call.run(pieces)
                _check_same(hidden, found, plain, call.dtype)
                self.pieces[key] = pieces
                return found
        except Exception as error:  # of any kind: it comes from the layer, the compiler or what the latter calls
            self.possible = False
            logger.warning("layers are not compiled: %s", str(error).strip().partition("\n")[0])
            return plain()
        if not self.told:
            self.told, most = True, f"there are {MOST} compiled ones: give all rows one width"
            why = most if len(self.pieces) >= MOST else "they are new when a CUDA graph is recorded"
            logger.warning("layers are not compiled for some shapes, since %s", why)
        return plain()


def _is_recorded(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _is_plain(layer: nn.Module) -> bool:
    """Whether a layer does in evaluation mode what its parts' classes say, with weights that take no gradient."""
    for part in layer.modules():
        known = type(part).__module__.startswith(("torch.", "transformers."))
        if not known or part.training or "forward" in vars(part) or any(vars(part)[hooks] for hooks in HOOKS):
            return False
    return not any(p.requires_grad or type(p) is not nn.Parameter for p in layer.parameters())  # as of quantised ones


def _with_bias(layer: Any, hidden: Tensor, given: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a layer is given; T5's first one with the bias that it would make itself, so that it is like the others."""
    if "T5" not in type(layer).__name__ or len(given) < 2 or given[1] is not None:
        return given
    attention, length = layer.layer[0].SelfAttention, hidden.shape[1]
    return given[0], attention.compute_bias(length, length, hidden.device).contiguous(), *given[2:]


@torch.no_grad()
def _check_same(hidden: Tensor, found: Any, plain: Callable[[], Any], cast: torch.dtype | None) -> None:
    """Refuse results that are not the plain layer's, such as those of a transformers that adds masks to T5's bias."""
    (out, *others), (expected, *wanted) = tensors(found), tensors(plain())
    gap, size = (float((x - y).double().norm()) for x, y in ((out, expected), (expected, hidden)))
    exact = cast is None and expected.dtype in (torch.float32, torch.float64)
    same = all(torch.allclose(x, y, rtol=1e-3) for x, y in zip(others, wanted, strict=True))
    if not (same and gap <= (2e-2 if exact else 0.5) * size):
        raise InputError(f"compiled, a layer's results differ by {gap:.0e} from its own, of norm {size:.0e}")


class Pieces(NamedTuple):
    """What a layer does in an outer step, as functions of tensors, one after the other, that return lists of them.

    The support rows' loss takes `forward`, and its gradient, the inner step, `backward`; the query rows' loss takes
    `forward` and `once`. That gradient goes back through the inner step by `double`, then through the support rows'
    pass by `merged`: what `forward` kept for `backward` has got gradients in `double`, which go on together with those
    of the output, so that no product is computed twice.
    """

    forward: Callable[..., Any]  # values (what the layer is given, its weights): output, kept, more for `merged`
    once: Callable[..., Any]  # values, kept, the output's gradient: gradients of the asked, not to be derived
    backward: Callable[..., Any]  # the same: gradients of the asked, and what `double` needs of it
    double: Callable[..., Any]  # all these, directions: derivatives by the asked, the output's gradient, the moving
    merged: Callable[..., Any]  # values, kept, more, gradients of the output and the moving: gradients of the asked
    kept: int  # how many are kept
    moving: list[int]  # which of the kept have gradients
    asked: list[int]  # which of the values have gradients
    casts: list[int]  # which weights autocast casts: they are given in its type
    result: Callable[[Tensor, Tensors], Any]  # what the layer returns, from its output and what it is given


class _Call:
    """A layer with what it is given; `values` are the tensors among these, then the layer's weights."""

    def __init__(self, layer: nn.Module, hidden: Tensor, given: Any) -> None:
        self.layer, self.given = layer, (hidden, given)
        self.inputs = tensors(self.given)
        # Hidden states always: those of the first layer of a decoder need none, and would be a form of their own.
        self.asked = [i for i, x in enumerate(self.inputs) if x.requires_grad or i == 0]
        weights = [*layer.named_parameters(), *layer.named_buffers()]
        self.named = {name: tensor for name, tensor in weights if BIAS not in name}
        device = hidden.device.type
        self.dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None

    def key(self) -> tuple[Any, ...]:
        """All that the pieces keep of a call."""
        known, others = ahead.forms_of([*self.inputs, *self.named.values()]), map_tensors(lambda _: Tensor, self.given)
        # Numbers are such as a norm's epsilon or whether attention is causal, which may be set for one layer alone.
        parts = [part for name, part in self.layer.named_modules() if BIAS not in name]
        numbers = [[(k, v) for k, v in vars(p).items() if isinstance(v, int | float) and k not in OWN] for p in parts]
        kinds = tuple((type(part), *own) for part, own in zip(parts, numbers, strict=True))
        return kinds, tuple(self.named), repr(known), repr(others), tuple(self.asked), self.dtype

    def values(self, casts: Sequence[int], dtype: torch.dtype | None) -> Tensors:
        """What the pieces take. Casts are few kernels for all weights, in each pass, as weights may have changed."""
        weights = list(self.named.values())
        cast = [torch.empty_like(weights[i], dtype=dtype) for i in casts]
        if cast:
            with torch.no_grad():
                torch._foreach_copy_(cast, [weights[i] for i in casts])
        for i, tensor in zip(casts, cast, strict=True):
            weights[i] = tensor
        return [*self.inputs, *weights]

    def run(self, pieces: Pieces) -> Any:
        found: Any = _Forward.apply(pieces, *self.values(pieces.casts, self.dtype))
        return pieces.result(found[0], self.inputs)

    def compiled(self, backend: str) -> Pieces:
        begin, count = time.perf_counter(), len(self.inputs)
        with ahead.Ahead(5 if backend == "inductor" else 0, self.inputs[0].device) as processes:
            graph, result = self._traced()
            casts = _without_casts(graph, count, count + len(self.named), self.dtype)
            parts, kept, moving = _cut(graph, count + len(self.named), self.asked)
            processes.compile(parts)
        found = list[Any]()

        def call(*given: Tensor) -> Tensors:
            """The next part compiled for these tensors, and what it gives: what comes later takes it as it lies."""
            part = parts[len(found)]
            found.append(part if backend == "eager" else ahead.by_inductor(part, ahead.forms_of(given)))
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
        logger.info("compiled a %s in %.0f s: pieces of %s operations", type(self.layer).__name__, seconds, sizes)
        return Pieces(*found, kept, moving, self.asked, casts, result)  # type: ignore[call-arg]

    def _traced(self) -> tuple[fx.GraphModule, Callable[[Tensor, Tensors], Any]]:
        """The graph of values and gradient, to output and gradients of the asked; `result` of the pieces."""
        count, places, asked = len(self.inputs), list[Any](), self.asked

        def plain(flat: Sequence[Tensor]) -> Tensor:
            """The layer's output; its other results must be inputs that it hands on."""
            (hidden, (given, named)), weights = rebuild(self.given, iter(flat[:count])), flat[count:]
            own = dict(zip(self.named, weights, strict=True))
            forward = vars(self.layer).pop("forward")
            try:
                found = torch.func.functional_call(self.layer, own, (hidden, *given), named, strict=False)
            finally:
                self.layer.forward = forward
            several = found if isinstance(found, tuple) else (found,)
            numbers = {id(x): i for i, x in enumerate(flat[:count])} | {id(None): None}
            if any(id(x) not in numbers for x in several[1:]):
                raise InputError(f"a {type(self.layer).__name__} returns more than hidden states and what it is given")
            places[:] = [isinstance(found, tuple), *(numbers[id(x)] for x in several[1:])]
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
    def forward(ctx: Any, pieces: Pieces, *values: Tensor) -> tuple[Tensor, ...]:
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
            raise InputError("compiled layers have no third derivative; leave compile out")
        if torch.is_grad_enabled():
            found = _Backward.apply(pieces, ctx.count, gradient, *given)
        elif second:
            found = pieces.merged(*saved, gradient, *inner)
        else:
            found = pieces.once(*given, gradient)
        return None, *_at(pieces.asked, found, ctx.count)


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pieces: Pieces, count: int, gradient: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
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
    """The graph of a function of tensors, with nothing done in place or twice, and without products of zeros."""
    from torch._functorch.compile_utils import fx_graph_cse
    from torch.fx.experimental.proxy_tensor import make_fx

    options: dict[str, Any] = {"tracing_mode": "fake", "_allow_non_fake_inputs": True}
    # Each token sees some token, so that the plain one is as safe.
    table = {torch.ops.aten._safe_softmax.default: lambda x, dim, dtype=None: torch.softmax(x, dim, dtype=dtype)}
    graph = make_fx(function, **options)(*given)
    graph = make_fx(torch.func.functionalize(graph), decomposition_table=table, **options)(*given)
    _simplify(graph)
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
    given, found = ahead.ends_of(graph)[0], []
    for number in range(first, end if dtype is not None else first):
        weight, uses = given[number], list(given[number].users)
        same = all(ahead.name_of(use) == "_to_copy" and use.kwargs["dtype"] == dtype for use in uses)
        if uses and same and weight.meta["val"].dtype != dtype:
            weight.meta["val"] = weight.meta["val"].to(dtype)
            for use in uses:
                use.replace_all_uses_with(weight)
                graph.graph.erase_node(use)
            found.append(number - first)
    return found


def _cut(graph: fx.GraphModule, count: int, asked: Sequence[int]) -> tuple[list[fx.GraphModule], int, list[int]]:
    """Graphs of the pieces from that of `count` values and the gradient; how many are kept, and which are moving.

    The derivatives of the backward, by values and kept apart, and of the forward are traced from these two.
    """
    given, (out, *first) = ahead.ends_of(graph)
    kept = _kept(first, ahead.later_than(given[count:]))
    forward = ahead.part_of(graph, given[:count], [out, *kept])
    once = ahead.part_of(graph, [*given[:count], *kept, given[count]], first)
    size, ways, of_asked = count + len(kept) + 1, len(asked), ahead.later_than([given[i] for i in asked])
    places = [i for i, node in enumerate(kept) if node in of_asked]
    ends = [*asked, size - 1, *(count + i for i in places)]
    values = [node.meta["val"] for node in (*given[:count], *kept, given[count])]
    like = [torch.empty_like(values[i], memory_format=torch.contiguous_format) for i in asked]

    def derived(*flat: Tensor) -> list[Tensor | None]:
        leaves = _leaves(flat[:size], ends)
        with torch.enable_grad():
            found = once(*leaves)
            pairs = [(f, u) for f, u in zip(found, flat[size:], strict=True) if f.requires_grad]
            of, by = zip(*pairs, strict=True)
            return [*found, *torch.autograd.grad(of, [leaves[i] for i in ends], by, allow_unused=True)]

    second = _graph(derived, [*values, *like])
    given, outputs = ahead.ends_of(second)
    wanted = outputs[ways:]
    more = _kept(wanted, ahead.later_than(given[size:]))
    backward = ahead.part_of(second, given[:size], [*outputs[:ways], *more])
    moving = [i for i, node in zip(places, wanted[ways + 1 :], strict=True) if node is not None]
    wanted = [*wanted[: ways + 1], *(node for node in wanted[ways + 1 :] if node is not None)]
    double = ahead.part_of(second, [*given[:size], *more, *given[size:]], wanted)

    def pulled(*flat: Tensor) -> Tensors:
        leaves = _leaves(flat[:count], asked)
        with torch.enable_grad():
            out, *inner = forward(*leaves)
            pairs = zip([out, *(inner[i] for i in moving)], flat[count:], strict=True)
            of, by = zip(*((f, u) for f, u in pairs if f.requires_grad), strict=True)
            return [out, *inner, *torch.autograd.grad(of, [leaves[i] for i in asked], by, materialize_grads=True)]

    whole = _graph(pulled, [*values[:count], values[-1], *(torch.empty_like(values[count + i]) for i in moving)])
    given, (out, *inner) = ahead.ends_of(whole)
    inner, first = inner[: len(kept)], inner[len(kept) :]
    inner += [node for node in _kept(first, ahead.later_than(given[count:])) if node not in inner]
    forward = ahead.part_of(whole, given[:count], [out, *inner])
    merged = ahead.part_of(whole, [*given[:count], *inner, *given[count:]], first)
    return [forward, once, backward, double, merged], len(kept), moving


def _kept(wanted: Sequence[fx.Node | None], late: set[fx.Node]) -> list[fx.Node]:
    """What the wanted nodes need of those before: what lies in memory for a product, or is not cheap to repeat."""

    def is_read(node: fx.Node) -> bool:
        users = [user for user in node.users if user not in late]
        return any(ahead.name_of(user) in PRODUCTS or (ahead.is_view(user) and is_read(user)) for user in users)

    return ahead.needed(wanted, late, lambda node: ahead.is_view(node) or (ahead.is_cheap(node) and not is_read(node)))


PRODUCTS = ("addmm", "baddbmm", "bmm", "mm")
LINEAR = ("bmm", "mm", "_to_copy", "clone", "mul", "neg", "sum", "threshold_backward")


def _simplify(graph: fx.GraphModule) -> None:
    """Leave out copies in name, and what zeros are multiplied with or added to, such as a ReLU's second derivative."""
    zeros = set[fx.Node]()
    for node in graph.graph.nodes:
        name, inputs = ahead.name_of(node), node.all_input_nodes
        zero = [other in zeros for other in inputs]
        if name in ("view", "_unsafe_view"):  # what it is given may lie otherwise in a derivative's graph
            node.target = torch.ops.aten.reshape.default
        if name in ("alias", "detach"):  # derivatives are those of the graph: nothing is cut off in it
            node.replace_all_uses_with(inputs[0])
        elif name == "zeros_like" or (any(zero) and (name in LINEAR or ahead.is_view(node))):
            zeros.add(node)
        elif name == "add" and zero in ([True, False], [False, True]) and not node.kwargs:
            other = inputs[zero.index(False)]
            if _form(other) == _form(node):
                node.replace_all_uses_with(other)
    outputs = next(iter(reversed(graph.graph.nodes)))
    outputs.args = ([None if node in zeros else node for node in outputs.args[0]],)
    graph.graph.eliminate_dead_code()


def _form(node: fx.Node) -> tuple[Any, ...]:
    value = node.meta.get("val")
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else ()
