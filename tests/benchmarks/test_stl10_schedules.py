"""The STL-10 script with a schedule: one objective an update at the same budget."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.run_stl10 import main
from metapretrain.experiments import command

SMOKE = ["--device", "cpu", "--image-size", "12", "--no-figures", "--dataset", "digits", "--smoke"]


@pytest.mark.parametrize("schedule", ["round-robin", "fixed:simclr", "utility:samples=1,updates=2", "exp3:updates=2"])
def test_one_objective_an_update(tmp_path: Path, schedule: str) -> None:
    assert main([*SMOKE, "--out", str(tmp_path), "--schedule", schedule, "--methods", "scheduled-frozen"]) == 0
    (folder,) = (tmp_path / "stl10").glob(f"digits-paper-{schedule.partition(':')[0]}*-smoke")
    names = ("scheduled-frozen-s0", "pretrain-scheduled-s0")
    row, pretraining = (json.loads((folder / name / "result.json").read_text()) for name in names)
    told, updates = pretraining["schedule"], pretraining["budget"]["updates"]
    assert told["name"] == schedule and sum(told["updates"].values()) == updates > 2
    assert pretraining["budget"]["encoder_passes"] == 64 * updates  # whatever was chosen
    assert schedule != "fixed:simclr" or told["updates"]["simclr"] == updates
    assert (told["probe_share"] > 0) == schedule.startswith(("utility", "exp3"))
    assert 0 <= row["metrics"]["test_accuracy"] <= 1


def test_jobs_are_told_the_schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def one_after_the_other(jobs: dict[str, list[str]], *_: object) -> None:
        assert all(main(command[2:]) == 0 for command in jobs.values())

    monkeypatch.setattr(command, "run_jobs", one_after_the_other)  # tests of tasks/command.py start processes
    words = ["--out", str(tmp_path), "--schedule", "uniform", "--jobs-per-device", "2", "--seeds", "0", "1"]
    assert main([*SMOKE, *words]) == 0
    done = {file.parent.name for file in tmp_path.glob("stl10/*/*/result.json")}
    rows = ("scheduled", "scheduled-frozen", "pretrain-scheduled")
    assert done == {f"{name}-s{seed}" for name in rows for seed in (0, 1)}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--schedule", "fixed:prl-query"], "prl"),
        (["--schedule", "random"], "round-robin"),
        (["--schedule", "uniform", "--methods", "simclr"], "scheduled"),
        (["--schedule", "uniform", "--set", "batch_size=65"], "multiple of 2 and at least 4, since simclr"),
        (["--methods", "scheduled"], "simclr"),
    ],
)
def test_what_cannot_be_run_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    try:
        status = main([*SMOKE, "--out", str(tmp_path), *words])
    except SystemExit as stop:
        status = int(stop.code or 0)
    shown = capsys.readouterr().err
    assert status == 2 and told in shown and shown.count("\n") == 1
