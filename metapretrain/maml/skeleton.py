"""A second module tree over the same tensors, which can be changed without touching the first."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import Tensor, nn

Copy = Callable[[Tensor], Any]
Replace = Callable[[Any], nn.Module]


def copy_tree(module: nn.Module, parameter: Copy = lambda p: p, replace: Replace = lambda m: m) -> Any:
    """Copy the modules, not the tensors: submodules, hooks and attributes are shared, tied ones stay tied.

    Args:
        parameter: what takes a parameter's place, asked once for each distinct tensor.
        replace: is given each copied module, and returns it or another one in its place.
    """
    return _copy(module, parameter, replace, {}, {})


def _copy(
    module: nn.Module,
    parameter: Copy,
    replace: Replace,
    modules: dict[int, Any],
    parameters: dict[int, Any],
) -> Any:
    if id(module) in modules:
        return modules[id(module)]
    copied = module.__new__(type(module))
    copied.__dict__ = {name: _rebound(value, module, copied) for name, value in module.__dict__.items()}
    for kind in ("_parameters", "_buffers", "_modules"):
        copied.__dict__[kind] = dict(module.__dict__[kind])
    result = modules[id(module)] = replace(copied)
    for name, value in module._parameters.items():
        if value is not None:
            if id(value) not in parameters:
                parameters[id(value)] = parameter(value)
            copied._parameters[name] = parameters[id(value)]
    for name, child in module._modules.items():
        if child is not None:
            copied._modules[name] = _copy(child, parameter, replace, modules, parameters)
    return result


def _rebound(value: Any, old: nn.Module, new: nn.Module) -> Any:
    """A method kept as an attribute (``self.forward = self._other``) must follow the copy."""
    if isinstance(value, MethodType) and value.__self__ is old:
        return MethodType(value.__func__, new)
    return value
