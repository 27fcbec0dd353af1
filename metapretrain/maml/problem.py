"""From the arguments of `adapt` to the inner loop: everything is checked here, once."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from metapretrain.errors import InputError, one_of
from metapretrain.maml.inner import Inner, LossFunction, Named, OptimizerFactory
from metapretrain.maml.nests import Nest, check_stacked, flat_params, map_tensors, tensors
from metapretrain.maml.rates import parse_rates

ENGINES = ("auto", "higher", "learn2learn", "loop", "mixed", "vmap")
OPTIMIZERS: dict[str, OptimizerFactory | None] = {
    "sgd": None,
    "momentum": lambda groups: torch.optim.SGD(groups, lr=1.0, momentum=0.9),
    "adam": lambda groups: torch.optim.Adam(groups, lr=1.0),
}
Only = str | Iterable[str] | Callable[[str], bool] | None


@dataclass(frozen=True)
class Options:
    """How an inner loop runs; :func:`metapretrain.maml.adapt` tells of each.

    Raises:
        InputError: a bad value, apart from `lr` and `only`, which are checked with the parameters.
    """

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


def build(loss_fn: LossFunction, params: Nest, batch: Nest, options: Options) -> tuple[Inner, Named]:
    """The inner loop, and the parameters by name.

    Raises:
        InputError: any bad value; see :func:`metapretrain.maml.adapt`.
    """
    if options.tasks is not None:
        check_stacked("batch", batch, options.tasks)
    named = flat_params(params)
    everything = {**named, **{f"batch tensor {i}": t for i, t in enumerate(tensors(batch))}}
    check_usable(everything)
    check_meta(everything)
    if options.order == 2:
        check_not_compiled(loss_fn)
    adapted = choose_names(options.only, tuple(named))
    rates = parse_rates(options.lr, {name: named[name].shape for name in adapted}, options.steps)
    sources = [*named.values(), *rates.tensors(), *tensors(batch)]
    inner = Inner(
        loss_fn, params, tuple(named), adapted, rates, options.steps, options.order,
        graph=any(source.requires_grad for source in sources), allow_unused=options.allow_unused,
        checkpoint=options.checkpoint, optimizer=options.factory,
    )  # fmt: skip
    return inner, named


def whole(what: str, value: int, low: int) -> int:
    """Return `value`, or raise InputError unless it is a whole number of at least `low`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise InputError(f"{what} is {value!r}; give a whole number of at least {low}")
    return value


def check_usable(named: Named) -> None:
    """Raise InputError where gradients cannot be taken: switched off, or tensors made in inference mode."""
    if torch.is_inference_mode_enabled() or not torch.is_grad_enabled():
        mode = "inference_mode" if torch.is_inference_mode_enabled() else "no_grad"
        raise InputError(
            f"the inner loop needs gradients but runs under torch.{mode}(); take it out of that block. "
            "To keep no graph at evaluation, give detached params: the result is then detached as well"
        )
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
    known = (function, getattr(function, "__self__", None), *cells)
    return [module for module in known if isinstance(module, nn.Module)]


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def check_module_not_compiled(module: nn.Module) -> None:
    """Raise InputError if the module or a part of it is compiled."""
    for name, part in module.named_modules():
        # Among its parts, not by hasattr: a learner passes on the attributes of its module.
        if "_orig_mod" in part._modules or getattr(part, "_compiled_call_impl", None) is not None:
            where = f"its part {name!r}" if name else f"the {type(part).__name__}"
            raise InputError(
                f"{where} is compiled: torch.compile has no second order; give the module as it was before"
            )


def choose_names(only: Only, names: tuple[str, ...]) -> tuple[str, ...]:
    """The names that `only` chooses: a name, a prefix up to a dot, a pattern with `*`, or a function.

    Raises:
        InputError: a filter, or a part of it, that matches nothing.

    Example:
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
        found = {n for n in names if n == part or n.startswith(f"{part}.") or fnmatch.fnmatchcase(n, part)}
        if not found:
            raise InputError(f"only={part!r} matches none of the parameters: {', '.join(names)}")
        chosen |= found
    if not chosen:
        raise InputError(f"only=[] chooses none of the parameters: {', '.join(names)}")
    return tuple(name for name in names if name in chosen)


def cuda_devices(named: Named) -> list[int]:
    """Indices of the CUDA devices that the tensors are on."""
    return sorted({p.device.index for p in named.values() if p.is_cuda})


def task_of(batch: Nest, task: int) -> Nest:
    """The batch of one task of a stack."""
    return map_tensors(lambda t: t[task], batch)


def stack_results(results: list[Named]) -> Named:
    """The tasks' parameters, (T, ...) each."""
    return {name: torch.stack([result[name] for result in results]) for name in results[0]}
