"""`metapretrain demo`: a table, figures and what to look at next; a second call keeps what is done."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from metapretrain import load
from metapretrain.cli import DEMO_METHODS, main
from metapretrain.data.registry import load_images
from metapretrain.experiments.images import experiment
from metapretrain.report.results import collect
from metapretrain.report.rows import by_seed, paired

SMOKE = ["demo", "--smoke", "--device", "cpu", "--seeds", "0", "2"]


def test_the_command_line_knows_the_demos_methods() -> None:
    assert set(DEMO_METHODS) == set(experiment.DEMO_METHODS)


def test_smoke_ends_with_one_table_and_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, root = ["--out", str(tmp_path)], tmp_path / "demo" / "digits-smoke"
    assert main([*SMOKE, *out, "--methods", "supervised,prl-query"]) == 0
    shown = capsys.readouterr().out
    for method in ("supervised", "prl-query"):
        assert re.search(rf"^\| {method} \| \d+\.\d\d ± \d+\.\d\d \| \d+\.\d\d ± ", shown, re.MULTILINE)
    *_, sentence = shown.rstrip().splitlines()
    assert sentence.startswith("Trained on 3 labelled images per digit") and sentence.count(". ") == 0
    assert "has the highest test accuracy" in sentence and "not how they compare" in sentence
    gap = paired(*(by_seed(collect(root).results)[name] for name in ("supervised", "prl-query")), "test_accuracy")
    assert gap is not None and gap.n == 2
    best, other = ("supervised", "prl-query") if gap.mean >= 0 else ("prl-query", "supervised")
    told = "higher than" if gap.low > 0 or gap.high < 0 else "with no difference shown to"
    assert f"digit, {best} has" in sentence and f", {told} {other}" in sentence
    assert sum(line.startswith("| ") for line in shown.splitlines()) == 4  # header, rule and two rows: one table
    assert "tensorboard --logdir" in shown and (root / "report" / "table.md").is_file()
    figures = sorted(root.rglob("*.png"))
    names = {path.relative_to(root).as_posix() for path in figures if "projector" not in path.parts}
    assert names == {
        "figures/curves.png",
        "figures/comparison.png",
        "supervised-s0/figures/confusion.png",
        "prl-query-s0/figures/confusion.png",
        "pretrain-prl-query-s0/figures/tsne.png",
    }
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in figures)
    results = collect(root).results
    assert {result["budget"]["encoder_passes"] for result in results if result["kind"] == "row"} == {600}

    test = load_images("digits", None, "test")
    accuracy = (load(root / "supervised-s2").predict(test.images) == test.labels).double().mean().item()
    stored = next(r for r in results if (r["method"], r["seed"]) == ("supervised", 2))
    assert accuracy == pytest.approx(stored["metrics"]["test_accuracy"])

    before = {path: path.stat().st_mtime_ns for path in root.glob("*-s*/result.json")}
    assert len(before) == 6
    assert main([*SMOKE[:-1], *out, "--methods", "supervised,prl-query", "--no-figures"]) == 0
    again = capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert re.search(r"^\| prl-query \| \d+\.\d\d ± ", again, re.MULTILINE)  # the other seed's run is in the table


def test_dry_run_trains_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMOKE, "--out", str(tmp_path), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert all(f"{method}: 600 encoder passes" in shown for method in DEMO_METHODS)
    assert list(tmp_path.iterdir()) == []


def test_uses_one_thread_unless_told_and_says_what_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    threads = torch.get_num_threads()
    one = ["demo", "--smoke", "--device", "cpu", "--seeds", "0", "--methods", "supervised", "--no-figures", "--out"]
    try:
        for variable, used in ((None, 1), ("2", 2)):
            torch.set_num_threads(2)
            monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
            if variable:
                monkeypatch.setenv("OMP_NUM_THREADS", variable)
            with caplog.at_level("INFO", "metapretrain"):
                assert main([*one, str(tmp_path / str(used))]) == 0
            assert collect(tmp_path / str(used)).results[0]["device"] == f"cpu ({used} threads)"
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert sum("supervised seed 0: done in" in line for line in caplog.messages) == 2
