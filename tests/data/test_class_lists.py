"""mini-ImageNet, tieredImageNet and CUB from made folders, and what is told of faults in them."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from metapretrain.data import class_lists
from metapretrain.data.registry import DATASETS, load_few_shot
from metapretrain.errors import InputError

LISTS = {"train": ["a", "b", "c"], "val": ["d", "e"], "test": ["f", "g"]}


def write(root: Path, name: str) -> Path:
    """Two images of each class, of a colour of their own."""
    for part, classes in LISTS.items():
        rows = ["filename,label"]
        for label in classes:
            for number in range(2):
                inside = {"mini-imagenet": f"images/{label}{number}.jpg", "cub": f"images/{label}/{number}.jpg"}
                place = root / inside.get(name, f"{part}/{label}/{number}.jpg")
                place.parent.mkdir(parents=True, exist_ok=True)
                Image.new("RGB", (10, 8), (30 * ord(label) % 256, 7 + 90 * number, 7)).save(place, quality=100)
                rows.append(f"{place.name},{label}")
        if name == "mini-imagenet":
            (root / f"{part}.csv").write_text("\n".join(rows) + "\n")
        if name == "cub":
            (root / f"{part}.txt").write_text("\n".join(classes) + "\n")
    return root


@pytest.fixture(params=["mini-imagenet", "tiered-imagenet", "cub"])
def name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    monkeypatch.setattr(class_lists, "CLASSES", {request.param: ((3, 2, 2), 14)})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found: str = request.param
    return found


def test_parts_and_classes_are_those_of_the_lists(name: str, tmp_path: Path) -> None:
    data = load_few_shot(name, write(tmp_path / "set", name), 16)
    assert (data.train.classes, data.validation.classes, data.test.classes) == tuple(LISTS.values())
    assert data.train.images.shape == (6, 3, 16, 16) and data.train.labels.tolist() == [0, 0, 1, 1, 2, 2]
    for image, label in zip(data.test.images, data.test.labels.tolist(), strict=True):
        assert abs(int(image[0, 0, 0]) - 30 * ord("fg"[label]) % 256) < 4
    assert "train 3 classes, 6 images; validation 2 classes" in DATASETS[name].check(tmp_path / "set")
    assert load_few_shot(name, tmp_path / "set").test.image_size == 84


def test_another_number_of_images_is_refused(name: str, tmp_path: Path) -> None:
    write(tmp_path / "set", name)
    class_lists.CLASSES[name] = ((3, 2, 2), 15)
    with pytest.raises(InputError, match=r"has 3/2/2 classes and 15 images, but here are 3/2/2 and 14"):
        load_few_shot(name, tmp_path / "set")


def test_a_missing_part_or_folder_is_told(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no train.* in .*nothing; expected "):
        load_few_shot(name, tmp_path / "nothing")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("none.jpg,a", "line 8: there is no image"),
        ("a0.jpg", ".*line 8: 1 field for 2 columns"),
        ("a0.jpg,", "line 8: label is empty"),
        ("", ""),
    ],
)
def test_rows_of_mini_imagenet_are_told_by_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str, told: str
) -> None:
    monkeypatch.setattr(class_lists, "CLASSES", {"mini-imagenet": ((3, 2, 2), 14)})
    root = write(tmp_path, "mini-imagenet")
    with (root / "train.csv").open("a") as stream:
        stream.write(line + "\n")
    if not told:  # empty lines at the end are none
        assert len(load_few_shot("mini-imagenet", root, 8).train) == 6
        return
    with pytest.raises(InputError, match=rf"train.csv[,:] {told}"):
        load_few_shot("mini-imagenet", root)


def test_the_heading_and_the_class_folders_are_checked(tmp_path: Path) -> None:
    root = write(tmp_path / "a", "mini-imagenet")
    (root / "val.csv").write_text("a0.jpg,a\n")
    with pytest.raises(InputError, match=r"val.csv.*filename"):
        load_few_shot("mini-imagenet", root)
    root = write(tmp_path / "b", "cub")
    (root / "test.txt").write_text("f\nnone\n")
    with pytest.raises(InputError, match=r"test.txt, line 2: there is no class folder"):
        load_few_shot("cub", root)
