"""BatchNorm over two ranks against torch's over the whole batch: values, gradients, tracking; and in learners."""

from __future__ import annotations

import copy
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from metapretrain import MAML
from metapretrain.distributed import SharedBatchNorm2d, share_norms

CASES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "1d": (lambda: nn.BatchNorm1d(3), (8, 3)),
    "1d-sequence": (lambda: nn.BatchNorm1d(3), (8, 3, 5)),
    "2d": (lambda: nn.BatchNorm2d(3), (8, 3, 2, 2)),
    "3d": (lambda: nn.BatchNorm3d(3), (8, 3, 2, 2, 2)),
    "no-affine": (lambda: nn.BatchNorm2d(3, affine=False), (8, 3, 2, 2)),
    "nothing-tracked": (lambda: nn.BatchNorm2d(3, track_running_stats=False), (8, 3, 2, 2)),
    "plain-average": (lambda: nn.BatchNorm2d(3, momentum=None), (8, 3, 2, 2)),
    "one-row-a-rank": (lambda: nn.BatchNorm1d(3), (2, 3)),
    "unlike-counts": (lambda: nn.BatchNorm2d(3), (8, 3, 2, 2)),
}


def outcome(norm: nn.Module, shape: tuple[int, ...], rows: slice, device: str = "cpu") -> dict[str, Tensor]:
    """Two steps on these rows: the last values and gradients, gradients of weights, and the state."""
    generator = torch.Generator().manual_seed(1)
    norm.double()
    for value in norm.parameters():
        nn.init.normal_(value, generator=generator)
    norm.to(device)
    found: dict[str, Tensor] = {}
    for _ in range(2):
        drawn = torch.randn(2, *shape, dtype=torch.float64, generator=generator)[:, rows].to(device)
        x, weights = (3 + 2 * drawn[0]).requires_grad_(), drawn[1]
        norm.zero_grad()
        y = norm(x)
        (y.sin() * weights).sum().backward()
        assert x.grad is not None
        found |= {"y": y.detach(), "x.grad": x.grad}
    found |= {f"{name}.grad": value.grad for name, value in norm.named_parameters() if value.grad is not None}
    found |= {name: value.clone() for name, value in norm.state_dict().items()}
    return {name: value.cpu() for name, value in found.items()}


NORMS = {"shared": lambda: share_norms(nn.BatchNorm1d(3)), "sync": lambda: nn.SyncBatchNorm(3)}


def adapted_losses(norm: nn.Module, tasks: slice) -> dict[str, Tensor]:
    """Query losses of these tasks after inner steps through a norm, by several ways."""
    generator = torch.Generator().manual_seed(2)
    net = nn.Sequential(nn.Linear(4, 3), norm, nn.Linear(3, 2)).double()
    for value in net.parameters():
        nn.init.normal_(value, generator=generator)
    x, y = (
        torch.randn(4, 6, 4, dtype=torch.float64, generator=generator)[tasks],
        torch.arange(6).repeat(4, 1)[tasks] % 2,
    )
    found = {way: MAML(net, 0.3, steps=2, engine=way).losses((x, y), (x, y)).detach() for way in ("loop", "vmap")}
    each = []
    for task in range(len(x)):
        learner = MAML(net, 0.3).clone()
        learner.adapt(F.cross_entropy(learner(x[task]), y[task]))
        each.append(F.cross_entropy(learner(x[task]), y[task]).detach())
    return {**found, "clone": torch.stack(each)}


def worker(rank: int, folder: str, device: str) -> None:
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    found = {}
    for name, (make, shape) in CASES.items():
        first = 6 if name == "unlike-counts" else shape[0] // 2
        norm = share_norms(make())
        found[name] = outcome(norm, shape, slice(first, None) if rank else slice(first), device)
        norm.cpu().eval()
        found[f"{name} evaluated"] = {"y": norm(torch.ones(shape, dtype=torch.float64)).detach()}
    for name, make_norm in NORMS.items() if device == "cpu" else ():
        found[name] = adapted_losses(make_norm(), slice(2, None) if rank else slice(2))
    wrong = share_norms(nn.BatchNorm2d(3))
    for shape in ((4, 3), (4, 1, 2, 2)) if device == "cpu" else ():
        with pytest.raises(ValueError, match="expected"):
            wrong(torch.ones(shape))
    torch.save(found, f"{folder}/{rank}.pt")
    dist.barrier()  # a rank that leaves while the other still reads from it takes both down
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=["cpu", "cuda"])
def ranks(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest, forked: Any
) -> list[dict[str, Any]]:
    if request.param == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    folder: Path = tmp_path_factory.mktemp("ranks")
    words = [[rank, str(folder), request.param] for rank in "01"]
    forked(__file__, words, [dict(os.environ)] * 2, folder)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_are_one_batch(ranks: list[dict[str, Any]], name: str) -> None:
    make, shape = CASES[name]
    norm = make()
    one, two = outcome(norm, shape, slice(None)), [rank[name] for rank in ranks]
    for key, value in one.items():
        if key in ("y", "x.grad"):
            found = torch.cat([rank[key] for rank in two])
        elif key.endswith(".grad"):
            found = two[0][key] + two[1][key]
        else:
            found = two[0][key]
            torch.testing.assert_close(two[1][key], found, rtol=0, atol=0)
        torch.testing.assert_close(found, value, rtol=1e-12, atol=1e-12)
    norm.eval()
    expected = norm(torch.ones(shape, dtype=torch.float64))
    torch.testing.assert_close(ranks[0][f"{name} evaluated"]["y"], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", NORMS)
def test_a_learner_adapts_each_task_by_its_own_statistics(ranks: list[dict[str, Any]], name: str) -> None:
    if name not in ranks[0]:
        pytest.skip("looked at on a CPU")
    for way, expected in adapted_losses(nn.BatchNorm1d(3), slice(None)).items():
        torch.testing.assert_close(torch.cat([rank[name][way] for rank in ranks]), expected)


def test_names_values_and_types_stay() -> None:
    net = nn.Sequential(nn.Conv2d(1, 3, 1), nn.BatchNorm2d(3), nn.GroupNorm(1, 3))
    kept = copy.deepcopy(net.state_dict())
    assert share_norms(net) is net and list(net.state_dict()) == list(kept)
    assert type(net[1]) is SharedBatchNorm2d and issubclass(SharedBatchNorm2d, nn.BatchNorm2d)
    assert all(torch.equal(value, kept[name]) for name, value in net.state_dict().items())
    assert type(share_norms(net)[1]) is SharedBatchNorm2d  # once is enough


def test_one_process_computes_what_torch_does() -> None:
    x = torch.randn(4, 3, 2, 2)
    torch.testing.assert_close(share_norms(nn.BatchNorm2d(3))(x), nn.BatchNorm2d(3)(x), rtol=0, atol=0)


def test_a_norm_that_computes_more_is_left_alone() -> None:
    class WithActivation(nn.BatchNorm2d):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input).relu()

    assert type(share_norms(WithActivation(3))) is WithActivation


if __name__ == "__main__":
    worker(int(sys.argv[1]), *sys.argv[2:])
