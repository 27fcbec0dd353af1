"""The scheduling script end to end on made data, and one line for all bad input."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from run_schedule import rows_of

from benchmarks.run_schedule import main, options_of, recipe_of, rows_named
from metapretrain.errors import InputError
from metapretrain.experiments.schedule.recipe import SETTINGS, scheduler_names
from metapretrain.report.figures import read_curves
from metapretrain.report.results import collect

TINY = ["--smoke", "--device", "cpu"]


def test_a_smoke_run_of_all_schedulers_and_its_report(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    methods = f"{','.join(scheduler_names())},fixed:masked-lm"
    assert run("--methods", methods) == 0
    shown = capsys.readouterr().out
    root = tmp_path / "runs" / "schedule" / "made-paper-smoke"
    found = collect(root)
    rows = {result["method"]: result for result in found.results}
    assert set(rows) == {f"{name}-{s}" for name in (*scheduler_names(), "fixed-masked-lm") for s in SETTINGS}
    assert (found.incomplete, found.problems) == ([], [])
    assert {result["budget"]["pretrain_updates"] for result in rows.values()} == {12}
    assert all(f"| {name} |" in shown for name in rows)
    assert "validation picks fixed-masked-lm-aware" in shown and "minus uniform-aware, target loss" in shown
    assert {file.name for file in (root / "figures").glob("*-a*.png")} == {
        f"{what}-{setting}.png" for what in ("target-loss", "shares") for setting in SETTINGS
    }
    exact, taylor, blind = (rows[f"{name}-aware"] for name in ("utility-exact", "utility-taylor", "uniform"))
    # 4 sources, 2 targets, M = 2, 3 decisions of 4 updates; 1 update of each head; 12 updates of 3 passes.
    assert exact["budget"]["compute_units"] - blind["budget"]["compute_units"] == 3 * 4 * 2 * (3 + 2 * 2)
    assert taylor["budget"]["compute_units"] - blind["budget"]["compute_units"] == 3 * 3 * 2 * (4 + 2)
    assert blind["budget"]["compute_units"] == 12 * 3 + 2
    assert -1 <= exact["metrics"]["taylor_rank_correlation"] <= 1 and 0 <= exact["metrics"]["taylor_regret"] <= 1
    assert exact["curve"]["updates"] == [0, 6, 12]
    assert sum(exact["curve"][f"share_{name}"][-1] for name in ("masked-lm", "reordering", "conll04", "squad")) == 1
    curves = read_curves(root / "utility-exact-aware-s0")
    assert curves["schedule/utility_masked-lm"][0].tolist() == [1, 5, 9]
    assert sum(curves[f"schedule/chosen_{name}"][1].sum() for name in ("masked-lm", "reordering")) <= 3
    before = {file: file.read_bytes() for file in root.glob("*/result.json")}
    assert run("--resume", "--methods", methods, "--no-figures") == 0
    assert before == {file: file.read_bytes() for file in root.glob("*/result.json")}


def test_a_dry_run_tells_the_budget_and_writes_nothing(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--dry-run", "--methods", "uniform,utility-exact", "--settings", "aware", "--set", "block=none") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[1:]] == ["uniform-aware", "utility-exact-aware"]
    assert "a decision every 56 costs 56 forward passes" in lines[2] and not (tmp_path / "runs").exists()


def test_validation_leaves_the_test_parts_alone(run: Callable[..., int], tmp_path: Path) -> None:
    assert run("--validate", "--methods", "uniform-aware", "--tag", "trial", "--set", "lr=0.01") == 0
    result = json.loads((tmp_path / "runs/schedule/made-paper-trial-smoke/uniform-aware-s0/result.json").read_text())
    assert result["kind"] == "tuning" and not any(name.endswith("_test") for name in result["counts"])
    assert "validation_downstream" in result["metrics"] and "downstream" not in result["metrics"]


def test_names_of_rows() -> None:
    rows = rows_of(["mlm", "order"], ["squad"])
    assert list(rows_named("uniform", rows, SETTINGS)) == ["uniform-aware", "uniform-agnostic"]
    assert list(rows_named("fixed:mlm,uniform-aware", rows, ["aware"])) == ["fixed-mlm-aware", "uniform-aware"]
    assert list(rows_named("fixed", rows, ["aware"])) == ["fixed-mlm-aware", "fixed-order-aware", "fixed-squad-aware"]
    assert rows_named("all", rows, SETTINGS) == rows


def test_a_row_is_found_by_its_name_again() -> None:
    """Rows side by side and `--config` are run by these names."""
    rows = rows_of(["mlm", "order"], ["squad"])
    given = (
        "softmax:temperature=0.3,smoothing=0.8,exp3:updates=1,turn=8,reward=1e-2,pike:zeta1=1,"
        "softmax-updates2000-agnostic:utility=taylor,exp3-block50-updates80:turn=8,fixed:mlm,utility-exact-block50"
    )
    found = rows_named(given, rows, SETTINGS)
    assert "softmax-temperature=0.3-smoothing=0.8-aware" in found and len(found) == 2 * 6 + 1
    for name, method in found.items():
        assert rows_named(name, rows, SETTINGS) == {name: method}
    assert rows_named(",".join(found), rows, SETTINGS) == found


def test_a_row_may_have_a_block_of_its_own() -> None:
    rows = rows_of(["mlm", "order"], ["squad"])
    found = rows_named("utility-exact-block50,uniform", rows, ["aware"])
    assert list(found) == ["utility-exact-block50-aware", "uniform-aware"]
    assert rows_named("utility-exact-block50-aware", rows, SETTINGS)["utility-exact-block50-aware"].block == 50
    for wrong in ("uniform-block0", "fixed:mlm-block5", "unifrom-block5"):
        with pytest.raises(InputError):
            rows_named(wrong, rows, SETTINGS)


def test_rows_of_two_blocks_stand_in_one_table(run: Callable[..., int], tmp_path: Path) -> None:
    assert run("--methods", "utility-taylor,uniform-block3,uniform", "--settings", "aware") == 0
    root = tmp_path / "runs/schedule/made-paper-smoke"
    table = (root / "report/table.md").read_text(encoding="utf-8")
    assert "uniform-block3-aware" in table and "uniform-aware" in table
    runs = json.loads((root / "uniform-block3-aware-s0/choices.json").read_text())
    assert all(updates % 3 == 0 for _, updates in runs) and sum(updates for _, updates in runs) == 12
    assert json.loads((root / "uniform-block3-aware-s0/result.json").read_text())["budget"]["decisions"] == 4


def test_options_change_the_recipe() -> None:
    options = options_of(["--recipe", "relative", "--encoder", "minilm", "--set", "block=40", "alpha=0.2"])
    recipe = recipe_of(options)
    assert (recipe.normalise, recipe.encoder, recipe.block, recipe.alpha) == ("relative", "minilm", 40, 0.2)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--methods", "unifrom"], "uniform"),
        (["--methods", "fixed:squad", "--settings", "agnostic"], "squad"),
        (["--sources", "masked-ml"], "masked-lm"),
        (["--targets", "rte"], "among targets and downstream"),
        (["--set", "epsilon=2"], "epsilon"),
        (["--set", "floor=1.5"], "floor"),
        (["--encoder", "no/such/folder"], "no folder"),
    ],
)
def test_bad_input_is_one_line(
    run: Callable[..., int], capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    assert run("--methods", "uniform", *words) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1 and shown.err.startswith("error: ") and told in shown.err


def test_a_length_is_above_zero(run: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run("--methods", "uniform", "--max-length", "-3")
    assert capsys.readouterr().err.startswith("error: --max-length")


def test_the_folder_of_the_data_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--methods", "uniform"]) == 2
    assert "--data-dir is needed" in capsys.readouterr().err
