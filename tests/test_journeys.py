"""How far it is from what a user calls to what happens: frames and files of this project on the way."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

from metapretrain import EpisodeLoader, EpisodeSampler, EpisodeSpec, ProtoLoss

ROOT = Path(__file__).parent.parent
OURS = (str(ROOT / "metapretrain"), str(ROOT / "benchmarks"))
SCRIPTS = {  # options, and the function that computes the first gradient
    "run_stl10": ("--dataset digits --methods supervised-mlp", "engine._update"),
    "run_text": ("--methods cross", "engine._update"),
    "run_prompts": ("--methods ppt", "tuning._gradient_of"),
    "run_schedule": ("--methods uniform --settings aware", "engine._update"),
    "run_fewshot": ("--methods protonet", "learner.backward"),
}


class Reached(BaseException):
    """Ends a run where it was to be looked at."""


def way(script: str, options: str, monkeypatch: pytest.MonkeyPatch, out: Path, last: str) -> list[str]:
    """The frames of this project from a script's main on, down to the first gradient computed in a function `last`."""
    compute, found = torch.autograd._engine_run_backward, list[str]()  # of both `grad` and `backward`

    def looked(*args: Any, **kwargs: Any) -> Any:
        frames, frame = [], sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename.startswith(OURS):
                frames.append(f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}")
            frame = frame.f_back  # type: ignore[assignment]
        if frames[0] == last:
            assert frames[-2].endswith(".main"), "the last one is the guard around main"
            found.extend(frames[-2::-1])
            raise Reached
        return compute(*args, **kwargs)

    monkeypatch.setattr(torch.autograd, "_engine_run_backward", looked)
    with pytest.raises(Reached):
        importlib.import_module(script).main([*options.split(), "--smoke", "--seeds", "0", "--out", str(out)])
    return found


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_is_at_its_first_training_step_after_few_calls(
    script: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    options, last = SCRIPTS[script]
    found = [*way(script, options, monkeypatch, tmp_path, last), "the step's forward"]
    assert len(found) <= 8, found


def test_few_shot_training_is_at_its_inner_update_after_few_calls(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = way("run_fewshot", "--methods maml", monkeypatch, tmp_path, "engines.descend")
    assert len(found) <= 10, found


def test_labels_become_a_loss_in_few_files() -> None:
    files: set[str] = set()

    def look(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(OURS):
            files.add(frame.f_code.co_filename)

    labels = np.arange(60) % 6
    x = np.random.default_rng(0).normal(size=(60, 4)).astype("float32")
    sys.setprofile(look)
    try:
        sampler = EpisodeSampler(labels, EpisodeSpec(ways=3, shots=2, queries=2), episodes=2, seed=0)
        loss = ProtoLoss("query")
        values = [loss(episode.query.x, episode.query.y).item() for episode in EpisodeLoader(x, sampler)]
    finally:
        sys.setprofile(None)
    assert len(values) == 2
    assert len({file for file in files if not file.endswith("__init__.py")}) <= 7, sorted(files)
