"""What learners refuse when they are made, cloned or given a batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from metapretrain import MAML, MetaSGD
from metapretrain.errors import InputError
from metapretrain.maml import CompiledMeta

X, Y = torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(0)), torch.arange(2).repeat(3, 3)


def adapted_clone(maml: Any) -> Any:
    learner = maml.clone()
    learner.adapt(F.cross_entropy(learner(X[0]), Y[0]))
    return learner


@pytest.mark.parametrize("lr", [0.0, -1.0, math.nan, math.inf])
def test_rates_that_are_not_above_zero_are_refused_by_every_way_in(lr: float) -> None:
    ways: list[Callable[[], Any]] = [
        lambda: MetaSGD(nn.Linear(4, 2), lr=lr),
        lambda: adapted_clone(MAML(nn.Linear(4, 2), lr=lr)),
        lambda: adapted_clone(MAML(nn.Linear(4, 2), lr={"weight": 0.1, "bias": lr})),
        lambda: MAML(nn.Linear(4, 2), lr=lr).backward((X, Y), (X, Y)),
        lambda: MAML(nn.Linear(4, 2), lr=lr).logits((X, Y), (X, Y)),
    ]
    for way in ways:
        with pytest.raises(InputError, match=rf"lr.* is {lr}; give a number above 0"):
            way()


def test_a_clone_takes_rates_by_name_and_none_by_step() -> None:
    net = nn.Linear(4, 2)
    both, one = (adapted_clone(MAML(net, lr=lr)).module for lr in ({"weight": 0.2, "bias": torch.tensor(0.1)}, 0.1))
    torch.testing.assert_close(both.weight - net.weight, 2 * (one.weight - net.weight))
    torch.testing.assert_close(both.bias, one.bias)
    with pytest.raises(InputError, match=r"lr has shape \(2,\), which does not fit \(\)"):
        adapted_clone(MAML(net, lr=torch.tensor([0.1, 0.2]), steps=2))
    with pytest.raises(InputError, match="lr has no entry for bias"):
        adapted_clone(MAML(net, lr={"weight": 0.1}))


def test_a_batch_that_is_no_pair_is_refused() -> None:
    with pytest.raises(InputError, match=r"support and query are \(x, y\) each, not a Tensor"):
        MAML(nn.Linear(4, 2), lr=0.1).backward(X, X)


def test_a_learner_names_the_part_that_is_compiled() -> None:
    net: Any = torch.compile(nn.Linear(4, 2))
    compiled = MAML(net, lr=0.1)
    with pytest.raises(InputError, match="its part 'module' is compiled"):
        compiled.backward((X, Y), (X, Y))
    with pytest.raises(InputError, match="is compiled"):
        CompiledMeta(compiled).backward((X, Y), (X, Y))
