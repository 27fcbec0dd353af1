"""Reader of a folder of images with one subfolder per class."""

import functools
import hashlib
import io
import logging
import os
import re
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from metapretrain.checks import check_alike, user_path, whole
from metapretrain.data.images import UNLABELLED, ImageSet, validation_split
from metapretrain.errors import InputError, one_of
from metapretrain.files import kept

logger = logging.getLogger(__name__)

UNLABELED = "unlabeled"
SPLITS = ("train", "test", UNLABELED)
ALL = "all"  # every part together, for an evaluation of classes that no training saw
PART_NAMES = {  # of a folder, as a regular expression of its small letters
    "train": "train(ing)?|trn",
    "validation": "val(id(ation)?)?|dev(el(opment)?)?",
    "test": "test(ing)?|tst",
}
TEST_SHARE = 0.2
SUFFIXES = set(".apng .bmp .gif .jfif .jpe .jpeg .jpg .pbm .pgm .png .pnm .ppm .tif .tiff .webp".split())
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")  # by content: others, such as EPS, start programs
DARK = 2**14 >> 8  # 16-bit pictures that are darker throughout have fewer bits, most likely


def load_image_folder(
    data_dir: str | Path, split: str, image_size: int = 96, *, channels: int = 3, workers: int | None = None
) -> ImageSet:
    """Read ``<data_dir>/train/<class>/*`` and ``<data_dir>/test/<class>/*``, or ``<data_dir>/<class>/*``.

    The folders of the parts may be spelled otherwise (``Training``, ``val``, ``test_set``). Without them a fixed,
    stratified fifth of the images is the test split. Images are turned as their EXIF tag says, laid on white where they
    are transparent, cut to a square about the centre, resized with antialiasing and decoded by a pool of threads.
    Classes are sorted by name. Files that are left out are counted in a warning.

    Args:
        split: ``"train"``, ``"test"``, ``"all"`` (every part), or ``"unlabeled"``: all images below, without labels.
        channels: 3 for colour, 1 for grey.
        workers: decoding threads; by default one per processor.

    Returns:
        images uint8 (N, channels, image_size, image_size) in the order of their paths; labels int64 (N,).

    Raises InputError: the folder is missing or has no images, there is one class, a class has no images, the test split
    has a class that the training split has not, or an image cannot be decoded (named).
    """
    classes, paths, labels = list_images(data_dir, split)
    root = user_path(data_dir)
    check_classes(classes, root)
    check_alike(root, classes)
    images, files = decode(paths, split, image_size, channels, workers)
    names = tuple(path.relative_to(root).as_posix() for path in paths)
    return ImageSet(images, labels, classes, root.resolve().name, split, files, names=names)


def read_images(images: Any, image_size: int, *, channels: int = 3, workers: int | None = None) -> Tensor:
    """Read an image file or a PIL image, or a list of either, as :func:`load_image_folder` does: uint8 (N, C, H, W).

    Raises InputError: a file cannot be decoded (named), or something that is neither a path nor a PIL image.
    """
    from PIL.Image import Image

    given = list(images) if isinstance(images, list | tuple) else [images]
    if given and all(isinstance(image, Image) for image in given):
        try:
            pixels = [_pixels(image, image_size, channels, b"")[0] for image in given]
        except (ValueError, OSError, TypeError, SyntaxError) as error:
            raise InputError(f"cannot read a PIL image: {' '.join(str(error).split())}") from error
        return torch.from_numpy(np.stack(pixels)).contiguous()
    wrong = [type(image).__name__ for image in given if not isinstance(image, str | Path)]
    if wrong:
        raise InputError(f"images must be a tensor (N, 1 or 3, H, W), paths or PIL images, got {wrong[0]}")
    return decode([Path(path) for path in given], "given", image_size, channels, workers)[0]


