"""Figures that the papers published, to stand beside ours, in the order in which they were printed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Published(NamedTuple):
    """Accuracies as printed, in fractions; the poster names neither seeds nor the number of test images."""

    test: float
    train: float | None = None


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

# Omniglot with the split of Vinyals et al. (2016). ProtoNet: Snell et al. (2017), table 1; MAML: Finn et al. (2017),
# table 1, convolutional.
OMNIGLOT: dict[str, Mapping[str, Published]] = {
    f"omniglot-{setting}": {"protonet": Published(proto), "maml": Published(maml)}
    for setting, proto, maml in (
        ("5w1s", 0.988, 0.987),
        ("5w5s", 0.997, 0.999),
        ("20w1s", 0.960, 0.958),
        ("20w5s", 0.989, 0.989),
    )
}

PUBLISHED: dict[str, Mapping[str, Published]] = {"stl10": STL10_POSTER, **OMNIGLOT}


def published_for(
    dataset: str, recipe: str, published: Mapping[str, Mapping[str, Published]] = PUBLISHED
) -> Mapping[str, Published]:
    """The figures that may stand beside runs of a data set: none for smoke runs, which see a part of it only.

    Example:
        >>> published_for("stl10", "paper")["simclr"].test, len(published_for("stl10", "paper-smoke"))
        (0.646, 0)
    """
    return {} if "smoke" in recipe.split("-") else published.get(dataset, {})
