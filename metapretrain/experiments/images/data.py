"""The images of an experiment: training, validation and test part, and their augmentation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from metapretrain.data.augment import BatchAugment, make_augmentation
from metapretrain.data.images import ImageSet, validation_split
from metapretrain.errors import InputError
from metapretrain.experiments.base import Machine
from metapretrain.experiments.images.recipe import ImagePhase


class Images(nn.Module):
    """Images and labels that follow the module to its device but are no part of its state.

    uint8 images are small: they are kept on the device, gathered by row and augmented there. Where they do not fit
    (`resident=False`), they stay in the memory of the CPU and each batch is copied.
    """

    def __init__(self, data: ImageSet, augment: BatchAugment, resident: bool = True) -> None:
        super().__init__()
        self.images, self.labels, self.resident = data.images, data.labels, resident
        self.augment = augment

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Images:
        # no buffers: DDP would send them to every rank in every step
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.labels = fn(self.labels)
        if self.resident:
            self.images = fn(self.images)
        return self

    def view(self, rows: Tensor) -> Tensor:
        """Return augmented, normalised images (B, C, H, W) of `rows` (B,)."""
        images = self.images[rows.to(self.images.device)]
        x: Tensor = self.augment(images.to(rows.device))
        return x


@dataclass(frozen=True)
class ImageData:
    """Training, validation and test part with the normalisation of the training part.

    `unlabelled`: what objectives that read no labels are trained on, in place of the training part.
    """

    train: ImageSet
    validation: ImageSet
    test: ImageSet
    mean: tuple[float, ...]
    std: tuple[float, ...]
    unlabelled: ImageSet | None = None

    @classmethod
    def of(cls, train: ImageSet, test: ImageSet, validation: int, unlabelled: ImageSet | None = None) -> ImageData:
        """Hold `validation` images of the training set back, the same ones for every seed.

        InputError: unlabelled rows, another image size in a part, or nothing left to train on.
        """
        train.require_labels()
        test.require_labels()
        if train.images.shape[1:] != test.images.shape[1:] or train.classes != test.classes:
            told = f"training images {tuple(train.images.shape[1:])} with {len(train.classes)} classes, but test"
            raise InputError(f"{told} images {tuple(test.images.shape[1:])} with {len(test.classes)}: they must agree")
        if unlabelled is not None and unlabelled.images.shape[1:] != train.images.shape[1:]:
            raise InputError(
                f"training images {tuple(train.images.shape[1:])}, but unlabelled ones "
                f"{tuple(unlabelled.images.shape[1:])}: give --image-size, or images of as many channels"
            )
        if not 0 <= validation < len(train):
            told = f"{validation} validation images of {len(train)} training images leave none to train on"
            raise InputError(f"{told}; lower the recipe's validation, such as validation=10")
        rows, held = validation_split(train.labels, validation)
        part = train.subset(rows)
        return cls(part, train.subset(held), test, *part.statistics(), unlabelled)

    def seen(self, labelled: bool) -> ImageSet:
        """What an objective is trained on that reads labels, or none."""
        return self.train if labelled or self.unlabelled is None else self.unlabelled

    @property
    def counts(self) -> dict[str, int]:
        parts = {"train": self.train, "validation": self.validation, "test": self.test, "unlabelled": self.unlabelled}
        return {name: len(part) for name, part in parts.items() if part is not None}


def describe(data: Any, encoder: str, stem: str, head: str | None) -> dict[str, Any]:
    """What a saved model of `data`, which has `train`, `mean` and `std`, is built again from."""
    train = data.train
    about = {"polarity": train.polarity} if train.polarity is not None else {}
    about |= {"encoder": encoder, "stem": stem, "head": head, "classes": list(train.classes)}
    about |= {"channels": train.channels, "image_size": train.image_size}
    return about | {"mean": list(data.mean), "std": list(data.std)}


def images_of(data: ImageData, phase: ImagePhase, machine: Machine, labelled: bool = True) -> Images:
    """Return the images that are trained on, augmented as the phase says."""
    train = data.seen(labelled)
    changes: dict[str, bool] = {"channels_last": machine.device != "cpu"}
    if train.channels == 1:  # digits are not mirrored
        changes["flip"] = False
    augment = make_augmentation(phase.augment, train.image_size, train.channels, data.mean, data.std, **changes)
    no_gpu = machine.device == "cpu" or not torch.cuda.is_available()
    return Images(train, augment, resident=no_gpu or train.images.numel() < torch.cuda.mem_get_info()[0] / 2)
