"""`metapretrain report` and `metapretrain plot`: tables and figures of a folder of runs."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from metapretrain.training.logs import write_embedding
from tests.test_cli import refuse, show, write_run


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "stl10" / "stl10-paper"
    for seed in (0, 1):
        write_run(folder, "supervised-resnet18", seed, 12 + seed)
        write_run(folder, "prl-query-frozen-linear", seed, 15 + seed)
    return folder


def test_report_writes_all_formats_and_shows_one(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = show(["report", str(runs.parent)], capsys)
    assert "prl-query-frozen-linear" in shown
    written = sorted(path.name for path in (runs.parent / "report").iterdir())
    assert written == ["table.csv", "table.json", "table.md"]
    as_json = json.loads(show(["report", str(runs.parent), "--format", "json"], capsys))
    assert as_json == json.loads((runs.parent / "report" / "table.json").read_text())
    as_csv = show(["report", str(runs.parent), "--format", "csv", "--out", str(runs / "elsewhere")], capsys)
    assert as_csv == (runs / "elsewhere" / "table.csv").read_text()


def test_report_is_rebuilt_from_the_bundle_that_it_wrote(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    kept = tmp_path / "docs" / "results" / "stl10.json"
    shown = show(["report", str(runs.parent), "--bundle", str(kept)], capsys)
    (kept.parent / "speed.json").write_text('{"rows": []}')
    with caplog.at_level("INFO"):
        assert show(["report", str(kept.parent), "--out", str(tmp_path / "report")], capsys) == shown
    assert "speed.json holds no results of runs" in caplog.text
    assert "cannot write" in refuse(["report", str(kept), "--bundle", str(kept / "b.json")], capsys)


def test_plot_draws_curves_and_comparison(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = [Path(line) for line in show(["plot", str(runs.parent)], capsys).splitlines()]
    assert written == [runs / "figures" / "curves.png", runs / "figures" / "comparison.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)


def test_plot_maps_the_embeddings_again_by_another_reducer(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, int]] = []

    class UMAP:
        def __init__(self, **settings: Any) -> None: ...

        def fit_transform(self, z: np.ndarray) -> np.ndarray:
            asked.append(("umap", len(z)))
            return z[:, :2]

    run = runs / "prl-query-frozen-linear-s0"
    assert "kept embeddings" in refuse(["plot", str(run), "--reducer", "tsne"], capsys)
    for name in ("test-after-pretraining", "train-before-pretraining"):
        write_embedding(run, name, torch.randn(12, 4), ["cat", "dog"] * 6, None, 7)
    monkeypatch.setitem(sys.modules, "umap", None)
    assert show(["plot", str(runs), "--reducer", "umap"], capsys).splitlines()[-1] == str(run / "figures" / "tsne.png")
    module = types.ModuleType("umap")
    monkeypatch.setattr(module, "UMAP", UMAP, raising=False)
    monkeypatch.setitem(sys.modules, "umap", module)
    drawn = show(["plot", str(runs), "--reducer", "umap"], capsys).splitlines()
    assert drawn[-1] == str(run / "figures" / "umap.png")
    assert asked == [("umap", 12)] * 2
    assert "did you mean 'umap'" in refuse(["plot", str(run), "--reducer", "umpa"], capsys)


def test_plot_of_one_run_goes_into_it(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = runs / "supervised-resnet18-s0"
    written = show(["plot", str(run), "--metrics", "validation/loss"], capsys).splitlines()
    assert written[0] == str(run / "figures" / "curves.png")
    assert "train/loss" in refuse(["plot", str(run), "--metrics", "train/los"], capsys)


def test_plot_into_another_folder(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show(["plot", str(runs.parent), "--out", str(tmp_path / "pictures")], capsys)
    assert (tmp_path / "pictures" / "stl10-paper" / "curves.png").is_file()
    assert not (runs / "figures").exists()
