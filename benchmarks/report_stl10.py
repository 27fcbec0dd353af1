"""The table of `run_stl10.py`: its baselines, the poster's numbers and claim; reliability diagrams of its methods."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from metapretrain.experiments.images.experiment import IMAGES
from metapretrain.files import read_json
from metapretrain.report.figures import panels, save_figure
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
# Ours: every image as a query against a part of them.
LOO = Claim("prl-loo", "prl-query", tuple((f"prl-loo-{end}", f"prl-query-{end}") for end in ENDS))

LAYOUT = replace(
    IMAGES,
    baselines=(("supervised-resnet18",), ("simclr", "simclr-frozen")),
    published={"stl10": POSTER},
    published_title="published test / train",
    published_counts={"test": 8000},  # the official test part
    cited=("test", "train"),
    claims=(QUERY, LOO),
)


def plot_reliability(root: Path) -> list[Path]:
    """Draw accuracy over confidence of each method, all seeds together, of runs evaluated by `--corrupt`."""
    found: dict[str, np.ndarray] = {}
    for file in sorted(root.glob("*/result.json")):
        result = read_json(file) or {}
        if "reliability" in result:
            bins = np.array([result["reliability"][name] for name in ("rows", "confidence", "right")])
            found[result["method"]] = found.get(result["method"], 0) + bins
    if not found:
        return []
    figure, axes = panels(len(found), 4, 2.6, 2.6)
    for (name, (rows, confidence, right)), one in zip(found.items(), axes, strict=False):
        full = rows > 0
        one.plot([0, 1], [0, 1], color="0.7", linewidth=1)
        one.plot(confidence[full] / rows[full], right[full] / rows[full], marker="o", markersize=3)
        one.set_title(f"{name}, ECE {100 * abs(confidence - right).sum() / rows.sum():.1f}%", fontsize=8)
        one.set(xlim=(0, 1), ylim=(0, 1), xlabel="confidence", ylabel="accuracy")
    return [save_figure(figure, root / "figures" / "reliability.png")]
