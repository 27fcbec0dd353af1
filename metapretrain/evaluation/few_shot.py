"""k-shot accuracy of an encoder on labelled images, also of classes that it never saw."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from metapretrain.errors import InputError
from metapretrain.evaluation.episodes import EpisodeResult, evaluate_embeddings
from metapretrain.evaluation.representation import Encode, embed

if TYPE_CHECKING:
    from metapretrain.data.images import ImageSet
    from metapretrain.episodes import EpisodeSpec


def few_shot_accuracy(
    encode: Encode,
    images: ImageSet,
    spec: EpisodeSpec,
    episodes: int = 600,
    seed: int = 0,
    *,
    distance: str = "euclidean",
    batch_size: int = 512,
    device: torch.device | str | None = None,
) -> EpisodeResult:
    """Accuracy by nearest support prototype over random episodes of `images`, for example 5-way 1-shot.

    Every labelled image is embedded once; episodes then only index the embeddings.

    Args:
        encode: maps uint8 images (B, C, H, W) to embeddings (B, D), for example `load(run).encode`.
        images: labelled images; rows of label -1 are left out.
        spec: ways, shots and queries.
        episodes: how many, at least 1.
        seed: which episodes.

    Raises:
        InputError: no labelled image, too few classes or images for `spec`, embeddings with NaN.

    Example:
        >>> from metapretrain.data.digits import load_digits_images
        >>> from metapretrain.episodes import EpisodeSpec
        >>> digits, spec = load_digits_images("test"), EpisodeSpec(ways=5, shots=1, queries=5)
        >>> result = few_shot_accuracy(lambda images: images.flatten(1).float(), digits, spec, episodes=200)
        >>> 0.6 < result.mean < 0.9  # by raw pixels
        True
    """
    from metapretrain.episodes import EpisodeSampler

    if episodes is None or episodes < 1:
        raise InputError(f"episodes must be 1 or more; got {episodes}")
    labelled = (images.labels >= 0).nonzero().flatten()
    if len(labelled) == 0:
        raise InputError(
            f"{images.name} {images.split} has no labelled image; few-shot accuracy needs labels"
        )
    sampler = EpisodeSampler(images.labels[labelled].cpu(), spec, episodes, seed=seed)
    z = embed(encode, images.images[labelled], batch_size, device)
    return evaluate_embeddings(z, sampler, distance=distance)
