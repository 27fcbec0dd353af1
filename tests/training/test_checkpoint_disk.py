"""Whatever a disk or a kill does while a checkpoint is written, a good one is left."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from metapretrain import files
from metapretrain.errors import InputError
from metapretrain.training.checkpoint import save
from tests.forks import Popen, python
from tests.training.states import read, round_trip, same

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("call", ["write", "fsync", "rename", "mkdir"])
@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_full_disk_at_any_call_leaves_the_last_one_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, after: int
) -> None:
    save(tmp_path, 1, {"w": torch.ones(3)})
    usual, count = getattr(os, call), iter(range(100))

    def failing(*args: Any, **more: Any) -> Any:
        if next(count) >= after:
            raise OSError(errno.ENOSPC, "No space left on device")
        return usual(*args, **more)

    monkeypatch.setattr(os, call, failing)
    said = None
    try:
        save(tmp_path, 2, {"w": torch.zeros(3)})
    except InputError as error:
        said = str(error)
    monkeypatch.undo()
    if said is None:  # there were fewer calls than `after`
        assert after > 0
        assert read(tmp_path)[0] == 2
        return
    assert "No space left on device" in said
    assert "step-00000001, is untouched" in said
    assert "\n" not in said
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert same(read(tmp_path), (1, {"w": torch.ones(3)}))


def test_a_short_write_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = os.write
    monkeypatch.setattr(files.os, "write", lambda file, data: usual(file, data[:7]))
    state = {"w": torch.randn(40)}
    assert same(state, round_trip(tmp_path, state))


def test_a_real_size_limit_gives_one_line(tmp_path: Path) -> None:
    code = f"""
import resource, torch
from metapretrain.errors import InputError
from metapretrain.training.checkpoint import save
save({str(tmp_path)!r}, 1, {{"w": torch.ones(3)}})
resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
try:
    save({str(tmp_path)!r}, 2, {{"w": torch.ones(30000)}})
except InputError as error:
    print(error)
"""
    done = python("-c", code, warm=False)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 1
    assert "File too large" in done.stdout
    assert "step-00000001, is untouched" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert read(tmp_path)[0] == 1


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot write checkpoint .*there is no checkpoint before it") as refused:
        save(tmp_path / "file" / "checkpoint", 1, {})
    assert "\n" not in str(refused.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder(tmp_path: Path) -> None:
    save(tmp_path, 1, {"a": 1})
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(InputError, match="Permission denied"):
            save(tmp_path, 2, {"a": 2})
        assert read(tmp_path) == (1, {"a": 1})
    finally:
        tmp_path.chmod(0o700)


def test_killed_while_writing_every_time_a_good_one_is_left(tmp_path: Path) -> None:
    code = f"""
import torch
from metapretrain.training.checkpoint import load_latest, save
found = load_latest({str(tmp_path)!r})
first = found.step + 1 if found else 1
for step in range(first, 1_000_000):
    save({str(tmp_path)!r}, step, {{"w": torch.full((20000,), float(step)), "step": step}})
    if step == first:
        print("saved", flush=True)
"""
    last = 0
    for wait in (0.05, 0.11, 0.23):
        child = Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, warm=False)
        assert child.stdout is not None
        assert child.stdout.readline() == b"saved\n"
        time.sleep(wait)
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        step, state = read(tmp_path)
        assert state["step"] == step > last
        assert same(state["w"], torch.full((20000,), float(step)))
        last = step
