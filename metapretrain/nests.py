"""Nests: a tensor, or dicts, lists, tuples and dataclasses of nests, read and rebuilt leaf by leaf; nested modules."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from metapretrain.errors import InputError

Nest = Any


def _opened(nest: Nest) -> tuple[dict[Any, Any], Callable[[dict[Any, Any]], Nest]] | None:
    """The parts by key, position or field name, and how a nest of this kind is made of others; None for a leaf."""
    if isinstance(nest, Mapping):
        return dict(nest.items()), dict
    if isinstance(nest, (list, tuple)):
        make = getattr(nest, "_make", type(nest))  # a named tuple is made by _make
        return dict(enumerate(nest)), lambda parts: make(parts.values())
    if dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        parts = {field.name: getattr(nest, field.name) for field in dataclasses.fields(nest)}
        return parts, lambda parts: dataclasses.replace(nest, **parts)
    return None


def named_leaves(nest: Nest, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf, tensor or not, with its path: keys, field names and positions joined by dots.

    Example:
        >>> [name for name, _ in named_leaves({"head": {"bias": 1}, "body": [2, 3]})]
        ['head.bias', 'body.0', 'body.1']
    """
    opened = _opened(nest)
    if opened is None:
        yield path, nest
        return
    for key, value in opened[0].items():
        yield from named_leaves(value, f"{path}.{key}" if path else str(key))


def tensors(nest: Nest) -> list[Tensor]:
    """The tensors of a nest, in order."""
    return [leaf for _, leaf in named_leaves(nest) if isinstance(leaf, Tensor)]


def map_tensors(function: Callable[[Tensor], Any], nest: Nest) -> Nest:
    """The nest with every tensor replaced; mappings become dicts, all other leaves stay."""
    if isinstance(nest, Tensor):
        return function(nest)
    if type(nest) is dict:  # the most common kinds first: this runs several times per task
        return {key: map_tensors(function, value) for key, value in nest.items()}
    if type(nest) is tuple:
        return tuple([map_tensors(function, value) for value in nest])
    opened = _opened(nest)
    if opened is None:
        return nest
    parts, make = opened
    return make({key: map_tensors(function, value) for key, value in parts.items()})


def rebuild(nest: Nest, values: Iterator[Tensor]) -> Nest:
    """The nest with its tensors replaced by `values`, in order."""
    return map_tensors(lambda _: next(values), nest)


def layout(nest: Nest) -> tuple[Any, ...]:
    """What two nests have to share for a computation recorded with one to serve for the other.

    Path, shape, dtype, device and whether a gradient is asked for, of each tensor in order; other leaves as text.

    Example:
        >>> import torch
        >>> a, b = torch.zeros(2), torch.ones(2)
        >>> layout({"x": a, "y": b}) == layout({"x": b, "y": a}), layout({"x": a, "y": b}) == layout({"y": b, "x": a})
        (True, False)
    """
    return tuple(
        (name, tuple(leaf.shape), leaf.dtype, leaf.device, leaf.requires_grad)
        if isinstance(leaf, Tensor)
        else (name, repr(leaf))
        for name, leaf in named_leaves(nest)
    )


def flat_params(params: Nest) -> dict[str, Tensor]:
    """Parameters by name.

    Raises InputError: there are none, a leaf is not a floating point tensor, or two leaves have one name.
    """
    found: dict[str, Tensor] = {}
    for name, leaf in named_leaves(params):
        name = name or "params"
        if not isinstance(leaf, Tensor):
            raise InputError(f"parameter {name!r} is a {type(leaf).__name__}; give tensors in (nested) dicts")
        if not leaf.is_floating_point():
            raise InputError(f"parameter {name!r} is {leaf.dtype}; give floating point tensors")
        if name in found:
            raise InputError(f"two parameters are named {name!r}: nested keys are joined by dots; rename one")
        found[name] = leaf
    if not found:
        raise InputError("params is empty; give a dict of tensors, for example dict(model.named_parameters())")
    return found


def check_stacked(what: str, batch: Nest, tasks: int) -> None:
    """Raise InputError unless every tensor of the batch has a leading dimension of `tasks`."""
    shapes = {name or what: leaf.shape for name, leaf in named_leaves(batch) if isinstance(leaf, Tensor)}
    bad = [f"{name} {tuple(s)}" for name, s in shapes.items() if not s or s[0] != tasks]
    if bad:
        good = [f"{name} {tuple(s)}" for name, s in shapes.items() if s and s[0] == tasks]
        beside = f" (beside {', '.join(good)})" if good else ""
        told = f"tasks={tasks}, but {what} has {', '.join(bad)}{beside}; every tensor needs a"
        raise InputError(f"{told} leading dimension of {tasks}, one entry a task (episodes: metapretrain.stack)")


def module_of(function: Any) -> nn.Module | None:
    """The module that a function is, is a method of, or is a partial of; None for any other function."""
    while isinstance(function, partial):
        function = function.func
    owner = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    return owner if isinstance(owner, nn.Module) else None


@contextmanager
def evaluation_mode(*functions: Any) -> Iterator[None]:
    """Put modules, or those whose methods are given, in evaluation mode; each part gets its former mode back."""
    owners = [owner for owner in map(module_of, functions) if owner is not None]
    modes = [(part, part.training) for owner in owners for part in owner.modules()]
    try:
        for part, _ in modes:
            part.training = False
        yield
    finally:
        for part, mode in modes:
            part.training = mode
