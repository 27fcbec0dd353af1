"""The rows of the speed benchmark name functions that exist and take their options."""

from __future__ import annotations

import inspect
from importlib import import_module

import pytest

from benchmarks.run_speed import ROWS
from benchmarks.speed_contenders import Contender
from benchmarks.speed_measure import calibrate
from benchmarks.speed_shapes import Shape


@pytest.mark.parametrize("name", list(ROWS))
def test_a_row_names_a_function_that_takes_its_options(name: str) -> None:
    module, _, function = ROWS[name].function.partition(".")
    inspect.signature(getattr(import_module(f"benchmarks.{module}"), function)).bind(**ROWS[name].options)


def test_a_shape_is_compared_with_the_fastest_and_with_the_smallest_peer() -> None:
    memory = {"auto": 9.0, "higher": 12.0, "learn2learn": 6.0}
    shape = Shape("mlp", "vmap", 3, {"auto": 1.0}, {"higher": 2.0, "learn2learn": 0.5}, memory)
    assert (shape.slowest, shape.largest) == (0.5, 1.5)


def test_a_slow_first_call_does_not_make_every_timing_one_call_long() -> None:
    now, calls = [0.0], [0]

    def work(n: int) -> None:
        now[0] += 60.0 * (calls[0] == 0) + 0.01 * n  # the first call compiles
        calls[0] += n

    contender = Contender("compiled", lambda: work, clock=lambda: now[0])
    assert 45 <= calibrate(contender, work, 0.5) <= 50


def test_what_is_slow_is_called_once_a_timing() -> None:
    now = [0.0]

    def work(n: int) -> None:
        now[0] += 3.0 * n

    assert calibrate(Contender("slow", lambda: work, clock=lambda: now[0]), work, 0.5) == 1
