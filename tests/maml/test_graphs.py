"""A recorded meta-step gives the eager one's losses and gradients; on a CPU it is the eager one."""

from __future__ import annotations

import gc
import random
import weakref
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from metapretrain import graphs
from metapretrain.errors import InputError
from metapretrain.maml import FOMAML, MAML, EngineChoice, MetaGraph, MetaSGD, learner
from metapretrain.maml.compiled import CompiledIfPossible
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


class OnGpu(Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


class Calls:
    """What :class:`RecordedBackward` does, with a learner on the CPU and graphs that run the function again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.eager, self.recorded, self.capturing = 0, 0, False

        class Graph:
            def __init__(own, function: Any, given: Any, pool: Any) -> None:
                self.recorded += 1
                own.function, own.given = function, given

            def __call__(own, leaves: list[Tensor]) -> Any:
                before = self.eager
                found = own.function(*own.given)
                self.eager = before
                return found

        real = MAML.eager_backward

        def eager(learner: MAML, *parts: Any) -> Tensor:
            self.eager += 1
            support, query = ((x.as_subclass(Tensor), y.as_subclass(Tensor)) for x, y in parts[:2])
            return real(learner, support, query, *parts[2:])

        monkeypatch.setattr(MAML, "eager_backward", eager)
        monkeypatch.setattr(MAML, "_stacked", lambda learner, support, query: (support, query))
        monkeypatch.setattr(graphs, "_Graph", Graph)
        monkeypatch.setattr(graphs, "_aside", lambda function, given: function(*given))
        monkeypatch.setattr(graphs, "_restoring", lambda: lambda: None)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)

    def backward(self, maml: MAML, times: int) -> None:
        part = tuple(tensor.as_subclass(OnGpu) for tensor in batch(0, "cpu"))
        for _ in range(times):
            maml.backward(part, part)


def with_gradients() -> tuple[MAML, list[Any]]:
    """A learner, and what one call of `backward` adds to its gradients."""
    torch.manual_seed(0)
    maml, part = MAML(net().double(), lr=0.1), batch(0, "cpu")
    maml.module[1] = nn.BatchNorm2d(4, track_running_stats=False).double()  # buffers on a CPU change when put back
    maml.eager_backward(part, part)
    once = [p.grad for p in maml.parameters()]
    maml.zero_grad()
    return maml, once


def test_backward_records_itself_after_a_few_calls_and_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    maml, once = with_gradients()
    calls = Calls(monkeypatch)
    for times in range(1, 8):  # gradients add up, eager or recorded
        calls.backward(maml, 1)
        assert calls.recorded == (times > 4)
        for p, grad in zip(maml.parameters(), once, strict=True):
            torch.testing.assert_close(p.grad, times * grad)
    assert calls.eager == 4 + 3  # and three to warm up
    maml.module.eval()
    calls.backward(maml, 5)
    assert calls.recorded == 2


SCALE = torch.ones((), dtype=torch.float64, requires_grad=True)


def learned_loss(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z * SCALE, y)


@pytest.mark.parametrize(
    "change",
    [
        lambda maml, calls: setattr(maml, "engine", "vmap"),
        lambda maml, calls: setattr(calls, "capturing", True),
        lambda maml, calls: setattr(maml, "lr", torch.tensor(0.1, requires_grad=True).exp()),
        lambda maml, calls: maml.module.register_forward_hook(lambda *_: None),
        lambda maml, calls: next(maml.parameters()).register_hook(lambda grad: grad),
        lambda maml, calls: setattr(maml, "loss", learned_loss),
    ],
)
def test_what_a_replay_would_miss_is_not_recorded(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    maml, calls = MAML(net().double(), lr=0.1), Calls(monkeypatch)
    for _ in range(6):
        change(maml, calls)
        calls.backward(maml, 1)
    assert calls.recorded == 0
    SCALE.grad = None


class Noisy(nn.Linear):
    """A layer whose noise is drawn on the CPU."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * random.random()


def test_steps_with_random_numbers_of_the_cpu_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = nn.Flatten(), Noisy(64, 3)
    maml, calls = MAML(nn.Sequential(*layers).double(), lr=0.1), Calls(monkeypatch)
    monkeypatch.setattr("metapretrain.maml.meta.choose", lambda *_: EngineChoice("loop", ""))
    calls.backward(maml, 6)
    assert calls.recorded == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda maml: maml.lr.mul_(2),
        lambda maml: setattr(maml, "lr", maml.lr.clone()),
        lambda maml: setattr(maml, "loss", partial(F.cross_entropy, weight=torch.ones(3).double())),
    ],
)
def test_a_constant_in_another_place_is_recorded_anew(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loss = partial(F.cross_entropy, weight=torch.ones(3).double())
    maml, calls = MAML(net().double(), lr=torch.tensor(0.1), loss=loss), Calls(monkeypatch)
    calls.backward(maml, 6)
    assert calls.recorded == 1
    kept = maml.lr, maml.loss
    change(maml)
    calls.backward(maml, 5)
    assert calls.recorded == 2 and kept


class Scaled(nn.Module):
    """A net whose output is computed by numbers from everywhere."""

    of_the_class = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.net, self.of_numpy = net(), np.float64(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * self.of_the_class * GLOBAL[0] * float(self.of_numpy)  # type: ignore[no-any-return]


GLOBAL = [1.0]


@pytest.mark.parametrize(
    "change",
    [
        lambda maml, patch: patch.setattr(Scaled, "of_the_class", 2.0),
        lambda maml, patch: patch.setitem(globals(), "GLOBAL", [2.0]),
        lambda maml, patch: setattr(maml.module, "of_numpy", np.float64(2)),
        lambda maml, patch: patch.setattr(Scaled, "forward", lambda own, x: 2 * own.net(x)),
        lambda maml, patch: setattr(maml.module.net[5].weight, "data", torch.ones(3, 16, dtype=torch.float64)),
        lambda maml, patch: setattr(maml.module.net[5], "bias", nn.Parameter(torch.ones(3, dtype=torch.float64))),
        lambda maml, patch: maml.module.net[5].bias.requires_grad_(False),
    ],
)
def test_what_changes_between_calls_is_not_replayed(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    maml = MAML(Scaled().double(), lr=0.1, allow_nograd=True)
    calls = Calls(monkeypatch)
    calls.backward(maml, 6)
    before = calls.eager
    assert calls.recorded == 1
    change(maml, monkeypatch)
    calls.backward(maml, 1)
    assert (calls.recorded, calls.eager) == (1, before + 1)


def test_a_learner_that_was_recorded_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    maml, calls = MAML(net().double(), lr=0.1), Calls(monkeypatch)
    calls.backward(maml, 6)
    gone = weakref.ref(maml)
    del maml
    gc.collect()
    assert gone() is None


def counted_compilers(monkeypatch: pytest.MonkeyPatch, calls: float) -> list[str]:
    """Let compiling pay after so many calls; what is called in place of compiled pieces is told."""
    told: list[str] = []

    def step(own: MAML, *parts: Any) -> Tensor:
        told.append("compiled")
        return own.eager_backward(*parts)

    monkeypatch.setattr(learner, "COMPILERS", [lambda: step])
    monkeypatch.setattr(learner, "seconds_saved", lambda *_: learner.COMPILING / calls)
    return told


def test_a_loop_that_is_long_enough_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    maml, once = with_gradients()
    told, calls = counted_compilers(monkeypatch, 10), Calls(monkeypatch)
    calls.backward(maml, 10)
    assert (calls.recorded, told) == (1, [])
    calls.backward(maml, 5)
    assert calls.recorded == 2 and len(told) == 3 + 5  # to warm up; replays of the fake graph call it too
    for p, grad in zip(maml.parameters(), once, strict=True):
        torch.testing.assert_close(p.grad, 15 * grad)
    for number in range(12):  # a rate that differs with each call is compiled by none of them
        maml.lr = 0.2 + number
        calls.backward(maml, 1)
    assert len(told) == 8


def test_short_loops_and_checkpoints_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch)
    for maml, needed in ((MAML(net().double(), lr=0.1), 100), (MAML(net().double(), lr=0.1, checkpoint=True), 1)):
        told = counted_compilers(monkeypatch, needed)
        calls.backward(maml, 20)
        assert not told


def test_what_cannot_be_compiled_goes_on_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    part = batch(0, "cpu")
    for maml in (MAML(net().double(), lr=0.1, chunk=1), MAML(nn.Sequential(net(), nn.Dropout(0.5)).double(), lr=0.1)):
        step = CompiledIfPossible()
        for _ in range(2):
            torch.manual_seed(0)
            found = step(maml, part, part)
            torch.manual_seed(0)
            torch.testing.assert_close(found, maml.eager_backward(part, part))
        assert not step.possible
        with pytest.raises(InputError, match=r"step_weights are \(3,\) for steps=1"):  # they are not left out
            step(maml, part, part, torch.ones(3))


def test_compiling_pays_sooner_the_more_there_is_to_compute() -> None:
    def saved(tasks: int, steps: int, first_order: bool = False) -> float:
        x, y = torch.zeros(tasks, 5, 1, 28, 28), torch.zeros(tasks, 5, dtype=torch.long)
        return learner.seconds_saved(MAML(net(), 0.1, first_order, steps=steps), (x, y), (x, y))

    assert saved(4, 1) == pytest.approx(2 * saved(2, 1))
    assert saved(2, 5) > saved(2, 1) > saved(2, 1, first_order=True) > 0
    linear, x = MAML(nn.Linear(4, 2), 0.1), torch.zeros(32, 75, 4)  # 12 passes of 32 x 75 x 8 products
    y = torch.zeros(32, 75, dtype=torch.long)
    assert learner.seconds_saved(linear, (x, y), (x, y)) == pytest.approx(2 * 12 * 32 * 75 * 8 / 2.5e13, rel=0.5)


def test_users_of_clone_and_adapt_are_told_once_what_is_faster(caplog: pytest.LogCaptureFixture) -> None:
    learner.tell_of_batches.cache_clear()
    for _ in range(2):
        learner.tell_of_batches()
    (record,) = caplog.records
    assert "MAML.backward(support, query)" in record.getMessage()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_backward_on_a_gpu_is_recorded_and_gives_the_same() -> None:
    torch.manual_seed(0)
    eager, maml = (MAML(net().cuda().double(), lr=0.1, steps=2) for _ in range(2))
    eager.load_state_dict(maml.state_dict())
    for seed in range(8):
        support, query = batch(seed, "cuda"), batch(seed + 10, "cuda")
        torch.testing.assert_close(maml.backward(support, query), eager.eager_backward(support, query))
        for p, q in zip(maml.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
    assert len(learner._recordings[maml].recorder.graphs) == 1
