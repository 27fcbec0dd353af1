"""Reader of STL-10's official binaries (Coates, Ng and Lee, 2011).

A file ``*_X.bin`` holds uint8 images of 3 x 96 x 96 whose planes are stored column after column; ``*_y.bin``
holds one uint8 label 1..10 an image. Only the files of the wanted split are needed.
"""

import logging
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from metapretrain.checks import user_path
from metapretrain.data.images import UNLABELLED, ImageSet, file_record
from metapretrain.errors import InputError, one_of

logger = logging.getLogger(__name__)

SPLITS = ("train", "test", "unlabeled")
CLASSES = ["airplane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck"]
SIZE = 96
IMAGE_BYTES = 3 * SIZE * SIZE
OFFICIAL_IMAGES = {"train": 5000, "test": 8000, "unlabeled": 100000}
OFFICIAL_MD5 = {
    "train_X.bin": "918c2871b30a85fa023e0c44e0bee87f",
    "train_y.bin": "5a34089d4802c674881badbb80307741",
    "test_X.bin": "7f263ba9f9e0b06b93213547f721ac82",
    "test_y.bin": "36f9794fa4beb8a2c72628de14fa638e",
    "unlabeled_X.bin": "5242ba1fed5e4be9e1e742405eb56ca4",
}


def load_stl10(data_dir: str | Path, split: str) -> ImageSet:
    """Read ``train``, ``test`` or ``unlabeled`` (labels -1): images uint8 (N, 3, 96, 96) and labels int64 (N,).

    A file that is not the official one is used after a warning. Raises InputError: the folder or a file is missing, a
    file is truncated, X and y disagree, or a label is outside 1..10.
    """
    one_of("split", split, SPLITS)
    folder = find_folder(data_dir, split)
    names = _names(split)
    columns = np.fromfile(folder / names[0], np.uint8).reshape(_count(folder / names[0]), 3, SIZE, SIZE)
    images = torch.from_numpy(columns).transpose(2, 3).contiguous()
    if len(names) == 2:
        labels = _read_labels(folder / names[1], len(images))
    else:
        labels = torch.full((len(images),), UNLABELLED)
    files = {name: file_record(folder / name, OFFICIAL_MD5[name]) for name in names}
    for name, record in files.items():
        if not record["official"]:
            sums = f"MD5 {record['md5']}, official {OFFICIAL_MD5[name]}"
            counts = f"{len(images)} of {OFFICIAL_IMAGES[split]} official {split} images"
            logger.warning("%s is not the official STL-10 file (%s): %s", name, sums, counts)
    return ImageSet(images, labels, _classes(folder), "stl10", split, files)


def find_folder(data_dir: str | Path, split: str = "train") -> Path:
    """Return the folder that holds the split's files: `data_dir` or its ``stl10_binary``."""
    given = user_path(data_dir)
    if not given.is_dir():
        what = f"{given} is a file, not a folder" if given.exists() else f"no folder {given}"
        raise InputError(f"{what}: name the folder that holds STL-10's {', '.join(_names(split))}")
    inner = given / "stl10_binary"
    folder = inner if inner.is_dir() and not (given / _names(split)[0]).exists() else given
    if not any(folder.iterdir()):
        raise InputError(f"{folder} is empty: put STL-10's {', '.join(_names(split))} there, or download them")
    missing = [name for name in _names(split) if not (folder / name).is_file()]
    if missing:
        error = _AllMissing if len(missing) == len(_names(split)) else InputError
        raise error(f"{folder} lacks {' and '.join(missing)}, needed for the {split} split of STL-10")
    return folder


def download_stl10(data_dir: str | Path) -> Path:
    """Download STL-10 (2.5 GB) through torchvision into `data_dir` and return its folder, or raise InputError."""
    from torchvision.datasets import STL10

    root = user_path(data_dir)
    root = root.parent if root.name == STL10.base_folder else root
    try:
        root.mkdir(parents=True, exist_ok=True)
        STL10(str(root), split="train", download=True)
    except (OSError, RuntimeError, EOFError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"could not download STL-10 into {root} from {STL10.url}: {reason}") from error
    folder: str = STL10.base_folder
    return root / folder


def check_stl10(data_dir: str | Path) -> str:
    """Return one line that says which splits `data_dir` holds and whether their files are the official ones."""
    found = []
    for split in SPLITS:
        try:
            folder = find_folder(data_dir, split)
        except _AllMissing:
            continue
        names = _names(split)
        count = _count(folder / names[0])
        if len(names) == 2:
            _read_labels(folder / names[1], count)
        official = all(file_record(folder / name, OFFICIAL_MD5[name])["official"] for name in names)
        kind = "official" if official else "not the official files"
        found.append(f"{split} {count:,} of {OFFICIAL_IMAGES[split]:,} images ({kind})")
    if not found:
        find_folder(data_dir)
    return "stl10: " + ", ".join(found)


class _AllMissing(InputError):
    """A folder holds no file of a split."""


def _names(split: str) -> list[str]:
    return ["unlabeled_X.bin"] if split == "unlabeled" else [f"{split}_X.bin", f"{split}_y.bin"]


def _count(path: Path) -> int:
    size = path.stat().st_size
    if size == 0 or size % IMAGE_BYTES:
        told = f"{size:,} bytes are not a whole number of images of {IMAGE_BYTES:,} bytes"
        raise InputError(f"{path} is truncated or not STL-10: {told}; fetch it again")
    return size // IMAGE_BYTES


def _read_labels(path: Path, images: int) -> Tensor:
    raw = np.fromfile(path, dtype=np.uint8)
    if len(raw) != images:
        image_file = path.name.replace("_y", "_X")
        raise InputError(f"{path} has {len(raw)} labels but {image_file} has {images} images; one is truncated")
    if raw.min() < 1 or raw.max() > len(CLASSES):
        raise InputError(f"{path}: labels must lie in 1..{len(CLASSES)}, got {raw.min()}..{raw.max()}")
    return torch.from_numpy(raw.astype(np.int64) - 1)


def _classes(folder: Path) -> list[str]:
    path = folder / "class_names.txt"
    if not path.is_file():
        return list(CLASSES)
    names = path.read_bytes().decode(errors="replace").split()
    if len(set(names)) != len(CLASSES) or len(names) != len(CLASSES):
        given = f"{len(names)}, {len(set(names))} of them different"
        raise InputError(f"{path} must name {len(CLASSES)} classes, one a line, got {given}")
    return names