def decode(
    paths: Sequence[Path], what: str, image_size: int, channels: int, workers: int | None, *, keep: bool = False
) -> tuple[Tensor, dict[str, dict[str, Any]]]:
    """Return the images uint8 (N, channels, image_size, image_size) and one record of the files together.

    `keep`: up to 2 GiB in the user's cache folder, and from there until a file changes its size or time.
    """
    whole("image size", image_size, 1)
    if channels not in (1, 3):
        raise InputError(f"channels must be 1 or 3, got {channels!r}")
    if keep and len(paths) * channels * image_size**2 <= 1 << 31:
        found = [[path.resolve().as_posix(), (stat := path.stat()).st_size, stat.st_mtime_ns] for path in paths]

        def read() -> dict[str, Tensor]:
            images, files = decode(paths, what, image_size, channels, workers)
            ((_, record),) = files.items()
            md5 = torch.tensor([*bytes.fromhex(record["md5"])], dtype=torch.uint8)
            return {"images": images, "md5": md5, "bytes": torch.tensor(record["bytes"])}

        saved = kept("images", [found, image_size, channels], read)
        record = {"bytes": int(saved["bytes"]), "md5": bytes(saved["md5"].tolist()).hex(), "official": None}
        return saved["images"], {f"{what} images": record}
    pixels = np.empty((len(paths), channels, image_size, image_size), dtype=np.uint8)
    digest, size, brightest = hashlib.md5(usedforsecurity=False), 0, []
    with ThreadPoolExecutor(workers or os.cpu_count()) as pool:
        decoded = pool.map(lambda path: _decode(path, image_size, channels), paths)
        shown = tqdm(decoded, total=len(paths), desc="reading images", unit="image", disable=None, leave=False)
        for row, (image, checksum, length, level) in enumerate(shown):
            pixels[row] = image
            digest.update(os.fsencode(paths[row].parent.name) + os.fsencode(paths[row].name) + checksum)
            size += length
            brightest += [] if level is None else [level]
    if brightest and max(brightest) < DARK:
        logger.warning(
            "%d of %d images have 16 bits a level, but none is above %d of 65535: if they have fewer bits, "
            "they are read as nearly black; save them with levels up to 65535",
            len(brightest),
            len(paths),
            256 * max(brightest) + 255,
        )
    files = {f"{what} images": {"bytes": size, "md5": digest.hexdigest(), "official": None}}
    return torch.from_numpy(pixels), files


def find_parts(root: Path) -> dict[str, Path]:
    """The folders of training, validation and test in a folder, by part; empty where it holds class folders."""
    if not root.is_dir():
        what = f"{root} is a file, not a folder" if root.exists() else f"no folder {root}"
        raise InputError(f"{what}: name a folder of images, with one subfolder per class where they have labels")
    folders = {folder: _part_of(folder.name) for folder in _subfolders(root)}
    parts: dict[str, Path] = {}
    for part in PART_NAMES:
        named = [folder for folder, its in folders.items() if its == part]
        named = [folder for folder in named if folder.name == part] or named
        if len(named) > 1:
            raise InputError(f"{root}: {named[0].name} and {named[1].name} are both named as the {part} part; keep one")
        if named:
            parts[part] = named[0]
    flat = [folder for folder in parts.values() if not _subfolders(folder)]
    if flat and len(parts) == 1 < len(folders):  # a class with the name of a part, such as trains among vehicles
        return {}
    if flat:
        told = f"{flat[0]} has no class folders: put the images of each class in a subfolder of its name"
        raise InputError(f"{told}, or, if it is a class itself, rename it")
    beside = sorted(path.name for path in root.iterdir() if path not in parts.values())
    if parts and beside:
        more = f" and {len(beside) - 5} more" if len(beside) > 5 else ""
        _tell(root, f"{', '.join(beside[:5])}{more}, beside its parts")
    return parts


