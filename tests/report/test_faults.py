"""Damaged fields of a result: named in one line, and left out of reports and figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from report_schedule import GREY, loss_figure, plot_schedule

from metapretrain.errors import InputError
from metapretrain.report.results import collect
from metapretrain.report.table import write

CURVE = {
    "updates": [0, 10, 20],
    "compute_units": [40, 70, 100],
    "target_loss": [3.0, 2.0, 1.0],
    "share_a": [1.0, 0.5, 0.5],
}
RUN = {
    "schema": 1,
    "status": "complete",
    "method": "exp3-aware",
    "seed": 0,
    "setting": "aware",
    "wall_s": 1.0,
    "metrics": {"downstream": 0.5},
    "counts": {"wic_test": 4},
    "budget": {"updates": 20},
    "benchmark": "schedule",
}
COST = {"pretrain_reads": 10, "pretrain_passes": 20}
PROMPTS = {
    "schema": 1,
    "status": "complete",
    "method": "ppt",
    "seed": 0,
    "metrics": {"mean_accuracy": 0.5},
    "benchmark": "prompts",
    "budget": COST,
    "pretrain_wall_s": 2.0,
}


def bundled(folder: Path, *results: dict[str, Any]) -> Path:
    (folder / "bundle.json").write_text(json.dumps(results))
    return folder / "bundle.json"


def reported(folder: Path, good: dict[str, Any], damaged: dict[str, Any]) -> str:
    """The one problem that a report of both names; the good result stays in it."""
    path = bundled(folder, good, damaged)
    found = collect(path)
    assert found.results == [good]
    assert good["method"] in write(path, folder / "report")
    (problem,) = found.problems
    assert "\n" not in problem and len(problem) < 150
    return problem


@pytest.mark.parametrize(
    ("curve", "told"),
    [
        (None, "'curve' is None; it must be a JSON object"),
        (True, "'curve' is True"),
        ({}, "curve.updates is None; it must be a list"),
        (CURVE | {"target_loss": "abc"}, "curve.target_loss is 'abc'; it must be a list"),
        (CURVE | {"target_loss": [3.0, [], 1.0]}, "curve.target_loss[1] is []; it must be a finite number or null"),
        (CURVE | {"target_loss": [3.0, float("nan"), 1.0]}, "curve.target_loss[1] is nan"),
        (CURVE | {"target_loss": [3.0, 2.0]}, "curve.target_loss has 2 numbers, curve.updates 3"),
        (CURVE | {"updates": [None] * 3}, "curve.updates[0] is None; it must be a finite number of at least 0"),
        (CURVE | {"updates": [0] * 3}, "curve.updates must rise from each evaluation to the next"),
        (CURVE | {"compute_units": [0] * 3}, "curve.compute_units must rise"),
        (CURVE | {"share_a": [1.0, {}, 0.5]}, "curve.share_a[1] is {}"),
    ],
)
def test_damaged_curves(tmp_path: Path, curve: Any, told: str) -> None:
    problem = reported(tmp_path, RUN | {"method": "uniform-aware", "curve": CURVE}, RUN | {"curve": curve})
    assert problem.startswith(f"bundle.json: {told}")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"setting": "../x"}, "'setting' is '../x'; it must be a word"),
        ({"counts": {"test": -5}}, "counts.test is -5; it must be a finite number of at least 0"),
        ({"wall_s": -1}, "wall_s is -1; it must be"),
    ],
)
def test_other_damaged_fields_of_a_scheduling_run(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    problem = reported(tmp_path, RUN | {"method": "uniform-aware", "curve": CURVE}, RUN | {"curve": CURVE} | change)
    assert problem.startswith(f"bundle.json: {told}")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"pretrain_wall_s": "x"}, "pretrain_wall_s is 'x'; it must be a finite number of at least 0"),
        ({"budget": COST | {"pretrain_passes": None}}, "budget.pretrain_passes is None; it must be"),
    ],
)
def test_damaged_costs_of_prompts(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    assert reported(tmp_path, PROMPTS, PROMPTS | {"seed": 1} | change).startswith(f"bundle.json: {told}")


def test_a_loss_that_was_not_finite_and_a_curve_without_points_are_used(tmp_path: Path) -> None:
    empty: dict[str, list[float]] = {name: [] for name in CURVE}
    lost = RUN | {"curve": CURVE | {"target_loss": [3.0, None, 1.0]}}
    found = collect(bundled(tmp_path, lost, RUN | {"seed": 1, "curve": empty}))
    assert (len(found.results), found.problems) == (2, [])


def test_figures_leave_damaged_curves_out_and_draw_methods_with_other_sources(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(InputError, match="no complete scheduling run"):
        plot_schedule(bundled(tmp_path, RUN | {"curve": True}).parent)
    other: dict[str, Any] = {"share_b" if name == "share_a" else name: values for name, values in CURVE.items()}
    bundled(tmp_path, RUN | {"curve": CURVE}, RUN | {"method": "uniform-aware", "curve": other})
    assert [file.name for file in plot_schedule(tmp_path)] == ["target-loss-aware.png", "shares-aware.png"]
    bundled(tmp_path, RUN | {"curve": {name: CURVE[name] for name in ("updates", "compute_units", "target_loss")}})
    assert len(plot_schedule(tmp_path)) == 2


def test_one_source_is_drawn_grey_and_named_where_it_ends() -> None:
    pytest.importorskip("matplotlib")
    empty: dict[str, list[float]] = {name: [] for name in CURVE}
    rows = {
        "uniform-aware": {0: {"curve": CURVE}},
        "fixed-squad-aware": {0: {"curve": CURVE, "scheduler": "fixed"}},
        "fixed-rte-aware": {0: {"curve": empty, "scheduler": "fixed"}},
    }
    updates, compute = loss_figure(rows).axes
    assert [line.get_color() == GREY for line in updates.get_lines()] == [False, True, True]
    assert [text.get_text() for text in updates.texts] == ["squad"] and updates.get_title() == "grey: one source only"
    assert [text.get_text() for text in compute.get_legend().get_texts()] == ["uniform-aware"]
    alone = loss_figure({"fixed-squad-aware": rows["fixed-squad-aware"]}).axes[0]
    assert [line.get_color() == GREY for line in alone.get_lines()] == [False] and not alone.texts


def test_schedules_of_two_recipes_are_not_drawn_as_one(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    bundled(tmp_path, RUN | {"curve": CURVE}, RUN | {"curve": CURVE, "recipe": "a/b", "encoder": "c"})
    names = {file.name for file in plot_schedule(tmp_path)}
    assert names == {f"{kind}-aware{more}.png" for kind in ("target-loss", "shares") for more in ("", "-a-b-c")}


@pytest.mark.parametrize("change", [{"tokens_per_s": 10**400}, {"schedule": {"name": "exp3", "probe_share": 10**400}}])
def test_numbers_beyond_what_can_be_computed_with(tmp_path: Path, change: dict[str, Any]) -> None:
    uniform, exp3 = (RUN | {"recipe": f"paper-{name}", "schedule": {"name": name}} for name in ("uniform", "exp3"))
    assert "exp3-aware" in write(bundled(tmp_path, uniform, exp3 | change), tmp_path / "report")


def test_a_name_that_is_no_utf8_is_written_with_escapes(tmp_path: Path) -> None:
    write(bundled(tmp_path, RUN | {"method": "caf\udce9"}), tmp_path / "report")
    for name in ("table.md", "table.csv", "table.json"):
        assert "caf\\udce9" in (tmp_path / "report" / name).read_text(encoding="utf-8")
