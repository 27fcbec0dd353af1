"""What the loss keeps: the call counter, bad calls, the epoch's prototypes; and that it never waits."""

from __future__ import annotations

import copy
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from metapretrain.errors import InputError
from metapretrain.protonet import MODES, ProtoLoss, check_labels, prototypes
from tests.protonet import slow

VARIANTS: list[dict[str, Any]] = [
    {"mode": "standard"},
    {"mode": "query"},
    {"mode": "query", "stratified": True, "num_classes": 5},
    {"mode": "query", "memory": "epoch", "num_classes": 5, "label_smoothing": 0.1},
    {"mode": "standard", "learn_temperature": True, "distance": "sqeuclidean"},
    {"mode": "query", "learn_temperature": True, "distance": "cosine"},
    {"mode": "leave-one-out", "distance": "cosine"},
    {"mode": "leave-one-out", "memory": "epoch", "num_classes": 5, "label_smoothing": 0.1},
]


def batch(seed: int = 0, n: int = 16, classes: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 6, generator=generator), torch.randint(0, classes, (n,), generator=generator)


def losses(loss: ProtoLoss, seeds: range) -> list[float]:
    return [loss(*batch(seed)).item() for seed in seeds]


@pytest.mark.parametrize("options", VARIANTS)
def test_a_restored_loss_continues_the_sequence(options: dict[str, Any]) -> None:
    unbroken = losses(ProtoLoss(**options), range(6))
    first = ProtoLoss(**options)
    assert losses(first, range(3)) == unbroken[:3]
    second = ProtoLoss(**options)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert losses(second, range(3, 6)) == unbroken[3:]


def test_a_used_loss_takes_the_state_of_a_fresh_one() -> None:
    options: dict[str, Any] = {"memory": "epoch", "num_classes": 5}
    fresh, used = ProtoLoss(**options), ProtoLoss(**options)
    state = copy.deepcopy(fresh.state_dict())
    losses(used, range(3))
    used.load_state_dict(state)
    assert losses(used, range(3)) == losses(fresh, range(3))


def test_the_split_changes_from_call_to_call_in_training_only() -> None:
    loss, (z, y) = ProtoLoss("query"), batch()
    assert len({loss(z, y).item() for _ in range(5)}) > 1
    assert loss.calls.item() == 5
    loss.eval()
    assert len({loss(z, y).item() for _ in range(5)}) == 1
    assert loss.calls.item() == 5


