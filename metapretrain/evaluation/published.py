"""Figures that the papers published, to stand beside ours, in the order in which they were printed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Published(NamedTuple):
    """Accuracies as printed, in fractions; the poster names neither seeds nor the number of test images."""

    test: float
    train: float


# R. Sikand, "Prototypical Pre-Training for Visual Representation Learning", poster, table "Results", by row.
STL10_POSTER: dict[str, Published] = {
    "supervised-mlp": Published(0.414, 0.591),
    "supervised-resnet18": Published(0.625, 0.984),
    "simclr": Published(0.646, 0.965),
    "prl-standard-frozen-linear": Published(0.607, 0.997),
    "prl-standard-frozen-mlp": Published(0.606, 0.998),
    "prl-standard-unfrozen-linear": Published(0.638, 0.999),
    "prl-standard-unfrozen-mlp": Published(0.602, 0.989),
    "prl-query-unfrozen-linear": Published(0.636, 0.997),
    "prl-query-frozen-linear": Published(0.642, 0.999),
    "prl-query-unfrozen-mlp": Published(0.638, 0.999),
    "prl-query-frozen-mlp": Published(0.631, 0.996),
}

PUBLISHED: dict[str, Mapping[str, Published]] = {"stl10": STL10_POSTER}


def published_for(
    dataset: str, recipe: str, published: Mapping[str, Mapping[str, Published]] = PUBLISHED
) -> Mapping[str, Published]:
    """The figures that may stand beside runs of a data set: none for smoke runs, which see a part of it only.

    Example:
        >>> published_for("stl10", "paper")["simclr"].test, len(published_for("stl10", "paper-smoke"))
        (0.646, 0)
    """
    return {} if "smoke" in recipe.split("-") else published.get(dataset, {})
