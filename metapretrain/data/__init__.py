"""Readers of image and text data sets, registries of them, batch augmentation, corruptions and cached tokens.

Data that is missing or cannot be used is an InputError of one line that names file and place.
"""

from metapretrain.data.augment import AUGMENTATIONS, BatchAugment, make_augmentation
from metapretrain.data.cs224n import load_cs224n
from metapretrain.data.images import ImageSet, normalize, validation_split
from metapretrain.data.made import made_sentiment, made_tasks
from metapretrain.data.registry import (
    DATASETS,
    DatasetInfo,
    load_few_shot,
    load_images,
    load_plain,
    load_sentiment,
    load_text_tasks,
    register,
)
from metapretrain.data.stl10 import download_stl10, load_stl10
from metapretrain.data.tables import from_dataset, read_texts
from metapretrain.data.texts import (
    SentenceData,
    TextSet,
    TextTask,
    balanced_sample,
    few_shot_draw,
    fixed_sample,
    hold_out,
    known_texts,
    overlap,
    without_known,
)
from metapretrain.data.tokens import Tokens, tokenize

__all__ = [
    "AUGMENTATIONS",
    "DATASETS",
    "BatchAugment",
    "DatasetInfo",
    "ImageSet",
    "SentenceData",
    "TextSet",
    "TextTask",
    "Tokens",
    "balanced_sample",
    "download_stl10",
    "few_shot_draw",
    "fixed_sample",
    "from_dataset",
    "hold_out",
    "known_texts",
    "load_cs224n",
    "load_few_shot",
    "load_images",
    "load_plain",
    "load_sentiment",
    "load_stl10",
    "load_text_tasks",
    "made_sentiment",
    "made_tasks",
    "make_augmentation",
    "normalize",
    "overlap",
    "read_texts",
    "register",
    "tokenize",
    "validation_split",
    "without_known",
]
