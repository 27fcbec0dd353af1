"""Names with line breaks, HTML, links, escape codes or formulas do no harm where reports and figures are read."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
import torch
from report_schedule import loss_figure, shares_figure
from sweep_prompts import sweep_figure

from metapretrain.cli import main
from metapretrain.evaluation.intervals import mean_interval
from metapretrain.report.figures import comparison_figure, confusion_figure, curves_figure, save_figure, tsne_figure
from metapretrain.report.markdown import printable
from tests.report.conftest import MakeRun

NAMES = ("line\nbreak", "<script>alert(1)</script>", "\x1b[31mred", "=1+1", "@sum", "a|b")


@pytest.mark.parametrize("name", NAMES)
def test_a_row_stays_one_row_of_plain_text(name: str, make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run("plain", 0)
    result = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps({**result, "method": name}))
    assert main(["report", str(folder.parent.parent)]) == 0
    shown = capsys.readouterr().out
    assert "<script>" not in shown.replace("\\<script>", "") and "\x1b" not in shown and "line\nbreak" not in shown
    table = next(Path(folder.parent.parent).rglob("table.csv")).read_text()
    (row,) = [row for row in csv.DictReader(io.StringIO(table)) if row["seeds"]]
    assert not row["method"].startswith(("=", "@"))
    assert row["method"].lstrip("'") == name


def test_plain_lines_stay_as_they_are() -> None:
    assert printable("| a < b | 3 ± 1 % | `code` |") == "| a < b | 3 ± 1 % | `code` |"


def test_an_option_behind_two_dashes_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["report", "x", "--", "--out", "y"])
    assert "leave the -- out" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["[here](https://example.org)", "![x](y)", "[a][b]"])
def test_a_name_is_no_link(name: str) -> None:
    page = pytest.importorskip("markdown").markdown(printable(f"- {name}"))
    assert "<a" not in page and "<img" not in page
    assert printable(name).replace("\\", "") == name


@pytest.mark.parametrize("name", ["$x_1^$", "a$b", r"$\frac$", "50 $ and 60 $"])
def test_a_dollar_in_a_name_begins_no_formula(name: str, tmp_path: Path) -> None:
    z, y = torch.eye(8), torch.arange(8) % 2
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "split": "train", "name": "loss", "value": 1.0}\n')
    curve = {"updates": [0, 1], "compute_units": [0, 3], "target_loss": [2.0, 1.0], f"share_{name}": [0.5, 0.5]}
    rows = {name: {0: {"curve": curve}}}
    figures = (
        tsne_figure({name: (z, y)}, [name, "b"]),
        confusion_figure(y, y, [name, "b"]),
        comparison_figure({name: mean_interval([0.5])}, title=name),
        curves_figure({name: [tmp_path]}, ["train/loss"]),
        loss_figure(rows),
        shares_figure(rows),
        sweep_figure({name: {1: [0.5]}}, name, name),
    )
    for number, figure in enumerate(figures):
        file = save_figure(figure, tmp_path / f"{number}.png")
        assert file.stat().st_size
