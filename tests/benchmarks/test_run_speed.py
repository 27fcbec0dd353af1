"""The rows of the speed benchmark name functions that exist and take their options."""

from __future__ import annotations

import inspect
from importlib import import_module

import pytest

from benchmarks.run_speed import ROWS


@pytest.mark.parametrize("name", list(ROWS))
def test_a_row_names_a_function_that_takes_its_options(name: str) -> None:
    module, _, function = ROWS[name].function.partition(".")
    inspect.signature(getattr(import_module(f"benchmarks.{module}"), function)).bind(**ROWS[name].options)
