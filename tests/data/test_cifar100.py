"""CIFAR-FS and FC100: splits, both layouts, and what is told of damaged data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from metapretrain.data import cifar100
from metapretrain.data.cifar100 import CLASSES, SUPERCLASSES, load_cifar100, split_of
from metapretrain.data.registry import DATASETS, load_few_shot
from metapretrain.errors import InputError


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Three and two images of each class, in a cache of their own."""
    monkeypatch.setattr(cifar100, "IMAGES", {"train": 3, "test": 2})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def pixels_of(split: str) -> tuple[np.ndarray, np.ndarray]:
    """Random images (N, 3, 32, 32) of a split and their classes, in a random order."""
    random = np.random.default_rng(len(split))
    count = cifar100.IMAGES[split]
    labels = random.permutation(np.repeat(np.arange(100), count)).astype(np.uint8)
    return random.integers(0, 256, (len(labels), 3, 32, 32), dtype=np.uint8), labels


def plain(names: str) -> list[str]:
    return [name.strip("+-") for name in names.split()]


def write_binary(folder: Path) -> Path:
    (folder / "cifar-100-binary").mkdir()
    coarse = [next(i for i, names in enumerate(SUPERCLASSES.values()) if name in plain(names)) for name in CLASSES]
    for split in ("train", "test"):
        images, labels = pixels_of(split)
        heads = np.stack([np.array(coarse, dtype=np.uint8)[labels], labels], 1)
        rows = np.concatenate([heads, images.reshape(len(images), -1)], 1)
        rows.tofile(folder / "cifar-100-binary" / f"{split}.bin")
    return folder


def write_images(folder: Path) -> Path:
    for split in ("train", "test"):
        images, labels = pixels_of(split)
        for row, (image, label) in enumerate(zip(images, labels, strict=True)):
            place = folder / split / CLASSES[label]
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image.transpose(1, 2, 0)).save(place / f"{row:05}.png")
    return folder


@pytest.mark.parametrize(("name", "counts"), [("cifar-fs", (64, 16, 20)), ("fc100", (60, 20, 20))])
def test_the_splits_have_all_classes_once(name: str, counts: tuple[int, ...]) -> None:
    parts = split_of(name)
    assert tuple(map(len, parts.values())) == counts
    assert sorted(name for classes in parts.values() for name in classes) == CLASSES and len(CLASSES) == 100


def test_fc100_never_parts_a_superclass() -> None:
    for names in SUPERCLASSES.values():
        assert len({part for part, classes in split_of("fc100").items() if set(plain(names)) & set(classes)}) == 1


@pytest.mark.parametrize("name", ["cifar-fs", "fc100"])
def test_both_layouts_give_the_same_images(small: Path, name: str) -> None:
    (small / "a").mkdir()
    binary = load_few_shot(name, write_binary(small / "a"))
    folder = load_few_shot(name, write_images(small / "b"))
    images, labels = pixels_of("train")
    for part in ("train", "validation", "test"):
        one, other = getattr(binary, part), getattr(folder, part)
        assert torch.equal(one.images, other.images) and torch.equal(one.labels, other.labels)
        assert one.classes == other.classes == split_of(name)[part]
    first = binary.test.images[0]
    assert torch.equal(first, torch.from_numpy(images[labels == CLASSES.index(binary.test.classes[0])][0]))
    assert binary.counts["test_images"] == 20 * 5


def test_images_of_a_folder_are_decoded_once(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = load_cifar100("fc100", write_images(small / "b"))
    monkeypatch.setattr("metapretrain.data.image_folder._decode", None)
    after = load_cifar100("fc100", small / "b")
    assert torch.equal(before["test"].images, after["test"].images) and before["test"].files == after["test"].files
    kept = sorted((small / "cache").rglob("*.safetensors"))
    assert len(kept) == 2
    kept[0].write_bytes(kept[0].read_bytes()[:100])
    with pytest.raises(TypeError):  # a damaged file is made again
        load_cifar100("fc100", small / "b")


def test_a_changed_image_is_read_again(small: Path) -> None:
    load_cifar100("fc100", write_images(small / "b"))
    image = next((small / "b" / "test" / "baby").iterdir())
    Image.new("RGB", (32, 32), (1, 2, 3)).save(image)
    assert (
        (load_cifar100("fc100", small / "b")["test"].images.flatten(2)[:5] == torch.tensor([[1], [2], [3]]))
        .all(2)
        .any()
    )


def test_the_command_counts_classes_and_images(small: Path) -> None:
    told = DATASETS["cifar-fs"].check(write_binary(small))
    assert told.endswith("train 64 classes, 320 images; validation 16 classes, 80 images; test 20 classes, 100 images")


def test_damaged_binaries_are_told_by_file_and_image(small: Path) -> None:
    write_binary(small)
    file = small / "cifar-100-binary" / "train.bin"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(InputError, match=r"train.bin should have 922,200 bytes, but has 922,199;"):
        load_cifar100("cifar-fs", small)
    file.write_bytes(whole[:3075] + bytes([100]) + whole[3076:])
    with pytest.raises(InputError, match=r"train.bin, image 2: class 100 is not one of 0..99"):
        load_cifar100("cifar-fs", small)
    other = (whole[1] + 1) % 100
    first = CLASSES[min(other, whole[1])]
    file.write_bytes(whole[:1] + bytes([other]) + whole[2:])
    with pytest.raises(InputError, match=rf"train.bin has [24] images of '{first}', 3 expected"):
        load_cifar100("cifar-fs", small)
    (small / "cifar-100-binary" / "test.bin").unlink()
    file.write_bytes(whole)
    with pytest.raises(InputError, match=r"test.bin should have .* but has 0;"):
        load_cifar100("cifar-fs", small)


def test_damaged_folders_are_told_by_class(small: Path) -> None:
    folder = write_images(small / "b")
    image = next((folder / "train" / "wolf").iterdir())
    content = image.read_bytes()
    image.unlink()
    with pytest.raises(InputError, match=r"train has 2 images of 'wolf', 3 expected"):
        load_cifar100("fc100", folder)
    image.write_bytes(content)
    (folder / "test" / "apple").rename(folder / "test" / "apples")
    with pytest.raises(InputError, match=r"test.*'apple"):
        load_cifar100("fc100", folder)
    with pytest.raises(InputError, match="no CIFAR-100 in"):
        load_cifar100("fc100", small / "cache")
