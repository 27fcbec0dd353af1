"""The 8 x 8 handwritten digits that scikit-learn ships (Alpaydin and Kaynak, 1998)."""

from __future__ import annotations

import numpy as np
import torch

from metapretrain.data.images import ImageSet, validation_split
from metapretrain.errors import one_of

SPLITS = ("train", "test")
TEST_IMAGES = 450
SPLIT_SEED = 0


def load_digits_images(split: str) -> ImageSet:
    """Return the digits as images uint8 (N, 1, 8, 8) with labels 0..9; no file or network is needed.

    The 1,797 digits are divided once and for all into 1,347 training and 450 test images, stratified by
    class. The source's grey levels 0..16 are stretched to 0..255.

    Raises:
        InputError: unknown split.

    Example:
        >>> digits = load_digits_images("test")
        >>> len(digits), tuple(digits.images.shape[1:]), digits.classes[:2]
        (450, (1, 8, 8), ['0', '1'])
    """
    from sklearn.datasets import load_digits

    one_of("split", split, SPLITS)
    source = load_digits()
    pixels = np.round(source.images * (255 / 16)).astype(np.uint8)[:, None]
    labels = torch.from_numpy(source.target.astype(np.int64))
    rows = validation_split(labels, TEST_IMAGES, SPLIT_SEED)[SPLITS.index(split)]
    return ImageSet(
        torch.from_numpy(pixels)[rows], labels[rows], [str(name) for name in source.target_names], "digits", split
    )


def check_digits(data_dir: object = None) -> str:
    """Return one line with the number of images of each split; `data_dir` is not used."""
    counts = ", ".join(f"{split} {len(load_digits_images(split)):,} images" for split in SPLITS)
    return f"digits: {counts} (part of scikit-learn)"
