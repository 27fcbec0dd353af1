"""Updates shared by processes: the benchmark's half of a batch is what the first of two processes gets."""

from __future__ import annotations

import io
import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import speed_scale  # as run_speed.py imports it
import torch
from speed_contenders import Missing
from speed_scale import BOUND, HALF_BATCH, WORK, scaling, serve

from metapretrain.training import engine
from metapretrain.training.engine import Engine


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def served(monkeypatch: pytest.MonkeyPatch, kind: str, *how: str) -> dict[str, Any]:
    """The batch of the one update that a process is told to do."""
    given: list[Any] = []
    monkeypatch.setattr(sys, "stdin", io.StringIO("1\n"))
    monkeypatch.setattr(Engine, "update", lambda _, batches: given.extend(batches))
    serve(kind, *how)
    (batch,) = given
    return dict(batch)


@pytest.mark.parametrize(("kind", "first"), [("images", "prl"), ("tasks", "episodes"), ("tokens", "sst")])
def test_half_the_batch_is_what_the_first_of_two_processes_gets(
    kind: str, first: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, half = served(monkeypatch, kind), served(monkeypatch, kind, "half")
    assert capsys.readouterr().out == "done\ndone\n"
    assert whole.keys() == half.keys()

    def parts(batch: Any) -> dict[str, torch.Tensor]:
        return batch[first] if isinstance(batch[first], dict) else {"rows": batch[first]}

    for name, rows in parts(half).items():
        if name == "width":  # of the whole batch, as in each of two processes
            assert rows.shape == parts(whole)[name].shape
            continue
        other = parts(WORK[kind](1, 2)[1])[name]
        assert len(rows) == len(other) == len(parts(whole)[name]) // 2
        together = torch.cat([rows, other]).flatten().sort().values
        assert torch.equal(together, parts(whole)[name].flatten().sort().values)


def test_half_the_batch_is_ours_and_counts_half(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[Any, ...]] = []
    monkeypatch.setattr(speed_scale, "group", lambda *told: started.append(told))
    *others, half = scaling("tasks")
    assert [(one.name, one.ours, one.each) for one in others] == [
        ("1 process", False, 8),
        ("2 processes", True, 8),
        ("4 processes", True, 8),
    ]
    assert (half.name, half.ours, half.each) == (HALF_BATCH, True, 4)
    assert half.note is not None and half.note() == BOUND
    for contender in (*others, half):
        contender.make()
    assert started == [("tasks", 1), ("tasks", 2), ("tasks", 4), ("tasks", 1, "half")]


def test_a_process_that_should_record_its_updates_and_does_not_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "records", lambda *_: True)
    with pytest.raises(RuntimeError, match="updates of tasks are not recorded"):
        served(monkeypatch, "tasks", "half")
    monkeypatch.setattr(engine, "records", lambda _, settings: settings.cuda_graph is not False)
    served(monkeypatch, "tasks", "eager")


def test_a_group_is_told_how_and_one_that_ended_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def start(command: list[str], env: dict[str, str], **_: Any) -> SimpleNamespace:
        commands.append([*command[2:], env["RANK"], env["WORLD_SIZE"]])
        return SimpleNamespace(stdin=io.StringIO(), stdout=io.StringIO("done\n"))

    monkeypatch.setattr(speed_scale.subprocess, "Popen", start)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    calls = speed_scale.group("tasks", 1, "half")
    speed_scale.group("tasks", 2)
    assert commands == [["tasks", "half", "0", "1"], ["tasks", "0", "2"], ["tasks", "1", "2"]]
    with pytest.raises(RuntimeError, match="a process of 1 for tasks ended"):
        calls(1)
    with pytest.raises(Missing, match="4 cores"):
        speed_scale.group("tasks", 4)
