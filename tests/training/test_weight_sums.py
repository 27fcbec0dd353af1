"""Weights of a folder that are not those that were written are not used."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from metapretrain.errors import InputError
from metapretrain.training.checkpoint import SUMS, check_sums, write_sums

FILES = ("head.safetensors", "encoder/model.safetensors", "checkpoint/step-1/state.safetensors", "notes.txt")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    check_sums(tmp_path)  # written before there were checksums
    write_sums(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", FILES)
def test_each_file_of_weights_is_checked_and_no_other(folder: Path, name: str) -> None:
    check_sums(folder)
    (folder / name).write_text("another run's")
    if name in FILES[:2]:
        with pytest.raises(InputError, match=f"{name} is damaged, or of another run: .*, or remove {SUMS}"):
            check_sums(folder)
    else:
        check_sums(folder)


def test_weights_that_are_not_listed_are_refused(folder: Path) -> None:
    (folder / "mine").mkdir()
    (folder / "mine/own.safetensors").write_text("")
    check_sums(folder)
    (folder / SUMS).write_text((folder / SUMS).read_text().replace("head", "heap"))
    with pytest.raises(InputError, match=r"damaged: it has no head\.safetensors"):
        check_sums(folder)


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="needs sha256sum")
def test_the_usual_tool_reads_it(folder: Path) -> None:
    done = subprocess.run(["sha256sum", "--check", "--strict", SUMS], cwd=folder, capture_output=True, text=True)
    assert (done.returncode, sorted(done.stdout.split("\n"))[1:]) == (0, [f"{name}: OK" for name in sorted(FILES[:2])])
