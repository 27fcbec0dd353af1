"""Parts of few-shot data: disjoint classes, folders, made glyphs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from metapretrain.data.few_shot import FewShotData, made_glyphs, split_classes
from metapretrain.data.images import ImageSet
from metapretrain.data.registry import load_few_shot
from metapretrain.errors import InputError


def write_classes(root: Path, names: list[str], first: int = 0) -> None:
    for number, name in enumerate(names):
        (root / name).mkdir(parents=True)
        for drawing in range(3):
            pixels = np.full((20, 20, 3), first + 10 * number + drawing, np.uint8)
            Image.fromarray(pixels).save(root / name / f"{drawing}.png")


def test_made_parts_are_disjoint_and_the_same_every_time() -> None:
    data = load_few_shot("made", None)
    again = load_few_shot("made", None)
    assert torch.equal(data.test.images, again.test.images)
    assert data.mean == (0.0,) and data.std == (1.0,)
    assert data.counts == {
        "train_classes": 40,
        "validation_classes": 20,
        "test_classes": 25,
        "train_images": 800,
        "validation_images": 400,
        "test_images": 500,
    }


def test_the_first_classes_are_those_with_all_their_images() -> None:
    data = load_few_shot("made", None)
    few = data.first(22, images=20)
    assert [len(part.classes) for part in (few.train, few.validation, few.test)] == [22, 20, 22]
    assert torch.equal(few.test.images, data.test.images[: 22 * 20])
    assert few.test.split == "test" and few.test.classes == data.test.classes[:22]


@pytest.mark.parametrize("validation", ["val", "validation"])
def test_a_folder_with_parts_is_read_part_by_part(tmp_path: Path, validation: str) -> None:
    for place, names in (("train", ["a", "b"]), (validation, ["c", "d"]), ("test", ["e", "f"])):
        write_classes(tmp_path / place, names)
    data = load_few_shot("image-folder", tmp_path, 16)
    assert (data.train.classes, data.validation.classes, data.test.classes) == (["a", "b"], ["c", "d"], ["e", "f"])
    assert data.validation.split == "validation" and data.test.images.shape == (6, 3, 16, 16)
    assert data.mean == data.train.statistics()[0]


def test_a_folder_of_classes_is_shared_out_whole_classes_at_a_time(tmp_path: Path) -> None:
    write_classes(tmp_path, [f"class{number:02}" for number in range(10)])
    data = load_few_shot("image-folder", tmp_path, 16)
    parts = (data.train, data.validation, data.test)
    assert [len(part.classes) for part in parts] == [6, 2, 2]
    for part in parts:
        assert part.labels.bincount().tolist() == [3] * len(part.classes)
        for image, label in zip(part.images, part.labels.tolist(), strict=True):
            assert part.classes[label] == f"class{int(image[0, 0, 0]) // 10:02}"


def test_a_class_in_two_parts_is_refused(tmp_path: Path) -> None:
    for place, names in (("train", ["a", "b"]), ("val", ["c", "e"]), ("test", ["b", "d"])):
        write_classes(tmp_path / place, names)
    with pytest.raises(InputError, match=r"train and test share 1 class\(es\), such as 'b'"):
        load_few_shot("image-folder", tmp_path, 16)


def test_classes_of_two_parts_that_differ_by_capitals_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for place, names in (("train", ["Dog", "cat"]), ("val", ["c", "e"]), ("test", ["dog", "d"])):
        write_classes(tmp_path / place, names)
    assert load_few_shot("image-folder", tmp_path, 16).test.classes == ["d", "dog"]
    assert "the parts: 'Dog' and 'dog' are two classes" in caplog.text and caplog.text.count("two classes") == 1


def test_a_turned_character_in_another_part_is_refused() -> None:
    parts = {part: made_glyphs(part) for part in ("train", "validation", "test")}
    train, test = parts["train"], parts["test"]
    train.classes[3], test.classes[7] = "Greek/character01/rot000", "Greek/character01/rot270"
    with pytest.raises(InputError, match="such as 'Greek/character01'"):
        FewShotData.of(parts)


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"omniglot needs a data folder \(--data-dir\)"):
        load_few_shot("omniglot", None)
    write_classes(tmp_path / "train", ["a"])
    with pytest.raises(
        InputError, match=r"has no validation folder; give train, validation and test, or class folders only"
    ):
        load_few_shot("image-folder", tmp_path)
    images = ImageSet(torch.zeros(2, 1, 8, 8, dtype=torch.uint8), torch.tensor([0, 1]), ["a", "b"])
    with pytest.raises(InputError, match=r"has 2 classes; training, validation and test need one each"):
        split_classes(images)
