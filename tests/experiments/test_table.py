"""A whole table: one row after the other or side by side, the same files."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from metapretrain.cli import main
from metapretrain.errors import InputError
from metapretrain.experiments import command
from metapretrain.experiments.command import _jobs, machine_of, run_jobs
from metapretrain.experiments.images.training import ImageMethod
from metapretrain.training import logs
from tests import forks

ARGUMENTS = ["demo", "--smoke", "--no-figures", "--device", "cpu", "--seeds", "0", "--methods", "supervised,prl-query"]


def test_side_by_side_gives_the_files_of_one_after_the_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(command, "subprocess", forks)
    threads = torch.get_num_threads()
    monkeypatch.setattr("os.cpu_count", lambda: 2 * threads)  # as many threads a job as here: the same sums
    assert main([*ARGUMENTS, "--out", str(tmp_path / "one")]) == 0
    first = capsys.readouterr().out
    assert main([*ARGUMENTS, "--out", str(tmp_path / "two"), "--jobs-per-device", "2"]) == 0
    second = capsys.readouterr().out
    one, two = (tmp_path / name / "demo" / "digits-smoke" for name in ("one", "two"))
    runs = sorted(path.name for path in one.glob("*-s0"))
    assert runs == ["pretrain-prl-query-s0", "prl-query-s0", "supervised-s0"]
    for run in runs:
        for name in ("encoder.safetensors", "prototypes.safetensors", "predictions.csv", "metrics.jsonl"):
            assert (one / run / name).read_bytes() == (two / run / name).read_bytes(), f"{run}/{name}"
        ours, theirs = (json.loads((root / run / "result.json").read_text()) for root in (one, two))
        assert ours["metrics"] == theirs["metrics"] and ours["budget"] == theirs["budget"]
    assert sorted(path.name for path in (two / "logs").iterdir()) == ["prl-query-s0.log", "supervised-s0.log"]
    assert "tensorboard --logdir" not in (two / "logs" / "supervised-s0.log").read_text()  # the table is shown once
    table = [line for line in first.splitlines() if line.startswith("| prl-query |")][:1]
    assert table and table[0] in second


def test_every_bar_and_every_line_tells_the_place_of_its_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tqdm.auto

    bars, real = [], tqdm.auto.tqdm
    monkeypatch.setattr(tqdm.auto, "tqdm", lambda *given, **more: bars.append(more["desc"]) or real(*given, **more))
    monkeypatch.setattr(logs, "TOLD_SECONDS", 0.0)
    names = ("supervised", "pretrain-prl-query", "prl-query")
    places = [f"run {place} of 3, {name} seed 0" for place, name in enumerate(names, start=1)]
    with caplog.at_level("INFO", "metapretrain"):
        assert main([*ARGUMENTS, "--out", str(tmp_path)]) == 0
    assert bars == places
    told = [line.rpartition(": ")[0] for line in caplog.messages if "updates" in line]
    assert list(dict.fromkeys(told)) == places
    bars.clear()
    (tmp_path / "demo" / "digits-smoke" / "prl-query-s0" / "result.json").unlink()
    assert main([*ARGUMENTS, "--out", str(tmp_path)]) == 0
    assert bars == ["run 1 of 1, prl-query seed 0"]  # the pretraining and the other row are kept


def test_jobs_without_a_terminal_tell_how_many_are_done(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "TOLD_SECONDS", 0.0)
    jobs = {name: [sys.executable, "-c", f"import time; time.sleep({name})"] for name in ("0", "2.5")}
    with caplog.at_level("INFO", "metapretrain"):
        run_jobs(jobs, [{}, {}], tmp_path)
    assert any(line.startswith("jobs: 1 of 2 done") for line in caplog.messages)


def test_a_job_is_a_seed_and_a_pretraining() -> None:
    methods = {
        "mlp": ImageMethod("supervised", encoder="mlp"),
        "supervised": ImageMethod("supervised"),
        "frozen": ImageMethod("prl-query", frozen=True),
        "simclr": ImageMethod("simclr"),
        "unfrozen": ImageMethod("prl-query"),
    }
    jobs = _jobs(methods, Namespace(seeds=[3, 1]), ["script.py", "--seeds", "3", "1"])
    assert list(jobs) == [
        f"{group}-s{seed}" for seed in (3, 1) for group in ("mlp", "supervised", "prl-query", "simclr")
    ]
    words = jobs["prl-query-s1"]
    assert words[:5] == [sys.executable, "script.py", "--seeds", "3", "1"]
    told = " ".join(words[5:])
    assert told == "--methods frozen,unfrozen --seeds 1 --jobs-per-device 1 --job --no-figures"
    assert "--no-figures" not in jobs["prl-query-s3"]


def test_the_machine_is_what_the_options_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    machine = machine_of(Namespace(device="cpu", precision="bf16"))
    assert (machine.device, machine.precision, machine.world, machine.compile) == ("cpu", "bf16", 1, False)
    assert machine_of(Namespace(device="cpu", precision="fp32", no_cuda_graph=True)).cuda_graph is False
    for device, precision in (("cpu", "fp16"), ("cpuu", "fp32"), ("cpu", "fp23")):
        with pytest.raises(InputError):
            machine_of(Namespace(device=device, precision=precision))
