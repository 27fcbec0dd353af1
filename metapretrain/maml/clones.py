"""What learn2learn's `clone()` and `adapt()` need: a module's copy with weights of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from metapretrain.errors import InputError
from metapretrain.maml.inner import Named
from metapretrain.maml.normalisation import set_policy
from metapretrain.maml.problem import check_module_not_compiled, check_usable
from metapretrain.maml.skeleton import copy_tree


def clone_module(module: nn.Module, policy: str) -> Any:
    """A copy whose parameters are computed from the module's: gradients flow back to it."""
    check_module_not_compiled(module)

    def placed(part: Any) -> nn.Module:
        if isinstance(part, _NormBase):
            set_policy(part, policy)
        return part  # type: ignore[no-any-return]

    return copy_tree(module, lambda p: p.clone() if p.requires_grad else p, placed)


def weights_of(module: nn.Module, only: Callable[[tuple[str, ...]], tuple[str, ...]], allow_nograd: bool) -> Named:
    """The parameters that adapt, by name.

    Raises:
        InputError: some take no gradient, and `allow_nograd` is False.
    """
    named = dict(module.named_parameters())
    chosen = {name: named[name] for name in only(tuple(named))}
    check_usable({})
    frozen = [name for name, p in chosen.items() if not p.requires_grad]
    if frozen and not allow_nograd:
        raise frozen_error(frozen)
    return {name: p for name, p in chosen.items() if p.requires_grad}


def frozen_error(names: list[str]) -> InputError:
    """The error for parameters that take no gradient."""
    return InputError(f"{', '.join(names)}: requires_grad is False; pass allow_nograd=True to leave them as they are")


def gradients_of(loss: Tensor, weights: Named, first_order: bool, allow_unused: bool) -> list[Tensor | None]:
    """The loss's gradient by each weight.

    Raises:
        InputError: the loss does not use some of them, and `allow_unused` is False; or it has no gradient.
    """
    if not loss.requires_grad:
        raise InputError("adapt: the loss has no gradient; compute it from this clone's output")
    gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=not first_order, allow_unused=True)
    unused = [name for name, g in zip(weights, gradients, strict=True) if g is None]
    if unused and not allow_unused:
        raise InputError(
            f"adapt: the loss does not use {', '.join(unused)}; pass allow_unused=True to keep them, "
            "and call adapt() on the clone that computed the loss"
        )
    return list(gradients)


def set_parameters(module: nn.Module, values: dict[int, Tensor]) -> None:
    """Put new tensors in the place of those with the given ids, wherever they are used."""
    for part in module.modules():
        for name, old in part._parameters.items():
            if id(old) in values:
                part._parameters[name] = values[id(old)]  # type: ignore[assignment]


def checked_module(module: Any) -> nn.Module:
    """Return `module`, or raise InputError unless it is one of PyTorch's."""
    if not isinstance(module, nn.Module):
        raise InputError(f"model must be a torch module, not a {type(module).__name__}")
    return module


def last_module(module: nn.Module) -> str:
    """Name of the module that holds the last parameter.

    Raises:
        InputError: the module has no parts with parameters.

    Example:
        >>> last_module(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)))
        '1'
    """
    names = [name.rpartition(".")[0] for name, _ in checked_module(module).named_parameters()]
    if not names or not names[-1]:
        raise InputError(f"{type(module).__name__} has no named head; say which parameters with head=...")
    return names[-1]
