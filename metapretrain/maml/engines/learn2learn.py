"""Engine `learn2learn`: its module cloning and its update, one task at a time."""

from __future__ import annotations

from typing import Any

from torch import nn

from metapretrain.errors import InputError
from metapretrain.maml.inner import Inner, Named
from metapretrain.maml.nests import Nest
from metapretrain.maml.steps import at_step

INSTALL = (
    'pip install --no-deps --config-settings="--build-option=build_ext" learn2learn==0.2.0'
    " && pip install gym requests scipy tqdm (needs a C compiler)"
)


def adapt_one(inner: Inner, params: Named, batch: Nest) -> Named:
    """All parameters of one task after the inner steps, by name."""
    utils = library().utils
    fast, frozen = inner.split(params)
    holder = utils.clone_module(_holder(inner.start(fast)))
    for step in range(inner.steps):
        fast = dict(zip(fast, holder._parameters.values(), strict=True))
        with at_step(step):
            loss = inner.loss({**frozen, **fast}, batch)
        gradients = inner.gradient(step, loss, fast)
        updates = [
            None if g is None else -inner.rates.at(step, name) * g for name, g in zip(fast, gradients, strict=True)
        ]
        # Given through its attribute: its `updates` argument matches by order and ignores what is left over.
        for weight, change in zip(fast.values(), updates, strict=True):
            weight.update = change  # type: ignore[attr-defined]
        holder = utils.update_module(holder)
        if not inner.graph:
            holder = _holder({n: p.detach().requires_grad_() for n, p in _weights(fast, holder).items()})
    return {**frozen, **inner.finish(_weights(fast, holder))}


def _weights(names: Named, holder: Any) -> Named:
    return dict(zip(names, holder._parameters.values(), strict=True))


def _holder(fast: Named) -> nn.Module:
    """A module whose parameters are these tensors, wherever they come from."""
    holder = nn.Module()
    for number, value in enumerate(fast.values()):
        holder._parameters[str(number)] = value  # type: ignore[assignment]
    return holder


def library() -> Any:
    """The module learn2learn.

    Raises:
        InputError: it is not installed, or what it imports is not.
    """
    try:
        import learn2learn
    except ImportError as error:
        if error.name not in (None, "learn2learn"):
            raise InputError(
                f"engine 'learn2learn' cannot be imported: {error}; pip install gym requests scipy tqdm"
            ) from None
        raise InputError(f"engine 'learn2learn' is not installed: {INSTALL}") from None
    return learn2learn
