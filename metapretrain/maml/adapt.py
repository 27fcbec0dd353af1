"""The inner loop of MAML with one signature (Finn et al., 2017): arguments checked, an engine chosen, tasks adapted."""

import fnmatch
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from metapretrain.checks import whole
from metapretrain.errors import InputError, one_of
from metapretrain.maml import engines
from metapretrain.maml.engines import channels_last
from metapretrain.maml.inner import (
    HiddenWeights,
    Inner,
    LossFunction,
    Named,
    OptimizerFactory,
    SwitchedOff,
    at_step,
    differentiable_twice,
    parse_rates,
)
from metapretrain.nests import Nest, check_stacked, flat_params, map_tensors, module_of, rebuild, tensors

ENGINES = ("auto", *engines.ENGINES)
OPTIMIZERS: dict[str, OptimizerFactory | None] = {
    "sgd": None,
    "momentum": lambda groups: torch.optim.SGD(groups, lr=1.0, momentum=0.9),
    "adam": lambda groups: torch.optim.Adam(groups, lr=1.0),
}
Only = str | Iterable[str] | Callable[[str], bool] | None


@dataclass(frozen=True)
class Options:
    """How an inner loop runs, see :func:`adapt`; raises InputError for bad values (`lr`, `only`: later)."""

    lr: Any
    steps: int = 1
    order: int = 2
    engine: str = "auto"
    tasks: int | None = None
    only: Only = None
    checkpoint: bool = False
    allow_unused: bool = False
    optimizer: str | OptimizerFactory | None = "sgd"

    def __post_init__(self) -> None:
        """Check what needs no parameters."""
        one_of("engine", self.engine, ENGINES)
        whole("steps", self.steps, 0)
        if self.order not in (1, 2) or isinstance(self.order, bool):
            raise InputError(f"order is {self.order!r}; give 2 (MAML) or 1 (first order, FOMAML)")
        if self.tasks is not None:
            whole("tasks", self.tasks, 1)
        factory = self.factory
        if factory is not None and self.engine not in ("auto", "higher"):
            raise InputError(f"engine {self.engine!r} has SGD only; optimizer={self.optimizer!r} needs engine='higher'")
        if self.checkpoint and (self.engine in ("higher", "learn2learn") or factory is not None):
            raise InputError("checkpoint=True needs engine 'loop', 'vmap' or 'mixed' (and optimizer 'sgd')")

    @property
    def factory(self) -> OptimizerFactory | None:
        """What makes the inner optimizer; None: plain gradient descent."""
        if isinstance(self.optimizer, str):
            return OPTIMIZERS[one_of("optimizer", self.optimizer, OPTIMIZERS)]
        return self.optimizer

    @property
    def asked(self) -> str:
        """The engine asked for, or the only one that has the optimizer."""
        return self.engine if self.factory is None else "higher"


def build(
    loss_fn: LossFunction, params: Nest, batch: Nest, options: Options, query: Nest = None
) -> tuple[Inner, Named]:
    """The inner loop, and the parameters by name; raises InputError as :func:`metapretrain.maml.adapt`."""
    if options.tasks is not None:
        check_stacked("batch", batch, options.tasks)
    named = flat_params(params)
    everything = {**named, **{f"batch tensor {i}": t for i, t in enumerate(tensors(batch))}}
    check_usable(everything)
    check_meta({**everything, **{f"query tensor {i}": t for i, t in enumerate(tensors(query))}})
    if options.order == 2:
        check_not_compiled(loss_fn)
    adapted = choose_names(options.only, tuple(named))
    rates = parse_rates(options.lr, {name: named[name].shape for name in adapted}, options.steps)
    graph = any(source.requires_grad for source in (*named.values(), *rates.tensors(), *tensors(batch)))
    how: dict[str, Any] = {name: getattr(options, name) for name in ("steps", "order", "allow_unused", "checkpoint")}
    return Inner(loss_fn, params, tuple(named), adapted, rates, graph=graph, optimizer=options.factory, **how), named


def check_usable(named: Named) -> None:
    """Raise InputError where gradients cannot be taken: switched off, or tensors made in inference mode."""
    if torch.is_inference_mode_enabled() or not torch.is_grad_enabled():
        mode = "inference_mode" if torch.is_inference_mode_enabled() else "no_grad"
        told = f"the inner loop needs gradients but runs under torch.{mode}(); take it out of that block. To keep"
        raise InputError(f"{told} no graph at evaluation, give detached params: the result is then detached as well")
    made = [name for name, tensor in named.items() if tensor.is_inference()]
    if made:
        raise InputError(f"{', '.join(made)}: made under torch.inference_mode(); .clone() it outside of it")


