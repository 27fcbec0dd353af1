"""Reader of a folder of images with one subfolder a class."""

from __future__ import annotations

import hashlib
import io
import os
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from metapretrain.checks import user_path, whole
from metapretrain.data.images import ImageSet, validation_split
from metapretrain.errors import InputError, one_of

SPLITS = ("train", "test")
ALL = "all"  # both splits together, for an evaluation of classes that no training saw
TEST_SHARE = 0.2
SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")  # by content: others, such as EPS, start programs


def load_image_folder(
    data_dir: str | Path, split: str, image_size: int = 96, *, channels: int = 3, workers: int | None = None
) -> ImageSet:
    """Read ``<data_dir>/train/<class>/*`` and ``<data_dir>/test/<class>/*``, or ``<data_dir>/<class>/*``.

    Without ``train`` and ``test`` folders a fixed, stratified fifth of the images is the test split. Images
    are turned as their EXIF tag says, cut to a square about the centre, resized with antialiasing and decoded
    by a pool of threads, with a progress bar on a terminal. Classes are sorted by name.

    Args:
        data_dir: the folder.
        split: ``"train"``, ``"test"`` or ``"all"`` (both).
        image_size: height and width of the result in pixels.
        channels: 3 for colour, 1 for grey.
        workers: decoding threads; by default one a processor.

    Returns:
        images uint8 (N, channels, image_size, image_size) in the order of their paths; labels int64 (N,).

    Raises:
        InputError: the folder is missing or has no images, a class has none, the test split has a class that
            the training split has not, or an image cannot be decoded (named).
    """
    classes, paths, labels = list_images(data_dir, split)
    images, files = decode(paths, split, image_size, channels, workers)
    name = user_path(data_dir).resolve().name
    return ImageSet(images, labels, classes, name, split, files)


def read_images(
    paths: Sequence[str | Path], image_size: int, *, channels: int = 3, workers: int | None = None
) -> Tensor:
    """Read image files as :func:`load_image_folder` does.

    Returns:
        uint8 (N, channels, image_size, image_size) in the order of `paths`.

    Raises:
        InputError: a file cannot be decoded (named).
    """
    return decode([Path(path) for path in paths], "given", image_size, channels, workers)[0]


def decode(
    paths: Sequence[Path], what: str, image_size: int, channels: int, workers: int | None
) -> tuple[Tensor, dict[str, dict[str, Any]]]:
    """Return the images uint8 (N, channels, image_size, image_size) and one record of the files together.

    Raises:
        InputError: a file cannot be decoded (named), or a bad size or number of channels.
    """
    whole("image size", image_size, 1)
    if channels not in (1, 3):
        raise InputError(f"channels must be 1 or 3, got {channels!r}")
    pixels = np.empty((len(paths), channels, image_size, image_size), dtype=np.uint8)
    digest, size = hashlib.md5(usedforsecurity=False), 0
    with ThreadPoolExecutor(workers or os.cpu_count()) as pool:
        decoded = pool.map(lambda path: _decode(path, image_size, channels), paths)
        for row, (image, checksum, length) in enumerate(_progress(decoded, len(paths))):
            pixels[row] = image
            digest.update(os.fsencode(paths[row].parent.name) + os.fsencode(paths[row].name) + checksum)
            size += length
    files = {f"{what} images": {"bytes": size, "md5": digest.hexdigest(), "official": None}}
    return torch.from_numpy(pixels), files


