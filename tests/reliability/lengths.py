"""Each test of this folder has a short length for every run of the tests, and a long one for `make reliability`."""

from __future__ import annotations

from typing import Any

import pytest


def lengths(short: Any, long: Any) -> list[Any]:
    """The values of a parameter: `short` always, `long` where the marker `reliability` is asked for."""
    return [pytest.param(short, id="short"), pytest.param(long, id="long", marks=pytest.mark.reliability)]


def only_long(*values: Any) -> Any:
    """One value (of several parameters, perhaps) that is left to `make reliability`."""
    return pytest.param(*values, marks=pytest.mark.reliability)