@pytest.mark.parametrize("options", VARIANTS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rows_that_are_not_finite_are_left_out_and_named(options: dict[str, Any], bad: float) -> None:
    z, y = batch(n=20)
    loss = ProtoLoss(**options)
    loss(z, y)
    loss.check()
    z[[4, 11], 2] = bad
    z.requires_grad_()
    value = loss(z, y)
    value.backward()
    assert value.isfinite() and value > 0
    assert z.grad is not None and z.grad.isfinite().all()
    assert torch.equal(z.grad[[4, 11]], torch.zeros(2, 6))
    loss(*batch())
    assert loss.first_bad.item() == 1
    with pytest.raises(InputError, match="first bad call 1, 1 in all: 2 embedding rows with NaN or infin"):
        loss.check()


def test_leaving_rows_out_equals_not_having_them() -> None:
    z, y = batch(n=20)
    broken = z.clone()
    broken[[4, 11]] = float("nan")
    keep = torch.tensor([row for row in range(20) if row not in (4, 11)])
    torch.testing.assert_close(ProtoLoss()(broken, y), ProtoLoss()(z[keep], y[keep]))


def test_labels_outside_num_classes_are_left_out_and_named() -> None:
    z, y = batch(n=20, classes=3)
    other = torch.cat([y, torch.tensor([-1, 3, 99])])
    loss = ProtoLoss(num_classes=3)
    torch.testing.assert_close(loss(torch.cat([z, z[:3]]), other), ProtoLoss(num_classes=3)(z, y))
    with pytest.raises(InputError, match=r"first bad call 0, 1 in all: 3 labels outside 0\.\.2"):
        loss.check()


@pytest.mark.parametrize("mark", [-1, -100])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_classes", [None, 8])
def test_rows_without_a_label_are_no_class(mark: int, mode: str, num_classes: int | None) -> None:
    z, y = batch(n=40, classes=3)
    marked = y.clone()
    marked[torch.randperm(40, generator=torch.Generator().manual_seed(0))[:13]] = mark
    known = marked != mark
    loss = ProtoLoss(mode, num_classes=num_classes)
    if mode == "standard":
        torch.testing.assert_close(loss(z, marked), ProtoLoss()(z[known], y[known]))
    moved = torch.where(known[:, None], z, 1e6).requires_grad_()
    torch.testing.assert_close(ProtoLoss(mode, num_classes=num_classes)(moved, marked), ProtoLoss(mode)(moved, marked))
    (gradient,) = torch.autograd.grad(loss(moved, marked), moved)
    assert not gradient[~known].any()
    with pytest.raises(
        InputError, match=rf"{13 * (2 if mode == 'standard' else 1)} labels (-1 or -100|outside 0\.\.7)"
    ):
        loss.check()
    nothing = ProtoLoss(mode, num_classes=num_classes)
    assert nothing(z, torch.full_like(y, mark)).item() == 0
    with pytest.raises(InputError, match="no example had a prototype"):
        nothing.check()
    with pytest.raises(InputError, match=r"13 of 40 labels are -1 or -100|num_classes=8 allows"):
        check_labels(marked, mode=mode, num_classes=num_classes)


@pytest.mark.parametrize(("dtype", "large"), [(torch.float32, 1e20), (torch.float64, 1e160)])
@pytest.mark.parametrize("distance", ["sqeuclidean", "euclidean", "cosine"])
def test_rows_whose_distances_overflow_are_left_out_and_named(distance: str, dtype: torch.dtype, large: float) -> None:
    z, y = batch(n=20, classes=3)
    z, broken = z.to(dtype), z.to(dtype)
    broken[[4, 11]] *= large
    keep = torch.tensor([row for row in range(20) if row not in (4, 11)])
    loss = ProtoLoss(distance=distance)
    value = loss(broken, y)
    assert value.isfinite()
    if distance == "sqeuclidean" or dtype == torch.float64:
        torch.testing.assert_close(value, ProtoLoss(distance=distance)(z[keep], y[keep]))
        with pytest.raises(InputError, match="2 embedding rows with NaN or infinity, or too large"):
            loss.check()


def test_a_batch_with_nothing_to_score_gives_zero_and_is_named() -> None:
    z = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()
    for options in ({"stratified": True}, {"stratified": False}, {"label_smoothing": 0.1, "num_classes": 9}):
        loss = ProtoLoss("query", **options)  # type: ignore[arg-type]
        value = loss(z, torch.tensor([0, 1, 2, 3]))
        (gradient,) = torch.autograd.grad(value, z)
        assert value.item() == 0
        assert torch.equal(gradient, torch.zeros_like(z))
        loss(z, torch.tensor([0, 1, 2, 3]))
        with pytest.raises(InputError, match="first bad call 0, 2 in all: 2 calls in which no example"):
            loss.check()


def test_everything_bad_gives_zero() -> None:
    z = torch.full((4, 6), float("nan"), requires_grad=True)
    value = ProtoLoss()(z, torch.tensor([0, 0, 1, 1]))
    value.backward()
    assert value.item() == 0
    assert z.grad is not None and torch.equal(z.grad, torch.zeros(4, 6))


def test_epoch_prototypes_are_means_over_the_epoch_with_the_batchs_gradient() -> None:
    """Against one loop over all rows so far in which the earlier ones carry no gradient."""
    loss = ProtoLoss(memory="epoch", num_classes=5)
    seen_z, seen_y = torch.zeros(0, 6, dtype=torch.float64), []
    for seed in range(4):
        z, y = batch(seed, n=6, classes=2 + seed)
        z = z.double().requires_grad_()
        value = loss(z, y)
        (gradient,) = torch.autograd.grad(value, z)
        everything = torch.cat([seen_z, z])
        seen_y += y.tolist()
        rows = list(range(len(seen_y)))
        expected = slow.loss(everything, seen_y, support=rows, query=rows[-6:])
        assert expected is not None
        torch.testing.assert_close(value, expected)
        torch.testing.assert_close(gradient, torch.autograd.grad(expected, z)[0], rtol=1e-6, atol=1e-9)
        seen_z = everything.detach()
    centres, present = prototypes(seen_z, torch.tensor(seen_y), 5)
    assert loss.memory_sums is not None and loss.memory_counts is not None
    counts = loss.memory_counts[:, None].clamp_min(1)
    torch.testing.assert_close(loss.memory_sums / counts, centres)
    assert torch.equal(loss.memory_counts > 0, present)


def test_reset_begins_a_new_epoch_and_evaluation_leaves_the_memory() -> None:
    loss, (z, y) = ProtoLoss(memory="epoch", num_classes=5), batch()
    loss.reset_epoch()
    loss.eval()
    loss(z, y)
    assert loss.memory_sums is None
    loss.train()
    first = loss(z, y)
    kept = copy.deepcopy(loss.state_dict())
    loss.eval()
    loss(*batch(1))
    for name, value in loss.state_dict().items():
        assert torch.equal(value, kept[name]), name
    loss.train()
    loss(*batch(1))
    loss.reset_epoch()
    torch.testing.assert_close(loss(z, y), first)


def test_a_query_is_scored_against_a_class_that_only_the_memory_has() -> None:
    z = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    y = torch.arange(4)
    loss = ProtoLoss("query", memory="epoch", num_classes=4)
    assert loss(z, y).item() == 0
    loss(z, torch.tensor([0, 0, 0, 0]))
    for _ in range(8):
        loss(z, y)
    assert loss(z, y).item() > 0


@pytest.mark.parametrize("options", VARIANTS)
def test_forward_and_backward_never_read_a_value(options: dict[str, Any]) -> None:
    """On the meta device there are no values: anything that reads one, or has a shape made of one, raises."""
    loss = ProtoLoss(**options).to("meta")
    z = torch.empty(16, 6, device="meta", requires_grad=True)
    y = torch.empty(16, dtype=torch.int64, device="meta")
    value = loss(z, y)
    value.backward()
    assert value.shape == ()
    assert z.grad is not None and z.grad.shape == z.shape


@pytest.mark.parametrize("options", VARIANTS)
@pytest.mark.parametrize("bad", [None, 0, 3])
def test_values_that_a_cpu_may_read_change_no_result(options: dict[str, Any], bad: int | None) -> None:
    """A CPU leaves out what only bad rows and absent classes need; here it is told not to look."""
    reading, blind = ProtoLoss(**options), ProtoLoss(**options)
    for seed in range(3):
        z, y = batch(seed)
        if bad is not None:
            z[bad, 0], y[bad + 1] = torch.nan, -1
        z, other = z.requires_grad_(), z.clone().requires_grad_()
        value = reading(z, y)
        with patch("metapretrain.protonet.loss._is_readable", return_value=False):
            expected = blind(other, y)
        torch.testing.assert_close(value, expected)
        torch.testing.assert_close(*(torch.autograd.grad(v, x)[0] for v, x in ((value, z), (expected, other))))
    for name, kept in blind.state_dict().items():
        torch.testing.assert_close(reading.state_dict()[name], kept)


@pytest.mark.parametrize("options", VARIANTS)
def test_the_loss_compiles_into_one_graph(options: dict[str, Any]) -> None:
    torch.compiler.reset()  # each variant is compiled anew, and torch allows eight
    plain, loss = ProtoLoss(**options), ProtoLoss(**options)
    compiled = torch.compile(loss, backend="eager", fullgraph=True)
    for seed in range(3):
        z, y = batch(seed)
        z, other = z.requires_grad_(), z.clone().detach().requires_grad_()
        expected, value = plain(z, y), compiled(other, y)
        expected.backward()
        value.backward()
        torch.testing.assert_close(value, expected)
        torch.testing.assert_close(other.grad, z.grad)
    for name, kept in plain.state_dict().items():
        torch.testing.assert_close(loss.state_dict()[name], kept)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("options", VARIANTS)
def test_a_cuda_graph_gives_the_cpus_losses(options: dict[str, Any]) -> None:
    plain, loss = ProtoLoss(**options), ProtoLoss(**options).cuda()
    z, y = (tensor.cuda() for tensor in batch())
    z.requires_grad_()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            loss(z, y).backward()
    torch.cuda.current_stream().wait_stream(stream)
    start = {name: value.clone() for name, value in loss.named_buffers()}
    graph = torch.cuda.CUDAGraph()
    z.grad = None
    with torch.cuda.graph(graph):
        value = loss(z, y)
        value.backward()
    for name, buffer in loss.named_buffers():
        buffer.copy_(torch.zeros_like(buffer) if name != "first_bad" else start[name])
    for seed in range(4):
        new_z, new_y = batch(seed)
        with torch.no_grad():
            z.copy_(new_z)
            y.copy_(new_y)
        graph.replay()
        new_z.requires_grad_()
        expected = plain(new_z, new_y)
        (gradient,) = torch.autograd.grad(expected, new_z)
        torch.testing.assert_close(value.cpu(), expected)
        assert z.grad is not None
        torch.testing.assert_close(z.grad.cpu(), gradient, rtol=1e-4, atol=1e-6)
