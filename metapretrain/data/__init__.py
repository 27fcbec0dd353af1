"""Readers of image and text data sets, registries of them, batch augmentation, corruptions and cached tokens."""

from metapretrain.data.augment import AUGMENTATIONS, BatchAugment, make_augmentation
from metapretrain.data.cs224n import load_cs224n
from metapretrain.data.images import ImageSet
from metapretrain.data.made_texts import made_tasks
from metapretrain.data.normalise import normalize
from metapretrain.data.registry import DATASETS, DatasetInfo, load_images, validation_split
from metapretrain.data.sentence_sets import (
    SentenceData,
    balanced_sample,
    few_shot_draw,
    fixed_sample,
    known_texts,
    without_known,
)
from metapretrain.data.sentiment import load_plain, load_sentiment, made_sentiment
from metapretrain.data.stl10 import download_stl10, load_stl10
from metapretrain.data.text_files import from_dataset, read_texts
from metapretrain.data.text_overlap import overlap
from metapretrain.data.text_registry import TEXT_DATASETS, TextDatasetInfo
from metapretrain.data.texts import TextSet, TextTask, hold_out
from metapretrain.data.tokens import Tokens, tokenize

__all__ = [
    "AUGMENTATIONS",
    "DATASETS",
    "TEXT_DATASETS",
    "BatchAugment",
    "DatasetInfo",
    "ImageSet",
    "SentenceData",
    "TextDatasetInfo",
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
    "load_images",
    "load_plain",
    "load_sentiment",
    "load_stl10",
    "made_sentiment",
    "made_tasks",
    "make_augmentation",
    "normalize",
    "overlap",
    "read_texts",
    "tokenize",
    "validation_split",
    "without_known",
]
