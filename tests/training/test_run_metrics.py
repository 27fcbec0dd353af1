"""Metrics and TensorBoard events of a run: both at once, cut back on a resume, whole after a kill."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from metapretrain.errors import InputError
from metapretrain.training.logs import read_metrics
from metapretrain.training.run_folder import RunFolder
from tests.training.run_files import CONFIG, events, lines, one_line, projector, scalars


def test_log_writes_both_at_once(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path, CONFIG) as run:
        run.log(1, "train", {"loss": torch.tensor(0.5), "lr": np.float32(0.25)})
        run.log(2, "test", {"accuracy": 1})
        assert (tmp_path / "metrics.jsonl").read_text().splitlines() == [
            '{"step": 1, "split": "train", "name": "loss", "value": 0.5}',
            '{"step": 1, "split": "train", "name": "lr", "value": 0.25}',
            '{"step": 2, "split": "test", "name": "accuracy", "value": 1.0}',
        ]
        assert scalars(tmp_path, "train/loss") == [(1, 0.5)]
        assert scalars(tmp_path, "test/accuracy") == [(2, 1.0)]


def test_numbers_that_are_not_finite_leave_valid_json(tmp_path: Path) -> None:
    def refuse(word: str) -> None:
        pytest.fail(f"{word} is not JSON")

    with RunFolder.open(tmp_path, {**CONFIG, "limit": math.inf}) as run:
        run.log(1, "train", {"a": math.nan, "b": math.inf, "c": 1.5})
        run.finish({"metrics": {"test_accuracy": math.nan, "knn_accuracy": torch.tensor(0.25)}})
        result = run.result()
    for name in ("config.json", "result.json"):
        json.loads((tmp_path / name).read_text(), parse_constant=refuse)
    found = [json.loads(text, parse_constant=refuse) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["value"] for line in found] == [None, None, 1.5]
    assert [math.isnan(line["value"]) for line in read_metrics(tmp_path)] == [True, True, False]
    assert result is not None
    assert result["metrics"] == {"test_accuracy": None, "knn_accuracy": 0.25}
    assert scalars(tmp_path, "train/b") == [(1, math.inf)]


@pytest.mark.parametrize("torn", [b'{"step": 3, "spl', b"\x00\x00\x00", b'{"step": 3, "split": "train"}'])
def test_a_torn_last_line_is_cut(tmp_path: Path, torn: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with RunFolder.open(tmp_path, CONFIG) as run:
        run.log(1, "train", {"loss": 1.0})
        run.log(2, "train", {"loss": 2.0})
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(torn)
    assert lines(tmp_path) == [(1, 1.0), (2, 2.0)]
    with RunFolder.open(tmp_path, CONFIG, resume=True) as run:
        run.log(3, "train", {"loss": 3.0})
    assert lines(tmp_path) == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert caplog.text == ""


def test_a_damaged_line_in_the_middle_is_left_out_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    good = '{"step": 1, "split": "train", "name": "loss", "value": 1.0}\n'
    (tmp_path / "metrics.jsonl").write_text(good + "garbage\n" + '{"step": 1}\n' + good)
    with caplog.at_level(logging.WARNING):
        assert lines(tmp_path) == [(1, 1.0), (1, 1.0)]
    assert "2 damaged lines" in caplog.text


def test_a_resume_shows_no_step_twice(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path, CONFIG) as run:
        for step in range(1, 8):
            run.log(step, "train", {"loss": 10.0 + step})
        run.embedding("before", torch.zeros(2, 2), ["a", "b"], step=2)
        run.embedding("after", torch.zeros(2, 2), ["a", "b"], step=6)
    with RunFolder.open(tmp_path, CONFIG, resume=True) as run:
        run.cut_back(4)
        assert lines(tmp_path) == [(step, 10.0 + step) for step in range(1, 5)]
        assert scalars(tmp_path, "train/loss") == [(step, 10.0 + step) for step in range(1, 5)]
        assert [entry.tensor_name for entry in projector(tmp_path)] == ["before:00000002"]
        for step in range(5, 9):
            run.log(step, "train", {"loss": 20.0 + step})
    expected = [(step, (10.0 if step < 5 else 20.0) + step) for step in range(1, 9)]
    assert lines(tmp_path) == expected
    assert scalars(tmp_path, "train/loss") == expected
    with RunFolder.open(tmp_path, CONFIG, resume=True) as run:
        run.log(9, "train", {"loss": 29.0})
        run.cut_back(-1)
        run.log(0, "train", {"loss": 30.0})
    assert lines(tmp_path) == [(0, 30.0)]
    assert scalars(tmp_path, "train/loss") == [(0, 30.0)]


def test_event_files_are_cut_whatever_the_order_of_their_names(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path, CONFIG) as run:
        for step in range(1, 6):
            run.log(step, "train", {"loss": 10.0 + step})
    (old,) = tmp_path.glob("events.out.*")
    old.rename(tmp_path / "events.out.tfevents.9999999999.another-machine-whose-clock-is-ahead")
    with RunFolder.open(tmp_path, CONFIG, resume=True) as run:
        run.cut_back(3)
        run.log(4, "train", {"loss": 24.0})
    assert scalars(tmp_path, "train/loss") == [(1, 11.0), (2, 12.0), (3, 13.0), (4, 24.0)]


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_torn_event_file_is_cut(tmp_path: Path, cut: int) -> None:
    with RunFolder.open(tmp_path, CONFIG) as run:
        for step in range(1, 4):
            run.log(step, "train", {"loss": 10.0 + step})
    (file,) = tmp_path.glob("events.out.*")
    os.truncate(file, file.stat().st_size - cut)
    with RunFolder.open(tmp_path, CONFIG, resume=True) as run:
        run.cut_back(1)
        run.log(2, "train", {"loss": 22.0})
    assert scalars(tmp_path, "train/loss") == [(1, 11.0), (2, 22.0)]


def test_the_purge_mark_of_an_older_resume_hides_nothing(tmp_path: Path) -> None:
    ahead = tmp_path / "events.out.tfevents.9999999999.another-machine-whose-clock-is-ahead"
    with RunFolder.open(tmp_path, CONFIG) as run:
        run.log(1, "train", {"loss": 11.0})
        run.log(2, "train", {"loss": 12.0})
    before = set(tmp_path.glob("events.out.*"))
    with RunFolder.open(tmp_path, CONFIG, resume=True) as run:
        run.cut_back(1)
        run.log(2, "train", {"loss": 22.0})
        run.log(3, "train", {"loss": 23.0})
    (set(tmp_path.glob("events.out.*")) - before).pop().rename(ahead)
    with RunFolder.open(tmp_path, CONFIG, resume=True) as run:
        run.cut_back(2)
        run.log(3, "train", {"loss": 33.0})
    assert scalars(tmp_path, "train/loss") == [(1, 11.0), (2, 22.0), (3, 33.0)]


def test_a_tensorboard_that_is_watching_drops_the_steps_too(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path, CONFIG) as run:
        for step in range(1, 6):
            run.log(step, "train", {"loss": 10.0 + step})
    (old,) = tmp_path.glob("events.out.*")
    old.rename(tmp_path / "events.out.tfevents.0000000001.first")
    watching = events(tmp_path)
    with RunFolder.open(tmp_path, CONFIG, resume=True) as run:
        run.cut_back(3)
        run.log(4, "train", {"loss": 24.0})
        watching.Reload()
    shown = [(event.step, event.value) for event in watching.Scalars("train/loss")]
    assert shown == [(1, 11.0), (2, 12.0), (3, 13.0), (4, 24.0)]


def test_cut_back_keeps_what_was_not_finite(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path, CONFIG) as run:
        run.log(1, "train", {"a": math.nan})
        run.cut_back(1)
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["value"] is None


def test_metrics_on_a_full_disk_are_one_line_and_no_line_is_torn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = os.write
    left = [30]

    def filling(file: int, data: Any) -> int:
        if left[0] == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        done = usual(file, data[: left[0]])
        left[0] -= done
        return done

    with RunFolder.open(tmp_path, CONFIG) as run:
        run.log(1, "train", {"loss": 1.0})
        monkeypatch.setattr(os, "write", filling)
        with pytest.raises(InputError, match=r"cannot write metrics\.jsonl .*No space left on device") as refused:
            run.log(2, "train", {"loss": 2.0})
        one_line(refused.value)
        monkeypatch.undo()
        assert (tmp_path / "metrics.jsonl").read_bytes()[-1:] != b"\n"
        run.log(3, "train", {"loss": 3.0})
    assert lines(tmp_path) == [(1, 1.0), (3, 3.0)]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    "line",
    [
        "[" * 100_000,
        '{"step": 1e999, "split": "a", "name": "b", "value": 1}',
        f'{{"step": {10**30}, "split": "a", "name": "b", "value": 1}}',
        f'{{"step": 1, "split": "a", "name": "b", "value": {10**400}}}',
    ],
)
def test_metrics_that_no_number_holds_are_left_out(tmp_path, line):
    good = '{"step": 1, "split": "a", "name": "b", "value": 1.0}'
    (tmp_path / "metrics.jsonl").write_text(f"{line}\n{good}\n")
    assert [found["value"] for found in read_metrics(tmp_path)] == [1.0]
