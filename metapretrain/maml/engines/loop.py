"""Engine `loop`: autograd, one task at a time. Works with every module."""

from __future__ import annotations

from metapretrain.maml.checkpointed import unroll
from metapretrain.maml.inner import Inner, Named
from metapretrain.maml.nests import Nest
from metapretrain.maml.steps import at_step


def adapt_one(inner: Inner, params: Named, batch: Nest) -> Named:
    """All parameters of one task after the inner steps, by name."""
    fast, frozen = inner.split(params)
    fast = unroll(_advance, inner, inner.start(fast), frozen, batch)
    return {**frozen, **inner.finish(fast)}


def _advance(inner: Inner, fast: Named, frozen: Named, batch: Nest, first: int, last: int) -> Named:
    for step in range(first, last):
        with at_step(step):
            loss = inner.loss({**frozen, **fast}, batch)
        fast = inner.update(step, fast, inner.gradient(step, loss, fast))
    return fast
