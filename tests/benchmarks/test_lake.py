"""Lake's one-shot runs from a made folder and archive, and their score."""

from __future__ import annotations

import json
import threading
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from score_lake import lake_errors, load_lake

from benchmarks.run_fewshot import main
from metapretrain import load
from metapretrain.errors import InputError


def drawing(path: Path, seed: int, noise: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).random((15, 15)) > 0.3
    pixels ^= np.random.default_rng(1000 * seed + noise).random((15, 15)) > 0.97
    pixels[[0, -1]] = pixels[:, [0, -1]] = True  # paper
    Image.fromarray(pixels.repeat(7, 0).repeat(7, 1)).save(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five alphabets of one character, one of 20, and 20 runs whose items are in another order than the classes."""
    root = tmp_path_factory.mktemp("lake")
    for alphabet, character in [*((a, 1) for a in range(5)), *((5, c) for c in range(1, 21))]:
        for number in range(20):
            place = root / "omniglot-py" / "images_background" / f"A{alphabet}" / f"character{character:02}"
            drawing(place / f"{number:02}.png", alphabet + 10 * character, number)
    for run in range(1, 21):
        lines, order = [], np.random.default_rng(run).permutation(20) + 1
        for item, label in enumerate(order, start=1):
            place = root / f"run{run:02}"
            drawing(place / "training" / f"class{label:02}.png", 100 * run + label, 0)
            drawing(place / "test" / f"item{item:02}.png", 100 * run + label, 1)
            lines.append(f"run{run:02}/test/item{item:02}.png run{run:02}/training/class{label:02}.png")
        (place / "class_labels.txt").write_text("\n".join(lines) + "\n")
    return root


class Pixels:
    """A model that compares pixels."""

    def adapt(self, images: torch.Tensor, labels: torch.Tensor) -> Pixels:
        self.shown, self.labels = images.flatten(1).float(), labels
        return self

    def predict(self, images: torch.Tensor) -> torch.Tensor:
        return self.labels[torch.cdist(images.flatten(1).float(), self.shown).argmin(1)]


def test_each_item_stands_behind_the_drawing_of_its_class(folder: Path) -> None:
    data = load_lake(folder)
    assert len(data["train"]) == 400  # 5 characters in 4 turns, of 20 drawings
    assert data["validation"].classes == [f"A5/character{c:02}/rot000" for c in range(1, 21)]
    assert data["test"].classes[:21:20] == ["run01/class01", "run02/class01"] and len(data["test"]) == 800
    shown, asked = data["test"].images[0::2].flatten(1).float(), data["test"].images[1::2].flatten(1).float()
    assert bool((torch.cdist(asked, shown).argmin(1) == torch.arange(400)).all())


def test_rows_are_tested_once_on_the_20_runs(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--device", "cpu", "--smoke", "--no-figures", "--settings", "lake", "--methods", "protonet", "--out"]
    assert main([*words, str(tmp_path), "--data-dir", str(folder)]) == 0
    (result,) = tmp_path.glob("fewshot/omniglot-lake-lake-conv4-smoke/protonet-s0/result.json")
    found = json.loads(result.read_text())
    model, test = load(result.parent), load_lake(folder)["test"]
    right = 1 - sum(lake_errors(model, test)) / 20
    assert found["counts"]["test_episodes"] == 20 and found["metrics"]["test_accuracy"] == pytest.approx(right)
    assert main([*words, str(tmp_path / "other"), "--dataset", "made"]) != 0
    assert "--settings lake stands alone and needs Omniglot" in capsys.readouterr().err


def test_the_archive_gives_what_its_folders_give(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readers, read = set[int](), zipfile.Path.read_bytes

    def watched(path: zipfile.Path) -> bytes:
        readers.add(threading.get_ident())
        time.sleep(0.0005)  # so that another thread would have its turn
        return read(path)

    monkeypatch.setattr(zipfile.Path, "read_bytes", watched)
    (tmp_path / "omniglot-py").symlink_to(folder / "omniglot-py")
    with zipfile.ZipFile(tmp_path / "all_runs.zip", "w") as archive:
        for file in sorted(folder.glob("run*/**/*")):
            archive.write(file, file.relative_to(folder).as_posix())
    one, other = (load_lake(place)["test"] for place in (folder, tmp_path))
    assert torch.equal(one.images, other.images) and one.classes == other.classes
    assert len(readers) == 1  # archives are not safe to read by several threads


def test_wrong_lists_are_told_by_line(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "omniglot-py").symlink_to(folder / "omniglot-py")
    with pytest.raises(InputError, match=r"no all_runs.zip and no folders run01 to run20"):
        load_lake(tmp_path)
    labels = folder / "run07" / "class_labels.txt"
    good = labels.read_text()
    try:
        labels.write_text(good.replace("item03", "item33"))
        with pytest.raises(InputError, match=r"class_labels.txt, line 3: .*item33.* does not name two files"):
            load_lake(folder)
        labels.write_text("\n".join(good.split("\n")[1:]))
        with pytest.raises(InputError, match=r"class_labels.txt should name 20 classes, it names 19"):
            load_lake(folder)
    finally:
        labels.write_text(good)
