"""Curves of logged metrics, over seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from metapretrain.errors import InputError
from metapretrain.evaluation.canvas import COLOURS, INK, darker, new_figure, plain
from metapretrain.training.metrics_file import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DRAWN = 1e100  # of a diverged run: axes to the largest float64 have no ticks that could be computed
Curve = tuple[NDArray[np.int64], NDArray[np.float64]]  # steps, values


def read_curves(run: Path | str) -> dict[str, Curve]:
    """What a run logged: "split/name" -> (steps int64 (S,) in order, values float64 (S,)); NaN where not finite.

    Example:
        >>> read_curves("no-such-run")
        {}
    """
    series: dict[str, dict[int, float]] = {}
    for line in read_metrics(run):
        series.setdefault(f"{line['split']}/{line['name']}", {})[line["step"]] = line["value"]
    return {
        key: (np.array(sorted(found), np.int64), np.array([found[step] for step in sorted(found)], np.float64))
        for key, found in series.items()
    }


def curves_figure(runs: Mapping[str, Sequence[Path | str]], metrics: Sequence[str]) -> Figure:
    """Curves of logged metrics, a panel a metric: mean over seeds, and a band from lowest to highest.

    At each step the seeds count that have reached it, so a run in progress does not cut the others short.

    Args:
        runs: method to the run folders of its seeds.
        metrics: "split/name", for example "train/loss".

    Raises:
        InputError: no run logged any of the metrics (the line names those that are there).
    """
    read = {method: [read_curves(folder) for folder in folders] for method, folders in runs.items()}
    there = sorted({key for seeds in read.values() for seed in seeds for key in seed})
    shown = [metric for metric in metrics if metric in there]
    if not shown:
        raise InputError(
            f"none of the metrics {', '.join(metrics)} was logged; there are: {', '.join(there) or 'none'}"
        )
    columns = min(2, len(shown))
    rows = math.ceil(len(shown) / columns)
    figure = new_figure(6.4 * columns, 4.2 * rows)
    for place, metric in enumerate(shown, start=1):
        axes = figure.add_subplot(rows, columns, place)
        ends: list[tuple[float, float, str, str]] = []
        for position, (method, seeds) in enumerate(read.items()):
            curves = [seed[metric] for seed in seeds if metric in seed]
            if curves:
                ends.append((*_curve(axes, curves, position), method))
        _end_labels(axes, ends)
        axes.set_title(metric, fontsize=11, color=INK)
        axes.set_xlabel("step", color=INK)
        plain(axes)
    most = max(len(seeds) for seeds in read.values())
    told = f"line: mean over seeds (up to {most}); band: lowest to highest seed"
    figure.supxlabel(told if most > 1 else "one seed", fontsize=8, color=INK)
    return figure


def over_seeds(curves: Sequence[Curve]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Bring the curves of seeds to all their steps: steps (S,) and values (seeds, S).

    Between its logged steps a curve is interpolated; outside them it is NaN.

    Example:
        >>> a = np.array([0, 2]), np.array([1.0, 3.0])
        >>> b = np.array([1]), np.array([5.0])
        >>> over_seeds([a, b])[1].tolist()
        [[1.0, 2.0, 3.0], [nan, 5.0, nan]]
    """
    grid = np.unique(np.concatenate([steps for steps, _ in curves]))
    return grid, np.stack([np.interp(grid, *curve, left=np.nan, right=np.nan) for curve in curves])


def _curve(axes: Axes, curves: Sequence[Curve], position: int) -> tuple[float, float, str]:
    """Draw mean and band; returns the last point and the colour."""
    grid, values = over_seeds(curves)
    values[np.abs(values) > DRAWN] = np.nan
    kept = ~np.isnan(values).all(axis=0)
    grid, values = grid[kept], values[:, kept]
    if grid.size == 0:
        return math.nan, math.nan, INK
    mean = np.nanmean(values, axis=0)
    colour = COLOURS[position % len(COLOURS)]
    style = ("-", "--", "-.", ":")[position // len(COLOURS) % 4]
    axes.plot(grid, mean, color=colour, linestyle=style, linewidth=1.6)
    if len(curves) > 1:
        low, high = np.nanmin(values, axis=0), np.nanmax(values, axis=0)
        axes.fill_between(grid, low, high, color=colour, alpha=0.18, linewidth=0)
    return float(grid[-1]), float(mean[-1]), colour


def _end_labels(axes: Axes, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Name each curve at its end, pushed apart so that no two names overlap and none leaves the panel."""
    low, high = axes.get_ylim()
    gap = (high - low) * 0.055
    finite = sorted((end for end in ends if math.isfinite(end[1])), key=lambda end: end[1])
    heights: list[float] = []
    for _, y, _, _ in finite:
        heights.append(max(y, heights[-1] + gap) if heights else y)
    top = high
    for place in reversed(range(len(heights))):
        heights[place] = min(heights[place], top)
        top = heights[place] - gap
    for height, (x, y, colour, method) in zip(heights, finite, strict=True):
        leader = {"arrowstyle": "-", "color": colour, "lw": 0.6, "relpos": (0, 0.5)}
        axes.annotate(
            method,
            (x, y),
            (1.02, height),
            textcoords=axes.get_yaxis_transform(),
            va="center",
            color=darker(colour),
            fontsize=8.5,
            annotation_clip=False,
            arrowprops=leader,
        )
