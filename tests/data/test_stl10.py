"""The STL-10 reader on small binaries in the official layout: data order, one line for every bad folder."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

import numpy as np
import pytest
import torch

from metapretrain.data import stl10
from metapretrain.data.registry import load_images
from metapretrain.errors import InputError


def write(folder: Path, split: str, images: np.ndarray, labels: list[int] | None = None) -> None:
    """Write (N, 3, 96, 96) images, rows first, as STL-10 does: each plane column after column."""
    folder.mkdir(parents=True, exist_ok=True)
    columns = b"".join(plane.tobytes(order="F") for image in images for plane in image)
    (folder / f"{split}_X.bin").write_bytes(columns)
    if labels is not None:
        (folder / f"{split}_y.bin").write_bytes(bytes(labels))


@pytest.fixture
def images() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (4, 3, 96, 96), dtype=np.uint8)


@pytest.fixture
def folder(tmp_path: Path, images: np.ndarray) -> Path:
    path = tmp_path / "stl10_binary"
    write(path, "train", images, [1, 10, 3, 3])
    return path


def test_pixels_rows_columns_and_channels_are_where_they_belong(tmp_path: Path) -> None:
    images = np.zeros((2, 3, 96, 96), dtype=np.uint8)
    images[0, 0, 5, 90] = 11  # red, near the top right corner
    images[1, 2, 94, 1] = 22  # blue, near the bottom left corner
    write(tmp_path, "train", images, [1, 2])
    # The official order, spelled out: plane, then column, then row.
    raw = (tmp_path / "train_X.bin").read_bytes()
    assert raw[90 * 96 + 5] == 11 and raw[27648 + 2 * 9216 + 1 * 96 + 94] == 22
    rows = stl10.load_stl10(tmp_path, "train")
    assert rows.images.nonzero().tolist() == [[0, 0, 5, 90], [1, 2, 94, 1]]
    assert rows.images.is_contiguous()


def test_reads_the_folder_or_its_parent_with_only_the_splits_files(folder: Path, images: np.ndarray) -> None:
    for given in (folder, folder.parent, str(folder)):
        rows = stl10.load_stl10(given, "train")
        assert torch.equal(rows.images, torch.from_numpy(images))
        assert rows.labels.tolist() == [0, 9, 2, 2]
    assert rows.classes[0] == "airplane" and rows.classes[9] == "truck" and len(rows.classes) == 10
    assert (rows.name, rows.split, rows.image_size, rows.channels) == ("stl10", "train", 96, 3)
    assert load_images("stl10", folder, "train", 32).image_size == 32


def test_checksums_and_a_warning_for_each_file_that_is_not_official(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.WARNING):
        rows = stl10.load_stl10(folder, "train")
    content = (folder / "train_X.bin").read_bytes()
    md5 = hashlib.md5(content, usedforsecurity=False).hexdigest()
    assert rows.files["train_X.bin"] == {"bytes": 4 * 27648, "md5": md5, "official": False}
    assert [record.getMessage().split()[0] for record in caplog.records] == ["train_X.bin", "train_y.bin"]
    assert "4 of 5000 official train images" in caplog.text
    caplog.clear()
    monkeypatch.setitem(stl10.OFFICIAL_MD5, "train_X.bin", md5)
    rows = stl10.load_stl10(folder, "train")
    assert rows.files["train_X.bin"]["official"] is True
    assert "train_X.bin" not in caplog.text


def test_official_checksums_are_the_ones_torchvision_checks() -> None:
    from torchvision.datasets import STL10

    assert dict(STL10.train_list + STL10.test_list) == stl10.OFFICIAL_MD5


def test_unlabelled_rows_are_minus_one_and_never_reach_labelled_training(folder: Path, images: np.ndarray) -> None:
    write(folder, "unlabeled", images)
    rows = stl10.load_stl10(folder, "unlabeled")
    assert rows.labels.tolist() == [-1] * 4
    with pytest.raises(InputError, match="stl10 unlabeled: 4 of 4 images have no label"):
        rows.require_labels()
    labelled = stl10.load_stl10(folder, "train")
    assert labelled.require_labels() is labelled


def test_class_names_of_the_folder_are_used(folder: Path) -> None:
    names = [f"class{k}" for k in range(10)]
    (folder / "class_names.txt").write_text("\n".join(names) + "\n")
    assert stl10.load_stl10(folder, "train").classes == names
    (folder / "class_names.txt").write_text("cat\ndog\n")
    with pytest.raises(InputError, match=r"class_names.txt must name 10 classes, one a line, got 2"):
        stl10.load_stl10(folder, "train")


def _one_line(message: str, data_dir: Path, split: str = "train") -> None:
    with pytest.raises(InputError, match=message) as error:
        stl10.load_stl10(data_dir, split)
    assert "\n" not in str(error.value)


def test_a_missing_or_empty_folder_is_one_line(tmp_path: Path) -> None:
    _one_line("no folder .*nowhere: name the folder that holds STL-10's train_X.bin", tmp_path / "nowhere")
    _one_line("is empty: put STL-10's train_X.bin, train_y.bin there", tmp_path)
    (tmp_path / "stl10_binary").mkdir()
    _one_line("stl10_binary is empty", tmp_path)
    (tmp_path / "a_file").touch()
    _one_line("a_file is a file, not a folder", tmp_path / "a_file")


def test_a_missing_file_is_named(folder: Path) -> None:
    _one_line("lacks test_X.bin and test_y.bin, needed for the test split", folder, "test")
    (folder / "train_y.bin").unlink()
    _one_line("lacks train_y.bin, needed for the train split", folder)


@pytest.mark.parametrize("keep", [0, 27647, 3 * 27648 + 1])
def test_a_truncated_binary_is_named(folder: Path, keep: int) -> None:
    path = folder / "train_X.bin"
    path.write_bytes(path.read_bytes()[:keep])
    _one_line(rf"train_X.bin is truncated or not STL-10: {keep:,} bytes", folder)


def test_files_that_disagree_are_one_line(folder: Path) -> None:
    (folder / "train_y.bin").write_bytes(bytes([1, 2, 3]))
    _one_line("train_y.bin has 3 labels but train_X.bin has 4 images", folder)


@pytest.mark.parametrize("bad", [0, 11, 255])
def test_a_label_outside_of_the_classes_is_one_line(folder: Path, bad: int) -> None:
    (folder / "train_y.bin").write_bytes(bytes([1, bad, 3, 3]))
    _one_line(r"train_y.bin: labels must lie in 1..10, got", folder)


def test_an_unknown_split_names_the_nearest(folder: Path) -> None:
    _one_line("unknown split 'tets'; did you mean 'test'", folder, "tets")


def test_check_names_what_is_there(folder: Path, images: np.ndarray) -> None:
    assert stl10.check_stl10(folder) == "stl10: train 4 of 5,000 images (not the official files)"
    write(folder, "test", images, [1, 2, 3, 4])
    assert "test 4 of 8,000 images" in stl10.check_stl10(folder.parent)
    (folder / "test_X.bin").write_bytes(b"12345")
    with pytest.raises(InputError, match=r"test_X.bin is truncated"):
        stl10.check_stl10(folder)
    (folder / "test_X.bin").unlink()
    with pytest.raises(InputError, match=r"lacks test_X.bin, needed for the test split"):
        stl10.check_stl10(folder)
    (folder / "train_X.bin").rename(folder / "other.bin")
    (folder / "test_y.bin").unlink()
    (folder / "train_y.bin").unlink()
    with pytest.raises(InputError, match=r"lacks train_X.bin and train_y.bin"):
        stl10.check_stl10(folder)
    with pytest.raises(InputError, match="no folder"):
        stl10.check_stl10(folder / "nowhere")


def test_a_failed_download_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision.datasets import STL10

    asked = []

    def download(self: STL10) -> None:
        asked.append(self.root)
        raise OSError("no\nroute")

    monkeypatch.setattr(STL10, "download", download)
    with pytest.raises(InputError, match=r"could not download STL-10 into .* from http.*: no route"):
        stl10.download_stl10(tmp_path / "stl10_binary")
    assert asked == [str(tmp_path)], "torchvision makes the folder stl10_binary itself"


@pytest.mark.parametrize("content", [b"\xff\xfe", b"a a c d e f g h i j"])
def test_class_names_that_are_no_text_or_twice_the_same_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "class_names.txt").write_bytes(content)
    with pytest.raises(InputError, match=r"class_names\.txt must name 10 classes"):
        stl10._classes(tmp_path)
