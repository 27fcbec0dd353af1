"""Reader of Omniglot: drawn characters, with the few-shot split in which a turned character is another class."""

import re
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from metapretrain.checks import user_path
from metapretrain.data.image_folder import decode
from metapretrain.data.images import LIGHT_ON_DARK, ImageSet
from metapretrain.data.tables import read_utf8
from metapretrain.errors import InputError, one_of

SPLITS = ("train", "validation", "trainval", "test")
SPLIT_FILES = {"train": "train.txt", "validation": "val.txt", "trainval": "trainval.txt", "test": "test.txt"}
PARTS = ("images_background", "images_evaluation")
DRAWINGS = 20  # of each character, each by another person
LAYOUT = (
    "omniglot-py/images_{background,evaluation}/<alphabet>/<character>/*.png as torchvision.datasets.Omniglot unpacks "
    "it, and omniglot-splits/{train,val,test}.txt with lines <alphabet>/<character>/rot090"
)


def load_omniglot(data_dir: str | Path, split: str, image_size: int = 28, *, workers: int | None = None) -> ImageSet:
    """Read a split of Omniglot (Lake et al., 2015) as few-shot papers use it (Vinyals et al., 2016).

    `data_dir` holds `omniglot-py` and `omniglot-splits` (or `splits`), or is `omniglot-py`. A class is a character and
    how far it is turned counterclockwise, 0, 90, 180 or 270 degrees. Images are uint8 (20 * classes, 1, image_size,
    image_size), ink 255 and paper 0, class after class in the order of the split's file.
    Raises InputError: a folder or file is missing, a line is malformed or repeated, a character is not there or has not
    20 drawings, or an image cannot be decoded.
    """
    one_of("split", split, SPLITS)
    characters = find_characters(data_dir)
    lines = read_split(data_dir, split)
    names = list(dict.fromkeys(character for character, _ in lines))
    missing = [name for name in names if name not in characters]
    if missing:
        told = f"omniglot {split}: {len(missing)} characters of {SPLIT_FILES[split]} are not in {data_dir}"
        raise InputError(f"{told}, the first is {missing[0]!r}; unpack both images_background and images_evaluation")
    paths = [path for name in names for path in characters[name]]
    drawings, files = decode(paths, f"omniglot {split}", image_size, 1, workers)
    ink = (255 - drawings).view(len(names), DRAWINGS, 1, image_size, image_size)
    place = {name: number for number, name in enumerate(names)}
    images = turned(ink[[place[name] for name, _ in lines]], torch.tensor([quarter for _, quarter in lines]))
    labels = torch.arange(len(lines)).repeat_interleave(DRAWINGS)
    classes = [f"{name}/rot{90 * quarter:03}" for name, quarter in lines]
    return ImageSet(images.flatten(0, 1), labels, classes, "omniglot", split, files, LIGHT_ON_DARK)


def turned(images: Tensor, quarters: Tensor) -> Tensor:
    """Turn images (N, ..., H, H) counterclockwise, each by its own number of quarter turns, 0..3 (N,)."""
    result = torch.empty_like(images)
    for quarter in range(4):
        rows = (quarters == quarter).nonzero().flatten()
        result[rows] = torch.rot90(images[rows], quarter, (-2, -1))
    return result


def find_characters(data_dir: str | Path, parts: Sequence[str] = PARTS) -> dict[str, list[Path]]:
    """Return the 20 image files of each character, by `alphabet/character`."""
    given = user_path(data_dir)
    places = (given, given / "omniglot-py")
    root = next((place for place in places if all((place / part).is_dir() for part in parts)), None)
    if root is None:
        raise InputError(f"no {' and '.join(PARTS)} in {given}; expected {LAYOUT}")
    found: dict[str, list[Path]] = {}
    for part in parts:
        for folder in sorted((root / part).glob("*/*/")):
            name = f"{folder.parent.name}/{folder.name}"
            files = sorted(path for path in folder.glob("*.png") if not path.name.startswith("."))
            if len(files) != DRAWINGS:
                raise InputError(f"{folder} has {len(files)} drawings, {DRAWINGS} expected; unpack Omniglot again")
            found[name] = files
    if not found:
        raise InputError(f"no characters in {root}; expected {LAYOUT}")
    return found


def read_split(data_dir: str | Path, split: str) -> list[tuple[str, int]]:
    """Return (character, quarter turns) of each class of a split."""
    name = SPLIT_FILES[one_of("split", split, SPLITS)]
    root = user_path(data_dir)
    places = [place / folder for place in (root, root.parent) for folder in ("omniglot-splits", "splits")]
    file = next((place / name for place in places if (place / name).is_file()), None)
    if file is None:
        raise InputError(f"no omniglot-splits/{name} in or beside {root}; expected {LAYOUT}")
    classes = []
    for number, line in enumerate(read_utf8(file).split("\n"), start=1):
        if not line.strip():
            continue
        found = re.fullmatch(r"([^/]+/[^/]+)/rot(000|090|180|270)", line.strip())
        if found is None:
            wanted = "<alphabet>/<character>/rot000, 090, 180 or 270"
            raise InputError(f"{name}, line {number}: {line.strip()!r} is not {wanted}")
        classes.append((found[1], int(found[2]) // 90))
    repeated = len(classes) - len(set(classes))
    if repeated or not classes:
        raise InputError(f"{name}: {f'{repeated} classes are named twice' if repeated else 'it names no class'}")
    return classes
