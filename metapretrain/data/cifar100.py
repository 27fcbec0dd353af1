"""Reader of CIFAR-100 (Krizhevsky, 2009) with the few-shot splits CIFAR-FS and FC100: all 600 images of each class."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from metapretrain.checks import user_path
from metapretrain.data.image_folder import decode, list_images
from metapretrain.data.images import ImageSet, file_record, resized
from metapretrain.errors import InputError, one_of

IMAGES = {"train": 500, "test": 100}  # of each class
ROW = 2 + 3 * 32 * 32  # superclass, class, and the planes of an image
LAYOUT = (
    "cifar-100-binary/{train,test}.bin, CIFAR-100's binary version, or its images as {train,test}/<class>/*.png, "
    "500 and 100 of each class"
)
ABOUT = {  # source, terms, layout
    name: ("https://www.cs.toronto.edu/~kriz/cifar.html", f"none stated; cite Krizhevsky (2009) and {paper}", LAYOUT)
    for name, paper in {"cifar-fs": "Bertinetto et al. (2019)", "fc100": "Oreshkin et al. (2018)"}.items()
}
# Superclass: classes. A class with - is for validation and one with + for the test of CIFAR-FS; a superclass, of FC100.
TABLE = """
aquatic_mammals+: beaver- dolphin otter- seal whale+
fish: aquarium_fish flatfish- ray shark- trout
flowers: orchid poppy+ rose+ sunflower tulip
food_containers: bottle bowl can cup plate
fruit_and_vegetables: apple mushroom orange pear sweet_pepper+
household_electrical_devices: clock keyboard lamp- telephone+ television-
household_furniture: bed+ chair couch table+ wardrobe+
insects+: bee beetle- butterfly- caterpillar cockroach
large_carnivores-: bear leopard+ lion tiger wolf
large_man-made_outdoor_things: bridge castle house road skyscraper
large_natural_outdoor_scenes: cloud forest mountain plain+ sea-
large_omnivores_and_herbivores-: camel- cattle- chimpanzee+ elephant kangaroo
medium_mammals+: fox+ porcupine possum raccoon skunk
non-insect_invertebrates-: crab- lobster snail+ spider worm+
people+: baby+ boy girl man+ woman+
reptiles: crocodile- dinosaur lizard snake turtle
small_mammals-: hamster mouse rabbit shrew squirrel
trees: maple_tree- oak_tree palm_tree pine_tree willow_tree
vehicles_1: bicycle+ bus motorcycle- pickup_truck+ train
vehicles_2: lawn_mower rocket+ streetcar tank tractor-
"""
SUPERCLASSES = dict(line.split(": ") for line in TABLE.split("\n") if line)
CLASSES = sorted(name.strip("+-") for names in SUPERCLASSES.values() for name in names.split())


def split_of(name: str) -> dict[str, list[str]]:
    """The classes of training, validation and test of `cifar-fs` or `fc100`."""
    one_of("split of CIFAR-100", name, ABOUT)
    parts: dict[str, list[str]] = {"train": [], "validation": [], "test": []}
    for superclass, names in SUPERCLASSES.items():
        for each in names.split():
            mark = (superclass if name == "fc100" else each)[-1]
            parts[{"-": "validation", "+": "test"}.get(mark, "train")].append(each.strip("+-"))
    return {part: sorted(classes) for part, classes in parts.items()}


def load_cifar100(name: str, data_dir: str | Path, image_size: int | None = None) -> dict[str, ImageSet]:
    """Read the parts of `cifar-fs` or `fc100`: uint8 (600 * classes, 3, 32, 32) or as large as asked.

    Raises InputError: no CIFAR-100 there, a truncated file, a class that is missing or has not 600 images.
    """
    root = user_path(data_dir)
    places = [root, root / "cifar-100-binary", root / "cifar100"]
    folder = next((place for place in places if (place / "train.bin").exists() or (place / "train").is_dir()), None)
    if folder is None:
        raise InputError(f"no CIFAR-100 in {root}; expected {LAYOUT}")
    reader = _read_binary if (folder / "train.bin").exists() else _read_folder
    read = [reader(folder, split, count) for split, count in IMAGES.items()]
    images, labels = torch.cat([part[0] for part in read]), torch.cat([part[1] for part in read])
    order = labels.argsort(stable=True).view(len(CLASSES), -1)
    made = {}
    for part, classes in split_of(name).items():
        rows = order[[CLASSES.index(each) for each in classes]].flatten()
        codes = torch.arange(len(classes)).repeat_interleave(order.shape[1])
        one = ImageSet(images[rows], codes, classes, name, part, read[0][2] | read[1][2])
        made[part] = resized(one, image_size)
    return made


Read = tuple[Tensor, Tensor, dict[str, dict[str, Any]]]  # images, labels, records of the files


def _read_binary(folder: Path, split: str, each: int) -> Read:
    file, expected = folder / f"{split}.bin", len(CLASSES) * each * ROW
    found = file.stat().st_size if file.is_file() else 0
    if found != expected:
        raise InputError(f"{file} should have {expected:,} bytes, but has {found:,}; unpack CIFAR-100 again")
    rows = torch.from_numpy(np.fromfile(file, dtype=np.uint8)).view(-1, ROW)
    labels = rows[:, 1].long()
    if wrong := (labels >= len(CLASSES)).nonzero().flatten().tolist():
        raise InputError(f"{file}, image {wrong[0] + 1}: class {int(labels[wrong[0]])} is not one of 0..99")
    _check_counts(labels, each, file)
    return rows[:, 2:].reshape(-1, 3, 32, 32), labels, {file.name: file_record(file, None)}


def _read_folder(folder: Path, split: str, each: int) -> Read:
    classes, paths, labels = list_images(folder, split)
    if other := sorted(set(CLASSES) ^ set(classes)):
        told = "lacks the class" if other[0] in CLASSES else "has, unlike CIFAR-100, a class"
        raise InputError(f"{folder / split} {told} {other[0]!r}; unpack CIFAR-100 again")
    _check_counts(labels, each, folder / split)
    images, files = decode(paths, split, 32, 3, None, keep=True)
    return images, labels, files


def _check_counts(labels: Tensor, each: int, where: Path) -> None:
    counts = labels.bincount(minlength=len(CLASSES)).tolist()
    for name, count in zip(CLASSES, counts, strict=True):
        if count != each:
            raise InputError(f"{where} has {count} images of {name!r}, {each} expected; unpack CIFAR-100 again")
