"""A benchmark's table is what its layout says."""

from __future__ import annotations

import pytest

from metapretrain.report.layout import Column, Layout
from metapretrain.report.layouts import LAYOUTS
from metapretrain.report.table import build_table


def test_a_new_benchmark_is_one_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Layout(
        (Column("speed", "speed", "speed", False), Column("noise", "noise", "noise", False)),
        "speed",
        "Speeds.",
        compared=("speed", "noise"),
        first_row=True,
        notes=lambda runs, published: [f"Seen: {', '.join(runs)}."],
    )
    monkeypatch.setitem(LAYOUTS, "own", own)
    about = {"schema": 1, "status": "complete", "dataset": "d", "recipe": "r", "seed": 0, "metrics": {"speed": 2.0}}
    results = [{**about, "benchmark": "own", "method": method} for method in ("a", "b")]
    (group,) = build_table(results).groups
    assert group.notes[-1] == "Seen: a, b." and "Seen: a, b." in build_table(results).markdown()
    assert not any("Not on all tasks" in note for note in group.notes)  # no other benchmark's notes
