"""Accuracy under corruptions: against a plain loop, and added to finished runs without touching the rest."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from metapretrain.cli import main
from metapretrain.data.images import ImageSet
from metapretrain.errors import InputError
from metapretrain.evaluation.metrics import calibration_error
from metapretrain.evaluation.representation import subsample
from metapretrain.evaluation.robustness import CORRUPTIONS, CorruptedImages, corrupt, corrupt_runs
from metapretrain.models import build_encoder, build_head
from metapretrain.models.saved import load, save_model

CLASSES = ["dark", "bright"]


def make_images(n: int, size: int = 8) -> ImageSet:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(n) % 2
    noise = torch.randint(0, 140, (n, 1, size, size), generator=generator)
    return ImageSet((noise + 90 * labels[:, None, None, None]).to(torch.uint8), labels, CLASSES, "own", "test")


def by_brightness(images: torch.Tensor) -> torch.Tensor:
    return (images.float().mean(dim=(1, 2, 3)) > 115).long()


def make_run(folder: Path, kind: str = "row", dataset: str = "own", **more: Any) -> Path:
    model = {
        "encoder": "small-conv",
        "stem": "standard",
        "head": "linear",
        "classes": CLASSES,
        "channels": 1,
        "image_size": 8,
        "mean": [0.4],
        "std": [0.2],
    }
    folder.mkdir(parents=True)
    encoder = build_encoder("small-conv", channels=1, image_size=8)
    (folder / "config.json").write_text(json.dumps({"config": {"model": model}}))
    save_model(folder, encoder, build_head("linear", encoder.features, 2), torch.zeros(2, encoder.features))
    result = {"schema": 1, "status": "complete", "method": "simclr", "seed": 0, "dataset": dataset, "kind": kind}
    (folder / "result.json").write_text(json.dumps(result | {"metrics": {"test_accuracy": 0.5}, "wall_s": 3.5} | more))
    return folder


def test_scores_are_those_of_a_plain_loop() -> None:
    images = make_images(40)
    scores = CorruptedImages(images, (2, 5), most=30, seed=3).score(by_brightness)
    part = images.subset(subsample(40, 30, 3))
    means = []
    for name in CORRUPTIONS:
        right = [
            (by_brightness(corrupt(part.images, name, severity, 3)) == part.labels).double().mean().item()
            for severity in (2, 5)
        ]
        means.append(sum(right) / 2)
        assert scores[f"corrupt_{name.replace('-', '_')}_accuracy"] == pytest.approx(means[-1])
    assert scores["corrupt_accuracy"] == pytest.approx(sum(means) / len(means))
    assert scores["corrupt_clean_accuracy"] == (by_brightness(part.images) == part.labels).double().mean().item()
    assert len(scores) == len(CORRUPTIONS) + 2
    assert scores["corrupt_accuracy"] < scores["corrupt_clean_accuracy"]


def test_finished_runs_get_the_scores_once(tmp_path: Path) -> None:
    run, pretraining = make_run(tmp_path / "a-s0"), make_run(tmp_path / "pretrain-a-s0", kind="pretraining")
    before, untouched = json.loads((run / "result.json").read_text()), (pretraining / "result.json").read_bytes()
    asked = []

    def images(dataset: str, size: int) -> ImageSet:
        asked.append((dataset, size))
        return make_images(20, size)

    ((folder, scores),) = corrupt_runs(tmp_path, images)
    assert folder == run
    after = json.loads((run / "result.json").read_text())
    assert after.pop("corrupt") == {"images": 20, "severities": [1, 3, 5], "seed": 0}
    bins = after.pop("reliability")
    assert sum(bins["rows"]) == 20 and len(bins["right"]) == 15
    model, test = load(run), make_images(20)
    shares = model.probabilities(test.images)
    assert sum(bins["right"]) == int((shares.argmax(1) == test.labels).sum())
    assert scores["calibration_error"] == calibration_error(shares, test.labels) > 0
    assert after.pop("metrics") == before.pop("metrics") | scores
    assert after == before
    assert (pretraining / "result.json").read_bytes() == untouched
    assert list(corrupt_runs(tmp_path, images)) == []
    assert asked == [("own", 8)]


def test_the_command_reads_the_data_set_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "a-s0", dataset="digits")
    assert main(["corrupt", str(tmp_path), "--device", "cpu"]) == 2
    assert "trained on classes ['dark', 'bright'], the images have ['0', '1'" in capsys.readouterr().err
    assert "corrupt" not in json.loads((run / "result.json").read_text())


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no finished run in"):
        list(corrupt_runs(tmp_path, lambda *_: make_images(4)))
    with pytest.raises(InputError, match="severity is 6; give a whole number from 1 to 5"):
        CorruptedImages(make_images(4), (6,)).score(by_brightness)
    with pytest.raises(InputError, match="needs images"):
        CorruptedImages(make_images(4).subset([]))


def test_images_of_other_files_than_the_run_was_tested_on_are_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a-s0", data={"test_X.bin": {"bytes": 3, "md5": "1"}})
    images = replace(make_images(20, 8), files={"test_X.bin": {"bytes": 3, "md5": "2"}})
    with pytest.raises(InputError, match=r"a-s0: was tested on another test_X\.bin"):
        list(corrupt_runs(tmp_path, lambda *_: images))
    assert "corrupt" not in json.loads((run / "result.json").read_text())