def list_images(data_dir: str | Path, split: str) -> tuple[list[str], list[Path], Tensor]:
    """Return (classes, image paths, labels int64 (N,)) of a split without reading any image."""
    one_of("split", split, (*SPLITS, ALL))
    root = user_path(data_dir)
    if split == UNLABELED and root.is_dir():
        left: Counter[str] = Counter()
        paths = _images_below(root, left)
        _tell(root, _counted(left))
        return [], paths, torch.full((len(paths),), UNLABELLED)
    parts = find_parts(root)
    if not parts:
        classes, paths, labels = _scan(root)
        if split == ALL:
            return classes, paths, labels
        test = max(round(TEST_SHARE * len(paths)), 1)
        sizes = torch.bincount(labels)
        if int(sizes.min()) < 2:
            told = f"{root / classes[int(sizes.argmin())]} has one image, and a fifth of all is the test split"
            raise InputError(f"{told}: add images, or make the folders train and test yourself")
        rows = validation_split(labels, test)[SPLITS.index(split)]
        return classes, [paths[row] for row in rows.tolist()], labels[rows]
    wanted = list(parts) if split == ALL else [split]
    if not set(wanted) <= set(parts):
        raise InputError(f"{root} has a {next(iter(parts))} folder but no {split} folder; add it, or leave both out")
    if split in SPLITS and "validation" in parts:
        _tell(root, f"{parts['validation'].name}: training holds images of the train part back for validation")
    read = {part: _scan(parts[part]) for part in wanted}
    known = sorted({name for classes, *_ in read.values() for name in classes})
    if split == "test" and "train" in parts:
        extra = sorted(set(known) - set(known := [folder.name for folder in _subfolders(parts["train"])]))
        if extra:
            raise InputError(f"{parts['test']} has the class {extra[0]!r}, which {parts['train']} has not")
    numbers = [torch.tensor([known.index(name) for name in classes])[labels] for classes, _, labels in read.values()]
    return known, [path for _, paths, _ in read.values() for path in paths], torch.cat(numbers)


def check_image_folder(data_dir: str | Path) -> str:
    """Read every image and return one line with the number of classes and images that each part of a folder has."""
    classes, paths, _ = list_images(data_dir, "train")
    check_classes(classes, user_path(data_dir))
    try:
        test = f"{len(list_images(data_dir, 'test')[1]):,} test images"
    except InputError as error:
        test = f"no test images ({error})"
    every = list_images(data_dir, ALL)[1]
    decode(every, ALL, 8, 3, None)
    return f"image-folder: {len(classes)} classes, {len(paths):,} train images, {test}, {len(every):,} images in all"


def _part_of(name: str) -> str | None:
    plain = re.sub("[^a-z]", "", name.lower())
    pattern = "(seg|images?)?({})(set|data|images?|split)?"
    return next((part for part, words in PART_NAMES.items() if re.fullmatch(pattern.format(words), plain)), None)


def _subfolders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _images_below(folder: Path, left: Counter[str]) -> list[Path]:
    """The image files below a folder, each linked folder once, by path; all other files are counted in `left`."""
    found, seen = [], set()

    def refuse(error: OSError) -> None:
        raise InputError(f"cannot read the folder {error.filename}: {error.strerror}")

    for place, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        if os.path.realpath(place) in seen:
            folders.clear()
            continue
        seen.add(os.path.realpath(place))
        for path in (Path(place, name) for name in names):
            if path.suffix.lower() in SUFFIXES and path.is_file() and not path.name.startswith("."):
                found.append(path)
            else:
                left[_kind(path)] += 1
    if not found:
        raise InputError(f"{folder} has no images ({', '.join(sorted(SUFFIXES))})")
    return sorted(found)


def _kind(path: Path) -> str:
    return "hidden" if path.name.startswith(".") else path.suffix.lower() or "without a suffix"


def _counted(left: Counter[str]) -> str:
    return f"{left.total()} files: " + ", ".join(f"{n} {kind}" for kind, n in sorted(left.items())) if left else ""


@functools.cache
def _tell(folder: Path, left: str) -> None:
    """Log what is left out; once, though the parts of a folder are read one by one."""
    if left:
        logger.warning("%s: left out %s", folder, left)


def check_classes(classes: Sequence[str], where: object) -> None:
    """Refuse a single class: every accuracy would be 100%."""
    if len(classes) == 1:
        told = f"{where} has one class, {classes[0]!r}, and with one class every accuracy is 100%: add classes"
        raise InputError(f"{told}, or name the folder right above the class folders")


