"""Shallow networks over an encoder's features."""

from __future__ import annotations

from torch import nn

from metapretrain.errors import one_of

HEADS = ("linear", "mlp")


def build_head(name: str, features: int, classes: int) -> nn.Module:
    """Build a classification head: features `(B, D)` to logits `(B, C)`.

    `linear` is one layer; `mlp` has one hidden ReLU layer as wide as the features (the poster's two heads).

    Raises:
        InputError: unknown name.

    Example:
        >>> build_head("linear", 512, 10)
        Linear(in_features=512, out_features=10, bias=True)
    """
    if one_of("head", name, HEADS) == "linear":
        return nn.Linear(features, classes)
    return nn.Sequential(nn.Linear(features, features), nn.ReLU(), nn.Linear(features, classes))


def projection(features: int, size: int = 128) -> nn.Module:
    """SimCLR's projection head: one hidden ReLU layer, `size` outputs (Chen et al., 2020, section 4.2).

    Example:
        >>> projection(512)[-1]
        Linear(in_features=512, out_features=128, bias=True)
    """
    return nn.Sequential(nn.Linear(features, features), nn.ReLU(), nn.Linear(features, size))
