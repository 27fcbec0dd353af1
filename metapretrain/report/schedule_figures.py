"""Figures of scheduling runs: target loss against source updates and all compute, and the sources over time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from metapretrain.errors import InputError
from metapretrain.report.figures import COLOURS, INK, MARKERS, new_figure, plain, save_figure
from metapretrain.report.layout import Result
from metapretrain.report.results import collect

if TYPE_CHECKING:
    from matplotlib.figure import Figure


AXES = {"updates": "source updates", "compute_units": "compute: forward passes of a batch, probes included"}


def plot_schedule(root: Path | str, place: Path | None = None) -> list[Path]:
    """Draw `target-loss-SETTING.png` and `shares-SETTING.png` for the complete runs below `root`.

    Runs of several recipes, encoders or data sets have figures of their own, with these in their names.

    Args:
        place: where they go; by default `root`/figures.

    Raises:
        InputError: there is no complete run with a curve, or a file cannot be written.
    """
    root = Path(root)
    place = root / "figures" if place is None else place
    groups: dict[str, dict[str, dict[str, dict[int, Result]]]] = {}
    for result in collect(root).results:
        if "curve" in result:
            kind = "-".join(str(result[key]) for key in ("dataset", "recipe", "encoder") if result.get(key))
            by_setting = groups.setdefault(kind, {})
            by_setting.setdefault(result["setting"], {}).setdefault(result["method"], {})[result["seed"]] = result
    if not groups:
        raise InputError(f"no complete scheduling run in {root}")
    written = []
    for kind, by_setting in groups.items():  # curves of two recipes are no comparison
        suffix = f"-{kind.replace('/', '-')}" if kind and len(groups) > 1 else ""
        for setting, rows in by_setting.items():
            figures = {"target-loss": loss_figure(rows), "shares": shares_figure(rows)}
            written += [save_figure(one, place / f"{name}-{setting}{suffix}.png") for name, one in figures.items()]
    return written


def loss_figure(rows: Mapping[str, Mapping[int, Result]]) -> Figure:
    """Target loss of each method, mean over seeds: a panel against source updates, one against all compute."""
    figure = new_figure(13, 4.6)
    for place, (axis, title) in enumerate(AXES.items(), start=1):
        axes = figure.add_subplot(1, 2, place)
        for number, (method, seeds) in enumerate(rows.items()):
            curves = [run["curve"] for run in seeds.values()]
            length = min(len(curve["updates"]) for curve in curves)
            x, y = (
                np.mean([np.array(curve[part][:length], np.float64) for curve in curves], axis=0)
                for part in (axis, "target_loss")
            )
            style, marker = ("-", "--", "-.", ":")[number // len(COLOURS) % 4], MARKERS[number % len(MARKERS)]
            colour = COLOURS[number % len(COLOURS)]
            axes.plot(x, y, color=colour, linestyle=style, marker=marker, markersize=3, linewidth=1.3, label=method)
        axes.set_xlabel(title, color=INK)
        axes.set_ylabel("target loss, mean over targets", color=INK)
        plain(axes)
    axes.legend(loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False, fontsize=8)
    return figure


def shares_figure(rows: Mapping[str, Mapping[int, Result]]) -> Figure:
    """The part of all updates so far that each source had, of each method's first seed: a panel a method."""
    shown = {method: seeds[min(seeds)]["curve"] for method, seeds in rows.items() if not method.startswith("fixed-")}
    shown = shown or {method: seeds[min(seeds)]["curve"] for method, seeds in rows.items()}
    columns = min(3, len(shown))
    lines = -(-len(shown) // columns)
    figure = new_figure(4.4 * columns + 2, 2.8 * lines)
    names = list(dict.fromkeys(name for curve in shown.values() for name in curve if name.startswith("share_")))
    for place, (method, curve) in enumerate(shown.items(), start=1):
        axes = figure.add_subplot(lines, columns, place)
        none = [0.0] * len(curve["updates"])  # a method may have other sources
        parts = [np.array(curve.get(name, none)[1:], np.float64) for name in names]
        labels = [name.removeprefix("share_") for name in names]
        colours = [COLOURS[i % len(COLOURS)] for i in range(len(names))]
        hatches = ["//" if i >= len(COLOURS) else "" for i in range(len(names))]  # more sources than colours
        if names:
            axes.stackplot(curve["updates"][1:], parts, labels=labels, colors=colours, hatch=hatches)
        axes.set_title(method, fontsize=9, color=INK)
        axes.set_ylim(0, 1)
        plain(axes)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize=8)
    return figure
