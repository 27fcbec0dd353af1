"""A module as a pure function of its parameters: a policy for batch normalisation, right second derivatives."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.utils.parametrizations import _WeightNorm

from metapretrain.errors import InputError, one_of
from metapretrain.maml.adapt import check_module_not_compiled
from metapretrain.maml.engines import Written
from metapretrain.maml.inner import Named

Copy = Callable[[Tensor], Any]
Replace = Callable[[Any], nn.Module]


def copy_tree(module: nn.Module, parameter: Copy = lambda p: p, replace: Replace = lambda m: m) -> Any:
    """Copy the modules, not the tensors: submodules, hooks and attributes are shared, tied ones stay tied.

    `parameter` gives what takes each distinct tensor's place; `replace` takes a copied module, returns it or another.
    """
    return _copy(module, parameter, replace, {}, {})


def _copy(
    module: nn.Module, parameter: Copy, replace: Replace, modules: dict[int, Any], parameters: dict[int, Any]
) -> Any:
    if id(module) in modules:
        return modules[id(module)]
    copied: nn.Module = object.__new__(type(module))  # not by the class: a GraphModule's makes another one
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


POLICIES = ("batch", "frozen", "support")
SINGLE = 'one number per channel has no variance to normalise by: give more rows, or use batchnorm="frozen"'
AGAIN = "torch.utils.checkpoint in the module would use other weights: switch it off; checkpoint=True saves memory"
TOLD = {AGAIN: AGAIN, "Expected more than 1 value per channel": SINGLE}
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class Functional(NamedTuple):
    """``apply(params, buffers, *inputs)`` with the parameters and buffers that the module has now."""

    apply: Callable[..., Any]
    params: Named
    buffers: Named


def functional(module: nn.Module, batchnorm: str = "batch") -> Functional:
    """The module as a pure function, for :func:`metapretrain.maml.adapt`.

    ``"batch"``: batch and instance normalisation by the statistics of the batch at hand, in training and evaluation
    mode, untracked and of this process alone, for `SyncBatchNorm` too. ``"frozen"``: by the running statistics that the
    module has, in both modes. ``"support"``: as "batch", and inside :func:`first_rows` by the statistics of these rows,
    the support, so that no query depends on another (MetaBN of Bronskill et al., 2020).

    The module itself is not changed. `params` are its own tensors, by name, without those tied to another; whatever is
    left out of a call is taken from the module. Training and evaluation mode follow the module; its other attributes
    (`net.scale`, `drop.p`, layers) are those of now, so call this again when they change. Rows of padding of an
    `nn.Embedding`, and weight norm, are written out where torch is wrong (docs/maml.md).

    Raises InputError: unknown policy, a compiled module, "frozen" for a layer without running statistics, an embedding
    with `max_norm`; and, from `apply`, unknown names, two values for one tied tensor, or a module that changes one of
    its buffers in place.

    Example:
        >>> apply, params, buffers = functional(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
        >>> sorted(params), sorted(buffers)
        (['0.bias', '0.weight', '1.bias', '1.weight'], [])
        >>> apply(params, buffers, torch.zeros(4, 2)).shape
        torch.Size([4, 3])
    """
    one_of("batchnorm", batchnorm, POLICIES)
    check_module_not_compiled(module)
    made = copy_tree(module, replace=lambda part: adaptable(part, batchnorm))
    for name, part in module.named_modules() if batchnorm == "frozen" else ():
        batch = isinstance(part, _NormBase) and not isinstance(part, nn.modules.instancenorm._InstanceNorm)
        if batch and part.running_mean is None:
            where = name or "the module"
            raise InputError(f'batchnorm="frozen" needs running statistics, but {where} keeps none; use "batch"')
    pairs = zip(made.modules(), module.modules(), strict=True)
    following = [(ours, theirs) for ours, theirs in pairs if batchnorm != "frozen" or not isinstance(ours, _NormBase)]
    places = _places(made)

    def apply(params: Named, buffers: Named, *inputs: Any, **keywords: Any) -> Any:
        for ours, theirs in following:
            ours.__dict__["training"] = theirs.training
        versions = {name: _version(buffer) for name, buffer in buffers.items()}
        # Not torch.func.functional_call: it leaves the last call's weights in shared modules (pytorch#164759).
        before = [(tensors, key, tensors[key]) for slots in places.values() for tensors, key in slots]
        try:
            _fill(places, {**params, **buffers})
            with forward_pass():
                output = made(*inputs, **keywords)
        finally:
            for tensors, key, value in before:
                tensors[key] = value
        changed = [name for name, version in versions.items() if _version(buffers[name]) != version]
        if changed:
            told = f"the module changes {', '.join(changed)} in place, which adaptation must not"
            raise InputError(f"{told}: put that part into evaluation mode, or keep its state elsewhere")
        return output

    apply.__dict__.update(__wrapped__=module, policy=batchnorm)  # its state, for the choice of an engine
    return Functional(apply, dict(module.named_parameters()), dict(made.named_buffers()))


@contextmanager
def forward_pass() -> Iterator[None]:
    """Errors of :data:`TOLD` in one line; it refuses checkpointing inside of the block, but not around it."""
    with ExitStack() as stack:
        with suppress(RuntimeError):  # the caller's own hooks
            stack.enter_context(torch.autograd.graph.disable_saved_tensors_hooks(AGAIN))
        try:
            yield
        except (RuntimeError, ValueError) as error:
            for start, told in TOLD.items():
                if str(error).startswith(start):
                    raise InputError(told) from None
            raise


Places = dict[str, list[tuple[dict[str, Any], str]]]


def _places(module: nn.Module) -> Places:
    """Where each parameter and buffer stands, in the dicts of its modules; tied ones share their list."""
    found: Places = {}
    tied: Places = {}
    for prefix, part in module.named_modules(remove_duplicate=False):
        for tensors in (part._parameters, part._buffers):
            for key, value in tensors.items():
                name = f"{prefix}.{key}" if prefix else key
                slots = found[name] = tied.setdefault(name if value is None else str(id(value)), [])
                slots.append((tensors, key))
    return found


def _fill(places: Places, values: Named) -> None:
    filled: dict[int, Tensor] = {}
    for name, value in values.items():
        if name not in places:
            raise InputError(f"the module has no parameter or buffer {name!r}; it has {', '.join(places)}")
        if filled.setdefault(id(places[name]), value) is not value:
            raise InputError(f"{name} is tied to another parameter that was given another value; give one of them")
        for tensors, key in places[name]:
            tensors[key] = value


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def adaptable(module: nn.Module, policy: str) -> nn.Module:
    """A copied part made fit for the inner loop: normalisation by the policy, and what torch differentiates wrongly.

    Raises InputError for an embedding that changes its weights in place.
    """
    if isinstance(module, _NormBase):
        if policy != "frozen":
            module.__dict__["track_running_stats"] = False
            if hasattr(module, "process_group"):  # it synchronises processes, which have other tasks
                module.__dict__["forward"] = MethodType(_BatchNorm.forward, module)
            for name in STATISTICS:
                module._buffers[name] = None
        else:
            module.__dict__["training"] = False
            module.__dict__["train"] = lambda mode=True: module
    elif isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
        raise InputError(f"{type(module).__name__}(max_norm=...) changes its weights in place; leave max_norm out")
    elif type(module).forward is nn.Embedding.forward and module.padding_idx is not None:
        module.__dict__["forward"] = MethodType(_embedding, module)
    elif type(module).forward is _WeightNorm.forward:
        module.__dict__["forward"] = MethodType(_weight_norm, module)
    return module


def _embedding(self: nn.Embedding, input: Tensor) -> Tensor:
    """Rows of padding as constants; by vmap, torch takes `padding_idx` for the first task only."""
    found = F.embedding(input, self.weight, scale_grad_by_freq=self.scale_grad_by_freq, sparse=self.sparse)
    padding = torch.eq(input, self.padding_idx)  # type: ignore[arg-type]  # not None here
    return torch.where(padding[..., None], found.detach(), found)


def _weight_norm(self: _WeightNorm, g: Tensor, v: Tensor) -> Tensor:
    """``g v / |v|``, with norms over all axes but `dim`, or over all for -1; torch's has wrong second derivatives."""
    axes = [axis for axis in range(v.ndim) if self.dim == -1 or axis != self.dim % v.ndim]
    return v * (g / v.square().sum(axes, keepdim=True).sqrt())


def first_rows(rows: int, total: int) -> Written:
    """Let batch normalisation take its statistics from the first `rows` of its `total` rows inside the block.

    Raises InputError inside it for other numbers of rows, and for statistics of a single number.
    """

    def normalised(x: Tensor, *_: Any, weight: Any, bias: Any, training: bool, eps: float, **__: Any) -> Tensor | None:
        if not training:
            return None
        if len(x) != total:
            raise InputError(
                f"batch normalisation sees {tuple(x.shape)} for {rows} support and {total - rows} other rows, so that "
                'the support cannot be told apart; keep one row per example, or use batchnorm="batch"'
            )
        wide, shape = x.to(torch.promote_types(x.dtype, torch.float32)), (1, -1, *[1] * (x.ndim - 2))
        if wide[:rows, :1].numel() < 2:
            raise InputError(SINGLE)
        var, mean = torch.var_mean(wide[:rows], [0, *range(2, x.ndim)], correction=0)
        scale = torch.rsqrt(var + eps) * (1 if weight is None else weight)
        shift = -mean * scale if bias is None else bias - mean * scale
        return (wide * scale.view(shape) + shift.view(shape)).to(x.dtype)

    def direct(*_: Any, **__: Any) -> None:
        raise InputError('torch.batch_norm knows no support: call torch.nn.functional.batch_norm, or use "batch"')

    return Written({F.batch_norm: normalised, torch.batch_norm: direct, torch.native_batch_norm: direct})
