"""Readers of image data sets, a registry of them, batch augmentation and corruptions."""

from metapretrain.data.augment import AUGMENTATIONS, BatchAugment, make_augmentation
from metapretrain.data.images import ImageSet
from metapretrain.data.normalise import normalize
from metapretrain.data.registry import DATASETS, DatasetInfo, load_images, validation_split
from metapretrain.data.stl10 import download_stl10, load_stl10

__all__ = [
    "AUGMENTATIONS",
    "DATASETS",
    "BatchAugment",
    "DatasetInfo",
    "ImageSet",
    "download_stl10",
    "load_images",
    "load_stl10",
    "make_augmentation",
    "normalize",
    "validation_split",
]
