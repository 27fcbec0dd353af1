"""Omniglot: split files, turned characters as classes, ink, and one line for all that is missing."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from metapretrain.data.omniglot import load_omniglot, turned
from metapretrain.data.registry import DATASETS, load_images
from metapretrain.errors import InputError

SPLITS = {
    "train": ["Greek/character01", "Greek/character02"],
    "val": ["Latin/character01"],
    "test": ["Tifinagh/character07"],
}


def drawing(number: int) -> np.ndarray:
    """Paper is 1 and ink 0, as published; ink in one corner, more of it in later drawings."""
    pixels = np.ones((105, 105), dtype=bool)
    pixels[: 30 + number, : 15 + number] = False
    return pixels


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for part, names in (("images_background", ["Greek", "Latin"]), ("images_evaluation", ["Tifinagh"])):
        for name in itertools.chain(*SPLITS.values()):
            if name.split("/")[0] in names:
                place = tmp_path / "omniglot-py" / part / name
                place.mkdir(parents=True)
                for number in range(20):
                    Image.fromarray(drawing(number)).save(place / f"0001_{number + 1:02}.png")
    (tmp_path / "omniglot-splits").mkdir()
    for split, names in SPLITS.items():
        lines = [f"{name}/rot{angle:03}" for name in names for angle in (0, 90, 180, 270)]
        (tmp_path / "omniglot-splits" / f"{split}.txt").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_a_turned_character_is_another_class_with_the_same_drawings(folder: Path) -> None:
    train = load_omniglot(folder, "train")
    assert train.images.shape == (2 * 4 * 20, 1, 28, 28)
    assert train.classes[:5] == [f"Greek/character01/rot{a}" for a in ("000", "090", "180", "270")] + [
        "Greek/character02/rot000"
    ]
    assert train.labels.bincount().tolist() == [20] * 8
    upright = train.images[:20]
    for quarter in range(4):
        assert torch.equal(train.images[20 * quarter : 20 * quarter + 20], torch.rot90(upright, quarter, (2, 3)))


def test_turned_is_counterclockwise_as_pillow_turns(folder: Path) -> None:
    pixels = np.arange(16, dtype=np.uint8).reshape(4, 4)
    for quarter in range(4):
        expected = np.asarray(Image.fromarray(pixels).rotate(90 * quarter))
        mine = turned(torch.from_numpy(pixels)[None], torch.tensor([quarter]))[0]
        assert mine.tolist() == expected.tolist()


def test_ink_is_one_and_paper_zero_at_the_right_place(folder: Path) -> None:
    image = load_omniglot(folder, "validation").images[0, 0]
    assert image[:6, :3].min() == 255
    assert image[10:, :].max() == 0 and image[:, 6:].max() == 0
    assert (load_omniglot(folder, "validation").images[:20].double().mean() / 255).item() == pytest.approx(
        np.mean([1 - drawing(number).mean() for number in range(20)]), abs=2e-3
    )


@pytest.mark.parametrize("place", [".", "omniglot-py"])
def test_both_folders_may_be_named(folder: Path, place: str) -> None:
    assert len(load_images("omniglot", folder / place, "test")) == 80
    assert load_images("omniglot", folder / place, "test", 14).image_size == 14


def test_check_reads_every_drawing_and_says_what_is_there(folder: Path) -> None:
    assert DATASETS["omniglot"].check(folder) == (
        "omniglot: train 8 classes, 160 images; validation 4 classes, 80 images; test 4 classes, 80 images"
    )
    next((folder / "omniglot-py").rglob("*.png")).write_bytes(b"")
    with pytest.raises(InputError, match="cannot read the image"):
        DATASETS["omniglot"].check(folder)


def test_a_character_in_two_splits_is_refused(folder: Path) -> None:
    with (folder / "omniglot-splits" / "test.txt").open("a") as file:
        file.write("Greek/character02/rot090\n")
    with pytest.raises(InputError, match=r"train and test share 1 class.*'Greek/character02'"):
        DATASETS["omniglot"].check(folder)


def test_what_is_missing_or_malformed_is_named(folder: Path) -> None:
    splits = folder / "omniglot-splits"
    with pytest.raises(InputError, match=r"no omniglot-splits/trainval.txt in or beside"):
        load_omniglot(folder, "trainval")
    (splits / "val.txt").write_text("Greek/character01/rot000\nGreek/character01\n")
    with pytest.raises(InputError, match=r"val.txt, line 2: 'Greek/character01' is not"):
        load_omniglot(folder, "validation")
    (splits / "val.txt").write_text("Greek/character01/rot000\n" * 2)
    with pytest.raises(InputError, match=r"1 classes are named twice"):
        load_omniglot(folder, "validation")
    (splits / "val.txt").write_text("Klingon/character01/rot000\n")
    with pytest.raises(InputError, match=r"1 characters of val.txt are not in .*'Klingon/character01'"):
        load_omniglot(folder, "validation")
    next((folder / "omniglot-py").rglob("*.png")).unlink()
    with pytest.raises(InputError, match=r"has 19 drawings, 20 expected"):
        load_omniglot(folder, "train")
    shutil.rmtree(folder / "omniglot-py" / "images_evaluation")
    with pytest.raises(InputError, match=r"no images_background and images_evaluation in"):
        load_omniglot(folder, "train")
