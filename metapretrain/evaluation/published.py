"""Figures that the papers published, to stand beside ours, in the order in which they were printed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from metapretrain.evaluation.prompt_columns import SETS as PROMPT_SETS


@dataclass(frozen=True)
class Published:
    """One row as printed.

    Args:
        scores: column of `columns.Layout` to figure, fractions or correlations; None where none was printed.
        source: `poster`, for a row that stands beside rows of another print; "" for the main one.
        comparable: False for a row that was made otherwise than the others, which the print marks by a star.
    """

    scores: Mapping[str, float | None]
    source: str = ""
    comparable: bool = True


def _images(test: float, train: float | None = None) -> Published:
    """Accuracies; the poster names neither seeds nor the number of test images."""
    return Published({"test": test, "train": train})


def _text(sst: float, para: float, sts: float, overall: float, source: str = "", star: bool = False) -> Published:
    return Published({"sst": sst, "para": para, "sts": sts, "overall": overall}, source, not star)


# R. Sikand, "Prototypical Pre-Training for Visual Representation Learning", poster, table "Results", by row.
STL10_POSTER: dict[str, Published] = {
    "supervised-mlp": _images(0.414, 0.591),
    "supervised-resnet18": _images(0.625, 0.984),
    "simclr": _images(0.646, 0.965),
    "prl-standard-frozen-linear": _images(0.607, 0.997),
    "prl-standard-frozen-mlp": _images(0.606, 0.998),
    "prl-standard-unfrozen-linear": _images(0.638, 0.999),
    "prl-standard-unfrozen-mlp": _images(0.602, 0.989),
    "prl-query-unfrozen-linear": _images(0.636, 0.997),
    "prl-query-frozen-linear": _images(0.642, 0.999),
    "prl-query-unfrozen-mlp": _images(0.638, 0.999),
    "prl-query-frozen-mlp": _images(0.631, 0.996),
}

# Omniglot with the split of Vinyals et al. (2016). ProtoNet: Snell et al. (2017), table 1; MAML: Finn et al. (2017),
# table 1, convolutional.
OMNIGLOT: dict[str, Mapping[str, Published]] = {
    f"omniglot-{setting}": {"protonet": _images(proto), "maml": _images(maml)}
    for setting, proto, maml in (
        ("5w1s", 0.988, 0.987),
        ("5w5s", 0.997, 0.999),
        ("20w1s", 0.960, 0.958),
        ("20w5s", 0.989, 0.989),
    )
}

# R. Sikand and A. Yeung, "Prototypical Pre-Training for Robust Multi-Task Learning in Natural Language Processing",
# table 1 (dev), with the rows that only their poster has. Stars: 10 epochs where the others had 20. The poster's
# "Prototypical Pre-trained" encodes the sentences of a pair separately (text paper, appendix A.2).
TEXT_PAPER: dict[str, Published] = {
    "baseline": _text(0.327, 0.648, 0.264, 0.413),
    "unfrozen": _text(0.490, 0.782, 0.383, 0.552),
    "combine-add": _text(0.351, 0.625, 0.290, 0.422, "poster", star=True),
    "combine-mult": _text(0.487, 0.692, 0.367, 0.515, "poster", star=True),
    "combine-concat": _text(0.490, 0.664, 0.289, 0.481, "poster", star=True),
    "cosine": _text(0.490, 0.759, 0.702, 0.650),
    "weighted-sst": _text(0.502, 0.629, 0.465, 0.532, star=True),
    "weighted-para": _text(0.321, 0.727, 0.369, 0.472, star=True),
    "weighted-sts": _text(0.296, 0.639, 0.571, 0.502, star=True),
    "shared": _text(0.479, 0.694, 0.259, 0.477, star=True),
    "cross": _text(0.496, 0.805, 0.833, 0.711),
    "proto-separate": _text(0.498, 0.779, 0.735, 0.670, "poster"),
    "proto": _text(0.490, 0.825, 0.857, 0.724),
}
# Table 2 of the paper and of the poster: the course's test sets, which come without labels.
TEXT_TEST: dict[str, Mapping[str, float | None]] = {
    "proto-separate": _text(0.524, 0.780, 0.714, 0.672).scores,
    "proto": _text(0.513, 0.822, 0.849, 0.728).scores,
}


def _prompts(*scores: float, star: bool = False) -> Published:
    """Accuracies on SST-5, SST-2, Amazon-5, Amazon-2, SentiHood, SemEval restaurant and laptop, or on SST-5 alone."""
    return Published(dict(zip(PROMPT_SETS, scores, strict=False)), comparable=not star)


# Y. Huang, K. Qian and Z. Yu, "Learning a Better Initialization for Soft Prompts via Meta-Learning", table 1, and
# table 2 (SST-5 alone) for the ways to make meta tasks. Their PPT was pretrained on pseudo labels.
_PPT = (0.4290, 0.8742, 0.5115, 0.9328, 0.8006, 0.6204, 0.5637)
PROMPT_PAPER: dict[str, Published] = {
    "ft": _prompts(0.4357, 0.8827, 0.4840, 0.9235, 0.8211, 0.7101, 0.6248),
    "ppt": _prompts(*_PPT, star=True),
    "ppt-pseudo": _prompts(*_PPT),
    "metapt-pseudo": _prompts(0.4526, 0.8947, 0.5547, 0.9443, 0.8038, 0.7693, 0.7086),
    "metapt-kmeans": _prompts(0.4624, 0.8726, 0.5873, 0.9539, 0.7827, 0.8072, 0.7232),
    "metapt-lda": _prompts(0.4410),
    "metapt-random": _prompts(0.4295),
    "metapt-label": _prompts(0.4284),
}

PUBLISHED: dict[str, Mapping[str, Published]] = {
    "yelp5": PROMPT_PAPER,
    "stl10": STL10_POSTER,
    **OMNIGLOT,
    "cs224n": TEXT_PAPER,
    "cs224n-qqp": TEXT_PAPER,  # more PARA pairs to train on, the same dev sets
}


def published_for(
    dataset: str, recipe: str, published: Mapping[str, Mapping[str, Published]] = PUBLISHED
) -> Mapping[str, Published]:
    """The figures that may stand beside runs of a data set: none for smoke runs, which see a part of it only.

    Example:
        >>> published_for("stl10", "paper")["simclr"].scores["test"], len(published_for("stl10", "paper-smoke"))
        (0.646, 0)
    """
    return {} if "smoke" in recipe.split("-") else published.get(dataset, {})