def check_meta(named: Named) -> None:
    """Raise InputError for meta tensors beside others: they hold no values, so the result is what memory holds."""
    meta = [name for name, tensor in named.items() if tensor.device.type == "meta"]
    if meta and len(meta) < len(named):
        raise InputError(f"{meta[0]} is on the meta device, where tensors have no values; move or make it elsewhere")


def check_not_compiled(function: Any) -> None:
    """Raise InputError for a compiled function, or one that closes over a compiled module."""
    if hasattr(function, "_torchdynamo_orig_callable"):
        raise InputError("loss_fn is compiled: torch.compile has no second order; give the plain function")
    for module in modules_of(function):
        check_module_not_compiled(module)


def modules_of(function: Any) -> list[nn.Module]:
    """The modules that a function is, belongs to or closes over."""
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or () if _filled(cell)]
    return [module for module in (module_of(function), *cells) if isinstance(module, nn.Module)]


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def check_module_not_compiled(module: nn.Module) -> None:
    """Raise InputError if the module or a part of it is compiled."""
    for name, part in module.named_modules():
        # Among its parts, not by hasattr: a learner passes on the attributes of its module.
        scripted = isinstance(part, torch.jit.ScriptModule)
        if scripted or "_orig_mod" in part._modules or getattr(part, "_compiled_call_impl", None) is not None:
            where = f"its part {name!r}" if name else f"the {type(part).__name__}"
            told = "torch.jit keeps its own weights" if scripted else "torch.compile has no second order"
            raise InputError(f"{where} is compiled: {told}; give the module as it was")


def choose_names(only: Only, names: tuple[str, ...]) -> tuple[str, ...]:
    """The names that `only` chooses: a name, a prefix up to a dot, a pattern with `*`, or a function.

    Raises InputError for a filter, or a part of it, that matches nothing.

    >>> choose_names("head", ("body.weight", "head.weight", "head.bias"))
    ('head.weight', 'head.bias')
    """
    if only is None:
        return names
    if callable(only):
        chosen = {name for name in names if only(name)}
        if not chosen:
            raise InputError(f"only=... chooses none of the parameters: {', '.join(names)}")
        return tuple(name for name in names if name in chosen)
    chosen = set()
    for part in [only] if isinstance(only, str) else list(only):
        found = {n for n in names if n == part or n.startswith(f"{part}.")}
        if set(part) & set("*?["):
            found |= {n for n in names if fnmatch.fnmatchcase(n, part)}
        if not found:
            raise InputError(f"only={part!r} matches none of the parameters: {', '.join(names)}")
        chosen |= found
    if not chosen:
        raise InputError(f"only=[] chooses none of the parameters: {', '.join(names)}")
    return tuple(name for name in names if name in chosen)


def task_of(batch: Nest, task: int) -> Nest:
    """The batch of one task of a stack."""
    return map_tensors(lambda t: t[task], batch)


def _rows(batch: Nest, tasks: range) -> Nest:
    return map_tensors(lambda t: t[tasks.start : tasks.stop], batch)


logger = logging.getLogger(__name__)

# On a CPU, a task whose forward pass has more multiplications than this keeps the cores busy by itself, and
# grouped convolutions only lose; below, the cost of starting operations counts, and a stack of tasks shares
# it. Larger networks lose by stacking their weights. Measured on two cores (docs/maml.md); a rule and not a
# timing, so that a run that is continued takes the engine that it had.
BUSY = 5.5e7
LARGE = 5e5
STACK = 6 * 2**20  # bytes of a stack: half of what a small task's process holds beside the libraries
FEW = 4  # tasks: a smaller stack is not faster than the loop


class EngineChoice(NamedTuple):
    """An engine and the reason for it."""

    engine: str
    why: str


Reasons = tuple[str | None, ...]  # why the support part, and the query part, are not computed by vmap
_answers: dict[Any, Reasons] = {}
KEPT = 64  # answers
UNKNOWN = "the first tasks' gradient is zero or not finite, which tells nothing about vmap"


