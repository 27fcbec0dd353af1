"""A folder of image files: layouts, splits, odd files, and one line for every bad folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from metapretrain.data.image_folder import check_image_folder, list_images, load_image_folder, read_images
from metapretrain.data.images import resize
from metapretrain.data.registry import load_images
from metapretrain.errors import InputError

COLORS = {"blue": (0, 0, 255), "green": (0, 255, 0), "red": (255, 0, 0)}


def _fill(folder: Path, counts: dict[str, int], size: tuple[int, int] = (12, 12)) -> None:
    for name, count in counts.items():
        (folder / name).mkdir(parents=True)
        for row in range(count):
            Image.new("RGB", size, COLORS[name]).save(folder / name / f"{row:02}.png")


def test_train_and_test_folders_share_the_class_order(tmp_path: Path) -> None:
    _fill(tmp_path / "train", {"red": 2, "blue": 3, "green": 1})
    _fill(tmp_path / "test", {"red": 1, "green": 2})
    train, test = load_image_folder(tmp_path, "train", 8), load_images("image-folder", tmp_path, "test", 8)
    assert train.classes == test.classes == ["blue", "green", "red"]
    assert train.labels.tolist() == [0, 0, 0, 1, 2, 2] and test.labels.tolist() == [1, 1, 2]
    for rows in (train, test):
        for image, label in zip(rows.images, rows.labels.tolist(), strict=True):
            assert image[:, 3, 4].tolist() == list(COLORS[rows.classes[label]])
    assert train.images.shape == (6, 3, 8, 8)
    assert check_image_folder(tmp_path) == "image-folder: 3 classes, 6 train images, 3 test images"


def test_without_split_folders_a_fifth_is_the_test_part(tmp_path: Path) -> None:
    _fill(tmp_path, {"red": 10, "blue": 20})
    parts = {split: list_images(tmp_path, split) for split in ("train", "test")}
    assert parts["test"][2].bincount().tolist() == [4, 2]
    assert not set(parts["train"][1]) & set(parts["test"][1])
    assert len(parts["train"][1]) == 24
    assert list_images(tmp_path, "test")[1] == parts["test"][1]
    everything = load_image_folder(tmp_path, "all", 8)
    assert everything.labels.bincount().tolist() == [20, 10]


def test_the_record_changes_with_any_byte_and_any_name(tmp_path: Path) -> None:
    _fill(tmp_path / "train", {"red": 2})
    first = load_image_folder(tmp_path, "train", 8).files
    (record,) = first.values()
    sizes = [path.stat().st_size for path in (tmp_path / "train" / "red").iterdir()]
    assert record["bytes"] == sum(sizes) and record["official"] is None and len(record["md5"]) == 32
    assert load_image_folder(tmp_path, "train", 8, workers=1).files == first
    (tmp_path / "train" / "red" / "00.png").rename(tmp_path / "train" / "red" / "07.png")
    assert load_image_folder(tmp_path, "train", 8).files != first


def test_images_are_cut_to_a_square_about_the_centre_and_turned(tmp_path: Path) -> None:
    folder = tmp_path / "train" / "a"
    folder.mkdir(parents=True)
    wide = np.zeros((10, 30, 3), dtype=np.uint8)
    wide[:, 10:20] = 200
    Image.fromarray(wide).save(folder / "0.png")
    half = np.zeros((10, 10, 3), dtype=np.uint8)
    half[:5] = 200
    exif = Image.Exif()
    exif[0x0112] = 6  # shown after a quarter turn clockwise
    Image.fromarray(half).save(folder / "1.png", exif=exif)
    rows = load_image_folder(tmp_path, "train", 10)
    assert rows.images[0].unique().tolist() == [200]
    assert rows.images[1, 0, 5].tolist() == [0] * 5 + [200] * 5


def test_every_pixel_format_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "train" / "a"
    folder.mkdir(parents=True)
    grey = np.full((6, 6), 100, dtype=np.uint8)
    Image.fromarray(grey).save(folder / "0_grey.png")
    Image.fromarray(grey.astype(np.uint16) * 256 + 7).save(folder / "1_deep.png")
    Image.fromarray(grey).convert("RGBA").save(folder / "2_alpha.png")
    palette = Image.fromarray(grey).convert("P")
    palette.save(folder / "3_palette.png", transparency=bytes(range(256)))
    Image.fromarray(grey).convert("RGB").save(folder / "4_photo.JPG", quality=95)
    (folder / "notes.txt").write_text("not an image")
    (folder / ".hidden.png").write_text("not an image")
    rows = load_image_folder(tmp_path, "train", 6)
    assert len(rows) == 5
    assert bool((rows.images.int() - 100).abs().le(1).all())
    assert load_image_folder(tmp_path, "train", 6, channels=1).images.shape == (5, 1, 6, 6)


def test_a_broken_image_is_named(tmp_path: Path) -> None:
    _fill(tmp_path / "train", {"red": 3}, (64, 64))
    broken = tmp_path / "train" / "red" / "01.png"
    for content in (b"", b"no image at all", broken.read_bytes()[:90]):
        broken.write_bytes(content)
        with pytest.raises(InputError, match=r"cannot read the image .*01\.png: .*repair or remove it") as error:
            load_image_folder(tmp_path, "train", 8)
        assert "\n" not in str(error.value)


def test_bad_folders_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no folder .*nowhere: name a folder with one subfolder"):
        load_image_folder(tmp_path / "nowhere", "train")
    with pytest.raises(InputError, match="has no class folders"):
        load_image_folder(tmp_path, "train")
    (tmp_path / "a_file").touch()
    with pytest.raises(InputError, match="a_file is a file, not a folder"):
        load_image_folder(tmp_path / "a_file", "train")
    _fill(tmp_path / "train", {"red": 2})
    with pytest.raises(InputError, match="has a train folder but no test folder"):
        load_image_folder(tmp_path, "test")
    assert "no test images" in check_image_folder(tmp_path)
    _fill(tmp_path / "test", {"blue": 1})
    with pytest.raises(InputError, match=r"has the class 'blue', which .*train has not"):
        load_image_folder(tmp_path, "test")
    (tmp_path / "train" / "green").mkdir()
    with pytest.raises(InputError, match="green has no images"):
        load_image_folder(tmp_path, "train")


def test_bad_options_are_one_line(tmp_path: Path) -> None:
    _fill(tmp_path / "train", {"red": 2})
    with pytest.raises(InputError, match="unknown split 'trian'; did you mean 'train'"):
        load_image_folder(tmp_path, "trian")
    with pytest.raises(InputError, match=r"image size is 0; give a whole number"):
        load_image_folder(tmp_path, "train", 0)
    with pytest.raises(InputError, match="channels must be 1 or 3, got 2"):
        load_image_folder(tmp_path, "train", 8, channels=2)


def test_the_rows_are_the_same_on_every_reading(tmp_path: Path) -> None:
    _fill(tmp_path, {"red": 5, "green": 5})
    first, second = (load_image_folder(tmp_path, "train", 8) for _ in range(2))
    assert torch.equal(first.images, second.images) and torch.equal(first.labels, second.labels)


def test_pixels_that_pillow_would_clip_are_refused(tmp_path: Path) -> None:
    for number, pixels in enumerate((np.full((8, 8), 60000, np.int32), np.full((8, 8), 0.7, np.float32))):
        file = tmp_path / f"{number}.tiff"
        Image.fromarray(pixels).save(file)
        with pytest.raises(InputError, match=rf"{number}\.tiff: its pixels are of .*8 or 16 bits"):
            read_images([file], 8)


def test_names_that_are_no_utf8_are_read(tmp_path: Path) -> None:
    for name in (b"0.png", b"\xff\xfe.png", b"2.png"):
        for folder in (b"cat", b"\xff"):
            os.makedirs(os.fsencode(tmp_path / "train") + b"/" + folder, exist_ok=True)
            Image.new("RGB", (8, 8)).save(os.fsencode(tmp_path / "train") + b"/" + folder + b"/" + name, format="PNG")
    images = load_image_folder(tmp_path, "train", 8)
    assert len(images) == 6 and images.classes == ["cat", "\udcff"]


def test_a_class_of_one_image_cannot_be_split(tmp_path: Path) -> None:
    for name in ("a/0", "a/1", "a/2", "b/0"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (8, 8)).save(tmp_path / f"{name}.png")
    with pytest.raises(InputError, match=r"b has one image.*folders train and test"):
        load_image_folder(tmp_path, "test", 8)


@pytest.mark.parametrize("size", [True, 8.5, 0])
def test_a_size_that_is_no_count_is_refused(tmp_path: Path, size: Any) -> None:
    with pytest.raises(InputError, match=r"image size is .*; give a whole number"):
        read_images([], size)
    with pytest.raises(InputError, match=r"image size is .*; give a whole number"):
        resize(torch.zeros(1, 1, 4, 4, dtype=torch.uint8), size)
