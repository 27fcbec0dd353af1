"""A benchmark's table is what its layout says; the layout is kept as data beside the runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import report_fewshot
import report_prompts
import report_schedule
import report_stl10
import report_text

from metapretrain.errors import InputError
from metapretrain.report.layout import FILE, Claim, Column, Layout, save_layout
from metapretrain.report.notes import NOTES
from metapretrain.report.results import bundle, collect
from metapretrain.report.rows import measure_claim
from metapretrain.report.table import build_table, write
from tests.forks import python

ERRORS = Layout(
    (Column("rmse", "test_rmse", "RMSE", percent=False, lower_is_better=True, drawn="RMSE"),),
    "rmse",
    "Errors.",
    compared=("rmse",),
    first_row=True,
)
LAYOUTS = {
    "fewshot": report_fewshot.LAYOUT,
    "prompts": report_prompts.LAYOUT,
    "schedule": report_schedule.LAYOUT,
    "stl10": report_stl10.LAYOUT,
    "text": report_text.LAYOUT,
}


def result(method: str, seed: int = 0, **metrics: float) -> dict[str, Any]:
    about = {"schema": 1, "status": "complete", "benchmark": "own", "dataset": "d", "recipe": "r", "seed": seed}
    return {**about, "method": method, "metrics": metrics}


def test_a_new_benchmark_is_one_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NOTES, "seen", lambda runs, layout: [f"Seen: {', '.join(runs)}."])
    own = Layout(
        (Column("speed", "speed", "speed", False), Column("noise", "noise", "noise", False)),
        "speed",
        "Speeds.",
        compared=("speed", "noise"),
        first_row=True,
        notes=("seen",),
    )
    results = [result(method, speed=2.0) for method in ("a", "b")]
    (group,) = build_table(results, own).groups
    assert group.notes[-1] == "Seen: a, b." and "Seen: a, b." in build_table(results, own).markdown()
    assert not any("Not on all tasks" in note for note in group.notes)  # no other benchmark's notes


def test_lower_is_better_where_the_column_says_so() -> None:
    results = [result(name, seed, test_rmse=value + seed) for name, value in (("a", 3), ("b", 2)) for seed in (0, 1)]
    text = build_table(results, ERRORS).markdown()
    assert "Errors. Lower is better: RMSE." in text and "Order by rmse: a > b." in text
    assert "| b | 2 | -1.000 ± 0.000 |" in text


@pytest.mark.parametrize("falling", [False, True])
def test_a_claim_is_of_the_better_side(falling: bool) -> None:
    layout = Layout((Column("main", "score", "score", False, lower_is_better=falling),), "main")
    runs = {name: {0: {"metrics": {"score": value}}} for name, value in (("a", 1.0), ("b", 2.0))}
    found = measure_claim(layout, Claim("a", "b", (("a", "b"), ("a", "missing"))), runs, {})
    assert found is not None and (found.pairs, found.better, found.over_seeds.mean) == (1, int(falling), -1.0)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_are_data(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    assert Layout.from_json(json.loads(json.dumps(layout.to_json(), sort_keys=True))) == layout
    stored = json.loads(save_layout(layout, tmp_path).read_text(encoding="utf-8"))
    again = Layout.from_json(stored)
    assert again == layout and [*again.published] == [*layout.published]
    for dataset, rows in layout.published.items():
        assert [*again.published[dataset]] == [*rows]  # rows stand in the order of the print
    assert set(layout.notes) <= NOTES.keys()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"colour": 1}, "unknown field of layout 'colour'"),
        ({"main": "mae"}, "unknown column 'mae'"),
        ({"main": 3}, "layout.main is 3; it must be text"),
        ({"columns": {}}, "layout.columns is {}; it must be a list"),
        ({"columns": [{"name": "rmse", "metric": "m"}]}, r"layout.columns\[0\] has no 'title'"),
        ({"columns": [3]}, r"layout.columns\[0\] is 3; it must be a JSON object"),
        ({"first_row": "yes"}, "layout.first_row is 'yes'; it must be true or false"),
        ({"published": {"d": 1}}, "it must be a list of pairs"),
        ({"published": [["d", [["a", {"scores": [["rmse", "x"]]}]]]]}, "scores.rmse is 'x'; it must be a number"),
    ],
)
def test_a_layout_that_is_none_is_one_line(change: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told) as caught:
        Layout.from_json(ERRORS.to_json() | change)
    assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match="layout is None; it must be a JSON object"):
        Layout.from_json(None)


def test_a_note_of_another_file_is_left_out_and_told(tmp_path: Path) -> None:
    layout = {**ERRORS.to_json(), "notes": ["os.system"]}
    bundle([{**result("a", test_rmse=1.0), "layout": layout}], tmp_path / "b.json")
    assert "Notes left out, computed by the file of their benchmark: 'os.system'; show them" in write(
        tmp_path / "b.json"
    )


@pytest.mark.parametrize("name", ["prompts-equal", "text-paper", "schedule-aware"])
def test_a_bundle_is_shown_by_a_process_of_its_own_and_with_its_notes_by_a_plugin(name: str, tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    plugin = ("--plugin", str(root / f"benchmarks/report_{name.partition('-')[0]}.py"))
    words = "-m", "metapretrain", "report", str(root / f"docs/results/{name}.json"), "--out", str(tmp_path)
    shown = [python(*words, *more, warm=False).stdout for more in ((), plugin)]
    assert ["Notes left out" in text for text in shown] == [True, False]
    assert len(shown[1]) > 0.9 * len(shown[0]) and all(text.startswith("## ") for text in shown)


def test_the_layout_of_a_folder_makes_its_table_and_travels_in_a_bundle(tmp_path: Path) -> None:
    for method, value in (("a", 2.0), ("b", 1.0)):
        folder = tmp_path / "table" / f"{method}-s0"
        folder.mkdir(parents=True)
        (folder / "result.json").write_text(json.dumps(result(method, test_rmse=value, train_rmse=0.5)))
    without = write(tmp_path / "table")
    assert "These runs keep no layout" in without and "| method | seeds | test rmse | train rmse |" in without
    save_layout(ERRORS, tmp_path / "table")
    text = write(tmp_path / "table")
    assert "| method | seeds | RMSE |" in text and "Errors." in text and "train" not in text
    for root in (tmp_path, tmp_path / "table" / "a-s0"):
        assert "| method | seeds | RMSE |" in build_table(collect(root)).markdown()
    path = bundle(collect(tmp_path / "table").results, tmp_path / "docs" / "own.json")
    assert write(path, tmp_path / "again") == text


@pytest.mark.parametrize("damage", ["{", "[]", '{"columns": 3}'])
def test_a_damaged_layout_is_one_problem_and_the_runs_are_shown(
    damage: str, tmp_path: Path, make_run: Callable[..., Path]
) -> None:
    for seed in range(3):
        table = make_run("simclr", seed).parent
    (table / FILE).write_text(damage)
    found = collect(tmp_path / "runs")
    (problem,) = found.problems
    assert "layout" in problem and "\n" not in problem and len(found.results) == 3
    assert "These runs keep no layout" in build_table(found).markdown()


def test_a_damaged_configuration_is_one_problem_and_the_run_is_shown(
    tmp_path: Path, make_run: Callable[..., Path]
) -> None:
    for seed in range(2):
        (make_run("simclr", seed) / "config.json").write_text('{"config": ' if seed else "{}")
    found = collect(tmp_path / "runs")
    (problem,) = found.problems
    assert "simclr-s1/config.json: not JSON (torn or damaged)" in problem and len(found.results) == 2


def test_results_without_a_figure_are_left_out(tmp_path: Path) -> None:
    bundle([result("a", test_rmse=1.0), result("b")], tmp_path / "b.json")
    assert collect(tmp_path / "b.json").problems == ["b.json: it has no number"]


def test_only_a_pretraining_yet() -> None:
    assert "Pretraining only" in build_table([{**result("a"), "kind": "pretraining"}]).markdown()
