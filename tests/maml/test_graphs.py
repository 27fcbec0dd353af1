"""A recorded meta-step gives the eager one's losses and gradients; on a CPU it is the eager one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from metapretrain.errors import InputError
from metapretrain.maml import FOMAML, MAML, MetaGraph, MetaSGD
from metapretrain.protonet.learner import ProtoNet

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"))]


def net(outputs: int = 3) -> nn.Sequential:
    layers = nn.Conv2d(1, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, 2, 1), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(16, outputs))


def batch(seed: int, device: str) -> tuple[Tensor, Tensor]:
    x = torch.randn(2, 6, 1, 8, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x.to(device), torch.arange(6, device=device).remainder(3).repeat(2, 1)


LEARNERS: dict[str, Any] = {
    "maml": lambda: MAML(net(), lr=0.1, steps=2),
    "fomaml": lambda: FOMAML(net(), lr=0.1),
    "metasgd": lambda: MetaSGD(net(), lr=0.1),
    "protonet": lambda: ProtoNet(net(), ways=3),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", LEARNERS)
def test_losses_and_gradients_are_those_of_backward(name: str, device: str) -> None:
    torch.manual_seed(0)
    eager = LEARNERS[name]().double().to(device)
    recorded = LEARNERS[name]().double().to(device)
    recorded.load_state_dict(eager.state_dict())
    graph = MetaGraph(recorded)
    for seed in range(3):  # gradients add up over the calls, as in backward
        support, query = batch(seed, device), batch(seed + 10, device)
        torch.testing.assert_close(graph.backward(support, query), eager.backward(support, query))
    few = tuple(part[:, :3] for part in batch(5, device))  # another shape is recorded apart
    torch.testing.assert_close(graph.backward(few, few), eager.backward(few, few))
    for (key, p), q in zip(eager.named_parameters(), recorded.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, msg=key)
    for p, q in zip(eager.buffers(), recorded.buffers(), strict=True):
        torch.testing.assert_close(q, p)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_new_weights_are_read() -> None:
    maml = MAML(net().cuda().double(), lr=0.1)
    graph, support, query = MetaGraph(maml), batch(0, "cuda"), batch(1, "cuda")
    first = graph.backward(support, query)
    with torch.no_grad():
        for p in maml.parameters():
            p.mul_(0.5)
    second = graph.backward(support, query)
    assert not torch.allclose(first, second)
    torch.testing.assert_close(second, maml.losses(support, query).detach())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_learned_rate_gets_its_gradient_once() -> None:
    found = []
    for record in (False, True):
        torch.manual_seed(0)
        rate = torch.tensor(0.1, dtype=torch.float64, device="cuda", requires_grad=True)
        maml = MAML(net().cuda().double(), lr=rate)
        step = MetaGraph(maml) if record else maml
        for seed in range(2):
            step.backward(batch(seed, "cuda"), batch(seed + 10, "cuda"))
        found.append(rate.grad)
    torch.testing.assert_close(found[1], found[0])
    maml.lr = rate.exp()
    with pytest.raises(InputError, match="lr comes from further computations"):
        MetaGraph(maml).backward(batch(0, "cuda"), batch(1, "cuda"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_the_names_of_inputs_are_not_mixed_up() -> None:
    class Less(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x: Tensor, minus: Tensor) -> Tensor:
            output: Tensor = self.net(x - 2 * minus)
            return output

    maml = MAML(Less().cuda().double(), lr=0.1)
    graph, ((a, y), (b, _)) = MetaGraph(maml), (batch(seed, "cuda") for seed in range(2))
    for x in ({"x": a, "minus": b}, {"minus": a, "x": b}):
        torch.testing.assert_close(graph.backward((x, y), (x, y)), maml.losses((x, y), (x, y)).detach())


def test_a_module_is_no_learner() -> None:
    with pytest.raises(InputError, match="a Linear is no learner: give MAML"):
        MetaGraph(nn.Linear(2, 2))
