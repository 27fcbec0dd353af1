"""Four ways to run the inner loop, with one result: loop, vmap, higher and learn2learn.

Under vmap a convolution whose weights differ between tasks becomes a grouped one, which is slow in cuDNN; its patches
laid side by side (im2col) and one batched matrix product do the same work fast.

``vmap(grad(...))`` differentiated once more is silently wrong through normalisation with adapted weights
(functorch#534), so only the forward pass is mapped: the summed losses' gradient stacks those of the tasks.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from metapretrain.checks import require
from metapretrain.errors import InputError
from metapretrain.maml.inner import (
    Inner,
    Named,
    SwitchedOff,
    at_step,
    check_operators,
    differentiable_twice,
    holding,
    in_segments,
)
from metapretrain.nests import Nest, map_tensors, rebuild, tensors

SMALL = 32 * 32  # pixels: images of 28 x 28 lose by it, of 84 x 84 they gain


class Written(TorchFunctionMode):
    """Within it functions run as they are written here, by function; where that gives None, as they are."""

    def __init__(self, written: Mapping[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self.written = written

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace what is written."""
        write = self.written.get(func)
        found = None if write is None else write(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if found is None else found


class ReshapingViews(Written):
    """Within it `view` copies where the layout needs it, as `reshape` does, instead of an error."""

    def __init__(self) -> None:
        super().__init__({Tensor.view: self._reshaped})

    @staticmethod
    def _reshaped(x: Tensor, *shape: Any, **named: Any) -> Tensor | None:
        return None if named or isinstance(shape[0], torch.dtype) else x.reshape(*shape)


def channels_last(params: Named, data: Nest) -> tuple[Named, Nest, AbstractContextManager[object]]:
    """Filters and images channels last, and the context to use them in; all as it is where it would not help."""
    filters = any(map(_is_image, params.values()))
    if not filters or not any(_is_image(x) and x.shape[2] * x.shape[3] > SMALL for x in tensors(data)):
        return params, data, nullcontext()
    return {name: _laid_out(p) for name, p in params.items()}, map_tensors(_laid_out, data), ReshapingViews()


def _is_image(x: Tensor) -> bool:
    return x.ndim == 4 and x.dtype == torch.float32 and x.device.type == "cpu"  # others have no such kernels


def _laid_out(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last) if _is_image(x) else x


LARGEST = 32 * 32  # pixels: above, writing the patches costs more than the grouped convolution (84 x 84: 76 ms to 51)


class MatmulConvolutions(Written):
    """Within it `conv2d` is a matrix product, where that is possible and fast.

    That is: one group, no dilation, padding in numbers, and images of at most :data:`LARGEST` pixels.
    """

    def __init__(self) -> None:
        super().__init__(dict.fromkeys((F.conv2d, torch.conv2d), partial(convolution, matmul_conv2d, LARGEST)))


def convolution(
    product: Callable[..., Tensor | None],
    largest: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor | None:
    """`product(input, weight, bias, stride, padding)` of maps up to `largest` pixels; None: it is not for these."""
    if groups != 1 or isinstance(padding, str) or pair_of(dilation) != (1, 1) or input.ndim != 4:
        return None
    if input.shape[-1] * input.shape[-2] > largest:
        return None
    return product(input, weight, bias, pair_of(stride), pair_of(padding))


def pair_of(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[-1])


def matmul_conv2d(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: tuple[int, int], padding: tuple[int, int]
) -> Tensor:
    """`conv2d` of x (N, C, H, W), weight (O, C, h, w) as a matrix product: (N, O, H', W'), in memory (O, N, H', W')."""
    out, _, height, width = weight.shape
    padded = F.pad(x.transpose(0, 1), (padding[1], padding[1], padding[0], padding[0]))
    windows = padded.unfold(2, height, stride[0]).unfold(3, width, stride[1])
    patches = windows.permute(0, 4, 5, 1, 2, 3)  # (C, h, w, N, H', W')
    _, _, _, images, rows, columns = patches.shape
    result = weight.reshape(out, -1) @ patches.reshape(-1, images * rows * columns)
    if bias is not None:
        result = result + bias[:, None]
    return result.reshape(out, images, rows, columns).transpose(0, 1)


_written: ContextVar[Callable[[], AbstractContextManager[object]] | None] = ContextVar("written", default=None)


def written(mode: Callable[[], AbstractContextManager[object]]) -> AbstractContextManager[None]:
    """Let the tasks' forward pass run in this mode inside the block: for a graph that will be compiled."""
    return holding(_written, mode)


Loss = Callable[[Inner, Named, Named, Nest], Tensor]
Engine = Callable[..., tuple[Named, Named]]


def descend(
    loss_of: Loss, inner: Inner, params: Named, batch: Nest, tasks: int | None = None, steps: range | None = None
) -> tuple[Named, Named]:
    """(adapted parameters, the others) after the inner steps; with `tasks` (T, ...), and `loss_of` sums over tasks."""
    fast, frozen = inner.begin(params, tasks)
    with differentiable_twice(inner.order):
        if inner.checkpoint and inner.graph:
            return in_segments(partial(descend, loss_of), inner, fast, frozen, batch), frozen
        for step in range(inner.steps) if steps is None else steps:
            with at_step(step):
                loss = loss_of(inner, fast, frozen, batch)
            inner.check_loss(step, loss, fast)
            found = torch.autograd.grad(loss, list(fast.values()), create_graph=inner.twice, allow_unused=True)
            fast = inner.update(step, fast, inner.checked(found, loss))
    return inner.finish(fast), frozen


def one_loss(inner: Inner, fast: Named, frozen: Named, batch: Nest) -> Tensor:
    """The loss of one task."""
    return inner.loss({**frozen, **fast}, batch)


def summed_losses(inner: Inner, fast: Named, frozen: Named, batch: Nest) -> Tensor:
    """The sum of the losses of all tasks."""
    return over_tasks(inner.loss, fast, frozen, batch).sum()


Function = Callable[[Named, Nest], Tensor]


def over_tasks(function: Function, fast: Named, frozen: Named, batch: Nest) -> Tensor:
    """`function` of each task's parameters and batch, (T, ...); random numbers differ between tasks.

    Raises InputError for operators that are wrong under vmap.
    """

    def one(stacked: list[Tensor], shared: list[Tensor], data: list[Tensor]) -> Tensor:
        params = {**dict(zip(frozen, shared, strict=True)), **dict(zip(fast, stacked, strict=True))}
        return function(params, rebuild(batch, iter(data)))

    mapped = torch.vmap(one, in_dims=(0, None, 0), randomness="different")
    on_cpu = next(iter(fast.values())).device.type == "cpu"
    mode = _written.get()
    if mode is None and not on_cpu and any(p.ndim == 5 for p in fast.values()):  # filters of each task's own
        mode = MatmulConvolutions
    # the CPU's fused attention has no rule for vmap either
    with differentiable_twice(2 if on_cpu else 1), mode() if mode else nullcontext(), _no_fast_path():
        out = mapped(list(fast.values()), list(frozen.values()), tensors(batch))
    check_operators(out, fast.values(), mapped=True)
    if len(out) != len(next(iter(fast.values()))):
        raise InputError("vmap mixes up the tasks of one of the operators in use; use engine='loop'")
    return out


# Transformer layers of torch in evaluation mode cannot see, under vmap, that a gradient is wanted.
_no_fast_path = SwitchedOff(torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled)


def descend_by_higher(inner: Inner, params: Named, batch: Nest, tasks: None = None) -> tuple[Named, Named]:
    """As :func:`descend` for one task, by an optimizer of higher."""
    fast, frozen = inner.begin(params, tasks)
    optimizer, weights = _differentiable(inner, fast), list(fast.values())

    def checked(gradients: Any) -> Any:
        gradients = inner.checked(gradients, loss)
        if inner.order == 2:
            return gradients
        return [None if g is None else g.detach() for g in gradients]

    for step in range(inner.steps):
        moving = dict(zip(fast, weights, strict=True))
        with at_step(step), differentiable_twice(inner.order):
            loss = inner.loss({**frozen, **moving}, batch)
        inner.check_loss(step, loss, moving)
        rates = [inner.rates.at(step, name) for name in fast]
        weights = optimizer.step(loss, params=weights, override={"lr": rates}, grad_callback=checked)
    return inner.finish(dict(zip(fast, weights, strict=True))), frozen


def _differentiable(inner: Inner, fast: Named) -> Any:
    higher = require("higher", "engine 'higher'")
    # Its own parameters only tell higher the groups, one a parameter so that each can have a rate.
    stand_ins = [p.detach().clone().requires_grad_() for p in fast.values()]
    groups: list[dict[str, Any]] = [{"params": [p]} for p in stand_ins]
    optimizer = torch.optim.SGD(groups, lr=1.0) if inner.optimizer is None else inner.optimizer(groups)
    try:
        return higher.get_diff_optim(optimizer, stand_ins, track_higher_grads=inner.graph)
    except ValueError as error:
        raise InputError(f"higher has no differentiable {type(optimizer).__name__}: {error}") from None


def descend_by_learn2learn(inner: Inner, params: Named, batch: Nest, tasks: None = None) -> tuple[Named, Named]:
    """As :func:`descend` for one task, by learn2learn's update of a module."""
    utils = require("learn2learn", "engine 'learn2learn'").utils
    fast, frozen = inner.begin(params, tasks)
    holder = utils.clone_module(_holder(fast)) if inner.graph else _holder(fast)
    for step in range(inner.steps):
        fast = _weights(fast, holder)
        with at_step(step), differentiable_twice(inner.order):
            loss = inner.loss({**frozen, **fast}, batch)
        inner.check_loss(step, loss, fast)
        found = torch.autograd.grad(loss, list(fast.values()), create_graph=inner.twice, allow_unused=True)
        # Given through its attribute: its `updates` argument matches by order and ignores what is left over.
        for (name, weight), g in zip(fast.items(), inner.checked(found, loss), strict=True):
            weight.update = None if g is None else -inner.rates.at(step, name) * g  # type: ignore[attr-defined]
        holder = utils.update_module(holder)
        if not inner.graph:
            holder = _holder({n: p.detach().requires_grad_() for n, p in _weights(fast, holder).items()})
    return inner.finish(_weights(fast, holder)), frozen


def _weights(names: Named, holder: Any) -> Named:
    return dict(zip(names, holder._parameters.values(), strict=True))


def _holder(fast: Named) -> nn.Module:
    """A module whose parameters are these tensors, wherever they come from."""
    holder = nn.Module()
    for number, value in enumerate(fast.values()):
        holder._parameters[str(number)] = value  # type: ignore[assignment]
    return holder


ENGINES: dict[str, Engine] = {
    "higher": descend_by_higher,
    "learn2learn": descend_by_learn2learn,
    "loop": partial(descend, one_loss),
    "mixed": partial(descend, summed_losses),
    "vmap": partial(descend, summed_losses),
}
STACKED = ("mixed", "vmap")  # these adapt all tasks at once, the others one by one