def choose(
    inner: Inner, named: Named, batch: Nest, tasks: int | None, query: Nest = None, function: LossFunction | None = None
) -> EngineChoice:
    """The engine for `engine="auto"`; `function` is what is computed of the query part, None: the loss.

    Whether vmap gives what the loop gives is tried once for each state of these functions (:func:`state_of`).
    """
    if inner.optimizer is not None:
        return EngineChoice("higher", "the only engine with optimizers other than SGD")
    if tasks is None or tasks == 1:
        return EngineChoice("loop", "a single task")
    device = next(iter(named.values())).device.type
    busiest = max((work(named, part) for part in (batch, query) if part is not None), default=0.0)
    if device == "cpu" and (sum(p.numel() for p in named.values()) > LARGE or busiest > BUSY):
        return EngineChoice("loop", "a task keeps this CPU busy by itself")
    if device == "cpu" and stack_size(inner, named, batch, query) < min(tasks, FEW):
        return EngineChoice("loop", "a stack of tasks would hold much more memory than one")
    parts = [(0, inner.loss_fn, batch)]
    if query is not None:
        parts.append((inner.steps, function or inner.loss_fn, query))
    shapes = tuple((name, p.shape, p.dtype, p.device.type) for name, p in named.items())
    data = tuple((t.ndim, t.dtype) for _, _, part in parts for t in tensors(part))
    cast = torch.is_autocast_enabled(device)
    key = state_of([called for _, called, _ in parts]), shapes, inner.adapted, data, cast
    if key in _answers:
        return _choice(_answers[key], device)
    reasons = _probe(inner, named, parts)
    choice = _choice(reasons, device)
    logger.debug("engine %s: %s", choice.engine, choice.why)
    if UNKNOWN not in reasons:
        while len(_answers) >= KEPT:
            del _answers[next(iter(_answers))]
        _answers[key] = reasons
    return choice


def _choice(reasons: Reasons, device: str) -> EngineChoice:
    if reasons[0] is not None:
        return EngineChoice("loop", reasons[0])
    if reasons[-1] is not None:
        return EngineChoice("mixed", f"of the query part: {reasons[-1]}")
    return EngineChoice("vmap", f"all tasks in one forward pass on {device}")


def work(named: Named, batch: Nest) -> float:
    """Rough count of multiplications of one task's forward pass; images are taken to halve twice a layer."""
    examples = [leaf for leaf in tensors(batch) if leaf.ndim >= 2]
    rows = max((leaf.shape[1] for leaf in examples), default=1)
    positions = max((math.prod(leaf.shape[3:]) for leaf in examples if leaf.ndim >= 5), default=1.0)
    total = 0.0
    for parameter in named.values():
        if parameter.ndim > 2:
            total += parameter.numel() * rows * positions
            positions = max(1.0, positions / 4)
        else:
            total += parameter.numel() * rows
    return total


def stack_size(inner: Inner, named: Named, batch: Nest, query: Nest = None) -> int:
    """How many tasks a CPU computes at once within STACK bytes; images are taken to halve twice a layer."""
    weights = sum(named[name].numel() * named[name].element_size() for name in inner.adapted)
    held = 2.0 * weights * (1 + (inner.steps if inner.twice else 1))
    for part, steps in ((batch, inner.steps if inner.twice else 1), (query, 1)):
        examples = [leaf for leaf in tensors(part) if leaf.ndim >= 2]
        rows = max((leaf.shape[1] for leaf in examples), default=0) * steps
        positions = max((math.prod(leaf.shape[3:]) for leaf in examples if leaf.ndim >= 5), default=1.0)
        for parameter in named.values():
            if parameter.ndim > 1:
                held += 4 * parameter.element_size() * rows * parameter.shape[0] * positions
                positions = max(1.0, positions / 4) if parameter.ndim > 2 else positions
    return max(1, int(STACK / held))


Part = tuple[int, LossFunction, Nest]  # an inner step, what is computed there, and of what
MOST = 20_000  # objects that are looked at
LONG = 1_000  # items of a list or a dict that is looked into
PLAIN = {int, float, bool, str, bytes, type, type(None), CodeType, BuiltinFunctionType, torch.dtype, torch.device}
BOXES = {dict, OrderedDict, list, tuple, set}  # empty ones, as hooks are, say nothing
OURS = ("torch.", "torchvision.", "transformers.", "metapretrain.", "builtins")  # what does not change


