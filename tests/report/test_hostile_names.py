"""Names of methods with line breaks, HTML, escape codes or formulas do no harm where reports are read."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from metapretrain.cli import main
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
