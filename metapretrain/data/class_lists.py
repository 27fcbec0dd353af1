"""Few-shot sets whose parts are lists or folders of classes: mini-ImageNet, tieredImageNet and CUB."""

from __future__ import annotations

from pathlib import Path

import torch

from metapretrain.checks import user_path
from metapretrain.data.image_folder import SUFFIXES, decode, find_parts, list_images
from metapretrain.data.images import ImageSet
from metapretrain.data.tables import read_utf8
from metapretrain.errors import InputError

PARTS = {"train": "train", "validation": "val", "test": "test"}  # and what their lists are called
SIZE = 84
CLASSES = {  # of each part, and all images
    "mini-imagenet": ((64, 16, 20), 60_000),
    "tiered-imagenet": ((351, 97, 160), 779_165),
    "cub": ((100, 50, 50), 11_788),
}
_IMAGENET = "ImageNet's terms: non-commercial research; cite"
ABOUT = {  # source, terms, layout
    "mini-imagenet": (
        "images: https://www.image-net.org; lists: https://github.com/twitter-research/meta-learning-lstm",
        f"{_IMAGENET} Vinyals et al. (2016), Ravi and Larochelle (2017)",
        "train.csv, val.csv and test.csv of Ravi and Larochelle (filename,label), beside images/<filename>",
    ),
    "tiered-imagenet": (
        "images: https://www.image-net.org; split: https://github.com/renmengye/few-shot-ssl-public",
        f"{_IMAGENET} Ren et al. (2018)",
        "{train,val,test}/<class>/<image>, 351, 97 and 160 classes",
    ),
    "cub": (
        "https://www.vision.caltech.edu/datasets/cub_200_2011/",
        "non-commercial research; cite Wah et al. (2011)",
        "images/<class>/<image> as in CUB-200-2011, beside train.txt, val.txt and test.txt, a class a line",
    ),
}


def load_listed(name: str, folder: str | Path, image_size: int | None = None) -> dict[str, ImageSet]:
    """Read the parts of `mini-imagenet`, `tiered-imagenet` or `cub`: uint8 (N, 3, size, size), 84 pixels unless asked.

    Raises:
        InputError: a file or image that is missing, a list with a malformed row (file and line are named), another
            number of classes or images than the set has.
    """
    root = user_path(folder)
    places = [root, root / name, root / "CUB_200_2011"]
    list_name = {"mini-imagenet": "train.csv", "cub": "train.txt"}.get(name, "train")
    root = next((place for place in places if (place / list_name).exists()), root)
    reader = {"mini-imagenet": _by_rows, "tiered-imagenet": _by_folders, "cub": _by_classes}[name]
    listed = {part: reader(root, part) for part in PARTS}
    counts = tuple(len({path_class for _, path_class in rows}) for rows in listed.values())
    total = sum(map(len, listed.values()))
    if (counts, total) != CLASSES[name]:
        raise InputError(
            f"{root}: {name} has {'/'.join(map(str, CLASSES[name][0]))} classes and {CLASSES[name][1]:,} images, but "
            f"here are {'/'.join(map(str, counts))} and {total:,}; unpack it again, or read it as --image-folder"
        )
    return {part: _read(name, part, rows, image_size or SIZE) for part, rows in listed.items()}


Rows = list[tuple[Path, str]]  # image and class


def _by_rows(root: Path, part: str) -> Rows:
    file = root / f"{PARTS[part]}.csv"
    lines = _lines(file)
    if lines[0].replace(" ", "") != "filename,label":
        raise InputError(f"{file}, line 1: {lines[0]!r} is not filename,label")
    rows = []
    for number, line in enumerate(lines[1:], start=2):
        name, _, label = (cell.strip() for cell in line.partition(","))
        if not name or not label or "," in label:
            raise InputError(f"{file}, line {number}: {line!r} is not an image and its label")
        if not (path := root / "images" / name).is_file():
            raise InputError(f"{file}, line {number}: there is no image {path}")
        rows.append((path, label))
    return rows


def _by_folders(root: Path, part: str) -> Rows:
    places = find_parts(root)
    if part not in places:
        raise InputError(f"{root} has no folder {PARTS[part]}; expected {ABOUT['tiered-imagenet'][2]}")
    classes, paths, labels = list_images(places[part], "all")
    return [(path, classes[label]) for path, label in zip(paths, labels.tolist(), strict=True)]


def _by_classes(root: Path, part: str) -> Rows:
    file, rows = root / f"{PARTS[part]}.txt", []
    for number, name in enumerate(_lines(file), start=1):
        folder = root / "images" / name.strip()
        if not name.strip() or not folder.is_dir():
            raise InputError(f"{file}, line {number}: there is no class folder {folder}")
        images = sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)
        rows += [(path, name.strip()) for path in images]
    return rows


def _lines(file: Path) -> list[str]:
    if not file.is_file():
        raise InputError(f"there is no {file}; name the folder (--data-dir) that holds it")
    lines = read_utf8(file).rstrip().splitlines()
    if not lines:
        raise InputError(f"{file} is empty")
    return lines


def _read(name: str, part: str, rows: Rows, image_size: int) -> ImageSet:
    classes = sorted({label for _, label in rows})
    place = {label: number for number, label in enumerate(classes)}
    rows = sorted(rows, key=lambda row: place[row[1]])
    images, files = decode([path for path, _ in rows], part, image_size, 3, None, keep=True)
    return ImageSet(images, torch.tensor([place[label] for _, label in rows]), classes, name, part, files)