def state_of(value: Any, *, places: bool = False) -> tuple[Any, ...]:
    """What a function computes by, to be compared: its code, closure, globals, modules, their classes and attributes.

    Tensors count by shape, dtype and device (with `places` by their memory too, and on a CPU by changes in place), long
    lists by their length, and what has no attributes by its type.
    """
    found: list[Any] = []
    seen: dict[int, tuple[int, Any]] = {}  # with the objects themselves, so that no other gets the id meanwhile
    waiting = [value]
    while waiting and len(seen) < MOST:
        one = waiting.pop()
        if id(one) in seen:
            found.append(seen[id(one)][0])
            continue
        seen[id(one)] = len(seen), one
        if isinstance(one, Tensor) and not is_lazy(one):
            found += (one.shape, one.dtype, one.device, one.requires_grad)
            if places and one.layout is torch.strided:
                found += (one.data_ptr(), one._version if one.device.type == "cpu" and not one.is_inference() else 0)
            continue
        parts = _parts(one)
        kinds = [type(part) for part in parts]
        found += (type(one), *kinds)
        found += [part for part, kind in zip(parts, kinds, strict=True) if kind in PLAIN]
        waiting += [part for part, kind in zip(parts, kinds, strict=True) if kind not in PLAIN]
    return tuple(found)


def _parts(one: Any) -> list[Any]:
    """What an object is compared by."""
    if isinstance(one, FunctionType):
        if isinstance(getattr(one, "__wrapped__", None), nn.Module):  # of :func:`functional`
            return [one.__code__, *vars(one).values()]
        cells = [cell.cell_contents for cell in one.__closure__ or () if _filled(cell)]
        if one.__module__ and one.__module__.startswith(OURS):
            return [one.__code__, *cells]
        named = [one.__globals__[name] for name in _names(one.__code__) if name in one.__globals__]
        return [one.__code__, one.__defaults__, one.__kwdefaults__, *cells, *named]
    if isinstance(one, MethodType):
        return [one.__func__, one.__self__]
    if isinstance(one, partial):
        return [one.func, one.args, one.keywords]
    if isinstance(one, (list, tuple, set, frozenset, Mapping)):
        if len(one) > LONG:
            return [len(one)]
        return [*one, *one.values()] if isinstance(one, Mapping) else list(one)
    if isinstance(one, ModuleType):
        return []
    if isinstance(one, (np.generic, np.ndarray)):
        return [one.tobytes()]
    given = {k: v for k, v in getattr(one, "__dict__", {}).items() if v is not None and (type(v) not in BOXES or v)}
    kinds = [k for k in type(one).__mro__ if isinstance(one, nn.Module) and not k.__module__.startswith(OURS)]
    return [*given, *given.values(), *(part for kind in kinds for part in vars(kind).values())]


@cache
def _names(code: CodeType) -> tuple[str, ...]:
    """The names that a function's code, and that of functions in it, may take from outside."""
    within = [_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return sum(within, code.co_names)


def _probe(inner: Inner, named: Named, parts: Sequence[Part]) -> Reasons:
    """Try each part on two tasks by vmap, leaving random numbers and buffers as they were; None: as the loop."""
    buffers = [buffer for _, function, _ in parts for module in modules_of(function) for buffer in module.buffers()]
    kept = [buffer.clone() for buffer in buffers]
    try:
        reasons: list[str | None] = []
        for part in parts:
            reasons.append(_reason(inner, named, *part))
            if reasons[0] is not None:
                break
        return tuple(reasons)
    finally:
        with torch.no_grad():
            for buffer, value in zip(buffers, kept, strict=True):
                buffer.copy_(value)


def _reason(inner: Inner, named: Named, step: int, function: LossFunction, batch: Nest) -> str | None:
    two = map_tensors(lambda t: t[:2].detach(), batch)
    inner = replace(inner, graph=True)
    values = partial(_values, inner, {name: p.detach() for name, p in named.items()}, function)
    devices = sorted({p.device.index for p in named.values() if p.is_cuda})
    with torch.random.fork_rng(devices=devices), at_step(step), differentiable_twice(2), exact_products():
        before = _random_states(devices)
        looped = [values(task_of(two, task), None) for task in range(2)]
        random = not all(map(torch.equal, before, _random_states(devices)))
        try:
            mapped = values(two, 2)
        except Exception as error:  # of any kind: it may come from the user's loss
            line = str(error).strip().partition("\n")[0]
            return f"vmap is not possible ({type(error).__name__}: {line})"
    return None if random else _difference(looped, mapped)  # dropout differs between the two by right


Found = list[Tensor | None]


def _values(inner: Inner, named: Named, function: LossFunction, batch: Nest, tasks: int | None) -> Found:
    """What the function gives, and the gradient of a weighted sum of it by each parameter that adapts."""
    fast, frozen = inner.begin(named, tasks)
    call = partial(inner.call, function)
    out = call({**frozen, **fast}, batch) if tasks is None else engines.over_tasks(call, fast, frozen, batch)
    if not isinstance(out, Tensor) or not out.requires_grad:
        return [out]
    each = out.reshape(tasks or 1, -1)
    weights = torch.arange(each.shape[1], device=out.device, dtype=out.dtype).cos()
    return [out.detach(), *torch.autograd.grad((each * weights).sum(), list(fast.values()), allow_unused=True)]


def _tf32() -> tuple[bool, bool]:
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


def _allow_tf32(value: Any) -> None:
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = value or (False, False)


# No TF32: its rounding alone is larger than the difference that the probe looks for.
exact_products = SwitchedOff(_tf32, _allow_tf32)


def _random_states(devices: list[int]) -> list[Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)]


