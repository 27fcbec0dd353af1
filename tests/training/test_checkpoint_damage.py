"""A damaged, mixed or hostile checkpoint is never loaded: the one before is used."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from metapretrain.files import CheckpointError, json_bytes, load_tensors
from metapretrain.training.checkpoint import load_latest, save
from tests.training.states import read, same


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-9] ^= 1
    file.write_bytes(data)


def empty(file: Path) -> None:
    file.write_bytes(b"")


@pytest.mark.parametrize("damage", [truncate, flip, empty, Path.unlink])
@pytest.mark.parametrize("name", ["tensors.safetensors", "state.json", "manifest.json"])
def test_a_damaged_newest_one_is_passed_over_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, damage: Any
) -> None:
    good = {"w": torch.randn(50), "note": "good"}
    save(tmp_path, 1, good)
    save(tmp_path, 2, {"w": torch.randn(50), "note": "x" * 50})
    damage(tmp_path / "step-00000002" / name)
    with caplog.at_level(logging.WARNING):
        step, state = read(tmp_path)
    assert step == 1
    assert same(good, state)
    (said,) = [record.getMessage() for record in caplog.records]
    assert str(tmp_path / "step-00000002" / name) in said
    assert "\n" not in said
    damage(tmp_path / "step-00000001" / name)
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be read"):
        load_latest(tmp_path)


def test_every_single_bit_matters(tmp_path: Path) -> None:
    """A flip anywhere is found."""
    state = {"w": torch.arange(4.0), "lr": 0.1, "betas": (0.9, None)}
    folder = save(tmp_path, 7, state)
    logging.disable(logging.WARNING)
    try:
        for file in sorted(folder.iterdir()):
            whole = file.read_bytes()
            for place in range(len(whole)):
                bad = bytearray(whole)
                bad[place] ^= 1 << (place % 8)
                file.write_bytes(bad)
                with pytest.raises(CheckpointError):
                    read(tmp_path)
            file.write_bytes(whole)
    finally:
        logging.disable(logging.NOTSET)
    assert same(state, read(tmp_path)[1])


def test_files_of_two_checkpoints_mixed_are_refused(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step, {"w": torch.full((3,), float(step))})
    other = (tmp_path / "step-00000001" / "tensors.safetensors").read_bytes()
    (tmp_path / "step-00000002" / "tensors.safetensors").write_bytes(other)
    assert read(tmp_path)[0] == 1
    (tmp_path / "step-00000001").rename(tmp_path / "step-00000009")
    with pytest.raises(CheckpointError):
        load_latest(tmp_path)


class Trap:
    """Unpickling it would raise."""

    def __reduce__(self) -> Any:
        return (pytest.fail, ("a pickle was loaded",))


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
def test_a_pickle_is_refused_and_never_loaded(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.write_bytes(pickle.dumps(Trap()))
    for read_it in (load_latest, load_tensors):
        with pytest.raises(CheckpointError) as refused:
            read_it(file)
        assert "\n" not in str(refused.value)
        assert ("never loaded" in str(refused.value)) == name.endswith(".pt")
    torch.save({"w": torch.ones(1)}, file)
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        load_tensors(file)


def test_a_pickle_inside_a_checkpoint_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path, 1, {"w": torch.ones(2)})
    (folder / "tensors.safetensors").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(CheckpointError):
        load_latest(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"schema": 1, "step": 2, "state": ' + "[" * 900 + "]" * 900 + "}",
        '{"schema": 1, "step": 2, "state": {"$": "tensor", "name": "w", "layout": "channels_last"}}',
    ],
)
def test_a_state_of_another_shape_falls_back_to_the_checkpoint_before(tmp_path, text):
    for step in (1, 2):
        save(tmp_path, step, {"w": torch.ones(2)})
    newest = tmp_path / "step-00000002"
    (newest / "state.json").write_text(text)
    manifest = json.loads((newest / "manifest.json").read_text())
    digest = hashlib.sha256(text.encode()).hexdigest()
    manifest["files"]["state.json"] = {"bytes": len(text), "sha256": digest}
    (newest / "manifest.json").write_text(json.dumps(manifest))
    assert load_latest(tmp_path).step == 1


@pytest.mark.parametrize("files", [{}, ["state.json"], None])
def test_a_manifest_without_the_two_files_is_damaged(tmp_path: Path, files: Any) -> None:
    save(tmp_path, 1, {"w": torch.ones(2)})
    file = save(tmp_path, 2, {"w": torch.zeros(2)}) / "manifest.json"
    file.write_bytes(json_bytes({**json.loads(file.read_bytes()), "files": files}))
    assert read(tmp_path)[0] == 1
