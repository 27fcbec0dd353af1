"""Engine `higher`: its differentiable optimizers, so the inner loop may use Adam or momentum as well."""

from __future__ import annotations

from typing import Any

import torch

from metapretrain.errors import InputError
from metapretrain.maml.inner import Inner, Named
from metapretrain.maml.nests import Nest
from metapretrain.maml.steps import at_step


def adapt_one(inner: Inner, params: Named, batch: Nest) -> Named:
    """All parameters of one task after the inner steps, by name."""
    fast, frozen = inner.split(params)
    optimizer = _differentiable(inner, fast)
    weights = list(inner.start(fast).values())

    def checked(gradients: Any) -> Any:
        gradients = inner.checked(gradients)
        if inner.order == 2:
            return gradients
        return [None if g is None else g.detach() for g in gradients]

    for step in range(inner.steps):
        with at_step(step):
            moving = dict(zip(fast, weights, strict=True))
            loss = inner.loss({**frozen, **moving}, batch)
        inner.check_loss(step, loss, moving)
        rates = [inner.rates.at(step, name) for name in fast]
        weights = optimizer.step(loss, params=weights, override={"lr": rates}, grad_callback=checked)
    return {**frozen, **inner.finish(dict(zip(fast, weights, strict=True)))}


def _differentiable(inner: Inner, fast: Named) -> Any:
    higher = library()
    # Its own parameters only tell higher the groups, one a parameter so that each can have a rate.
    stand_ins = [p.detach().clone().requires_grad_() for p in fast.values()]
    groups: list[dict[str, Any]] = [{"params": [p]} for p in stand_ins]
    optimizer = torch.optim.SGD(groups, lr=1.0) if inner.optimizer is None else inner.optimizer(groups)
    try:
        return higher.get_diff_optim(optimizer, stand_ins, track_higher_grads=inner.graph)
    except ValueError as error:
        raise InputError(f"higher has no differentiable {type(optimizer).__name__}: {error}") from None


def library() -> Any:
    """The module higher.

    Raises:
        InputError: it is not installed.
    """
    try:
        import higher
    except ImportError:
        raise InputError("engine 'higher' needs the package higher: pip install higher") from None
    return higher
