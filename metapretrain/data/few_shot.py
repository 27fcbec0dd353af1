"""Data of few-shot learning: three parts whose classes are disjoint, from Omniglot, any image folder, or made here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.nn import functional as F

from metapretrain.checks import check_alike, user_path
from metapretrain.data.image_folder import find_parts, load_image_folder
from metapretrain.data.images import LIGHT_ON_DARK, ImageSet
from metapretrain.draws import torch_generator
from metapretrain.errors import InputError, one_of

PARTS = ("train", "validation", "test")
SHARES = {"validation": 0.2, "test": 0.2}  # of the classes of a folder without parts
MADE = {"train": 40, "validation": 20, "test": 25}  # classes


@dataclass(frozen=True)
class FewShotData:
    """Images to learn from, to choose by and to be tested on; no class is in two parts.

    `mean` and `std` of each channel, in 0..1 units, are those that a backbone normalises by.
    """

    train: ImageSet
    validation: ImageSet
    test: ImageSet
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(cls, parts: Mapping[str, ImageSet]) -> FewShotData:
        """Check the parts, or raise InputError; grey images are divided by 255, colours normalised by training."""
        train, validation, test = (parts[name].require_labels() for name in PARTS)
        check_disjoint(parts)
        shapes = {name: tuple(part.images.shape[1:]) for name, part in parts.items()}
        if len(set(shapes.values())) > 1:
            raise InputError(f"the parts have images of different shapes: {shapes}")
        mean, std = ((0.0,), (1.0,)) if train.channels == 1 else train.statistics()
        return cls(train, validation, test, mean, std)

    def first(self, classes: int, images: int) -> FewShotData:
        """Return the first images of the first classes of each part, or all that there are: for a quick look."""
        parts = {name: _first_images(getattr(self, name), images) for name in PARTS}
        return FewShotData.of({n: _classes(p, torch.arange(len(p.classes))[:classes], n) for n, p in parts.items()})

    @property
    def counts(self) -> dict[str, int]:
        parts = {name: getattr(self, name) for name in PARTS}
        classes = {f"{name}_classes": len(part.classes) for name, part in parts.items()}
        return classes | {f"{name}_images": len(part) for name, part in parts.items()}


def check_disjoint(parts: Mapping[str, ImageSet]) -> None:
    """Raise InputError where parts share a class; turned copies of an Omniglot character count as the same."""
    owner: dict[str, str] = {}
    for name, part in parts.items():
        mine = dict.fromkeys(re.sub(r"/rot\d{3}$", "", label) for label in part.classes)
        shared = [label for label in mine if label in owner]
        if shared:
            told = f"{owner[shared[0]]} and {name} share {len(shared)} class(es), such as {shared[0]!r}"
            raise InputError(f"{told}: few-shot accuracy is measured on classes that training has not seen")
        owner |= dict.fromkeys(mine, name)
    check_alike("the parts", owner)


def folder_parts(folder: str | Path, image_size: int | None = None) -> dict[str, ImageSet]:
    """Read the parts of a folder, in any spelling, or class folders, shared out; `image_size` None is 84."""
    root, size = user_path(folder), image_size or 84
    places = find_parts(root)
    missing = [part for part in PARTS if part not in places]
    if not missing:
        return {part: replace(load_image_folder(folder, "all", size), split=part) for part, folder in places.items()}
    if places:
        raise InputError(f"{root} has no {missing[0]} folder; give train, validation and test, or class folders only")
    return split_classes(load_image_folder(root, "all", size))


def split_classes(images: ImageSet) -> dict[str, ImageSet]:
    """Share the classes of a set out over training, validation and test, the same way every time."""
    count = len(images.classes)
    held = {part: max(1, round(share * count)) for part, share in SHARES.items()}
    if count < 3:
        raise InputError(f"{images.name} has {count} classes; training, validation and test need one each, or more")
    order = torch.randperm(count, generator=torch_generator(0))
    shares = zip(PARTS, order.split([count - sum(held.values()), *held.values()]), strict=True)
    return {part: _classes(images, rows.sort().values, part) for part, rows in shares}


def _first_images(part: ImageSet, most: int) -> ImageSet:
    order = part.labels.sort(stable=True).indices
    place = torch.arange(len(order)) - torch.searchsorted(part.labels[order], part.labels[order])
    return part.subset(order[place < most].sort().values)


def _classes(images: ImageSet, chosen: torch.Tensor, split: str) -> ImageSet:
    part = images.subset(torch.isin(images.labels, chosen))
    classes = [images.classes[number] for number in chosen.tolist()]  # in ascending order, as split and first give them
    return replace(part, labels=torch.searchsorted(chosen, part.labels), classes=classes, split=split)


def made_glyphs(part: str, image_size: int = 28) -> ImageSet:
    """Random blocks as characters, 20 noisy and shifted drawings (1, H, H) of each: data for trying things out."""
    random = torch_generator(PARTS.index(one_of("part", part, PARTS)))
    count = MADE[part]
    glyphs = (torch.rand(count, 1, 6, 6, generator=random) < 0.4).float()
    large = F.interpolate(glyphs, (image_size - 4, image_size - 4), mode="bilinear")
    images = torch.zeros(count, 20, 1, image_size, image_size)
    for number in range(20):
        down, right = torch.randint(0, 5, (2,), generator=random).tolist()
        images[:, number, :, down : down + image_size - 4, right : right + image_size - 4] = large
    images += 0.15 * torch.randn(images.shape, generator=random)
    pixels = (images * 255).round().clamp(0, 255).to(torch.uint8).flatten(0, 1)
    labels = torch.arange(count).repeat_interleave(20)
    classes = [f"{part} glyph {number}" for number in range(count)]
    return ImageSet(pixels, labels, classes, "made", part, polarity=LIGHT_ON_DARK)