def list_images(data_dir: str | Path, split: str) -> tuple[list[str], list[Path], Tensor]:
    """Return (classes, image paths, labels int64 (N,)) of a split without reading any image.

    Raises:
        InputError: as :func:`load_image_folder`, but for images that cannot be decoded.
    """
    one_of("split", split, (*SPLITS, ALL))
    root = user_path(data_dir)
    if not root.is_dir():
        what = f"{root} is a file, not a folder" if root.exists() else f"no folder {root}"
        raise InputError(f"{what}: name a folder with one subfolder of images a class")
    parts = [part for part in SPLITS if (root / part).is_dir()]
    if not parts:
        classes, paths, labels = _scan(root)
        if split == ALL:
            return classes, paths, labels
        test = max(round(TEST_SHARE * len(paths)), 1)
        sizes = torch.bincount(labels)
        if int(sizes.min()) < 2:
            raise InputError(
                f"{root / classes[int(sizes.argmin())]} has one image, and a fifth of all is the test split: add "
                "images, or make the folders train and test yourself"
            )
        rows = validation_split(labels, test)[SPLITS.index(split)]
        return classes, [paths[row] for row in rows.tolist()], labels[rows]
    if split == ALL:
        listed = [list_images(root, part) for part in parts]
        paths = [path for _, part, _ in listed for path in part]
        return listed[0][0], paths, torch.cat([labels for _, _, labels in listed])
    if split not in parts:
        raise InputError(f"{root} has a {parts[0]} folder but no {split} folder; add it, or leave both out")
    classes, paths, labels = _scan(root / split)
    if split == "test" and "train" in parts:
        known = _class_folders(root / "train")
        extra = sorted(set(classes) - set(known))
        if extra:
            raise InputError(f"{root / 'test'} has the class {extra[0]!r}, which {root / 'train'} has not")
        labels = torch.tensor([known.index(name) for name in classes])[labels]
        classes = known
    return classes, paths, labels


def check_image_folder(data_dir: str | Path) -> str:
    """Return one line with the number of classes and images that each split of a folder has.

    Raises:
        InputError: the folder cannot be read as a training split.
    """
    classes, paths, _ = list_images(data_dir, "train")
    try:
        test = f"{len(list_images(data_dir, 'test')[1]):,} test images"
    except InputError as error:
        test = f"no test images ({error})"
    return f"image-folder: {len(classes)} classes, {len(paths):,} train images, {test}"


def _class_folders(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _scan(folder: Path) -> tuple[list[str], list[Path], Tensor]:
    classes = _class_folders(folder)
    if not classes:
        raise InputError(f"{folder} has no class folders: put the images of each class in a subfolder of its name")
    paths: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        images = sorted(
            path
            for path in (folder / name).rglob("*")
            if path.suffix.lower() in SUFFIXES and path.is_file() and not path.name.startswith(".")
        )
        if not images:
            raise InputError(f"{folder / name} has no images ({', '.join(sorted(SUFFIXES))})")
        paths += images
        labels += [label] * len(images)
    return classes, paths, torch.tensor(labels)


def _decode(path: Path, image_size: int, channels: int) -> tuple[np.ndarray[Any, Any], bytes, int]:
    """Return the square image (channels, image_size, image_size), the file's MD5 and its number of bytes."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        content = path.read_bytes()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image: Any = ImageOps.exif_transpose(Image.open(io.BytesIO(content), formats=FORMATS))
            if image.mode.startswith("I;16"):
                # Pillow clips 16-bit grey levels to 8 bits; keep the upper byte instead.
                image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
            if image.mode in ("I", "F"):  # Pillow would clip them to 0..255
                raise ValueError(
                    f"its pixels are of {'32 bits' if image.mode == 'I' else 'floating point'}; save it "
                    "with 8 or 16 bits a channel"
                )
            if "transparency" in image.info:
                image = image.convert("RGBA")
            image = image.convert("RGB" if channels == 3 else "L")
            image = ImageOps.fit(image, (image_size, image_size), Image.Resampling.BILINEAR)
    except Exception as error:  # Pillow raises any type on damaged files, struct.error and TypeError among them
        reason = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, FileNotFoundError):
            raise InputError(f"there is no image {path}") from error
        if isinstance(error, UnidentifiedImageError):  # its own text shows the address of a buffer
            reason = f"it is of no known image format ({', '.join(FORMATS)})"
        if isinstance(error, IsADirectoryError):
            raise InputError(f"{path} is a folder, not an image; name the files in it") from error
        raise InputError(f"cannot read the image {path}: {reason}; repair or remove it") from error
    pixels = np.asarray(image).reshape(image_size, image_size, channels).transpose(2, 0, 1)
    return pixels, hashlib.md5(content, usedforsecurity=False).digest(), len(content)


def _progress(items: Any, total: int) -> Any:
    from tqdm import tqdm

    return tqdm(items, total=total, desc="reading images", unit="image", disable=None, leave=False)
