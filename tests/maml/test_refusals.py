"""What learners refuse when they are made, cloned or given a batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from metapretrain import ANIL, MAML, MetaSGD, ProtoNet
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
    with pytest.raises(InputError, match="the OptimizedModule is compiled"):
        compiled.backward((X, Y), (X, Y))
    with pytest.raises(InputError, match="is compiled"):
        CompiledMeta(compiled).backward((X, Y), (X, Y))


LEARNERS: list[Callable[..., Any]] = [
    lambda net, **options: MAML(net, lr=0.1, **options),
    lambda net, **options: ANIL(net, lr=0.1, **options),
    lambda net, **options: MetaSGD(net, lr=0.1, **options),
    ProtoNet,
]


@pytest.mark.parametrize("make", LEARNERS)
@pytest.mark.parametrize("way", ["losses", "backward", "logits"])
def test_empty_tasks_and_meta_tensors_are_refused(make: Callable[..., Any], way: str) -> None:
    call, whole = getattr(make(nn.Sequential(nn.Linear(4, 2))), way), (X, Y)
    for none in ((X[:, :0], Y[:, :0]), (X[:0], Y[:0])):
        for given in ((none, whole), (whole, none)):
            with pytest.raises(InputError, match="one of their tensors is empty"):
                call(*given)
    if make is not ProtoNet:  # which is no inner loop: PyTorch itself refuses
        for given in (((X.to("meta"), Y), whole), (whole, (X.to("meta"), Y))):
            with pytest.raises(InputError, match="on the meta device, where tensors have no values"):
                call(*given)


@pytest.mark.parametrize("make", LEARNERS)
@pytest.mark.parametrize("net", [None, "net", torch.relu])
def test_what_is_no_module_is_refused(make: Callable[..., Any], net: Any) -> None:
    with pytest.raises(InputError, match="model must be a torch module, not a "):
        make(net)


def test_a_loss_is_a_function() -> None:
    with pytest.raises(InputError, match="loss is 'mse'; give a function"):
        MAML(nn.Linear(4, 2), lr=0.1, loss="mse")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("support", "query", "message"),
    [
        ((X, Y[:, :3]), (X, Y), r"support is x \(3, 6, 4\) and y \(3, 3\); give \(3, N, ...\) and \(3, N\)"),
        ((X, Y), (X, Y[:, :3]), "query is x"),
        ((X, Y), (X[:2], Y[:2]), r"query is x \(2, 6, 4\) and y \(2, 6\); give \(3, N"),
        ((X[0], Y[0]), (X[0], Y[0]), r"support is x \(6, 4\) and y \(6,\)"),
        (([1], [2]), (X, Y), "support is x list and y list"),
        ((X, Y), (X.numpy(), Y), "query is x ndarray"),
    ],
)
def test_protonet_names_the_part_that_does_not_fit(support: Any, query: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        ProtoNet(nn.Linear(4, 2)).losses(support, query)
