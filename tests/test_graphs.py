"""Which calls are recorded as CUDA graphs and replayed, told without a GPU: a stand-in says what is recorded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from metapretrain import graphs as module
from metapretrain.graphs import MOST, SIZES, WARMUPS, Replay, rounded_up


class OnGpu(Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


def given(size: int) -> Tensor:
    return torch.arange(float(size)).as_subclass(OnGpu)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes that were recorded; the stand-in for a graph returns minus what the function does."""
    sizes: list[int] = []

    class Recorded:
        def __init__(self, function: Any, tensors: tuple[Tensor, ...], pool: Any) -> None:
            function(*tensors)
            self.function = function
            sizes.append(len(tensors[0]))

        def __call__(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return tuple(-value for value in self.function(*tensors))

    monkeypatch.setattr(module, "_Recorded", Recorded)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return sizes


def total(x: Tensor) -> tuple[Tensor, ...]:
    return (x.sum(),)


def test_a_shape_is_recorded_once_it_has_come_often_enough(recorded: list[int]) -> None:
    replay = Replay(total)
    found = [replay(given(size))[0].item() for size in [3] * (WARMUPS + 2) + [4]]
    assert found == [3.0] * WARMUPS + [-3.0] * 2 + [6.0]
    assert recorded == [3]


def test_another_type_is_another_shape(recorded: list[int]) -> None:
    replay = Replay(total)
    for _ in range(WARMUPS):
        replay(given(3))
        replay(given(3).double())
    assert recorded == []


def test_there_are_so_many_graphs_and_no_more(recorded: list[int]) -> None:
    replay = Replay(total)
    for size in range(1, MOST + 3):
        for _ in range(WARMUPS + 1):
            last = replay(given(size))[0].item()
    assert len(recorded) == MOST and last > 0


def test_on_a_cpu_nothing_is_recorded(recorded: list[int]) -> None:
    replay = Replay(total)
    assert [replay(torch.ones(2))[0].item() for _ in range(WARMUPS + 2)] == [2.0] * (WARMUPS + 2)
    assert recorded == []


def test_what_cannot_be_recorded_runs_as_it_is_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, recorded: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(module, "_Recorded", refuse)
    replay = Replay(total)
    assert [replay(given(3))[0].item() for _ in range(WARMUPS + 3)] == [3.0] * (WARMUPS + 3)
    assert [record.message for record in caplog.records] == [
        "steps are not recorded as CUDA graphs: operation not permitted when stream is capturing"
    ]


def test_an_error_of_the_function_itself_is_raised(recorded: list[int]) -> None:
    calls = []

    def breaks(x: Tensor) -> tuple[Tensor, ...]:
        calls.append(1)
        if len(calls) > WARMUPS:
            raise RuntimeError("shapes do not fit")
        return total(x)

    replay = Replay(breaks)
    for _ in range(WARMUPS):
        replay(given(3))
    with pytest.raises(RuntimeError, match="do not fit"):
        replay(given(3))


def test_few_shapes_hold_any_number_of_rows() -> None:
    sizes = [rounded_up(count) for count in range(1, 300)]
    assert all(size >= count and size - count < max(64, count) for count, size in enumerate(sizes, start=1))
    assert sizes == sorted(sizes) and {size for size in sizes if size <= 64} == set(SIZES)
    assert all(size % 64 == 0 for size in sizes if size > 64)