def _difference(looped: list[Found], mapped: Found) -> str | None:
    """Why what vmap gives is not what the loop gives, each tensor compared by itself; rounding apart."""
    exact, gaps, sizes = True, [], []
    for stack, *each in zip(mapped, *looped, strict=True):
        ones = [one for one in each if one is not None]
        if stack is not None and len(ones) == len(each):
            expected = torch.stack(ones).view_as(stack).double()
            sizes.append(float(expected.norm()))
            gaps.append(float((stack.double() - expected).norm()))
            exact = exact and stack.dtype == torch.float64
    total = math.hypot(*sizes[1:])
    if not math.isfinite(sum(sizes)) or (total == 0 and len(mapped) > 1):
        return UNKNOWN
    floors = [sizes[0], *(max(size, total / 100) for size in sizes[1:])]  # a bias before BatchNorm: 0 but for rounding
    worst = max(gap / (floor or 1.0) for gap, floor in zip(gaps, floors, strict=True))
    if worst <= (1e-8 if exact else 2e-2):
        return None
    return f"by vmap the gradient differs by {worst:.0e} from that of one task at a time"


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
        params: a tensor, or (nested) dicts of tensors. If neither they nor `lr` nor `batch` (nor tensors that loss_fn
            holds) ask for a gradient, the result is detached and no graph is kept: give detached params at evaluation.
        batch: any nest of dicts, lists, tuples and dataclasses of tensors.
        lr: the inner rate: a number above 0; a tensor, which can be learned; a dict by parameter name of either
            (Meta-SGD), of the parameter's shape or broadcast to it; or a list of these, one for each step.
        steps: 0 returns the parameters.
        order: 2 differentiates through the inner gradients (MAML), 1 takes them as constants (FOMAML).
        engine: "loop" (one task at a time), "vmap" (all tasks in one forward pass), "mixed" (vmap, but loop for the
            query part), "higher", "learn2learn", or "auto".
        tasks: T, if every tensor of the batch has a leading dimension (T, ...); the result's leaves have it too.
        only: which parameters adapt: names, prefixes up to a dot, patterns with ``*``, or a function of the name. The
            others are passed to loss_fn as they are, and keep their meta-gradient.
        checkpoint: compute the steps again in the backward pass, in segments: memory of about 2 sqrt(steps) steps for
            one more forward and backward pass a step.
        allow_unused: leave parameters that the loss does not use as they are, instead of an error.
        optimizer: "sgd", or with engine "higher" also "momentum" (0.9), "adam", or a function from parameter groups to
            a torch optimizer; its rate is `lr`.

    Raises InputError: a bad value, a loss that is not a scalar, or (on a CPU) NaN with a finite gradient, unused
    parameters, gradients switched off, a compiled function in second order, an engine that is not installed.

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
        engine = options.asked if options.asked != "auto" else choose(inner, named, batch, tasks).engine
        results = _adapted(inner, named, batch, tasks, engine)
    return rebuild(params, iter([results[name] for name in named]))


