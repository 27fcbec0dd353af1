"""Few-shot sets whose parts are lists or folders of classes: mini-ImageNet, tieredImageNet and CUB."""

from pathlib import Path

import torch

from metapretrain.checks import user_path
from metapretrain.data.image_folder import decode, find_parts, list_images
from metapretrain.data.images import ImageSet
from metapretrain.data.published import read_file
from metapretrain.data.tables import read_utf8
from metapretrain.errors import InputError

PARTS = {"train": "train", "validation": "val", "test": "test"}  # and what their lists are called
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

    Raises InputError: a file or image that is missing, a malformed row, or other numbers of classes or images.
    """
    given = user_path(folder)
    places = [given, given / name, given / "CUB_200_2011"]
    list_name = {"mini-imagenet": "train.csv", "cub": "train.txt"}.get(name, "train")
    root = next((place for place in places if (place / list_name).exists()), None)
    if root is None:
        raise InputError(f"no {list_name} in {places[0]}; expected {ABOUT[name][2]}")
    reader = {"mini-imagenet": _by_rows, "tiered-imagenet": _by_folders, "cub": _by_classes}[name]
    listed = {part: sorted(reader(root, part), key=lambda row: row[1]) for part in PARTS}
    classes = {part: sorted({label for _, label in rows}) for part, rows in listed.items()}
    counts, total = tuple(map(len, classes.values())), sum(map(len, listed.values()))
    if (counts, total) != CLASSES[name]:
        raise InputError(
            f"{root}: {name} has {'/'.join(map(str, CLASSES[name][0]))} classes and {CLASSES[name][1]:,} images, but "
            f"here are {'/'.join(map(str, counts))} and {total:,}; unpack it again, or read it as --image-folder"
        )
    made = {}
    for part, rows in listed.items():
        place = {label: number for number, label in enumerate(classes[part])}
        images, files = decode([path for path, _ in rows], part, image_size or 84, 3, None, keep=True)
        labels = torch.tensor([place[label] for _, label in rows])
        made[part] = ImageSet(images, labels, classes[part], name, part, files)
    return made


Rows = list[tuple[Path, str]]  # image and class


def _by_rows(root: Path, part: str) -> Rows:
    file = root / f"{PARTS[part]}.csv"
    found = read_file(file, text="filename", id="label", format="csv")
    rows = [(root / "images" / name, label) for name, label in zip(found.first, found.ids, strict=True)]
    seen: set[Path] = set()
    for number, (path, label) in enumerate(rows, start=2):
        if not label:
            raise InputError(f"{file}, line {number}: label is empty; give the image's class")
        if not path.is_file():
            raise InputError(f"{file}, line {number}: there is no image {path}")
        if path in seen:
            raise InputError(f"{file}, line {number}: the image {path} is listed above as well")
        seen.add(path)
    return rows


def _by_folders(root: Path, part: str) -> Rows:
    places = find_parts(root)
    if part not in places:
        raise InputError(f"{root} has no folder {PARTS[part]}; expected {ABOUT['tiered-imagenet'][2]}")
    return _images_of(places[part])


def _by_classes(root: Path, part: str) -> Rows:
    file, rows = root / f"{PARTS[part]}.txt", _images_of(root / "images")
    names, known = read_utf8(file, f"expected {ABOUT['cub'][2]}").split(), {label for _, label in rows}
    for number, name in enumerate(names, start=1):
        if name not in known:
            raise InputError(f"{file}, line {number}: there is no class folder {root / 'images' / name}")
    return [row for row in rows if row[1] in names]


def _images_of(folder: Path) -> Rows:
    classes, paths, labels = list_images(folder, "all")
    return [(path, classes[label]) for path, label in zip(paths, labels.tolist(), strict=True)]
