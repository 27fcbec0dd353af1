"""Which calls are recorded as CUDA graphs and recordered, told without a GPU: a stand-in says what is recorded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from metapretrain import graphs as module
from metapretrain.graphs import MOST, SIZES, Recorder, add_gradients, own_gradients, rounded_up
from metapretrain.nests import rebuild
from metapretrain.nests import tensors as leaves_of

PLAIN = 2  # calls before a recording


class OnGpu(Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


RESTORED = -1


def given(size: int) -> Tensor:
    return torch.arange(float(size)).as_subclass(OnGpu)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes that were recorded; the stand-in for a graph returns minus what the function does."""
    sizes: list[int] = []

    class Graph:
        def __init__(self, function: Any, tensors: tuple[Tensor, ...], pool: Any) -> None:
            function(*tensors)
            self.function = function
            sizes.append(len(leaves_of(tensors)[0]))

            self.given = tensors

        def __call__(self, leaves: list[Tensor]) -> tuple[Tensor, ...]:
            return tuple(-value for value in self.function(*rebuild(self.given, iter(leaves))))

    monkeypatch.setattr(module, "_Graph", Graph)
    monkeypatch.setattr(module, "_aside", lambda function, tensors: function(*tensors))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(module, "_restoring", lambda: lambda: sizes.append(RESTORED))
    return sizes


def total(x: Tensor) -> tuple[Tensor, ...]:
    return (x.sum(),)


def test_a_shape_is_recorded_once_it_has_come_often_enough(recorded: list[int]) -> None:
    recorder = Recorder(total)
    found = [recorder(given(size))[0].item() for size in [3] * (PLAIN + 2) + [4]]
    assert found == [3.0] * PLAIN + [-3.0] * 2 + [6.0]
    assert recorded == [3]


def test_another_type_is_another_shape(recorded: list[int]) -> None:
    recorder = Recorder(total)
    for _ in range(PLAIN):
        recorder(given(3))
        recorder(given(3).double())
    assert recorded == []


def test_there_are_so_many_graphs_and_no_more(recorded: list[int]) -> None:
    recorder = Recorder(total)
    for size in range(1, MOST + 3):
        for _ in range(PLAIN + 1):
            last = recorder(given(size))[0].item()
    assert len(recorded) == MOST and last > 0


def test_on_a_cpu_nothing_is_recorded(recorded: list[int]) -> None:
    recorder = Recorder(total)
    assert [recorder(torch.ones(2))[0].item() for _ in range(PLAIN + 2)] == [2.0] * (PLAIN + 2)
    assert recorded == []


def test_what_cannot_be_recorded_runs_as_it_is_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, recorded: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(module, "_Graph", refuse)
    recorder = Recorder(total)
    assert [recorder(given(3))[0].item() for _ in range(PLAIN + 3)] == [3.0] * (PLAIN + 3)
    assert recorded == [RESTORED]
    assert [record.message for record in caplog.records] == [
        "steps are not recorded as CUDA graphs: operation not permitted when stream is capturing"
    ]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_random_numbers_and_the_stream_are_as_before_after_a_failed_recording() -> None:
    recorder = Recorder(lambda x: (x + torch.rand(3, device="cuda") + float(x[0].item()),), plain=0)
    stream, x = torch.cuda.current_stream(), torch.ones(3, device="cuda")
    torch.manual_seed(0)
    found = [recorder(x)[0] for _ in range(2)]
    assert not recorder.possible and torch.cuda.current_stream() == stream
    torch.manual_seed(0)
    torch.testing.assert_close(found, [2 + torch.rand(3, device="cuda") for _ in range(2)])


def test_an_error_of_the_function_itself_is_raised(recorded: list[int]) -> None:
    calls = []

    def breaks(x: Tensor) -> tuple[Tensor, ...]:
        calls.append(1)
        if len(calls) > PLAIN:
            raise RuntimeError("shapes do not fit")
        return total(x)

    recorder = Recorder(breaks)
    for _ in range(PLAIN):
        recorder(given(3))
    with pytest.raises(RuntimeError, match="do not fit"):
        recorder(given(3))


def test_what_warm_ups_changed_is_put_back(recorded: list[int]) -> None:
    count, order = torch.zeros(()), list[str]()

    def counted(x: Tensor) -> tuple[Tensor, ...]:
        count.add_(1)
        order.append("call")
        return total(x)

    def prepare() -> None:
        count.add_(1)
        order.append("prepared")

    Recorder(counted, plain=0, warmups=3, changed=lambda: [count], prepare=prepare)(given(3))
    assert order == ["prepared"] + ["call"] * 5  # three to warm up, recorded and replayed
    assert count == 2


def test_a_nest_is_recorded_by_its_layout(recorded: list[int]) -> None:
    def difference(batch: dict[str, Tensor], _: str) -> tuple[Tensor, ...]:
        return (batch["a"][0] - batch["b"][0],)

    recorder = Recorder(difference, plain=0)
    for names in ("ab", "ba"):
        for note in ("x", "y"):
            recorder(dict(zip(names, (given(2), given(3)), strict=True)), note)
    assert len(recorder.graphs) == 4


def test_gradients_of_a_backward_stand_beside_grad() -> None:
    used, unused = (torch.ones(2, requires_grad=True) for _ in range(2))
    used.grad = kept = torch.full((2,), 5.0)
    with own_gradients([used, unused]) as found:
        (3 * used).sum().backward()
    assert used.grad is kept and kept.tolist() == [5, 5] and unused.grad is None
    assert found[1] is None
    add_gradients([used, unused], found)
    assert used.grad.tolist() == [8, 8] and unused.grad is None


def test_few_shapes_hold_any_number_of_rows() -> None:
    sizes = [rounded_up(count) for count in range(1, 300)]
    assert all(size >= count and size - count < max(64, count) for count, size in enumerate(sizes, start=1))
    assert sizes == sorted(sizes) and {size for size in sizes if size <= 64} == set(SIZES)
    assert all(size % 64 == 0 for size in sizes if size > 64)


def test_a_replay_hands_out_copies_of_every_result() -> None:
    x, y = torch.arange(6.0).view(2, 3).T, torch.tensor([4, 5])
    graph = object.__new__(module._Graph)
    graph.given, graph.graph, graph.found = [], SimpleNamespace(replay=lambda: None), {"loss": x, "rest": [y, None]}
    found = graph([])
    assert found["rest"][1] is None
    torch.testing.assert_close([found["loss"], found["rest"][0]], [x, y])
    assert found["loss"].stride() == x.stride()
    x.zero_(), y.zero_()  # by the next replay
    assert found["loss"].sum() == 15 and found["rest"][0].sum() == 9
