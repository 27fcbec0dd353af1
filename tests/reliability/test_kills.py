"""Runs killed (SIGKILL) at random moments and resumed each time end with the bits of an unbroken run."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
import time
from pathlib import Path
from subprocess import DEVNULL, TimeoutExpired
from typing import Any

import pytest

from metapretrain.training.logs import read_metrics
from tests.forks import Popen
from tests.reliability.lengths import only_long

ROOT = Path(__file__).parents[2]
MEASURED = re.compile(r"command|commit|peak_memory_bytes|(.*_)?(seconds|per_s|wall_s)")  # not of what was computed
KILLED = -signal.SIGKILL
PRL = ["--dataset", "digits", "--methods", "prl-query-frozen-linear"]


SCRIPT = f"""
import importlib, sys
from metapretrain.training import loop
loop._Loop._checkpoint_due = lambda self: self.step % 2 == 0  # in place of once a minute
sys.path.insert(0, {str(ROOT / "benchmarks")!r})
sys.exit(importlib.import_module(sys.argv[1]).main(sys.argv[2:]))
"""


class Victim:
    """Starts runs of a script, each in a process of its own, and kills them."""

    def __init__(self, script: str, log: Path) -> None:
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.environment.pop("WORLD_SIZE", None)
        self.script, self.log, self.wait = script, log, 0.0

    def run(self, out: Path, *words: str, kill_after: float = 120) -> int:
        """Run the script with its runs in `out`, at most `kill_after` seconds, and return the exit status."""
        given = ["--smoke", "--device", "cpu", "--no-figures", "--resume", "--out", str(out), *words]
        command = [sys.executable, "-c", SCRIPT, self.script, *given]
        with self.log.open("a") as log:
            process = Popen(command, stdin=DEVNULL, stdout=log, stderr=log, env=self.environment)
        began = time.monotonic()
        try:
            status = process.wait(kill_after)
        except TimeoutExpired:
            process.kill()
            status = process.wait()
        self.wait = time.monotonic() - began
        return status


@pytest.fixture
def victim(request: pytest.FixtureRequest, tmp_path: Path) -> Victim:
    return Victim(request.param, tmp_path / "log.txt")


def outcome(out: Path) -> dict[str, Any]:
    """What runs left, without times: bytes of weights and predictions, metrics, results, names of other files."""
    found: dict[str, Any] = {}
    for file in sorted(path for path in out.rglob("*") if path.is_file() and "tfevents" not in path.name):
        name = str(file.relative_to(out))
        if file.name == "result.json":
            result = json.loads(file.read_text())
            found |= {f"{name} {key}": value for key, value in result.items() if not MEASURED.fullmatch(key)}
        elif file.name == "metrics.jsonl":
            lines = (line for line in read_metrics(file.parent) if not MEASURED.fullmatch(line["name"]))
            found[name] = [{**line, "value": repr(line["value"])} for line in lines]
        elif file.suffix in {".safetensors", ".csv"} and "report" not in file.parts:
            found[name] = file.read_bytes()
        else:
            found[name] = "there"
    return found


@pytest.mark.parametrize(
    ("victim", "words", "kills"),
    [
        pytest.param("run_stl10", PRL, 2, id="images-short"),
        only_long("run_stl10", [*PRL, "--set", "epochs=8"], 20),
        only_long("run_text", ["--methods", "proto"], 10),
        only_long("run_prompts", ["--methods", "metapt-kmeans", "--sets", "sst2"], 10),
        only_long("run_schedule", ["--methods", "utility-exact", "--settings", "aware"], 10),
        only_long("run_fewshot", ["--settings", "5w1s", "--methods", "protonet", "--validation-episodes", "2"], 5),
    ],
    indirect=["victim"],
)
def test_killed_runs_end_with_the_bits_of_an_unbroken_run(
    victim: Victim, words: list[str], kills: int, tmp_path: Path
) -> None:
    assert victim.run(tmp_path / "whole", *words) == 0, victim.log.read_text()[-2000:]
    whole = outcome(tmp_path / "whole")
    assert any("result.json" in name for name in whole) and any(isinstance(x, bytes) for x in whole.values())
    usual, moments = victim.wait, random.Random(kills)
    done = folders = 0
    while done < kills:  # a run that ended before it was killed is followed by a new one
        out, status = tmp_path / f"killed-{folders}", KILLED
        while status == KILLED:
            wait = moments.uniform(0, 0.8 * usual) if done < kills else 120
            status = victim.run(out, *words, kill_after=wait)
            done += status == KILLED
        assert status == 0, victim.log.read_text()[-2000:]
        found = outcome(out)
        assert {name for name in whole | found if found.get(name) != whole.get(name)} == set()
        folders += 1
