"""The table of `run_stl10.py`: its baselines, the poster's figures and the poster's claim."""

from __future__ import annotations

from dataclasses import replace

from metapretrain.experiments.images.experiment import IMAGES
from metapretrain.report.layout import Claim, Published


def _printed(test: float, train: float) -> Published:
    """Accuracies; the poster names neither seeds nor the number of test images."""
    return Published({"test": test, "train": train})


# R. Sikand, "Prototypical Pre-Training for Visual Representation Learning", poster, table "Results", by row.
POSTER = {
    "supervised-mlp": _printed(0.414, 0.591),
    "supervised-resnet18": _printed(0.625, 0.984),
    "simclr": _printed(0.646, 0.965),
    "prl-standard-frozen-linear": _printed(0.607, 0.997),
    "prl-standard-frozen-mlp": _printed(0.606, 0.998),
    "prl-standard-unfrozen-linear": _printed(0.638, 0.999),
    "prl-standard-unfrozen-mlp": _printed(0.602, 0.989),
    "prl-query-unfrozen-linear": _printed(0.636, 0.997),
    "prl-query-frozen-linear": _printed(0.642, 0.999),
    "prl-query-unfrozen-mlp": _printed(0.638, 0.999),
    "prl-query-frozen-mlp": _printed(0.631, 0.996),
}
ENDS = ("frozen-linear", "frozen-mlp", "unfrozen-linear", "unfrozen-mlp")
# The poster: the query variant outperforms the standard one.
QUERY = Claim("prl-query", "prl-standard", tuple((f"prl-query-{end}", f"prl-standard-{end}") for end in ENDS))

LAYOUT = replace(
    IMAGES,
    baselines=(("supervised-resnet18",), ("simclr", "simclr-frozen")),
    published={"stl10": POSTER},
    published_title="published test / train",
    published_counts={"test": 8000},  # the official test part
    cited=("test", "train"),
    claims=(QUERY,),
)
