"""Reading image files one by one, and both splits of a folder together."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from metapretrain.data.image_folder import load_image_folder, read_images
from metapretrain.errors import InputError


def write_image(path: Path, grey: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((12, 12, 3), grey, np.uint8)).save(path)
    return path


def test_files_are_read_in_the_order_given(tmp_path: Path) -> None:
    paths = [write_image(tmp_path / f"{grey}.png", grey) for grey in (200, 7, 90)]
    images = read_images(paths, 8)
    assert images.shape == (3, 3, 8, 8)
    assert images[:, 0, 0, 0].tolist() == [200, 7, 90]
    assert read_images(paths[:1], 8, channels=1).shape == (1, 1, 8, 8)


def test_file_that_is_no_image_is_named(tmp_path: Path) -> None:
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"not an image")
    with pytest.raises(InputError, match=r"cannot read the image .*bad\.png: it is of no known"):
        read_images([write_image(tmp_path / "good.png", 1), bad], 8)
    with pytest.raises(InputError, match=r"there is no image .*none\.png"):
        read_images([tmp_path / "none.png"], 8)
    with pytest.raises(InputError, match="is a folder, not an image; name the files in it"):
        read_images([tmp_path], 8)


@pytest.mark.parametrize("layout", ["flat", "train and test", "train only"])
def test_all_is_every_image_once(tmp_path: Path, layout: str) -> None:
    for number in range(10):
        split = {"flat": "", "train and test": ("train", "test")[number % 2], "train only": "train"}[layout]
        for label, name in enumerate(("cat", "dog")):
            write_image(tmp_path / split / name / f"{number}.png", 100 * label + number)
    images = load_image_folder(tmp_path, "all", 8)
    grey = images.images[:, 0, 0, 0].to(torch.int64)
    assert sorted(grey.tolist()) == [*range(10), *range(100, 110)]
    assert torch.equal(images.labels, grey // 100)
    assert images.classes == ["cat", "dog"]
