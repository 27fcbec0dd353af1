"""A damaged TensorBoard file, and one that a kill at the end of a run has left, do not stand in a resume's way."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from metapretrain.training.run_folder import RunFolder
from tests.training.run_files import CONFIG, scalars

LOGGED = [(step, 10.0 + step) for step in range(1, 5)]


def test_what_is_left_of_a_damaged_event_file_is_right_and_the_loss_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with RunFolder.open(tmp_path, CONFIG) as run:
        for step, value in LOGGED:
            run.log(step, "train", {"loss": value})
    (file,) = tmp_path.glob("events.out.*")
    name, whole = file.name, file.read_bytes()
    for place in range(len(whole)):
        for other in tmp_path.glob("events.out.*"):
            other.unlink()
        (tmp_path / name).write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        caplog.clear()
        with RunFolder.open(tmp_path, CONFIG, resume=True) as run, caplog.at_level(logging.WARNING):
            run.cut_back(4)
            run.log(5, "train", {"loss": 15.0})
        found = scalars(tmp_path, "train/loss")
        assert found[-1] == (5, 15.0) and set(found[:-1]) <= set(LOGGED), place
        (told,) = (record.getMessage() for record in caplog.records if record.name.startswith("metapretrain"))
        assert f"{name} is damaged" in told and "\n" not in told, place


def test_final_metrics_are_shown_once_after_a_kill_before_the_result(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path, CONFIG) as run:  # killed before run.finish
        run.log(1, "train", {"loss": 1.0})
        run.hparams(CONFIG, {"test_accuracy": 0.75})
    with RunFolder.open(tmp_path, CONFIG, resume=True) as run:
        run.cut_back(1)
        run.hparams(CONFIG, {"test_accuracy": 0.75})
    assert scalars(tmp_path, "when_done/test_accuracy") == [(0, 0.75)]
    assert scalars(tmp_path, "train/loss") == [(1, 1.0)]
