"""A folder of image files: layouts, splits, odd files, and one line for every bad folder."""

from __future__ import annotations

import logging
import os
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
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
    assert train.names[:2] == ("train/blue/00.png", "train/blue/01.png") and len(test.names) == 3
    assert train.subset([5, 0]).names == ("train/red/01.png", "train/blue/00.png")
    assert train.subset(train.labels == 1).names == ("train/green/00.png",)
    assert check_image_folder(tmp_path) == "image-folder: 3 classes, 6 train images, 3 test images, 9 images in all"


def test_classes_that_differ_by_capitals_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _fill(tmp_path, {"red": 3, "blue": 3})
    load_image_folder(tmp_path, "train", 8)
    assert not caplog.text
    (tmp_path / "red").rename(tmp_path / "Blue")
    assert load_images("image-folder", tmp_path, "train", 8).classes == ["Blue", "blue"]
    assert caplog.text.count("'Blue' and 'blue' are two classes; write them alike if they are one") == 1
    (tmp_path / "Blue").rename(tmp_path / "7")
    (tmp_path / "blue").rename(tmp_path / "07")
    with pytest.raises(InputError, match="'07' and '7' are two classes, but one number; write them alike"):
        load_image_folder(tmp_path, "train", 8)


def test_without_split_folders_a_fifth_is_the_test_part(tmp_path: Path) -> None:
    _fill(tmp_path, {"red": 10, "blue": 20})
    parts = {split: list_images(tmp_path, split) for split in ("train", "test")}
    assert parts["test"][2].bincount().tolist() == [4, 2]
    assert not set(parts["train"][1]) & set(parts["test"][1])
    assert len(parts["train"][1]) == 24
    assert list_images(tmp_path, "test")[1] == parts["test"][1]
    everything = load_image_folder(tmp_path, "all", 8)
    assert everything.labels.bincount().tolist() == [20, 10]


WORDS = {
    "train": ("train", "training", "trn"),
    "validation": ("val", "valid", "validation", "dev"),
    "test": ("test", "testing"),
}
FORMS = ("{}", "{}_set", "{}-images", "seg_{}", "{}_data", "images {}", "1_{}")


@settings(max_examples=60, deadline=None)
@given(
    spelled=st.fixed_dictionaries({part: st.sampled_from(words) for part, words in WORDS.items()}),
    form=st.sampled_from(FORMS),
    case=st.sampled_from((str.lower, str.upper, str.title)),
)
def test_parts_are_known_in_any_spelling(spelled: dict[str, str], form: str, case: Any) -> None:
    with tempfile.TemporaryDirectory() as name:
        root, count = Path(name), {"train": 3, "validation": 2, "test": 1}
        for part, word in spelled.items():
            _fill(root / case(form.format(word)), dict.fromkeys(COLORS, count[part]), (4, 4))
        assert {part: len(list_images(root, part)[1]) for part in ("train", "test")} == {"train": 9, "test": 3}
        classes, paths, labels = list_images(root, "all")
        assert classes == sorted(COLORS) and len(paths) == len(labels) == 18


