"""Two gloo processes give the losses and gradients of one process over the whole batch."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from metapretrain.protonet import ProtoLoss, gather_rows

VARIANTS: list[dict[str, Any]] = [
    {"mode": "standard", "label_smoothing": 0.1},
    {"mode": "query", "seed": 5, "learn_temperature": True, "temperature": 2.0},
    {"mode": "query", "stratified": True, "distance": "sqeuclidean"},
    {"mode": "standard", "memory": "epoch", "num_classes": 4},
    {"mode": "leave-one-out", "label_smoothing": 0.1},
    {"mode": "leave-one-out", "distance": "cosine", "num_classes": 4, "learn_temperature": True},
]
STEPS = 2


class Model(nn.Module):
    """An encoder and its loss, so that DDP averages the gradients of both."""

    def __init__(self, options: dict[str, Any], gather: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
        self.loss = ProtoLoss(gather=gather, **options)
        self.double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        value: Tensor = self.loss(self.encoder(x), y)
        return value


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(12, 5, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 4, (12,), generator=generator)


def train(model: nn.Module, rows: slice) -> dict[str, Tensor]:
    """Loss and every gradient of each step."""
    found = {}
    for step in range(STEPS):
        model.zero_grad()
        x, y = batch(step)
        value = model(x[rows], y[rows])
        value.backward()
        found[f"{step}.value"] = value.detach()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            found[f"{step}.{name.removeprefix('module.')}"] = parameter.grad.clone()
    return found


def mixed(x: Tensor) -> Tensor:
    """A number in which each row meets every other."""
    return (x.sum(0) ** 3).sum() + (x @ x.T).sin().sum()


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    rows = slice(6 * rank, 6 * rank + 6)
    found: dict[str, Any] = {"labels": gather_rows(batch(0)[1][rows])}
    x = batch(0)[0][rows].requires_grad_()
    (torch.arange(12.0).double()[:, None] * gather_rows(x)).sum().backward()
    found["gradient"] = x.grad
    x = batch(0)[0][rows].requires_grad_()
    (gradient,) = torch.autograd.grad(mixed(gather_rows(x)) / 2, x, create_graph=True)  # halves: ranks are summed
    gradient.square().sum().backward()
    found["second"] = x.grad
    for i, options in enumerate(VARIANTS):
        model = DistributedDataParallel(Model(options, gather=True))
        found[str(i)] = train(model, rows)
    torch.save(found, f"{folder}/{rank}.pt")
    del model
    dist.barrier()  # a rank that leaves while the other still reads from it takes both down
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, forked: Any) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("gloo")
    forked(__file__, [[rank, str(folder)] for rank in "01"], [dict(os.environ)] * 2, folder)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("variant", range(len(VARIANTS)))
def test_two_ranks_give_the_one_process_loss_and_gradient(ranks: list[Any], variant: int) -> None:
    expected = train(Model(VARIANTS[variant], gather=False), slice(None))
    assert any(value.abs().max() > 1e-3 for name, value in expected.items() if "weight" in name)
    for rank in ranks:
        assert rank[str(variant)].keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(rank[str(variant)][name], value, rtol=1e-10, atol=1e-12)


def test_gathered_rows_are_in_rank_order_and_gradients_are_summed_over_ranks(ranks: list[Any]) -> None:
    for i, rank in enumerate(ranks):
        assert torch.equal(rank["labels"], batch(0)[1])
        weights = 2 * torch.arange(6.0 * i, 6.0 * i + 6).double()
        assert torch.equal(rank["gradient"], weights[:, None].expand(6, 5))


def test_gradients_of_gradients_are_those_of_one_process(ranks: list[Any]) -> None:
    x = batch(0)[0].requires_grad_()
    (gradient,) = torch.autograd.grad(mixed(x), x, create_graph=True)
    gradient.square().sum().backward()
    torch.testing.assert_close(torch.cat([rank["second"] for rank in ranks]), x.grad, rtol=1e-10, atol=1e-12)


def test_without_a_process_group_the_rows_are_returned() -> None:
    x = torch.ones(2, 3)
    assert gather_rows(x) is x


if __name__ == "__main__":
    worker(int(sys.argv[1]), sys.argv[2])
