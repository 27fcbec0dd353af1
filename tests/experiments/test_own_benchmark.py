"""The page on a benchmark of one's own: one short file, whose metric is an error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from metapretrain.cli import main as metapretrain
from tests.test_docs import ROOT, blocks, load_script


def test_the_file_of_the_page_is_a_benchmark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sklearn")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    (source,) = blocks(ROOT / "docs" / "own-benchmark.md", "python")
    assert source.count("\n") <= 120
    Path("diabetes.py").write_text(source, encoding="utf-8")
    module = load_script(tmp_path / "diabetes.py")
    given = ["--seeds", "0", "1", "--device", "cpu"]
    assert module.main([*given, "--dry-run"]) == 0 and not Path("runs").exists()
    assert module.main(given) == 0
    shown = capsys.readouterr().out
    assert "| method | seeds | RMSE (n = 142) | RMSE of training rows | published |" in shown
    assert "Lower is better: RMSE, RMSE of training rows." in shown and "| 50.480 \\* |" in shown
    assert "Paired differences, minus linear:" in shown and "Order by rmse: " in shown and "accuracy" not in shown
    assert "Unequal budgets" not in shown and "pretrain-autoencoder" in shown

    assert metapretrain(["report", "runs/diabetes", "--bundle", "kept/diabetes.json"]) == 0
    table = capsys.readouterr().out
    assert table.strip() in shown
    assert metapretrain(["report", "kept/diabetes.json"]) == 0 and capsys.readouterr().out == table
    kept = json.loads(Path("runs/diabetes/diabetes-short/report/layout.json").read_text(encoding="utf-8"))
    assert kept == module.LAYOUT.to_json()
    assert metapretrain(["plot", "runs/diabetes"]) == 0 and "comparison.png" in capsys.readouterr().out

    assert module.main([*given, "--resume"]) == 0  # finished rows are kept
    assert table.strip() in capsys.readouterr().out
    assert module.main(given) == 2 and "--resume" in capsys.readouterr().err
