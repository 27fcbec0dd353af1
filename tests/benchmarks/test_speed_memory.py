"""The memory rows of the speed benchmark count what is held and what is left, and name a peer that is missing."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import run_speed, speed_memory
from benchmarks.speed_maml import MamlWork

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="counts tensors on the CPU")
MIB = speed_memory.MIB


def test_the_most_and_the_rest_are_counted_in_bytes() -> None:
    kept = []

    def step() -> None:
        kept.append(torch.empty(MIB, dtype=torch.uint8))
        torch.empty(3 * MIB, dtype=torch.uint8)
        torch.empty(2 * MIB, dtype=torch.uint8)

    assert speed_memory.held(step, 1) == (4 * MIB, MIB)
    assert speed_memory.held(step, 5) == (8 * MIB, 5 * MIB)


def test_a_meta_step_of_fewer_tasks_holds_less_and_what_is_kept_shows() -> None:
    kept: list[Any] = []

    def keeps(work: MamlWork, net: Any, support: Any, query: Any) -> Any:
        return lambda: kept.append(net(support[0][0]).sum())

    work = MamlWork(4, 1, 2, 28, 1, 4, 1, 2, pooled=False)
    contenders = [*speed_memory.contenders(work, chunk=2)[:4], speed_memory.MemoryContender("leaks", work, keeps)]
    loop, checkpointed, chunks, whole, leaks = speed_memory.measure_memory("row", contenders, 3)
    assert loop.peak < chunks.peak < 0.6 * whole.peak
    assert [m.left for m in (loop, checkpointed, chunks, whole)] == [0.0] * 4
    assert leaks.left > 0.01
    assert loop.ratio == pytest.approx(leaks.peak / loop.peak)


def test_the_row_is_printed_and_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "learn2learn", None)
    small = MamlWork(2, 1, 1, 28, 1, 4, 1, 2, pooled=False)
    monkeypatch.setitem(sys.modules, "speed_memory", speed_memory)
    monkeypatch.setattr(speed_memory, "omniglot", lambda steps: speed_memory.contenders(small, 1))
    out = tmp_path / "speed.json"
    assert run_speed.main(["--smoke", "--rows", "memory-omniglot-1-step", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "| learn2learn | skipped: needs learn2learn" in printed
    assert "MiB after 5 episodes" in printed
    content = json.loads(out.read_text())
    assert content["rows"] == []
    assert [m["peak"] > 0 for m in content["memory"]] == [True, True, True, True, False, True]