def _scan(folder: Path) -> tuple[list[str], list[Path], Tensor]:
    folders = _subfolders(folder)
    if not folders:
        told = f"{folder} has no class folders: put the images of each class in a subfolder of its name"
        raise InputError(f"{told}; images without classes are the split {UNLABELED!r}")
    left = Counter(f"{_kind(path)} beside the class folders" for path in folder.iterdir() if path not in folders)
    images = [_images_below(place, left) for place in folders]
    _tell(folder, _counted(left))
    counts = torch.tensor([len(found) for found in images])
    labels = torch.arange(len(folders)).repeat_interleave(counts)
    return [place.name for place in folders], [path for found in images for path in found], labels


def _decode(path: Path, image_size: int, channels: int) -> tuple[np.ndarray[Any, Any], bytes, int, int | None]:
    """The square image, the file's MD5 and bytes, and the brightest level (0..255) of a picture of 16 bits."""
    from PIL import Image, UnidentifiedImageError

    try:
        content = path.read_bytes()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image: Any = Image.open(io.BytesIO(content), formats=FORMATS)
            pixels, brightest = _pixels(image, image_size, channels, content)
    except Exception as error:  # Pillow raises any type on damaged files, struct.error and TypeError among them
        reason = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, FileNotFoundError):
            raise InputError(f"there is no image {path}") from error
        if isinstance(error, UnidentifiedImageError):  # its own text shows the address of a buffer
            reason = f"it is of no known image format ({', '.join(FORMATS)})"
        if isinstance(error, IsADirectoryError):
            raise InputError(f"{path} is a folder, not an image; name the files in it") from error
        raise InputError(f"cannot read the image {path}: {reason}; repair or remove it") from error
    return pixels, hashlib.md5(content, usedforsecurity=False).digest(), len(content), brightest


def _pixels(image: Any, image_size: int, channels: int, content: bytes) -> tuple[np.ndarray[Any, Any], int | None]:
    """The square image (C, H, W) of an opened one, and its brightest level (0..255) if it has 16 bits."""
    from PIL import Image, ImageOps

    tags = getattr(image, "tag_v2", {})  # of a TIFF
    _check_channels(tags)
    grey16 = image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM")
    bits = 16 if image.format == "PNG" and content[24:25] == b"\x10" else max(tags.get(BITS, (16 if grey16 else 8,)))
    image = ImageOps.exif_transpose(image)
    if grey16:  # Pillow would clip the levels to 8 bits; keep the upper 8 of those that the file states
        image = Image.fromarray((np.asarray(image) >> (bits - 8)).astype(np.uint8))
    if image.mode in ("I", "F"):  # Pillow would clip them to 0..255
        told = f"its pixels are of {'32 bits' if image.mode == 'I' else 'floating point'}"
        raise ValueError(f"{told}; save it with 8 or 16 bits a channel")
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba)
    brightest = image.convert("L").getextrema()[1] if bits > 8 else None
    image = image.convert("RGB" if channels == 3 else "L")
    image = ImageOps.fit(image, (image_size, image_size), Image.Resampling.BILINEAR)
    return np.asarray(image).reshape(image_size, image_size, channels).transpose(2, 0, 1), brightest


BITS, PHOTOMETRIC, SAMPLES, EXTRA = 258, 262, 277, 338  # tags of a TIFF


def _check_channels(tags: Mapping[int, Any]) -> None:
    """Refuse a TIFF with channels beside colour and alpha: Pillow drops them, or takes one for alpha."""
    colours = {2: 3, 5: 4, 6: 3, 8: 3}.get(tags.get(PHOTOMETRIC, 1), 1)
    extra = tags.get(SAMPLES, colours) - colours
    if extra > 0 and tags.get(EXTRA) not in ((1,), (2,)):  # the two kinds of alpha
        told = f"it has {extra} channels beside its {colours} of colour, and only one of alpha may stand there"
        raise ValueError(f"{told}; save it as grey or RGB")
