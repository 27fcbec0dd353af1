"""Several processes by the documented commands: on two machines, and refused where a run is one process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import run_fewshot
import run_prompts
import run_schedule
import run_stl10
import run_text
import script_options

from metapretrain.experiments.base import Machine


@pytest.mark.parametrize("script", [run_prompts, run_schedule])
def test_a_run_of_one_process_says_what_to_do_instead(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script_options, "machine_of", lambda _: Machine(rank=1, world=2))
    assert script.main(["--smoke", "--out", str(tmp_path / "runs")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and "one process" in lines[0] and "--jobs-per-device" in lines[0]
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "words", "folders"),  # the row, and its pretraining where there is one
    [
        (run_stl10, ["--dataset", "digits", "--methods", "prl-query-frozen-linear"], 2),
        (run_text, ["--recipe", "strong", "--methods", "proto"], 2),
        (run_fewshot, ["--methods", "maml", "--settings", "5w1s", "--queries", "3", "--image-size", "16"], 1),
    ],
)
def test_two_machines_train_one_run(
    script: ModuleType,
    words: list[str],
    folders: int,
    tmp_path: Path,
    port: int,
    ranks: Callable[[int], list[dict[str, str]]],
) -> None:
    (usual,), machines = ranks(1), []
    for number in (0, 1):
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes",
            "2",
            "--nproc_per_node",
            "1",
            "--node_rank",
            str(number),
            "--rdzv_id",
            "one-run",
            "--rdzv_backend",
            "c10d",
            "--rdzv_endpoint",
            f"127.0.0.1:{port}",
            "--local_addr",
            "127.0.0.1",
            str(script.__file__),
            *words,
            "--smoke",
            "--device",
            "cpu",
            "--out",
            str(tmp_path / "runs"),
        ]
        machines.append(subprocess.Popen(command, env=usual, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    shown = [process.communicate(timeout=300) for process in machines]
    assert [process.returncode for process in machines] == [0, 0], shown
    assert sum("tensorboard --logdir" in text for text, _ in shown) == 1  # one of them prints the table
    results = [json.loads(file.read_text()) for file in tmp_path.glob("runs/*/*/*/result.json")]
    assert [result["processes"] for result in results] == [2] * folders
    assert {result["status"] for result in results} == {"complete"}