def test_a_class_may_have_the_name_of_a_part_but_parts_are_no_classes(tmp_path: Path) -> None:
    for name in ("train", "car", "plane"):
        (tmp_path / "vehicles" / name).mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(tmp_path / "vehicles" / name / "0.png")
    assert list_images(tmp_path / "vehicles", "all")[0] == ["car", "plane", "train"]
    for name in ("Training", "Testing"):
        (tmp_path / "flat" / name).mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(tmp_path / "flat" / name / "0.png")
    with pytest.raises(InputError, match="Training has no class folders"):
        list_images(tmp_path / "flat", "train")
    for name in ("training", "Train_set"):
        _fill(tmp_path / "twice" / name, {"red": 1, "blue": 1})
    with pytest.raises(InputError, match="Train_set and training are both named as the train part"):
        list_images(tmp_path / "twice", "train")


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.sampled_from(("a.png", "b.JPG", "c.jfif", "d", "e.txt", "f.PNG.bak", ".g.png", "h.bmp")),
        max_size=8,
        unique=True,
    )
)
def test_every_file_is_read_or_counted(names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder, capture() as told:
        root = Path(folder)
        for place in ("cat/deep", "dog"):
            (root / place).mkdir(parents=True)
            for name in ["0.png", *names]:
                Image.new("L", (4, 4)).save(root / place / name, "PNG")
        Image.new("L", (4, 4)).save(root / "beside.png")
        read = len(list_images(root, "all")[1])
        left = sum(int(message.split("left out ")[1].split(" files")[0]) for message in told)
        assert read + left == 2 * (1 + len(names)) + 1
        assert read == 2 + 2 * len({"a.png", "b.JPG", "c.jfif", "h.bmp"} & set(names))


@contextmanager
def capture() -> Iterator[list[str]]:
    """The warnings of the reader."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("metapretrain.data.image_folder").addHandler(handler)
    try:
        yield told
    finally:
        logging.getLogger("metapretrain.data.image_folder").removeHandler(handler)


def test_linked_folders_are_read_once(tmp_path: Path) -> None:
    _fill(tmp_path / "data", {"red": 2, "blue": 1})
    _fill(tmp_path / "store", {"green": 3})
    (tmp_path / "data" / "red" / "more").symlink_to(tmp_path / "store" / "green")
    (tmp_path / "data" / "red" / "round").symlink_to(tmp_path / "data" / "red")
    assert list_images(tmp_path / "data", "all")[2].bincount().tolist() == [1, 5]


def test_what_stands_beside_the_parts_is_told(tmp_path: Path, caplog: Any) -> None:
    _fill(tmp_path / "train", {"red": 1, "blue": 1})
    (tmp_path / "extra").mkdir()
    (tmp_path / "labels.csv").touch()
    list_images(tmp_path, "train")
    assert "left out extra, labels.csv, beside its parts" in caplog.text
    _fill(tmp_path / "val", {"red": 1, "blue": 1})
    list_images(tmp_path, "train")
    assert "left out val: training holds images of the train part back" in caplog.text


def test_images_without_classes_are_a_split(tmp_path: Path) -> None:
    for name in ("0.png", "a/1.png", "a/b/2.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4)).save(tmp_path / name)
    images = load_images("image-folder", tmp_path, "unlabeled", 8)
    assert images.images.shape == (3, 3, 8, 8) and images.labels.tolist() == [-1] * 3 and not images.classes
    (tmp_path / "none").mkdir()
    with pytest.raises(InputError, match="has no images"):
        load_images("image-folder", tmp_path / "none", "unlabeled", 8)


def test_the_record_changes_with_any_byte_and_any_name(tmp_path: Path) -> None:
    _fill(tmp_path / "train", {"red": 2, "green": 1})
    first = load_image_folder(tmp_path, "train", 8).files
    (record,) = first.values()
    sizes = [path.stat().st_size for path in (tmp_path / "train").glob("*/*")]
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
    rows = read_images(sorted(folder.iterdir()), 10)
    assert rows[0].unique().tolist() == [200]
    assert rows[1, 0, 5].tolist() == [0] * 5 + [200] * 5


def test_every_pixel_format_is_read(tmp_path: Path) -> None:
    grey = np.full((6, 6), 100, dtype=np.uint8)
    Image.fromarray(grey).save(tmp_path / "0_grey.png")
    Image.fromarray(grey.astype(np.uint16) * 256 + 7).save(tmp_path / "1_deep.png")
    Image.fromarray(grey).convert("RGBA").save(tmp_path / "2_alpha.png")
    Image.fromarray(grey).convert("RGB").save(tmp_path / "3_photo.JPG", quality=95)
    Image.fromarray(grey).save(tmp_path / "4_jfif.jfif", "JPEG", quality=95)
    (tmp_path / "5_deep.pgm").write_bytes(b"P5 6 6 4095\n" + (grey.astype(np.uint16) * 16).astype(">u2").tobytes())
    Image.fromarray(grey).convert("CMYK").save(tmp_path / "6_inks.tif")
    paths = sorted(tmp_path.iterdir())
    for channels in (1, 3):
        images = read_images(paths, 6, channels=channels)
        assert images.shape == (7, channels, 6, 6)
        assert bool((images.int() - 100).abs().le(1).all()), [image.unique() for image in images]


@pytest.mark.parametrize("mode", ["LA", "RGBA", "P", "transparent grey", "transparent colour"])
def test_what_is_transparent_lies_on_white(mode: str, tmp_path: Path) -> None:
    grey = np.full((6, 6), 100, dtype=np.uint8)
    grey[:3] = 40  # where the picture is seen through
    image, options = Image.fromarray(grey), {}
    if mode in ("LA", "RGBA"):
        image = image.convert(mode)
        image.putalpha(Image.fromarray(np.where(grey == 40, 0, 255).astype(np.uint8)))
    elif mode == "P":
        image, options = image.convert("P"), {"transparency": 40}
    else:
        image = image.convert("L" if mode.endswith("grey") else "RGB")
        options = {"transparency": 40 if mode.endswith("grey") else (40, 40, 40)}
    image.save(tmp_path / "x.png", **options)
    for channels in (1, 3):
        read = read_images([tmp_path / "x.png"], 6, channels=channels)
        assert read[:, :, :3].unique().tolist() == [255] and read[:, :, 3:].unique().tolist() == [100]


def test_half_transparent_is_half_white(tmp_path: Path) -> None:
    Image.new("RGBA", (4, 4), (0, 100, 200, 128)).save(tmp_path / "x.png")
    assert read_images([tmp_path / "x.png"], 4)[0, :, 0, 0].tolist() == pytest.approx([127, 177, 227], abs=1)


@pytest.mark.parametrize(("fourth", "good"), [("alpha", True), ("premultiplied", True), ("other", False), ("", False)])
def test_channels_beside_colour_and_alpha_are_refused(fourth: str, good: bool, tmp_path: Path) -> None:
    file = tmp_path / "x.tif"
    Image.new("RGBA", (4, 4), (10, 20, 30, 255)).save(file)
    content = bytearray(file.read_bytes())
    place = content.index(struct.pack("<HHLH", 338, 3, 1, 2))  # what the fourth channel is; none: the file does not say
    tag, value = (338, ("other", "premultiplied", "alpha").index(fourth)) if fourth else (337, 2)
    content[place : place + 10] = struct.pack("<HHLH", tag, 3, 1, value)
    file.write_bytes(content)
    if good:
        assert read_images([file], 4)[0, :, 0, 0].tolist() == [10, 20, 30]
        return
    with pytest.raises(InputError, match="1 channels beside its 3 of colour"):
        read_images([file], 4)


@pytest.mark.parametrize(("top", "told"), [(1023, True), (4095, True), (16_383, True), (40_000, False)])
def test_levels_narrower_than_16_bits_are_told(top: int, told: bool, tmp_path: Path, caplog: Any) -> None:
    levels = np.linspace(0, top, 16).reshape(4, 4).astype(np.uint16)
    for number in range(2):
        Image.fromarray(levels // (number + 1)).save(tmp_path / f"{number}.png")
    Image.new("L", (4, 4), 3).save(tmp_path / "dark.png")
    read_images(sorted(tmp_path.iterdir()), 4)
    assert ("2 of 3 images have 16 bits a level, but none is above" in caplog.text) == told


def test_a_file_that_states_12_bits_is_read_by_them(tmp_path: Path, caplog: Any) -> None:
    file = tmp_path / "x.tif"
    Image.fromarray(np.full((4, 4), 0, np.uint16)).save(file)
    content = bytearray(file.read_bytes())
    place = content.index(struct.pack("<HHLH", 258, 3, 1, 16))
    content[place + 8 : place + 10] = struct.pack("<H", 12)
    with Image.open(file) as image:
        first = image.tag_v2[273][0]
    content[first : first + 24] = b"\xff" * 24
    file.write_bytes(content)
    assert read_images([file], 4).unique().tolist() == [255] and not caplog.text


def test_a_broken_image_is_named(tmp_path: Path) -> None:
    _fill(tmp_path / "train", {"red": 3, "blue": 1}, (64, 64))
    broken = tmp_path / "train" / "red" / "01.png"
    for content in (b"", b"no image at all", broken.read_bytes()[:90]):
        broken.write_bytes(content)
        with pytest.raises(InputError, match=r"cannot read the image .*01\.png: .*repair or remove it") as error:
            load_image_folder(tmp_path, "train", 8)
        assert "\n" not in str(error.value)
        with pytest.raises(InputError, match=r"cannot read the image .*01\.png"):
            check_image_folder(tmp_path)


def test_bad_folders_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no folder .*nowhere: name a folder of images, with one subfolder per class"):
        load_image_folder(tmp_path / "nowhere", "train")
    with pytest.raises(InputError, match="has no class folders"):
        load_image_folder(tmp_path, "train")
    (tmp_path / "a_file").touch()
    with pytest.raises(InputError, match="a_file is a file, not a folder"):
        load_image_folder(tmp_path / "a_file", "train")
    _fill(tmp_path / "train", {"red": 2})
    with pytest.raises(InputError, match="has one class, 'red', and with one class every accuracy is 100%"):
        load_image_folder(tmp_path, "train")
    _fill(tmp_path / "train", {"green": 2})
    with pytest.raises(InputError, match="has a train folder but no test folder"):
        load_image_folder(tmp_path, "test")
    assert "no test images" in check_image_folder(tmp_path)
    _fill(tmp_path / "test", {"blue": 1})
    with pytest.raises(InputError, match=r"has the class 'blue', which .*train has not"):
        load_image_folder(tmp_path, "test")
    (tmp_path / "train" / "blue").mkdir()
    with pytest.raises(InputError, match="blue has no images"):
        load_image_folder(tmp_path, "train")


def test_bad_options_are_one_line(tmp_path: Path) -> None:
    _fill(tmp_path / "train", {"red": 2, "green": 1})
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
