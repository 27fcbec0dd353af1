"""Engine `learn2learn`: its module cloning and its update, one task at a time."""

from __future__ import annotations

from typing import Any

from torch import nn

from metapretrain.extras import import_learn2learn
from metapretrain.maml.inner import Inner, Named
from metapretrain.maml.nests import Nest
from metapretrain.maml.steps import at_step


def adapt_one(inner: Inner, params: Named, batch: Nest) -> Named:
    """All parameters of one task after the inner steps, by name."""
    utils = import_learn2learn("engine 'learn2learn'").utils
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