def _adapted(inner: Inner, named: Named, batch: Nest, tasks: int | None, engine: str) -> Named:
    try:
        if engine in engines.STACKED:
            stack = map_tensors(lambda t: t[None], batch) if tasks is None else batch
            fast, frozen = engines.ENGINES[engine](inner, named, stack, tasks or 1)
            if tasks is None:
                return {**frozen, **{name: p[0] for name, p in fast.items()}}
            return {**{name: p.expand(tasks, *p.shape) for name, p in frozen.items()}, **fast}
        parts = [batch] if tasks is None else [task_of(batch, task) for task in range(tasks)]
        found = [engines.ENGINES[engine](inner, named, part) for part in parts]
    except HiddenWeights:
        return _adapted(replace(inner, graph=True), named, batch, tasks, engine)
    each = [{**frozen, **fast} for fast, frozen in found]
    return each[0] if tasks is None else {name: torch.stack([one[name] for one in each]) for name in named}


def engine_for(
    loss_fn: LossFunction,
    params: Nest,
    batch: Nest,
    query: Nest = None,
    *,
    lr: Any,
    query_loss: LossFunction | None = None,
    **options: Any,
) -> EngineChoice:
    """The engine that :func:`adapt`, or with `query` :func:`meta_loss`, takes: ``EngineChoice(engine, why)``.

    Example:
        >>> engine_for(lambda w, x: (w - x) ** 2, torch.tensor(1.0), torch.tensor(0.0), lr=0.1)
        EngineChoice(engine='loop', why='a single task')
    """
    chosen = Options(lr, **options)
    inner, named = build(loss_fn, params, batch, chosen)
    if chosen.asked != "auto":
        return EngineChoice(chosen.asked, "asked for")
    return choose(inner, named, batch, chosen.tasks, query, query_loss)


def task_values(
    inner: Inner,
    named: Named,
    support: Nest,
    query: Nest,
    tasks: range,
    engine: str,
    function: LossFunction,
    weights: Tensor | None = None,
) -> Tensor:
    """`function(adapted params, query)` of each of `tasks`; with `weights` (steps,) their sum over all steps."""
    if engine == "auto":
        engine = choose(inner, named, support, len(tasks), query, function).engine
    run, stacked, each = engines.ENGINES[engine], engine in engines.STACKED, []
    spans: list[dict[str, range]] = [{}]
    if weights is not None:
        spans = [{"steps": range(step, step + 1)} for step in range(inner.steps)]
    try:
        for task in (None,) if stacked else tasks:
            batch, data = (_rows(nest, tasks) if task is None else task_of(nest, task) for nest in (support, query))
            start, number, values = named, len(tasks) if stacked else None, []
            for done, span in enumerate(spans, 1):
                fast, frozen = run(inner, start, batch, number, **span)
                values.append(_values_after(inner, function, done if span else inner.steps, fast, frozen, data, engine))
                start, number = {**frozen, **fast}, None  # stacked from the first step on
            found = values[0] if weights is None else torch.tensordot(weights.to(values[0]), torch.stack(values), 1)
            each.append(found)
    except HiddenWeights:
        return task_values(replace(inner, graph=True), named, support, query, tasks, engine, function, weights)
    return each[0] if stacked else each[0][None] if len(each) == 1 else torch.stack(each)


def _values_after(
    inner: Inner, function: LossFunction, step: int, fast: Named, frozen: Named, query: Nest, engine: str
) -> Tensor:
    """`function` of parameters that have taken `step` steps: of one task, or of a stack of them."""
    with at_step(step):
        if engine not in engines.STACKED:
            return _value(inner, function, {**frozen, **fast}, query, engine == "loop")
        if engine == "vmap":
            return engines.over_tasks(partial(inner.call, function), fast, frozen, query)
        tasks = enumerate(zip(*(stack.unbind() for stack in fast.values()), strict=True))
        each = [(dict(zip(fast, own, strict=True)), task_of(query, task)) for task, own in tasks]
        return torch.stack([_value(inner, function, {**frozen, **own}, data, True) for own, data in each])


def _value(inner: Inner, function: LossFunction, params: Named, query: Nest, reorder: bool) -> Tensor:
    layout: AbstractContextManager[object] = nullcontext()
    if reorder:
        params, query, layout = channels_last(params, query)
    with layout:
        return inner.call(function, params, query)
