"""What holds the classes of few-shot data: our labels, or learn2learn's MetaDataset."""

from __future__ import annotations

from dataclasses import replace

import torch

from metapretrain.data.few_shot import FewShotData
from metapretrain.data.images import ImageSet
from metapretrain.episodes import to_metadataset
from metapretrain.errors import one_of

HOLDERS = ("labels", "learn2learn")


def held_by(holder: str, data: FewShotData) -> FewShotData:
    """The data with the classes of their rows as `holder` has them, one of `HOLDERS`: the same ones by each.

    Raises:
        InputError: an unknown name, or learn2learn is not installed.
    """
    if one_of("holder", holder, HOLDERS) == "labels":
        return data
    return replace(data, train=_held(data.train), validation=_held(data.validation), test=_held(data.test))


def _held(images: ImageSet) -> ImageSet:
    classes = to_metadataset(images.images, images.labels).indices_to_labels
    return replace(images, labels=torch.tensor([classes[row] for row in range(len(images))]))
