"""Each damage of a few-shot set's files is told in one line that names the file, or changes nothing."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from metapretrain.data import cifar100, class_lists
from metapretrain.data.few_shot import FewShotData
from metapretrain.data.registry import load_few_shot
from metapretrain.errors import InputError
from tests.data.test_cifar100 import write_binary, write_images
from tests.data.test_class_lists import write


def lines_of(change: Callable[[list[bytes]], list[bytes]]) -> Callable[[Path], None]:
    return lambda file: file.write_bytes(b"".join(change(file.read_bytes().splitlines(keepends=True)))) and None


def as_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "gone": Path.unlink,
    "empty": lambda file: file.write_bytes(b""),
    "cut": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "zeros": lambda file: file.write_bytes(bytes(file.stat().st_size)),
    "ones": lambda file: file.write_bytes(b"\xff" * file.stat().st_size),
    "longer": lambda file: file.write_bytes(file.read_bytes() + b"\x00\xff more\n"),
    "folder": as_folder,
    "a page": lambda file: file.write_bytes(b"<!DOCTYPE html><html>not found</html>\n"),
}
LISTS = {
    "first line gone": lines_of(lambda lines: lines[1:]),
    "last line gone": lines_of(lambda lines: lines[:-1]),
    "a line twice": lines_of(lambda lines: [*lines, lines[-1]]),
    "a line for another": lines_of(lambda lines: [*lines[:-1], lines[-2]]),
    "a line of nothing": lines_of(lambda lines: [*lines, b",,\n"]),
    "an unknown name": lines_of(lambda lines: [*lines, b"nobody\n"]),
    "a way out": lines_of(lambda lines: [*lines[:-1], b"../../x,../y\n"]),
    "other ends of lines": lines_of(lambda lines: [line.replace(b"\n", b"\r\n") for line in lines]),
    "a mark first": lines_of(lambda lines: [b"\xef\xbb\xbf" + lines[0], *lines[1:]]),
    "wide letters": lambda file: file.write_bytes(file.read_text().encode("utf-16")),
}
SETS: dict[str, tuple[str, Callable[[Path], object], tuple[str, ...]]] = {  # the set, what makes it, files of each kind
    "mini-imagenet": (
        "mini-imagenet",
        lambda root: write(root, "mini-imagenet"),
        ("train.csv", "test.csv", "images/a0.jpg"),
    ),
    "tiered-imagenet": (
        "tiered-imagenet",
        lambda root: write(root, "tiered-imagenet"),
        ("train/a/0.jpg", "test/g/1.jpg"),
    ),
    "cub": ("cub", lambda root: write(root, "cub"), ("train.txt", "val.txt", "images/f/0.jpg")),
    "cifar binary": ("cifar-fs", write_binary, ("cifar-100-binary/train.bin", "cifar-100-binary/test.bin")),
    "cifar images": ("fc100", write_images, ("train/apple/*", "test/bee/*")),
}
CASES = [
    (kind, place, damage)
    for kind, (_, _, places) in SETS.items()
    for place in places
    for damage in (*DAMAGES, *(LISTS if place.endswith((".csv", ".txt")) else ()))
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One undamaged folder of each format."""
    folders = {}
    for kind, (_, make, _) in SETS.items():
        folders[kind] = tmp_path_factory.mktemp("made") / "set"
        folders[kind].mkdir()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cifar100, "IMAGES", {"train": 2, "test": 1})
            make(folders[kind])
    return folders


def same(one: FewShotData, other: FewShotData) -> bool:
    pairs = [(getattr(one, part), getattr(other, part)) for part in ("train", "validation", "test")]
    return all(
        a.classes == b.classes and torch.equal(a.images, b.images) and torch.equal(a.labels, b.labels) for a, b in pairs
    )


@pytest.mark.parametrize(("kind", "place", "damage"), CASES)
def test_a_damaged_file_is_told_or_changes_nothing(
    kind: str, place: str, damage: str, made: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = SETS[kind][0]
    monkeypatch.setattr(cifar100, "IMAGES", {"train": 2, "test": 1})
    monkeypatch.setattr(class_lists, "CLASSES", {name: ((3, 2, 2), 14)})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    root = shutil.copytree(made[kind], tmp_path / "set")
    before = load_few_shot(name, root, 16)
    file = min(root.glob(place))
    {**DAMAGES, **LISTS}[damage](file)
    try:
        found = load_few_shot(name, root, 16)
    except InputError as error:
        said = str(error)
        assert "\n" not in said and len(said) < 600 and (file.name in said or str(root) in said), said
        return
    assert same(before, found)
