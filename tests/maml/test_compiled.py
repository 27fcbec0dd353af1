"""The pieces of a compiled meta-step give the losses and gradients of the learner's own backward."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from metapretrain.errors import InputError
from metapretrain.maml import ANIL, FOMAML, MAML, CompiledMeta, MetaGraph, MetaSGD, ProtoNet


def net() -> nn.Sequential:
    layers = nn.Conv2d(1, 3, 3, 2, 1), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(27, 3)).double()


def batch(seed: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    x = torch.randn(2, 6, 1, 6, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x.to(device), torch.arange(6, device=device).remainder(3).repeat(2, 1)


def frozen_body(first_order: bool) -> MAML:
    maml = ANIL(net(), 0.1, first_order=first_order, steps=2)
    next(maml.module.parameters()).requires_grad_(False)
    return maml


LEARNERS: dict[str, Any] = {
    "maml": lambda: MAML(net(), 0.1, steps=3),
    "fomaml": lambda: FOMAML(net(), 0.1, steps=2),
    "metasgd": lambda: MetaSGD(net(), 0.1, steps=2),
    "metasgd, first order": lambda: MetaSGD(net(), 0.1, first_order=True, steps=2),
    "anil": lambda: ANIL(net(), 0.1, steps=2),
    "partly frozen": lambda: frozen_body(False),
    "partly frozen, first order": lambda: frozen_body(True),
}


def assert_same(eager: nn.Module, compiled: nn.Module) -> None:
    for (name, p), q in zip(eager.named_parameters(), compiled.named_parameters(), strict=True):
        assert (p.grad is None) == (q[1].grad is None), name
        if p.grad is not None:
            torch.testing.assert_close(q[1].grad, p.grad, rtol=1e-10, atol=1e-13, msg=name)


@pytest.mark.parametrize("name", LEARNERS)
def test_losses_and_gradients_are_those_of_backward(name: str) -> None:
    torch.manual_seed(0)
    eager = LEARNERS[name]()
    learner = copy.deepcopy(eager)
    compiled = CompiledMeta(learner, backend="eager")
    for seed in range(2):  # new weights are read, and gradients add up
        support, query = batch(seed), batch(seed + 10)
        expected = eager.backward(support, query)
        torch.testing.assert_close(compiled.backward(support, query), expected, rtol=1e-10, atol=1e-13)
        assert_same(eager, learner)
        for parameters in (eager.parameters(), learner.parameters()):
            with torch.no_grad():
                for p in parameters:
                    if p.grad is not None:
                        p.sub_(0.1 * p.grad)


def test_shapes_and_modes_are_compiled_apart() -> None:
    torch.manual_seed(0)
    eager = MAML(net(), 0.1)
    learner = copy.deepcopy(eager)
    compiled = CompiledMeta(learner, backend="eager")
    for rows in (6, 3):
        part = tuple(tensor[:, :rows] for tensor in batch(0))
        torch.testing.assert_close(compiled.backward(part, part), eager.backward(part, part), rtol=1e-10, atol=1e-13)
    assert_same(eager, learner)


@pytest.mark.parametrize(
    ("learner", "words"),
    [
        (lambda: ProtoNet(net(), ways=3), "only MAML and its kin"),
        (lambda: MAML(net(), 0.1, batchnorm="per-step"), "batchnorm='per-step'"),
        (lambda: MAML(net(), 0.1, optimizer="adam", engine="higher"), "optimizer='adam'"),
        (lambda: MAML(net(), 0.1, chunk=2), "chunk=2"),
        (lambda: MAML(net(), 0.1, engine="loop"), "engine='loop'"),
        (lambda: MAML(net(), [0.1, 0.2], steps=2), "rates by step"),
        (lambda: MAML(nn.Sequential(net(), nn.Dropout(0.5)), 0.1), "dropout"),
    ],
)
def test_what_cannot_be_compiled_is_refused(learner: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        CompiledMeta(learner())


def test_errors_are_those_of_backward() -> None:
    (x, y), other = batch(0), batch(1)
    with pytest.raises(InputError, match="leading dimension"):
        CompiledMeta(MAML(net(), 0.1), backend="eager").backward((x[:1], y), other)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_compiled_for_a_gpu_and_recorded() -> None:
    torch.manual_seed(0)
    eager = MAML(net().cuda(), 0.1, steps=2)
    learner = copy.deepcopy(eager)
    graph = MetaGraph(learner, compile=True)
    for seed in range(2):
        support, query = batch(seed, "cuda"), batch(seed + 10, "cuda")
        torch.testing.assert_close(graph.backward(support, query), eager.backward(support, query))
    assert_same(eager, learner)
