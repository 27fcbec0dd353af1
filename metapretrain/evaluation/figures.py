"""Figures of a run: embeddings, curves, confusion matrix and comparison, on an Agg canvas without global state."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from metapretrain.errors import InputError, one_of
from metapretrain.evaluation.intervals import Interval
from metapretrain.evaluation.predictions import confusion
from metapretrain.evaluation.representation import check_embeddings, knn_leave_one_out, silhouette, subsample

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Paul Tol's "muted" scheme and black: ten colours that stay apart for colour-blind readers.
COLOURS = (
    "#332288", "#DDCC77", "#117733", "#CC6677", "#88CCEE",
    "#882255", "#44AA99", "#999933", "#AA4499", "#000000",
)  # fmt: skip
MARKERS = "osD^vPX<>*"
INK = "#333333"

log = logging.getLogger(__name__)


def new_figure(width: float, height: float) -> Figure:
    """A figure in inches on an Agg canvas, known to no global list, so that none is ever left open."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Figure, path: Path | str) -> Path:
    """Write a PNG, whole or not at all.

    Raises:
        InputError: the folder cannot be made or written.
    """
    path = Path(path)
    partial = path.with_name(f".{path.stem}.partial.png")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(partial)
        partial.replace(path)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error
    return path


def _plain(axes: Axes) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(colors=INK)


def project(z: Tensor, reducer: str = "tsne", seed: int = 0) -> NDArray[np.float32]:
    """Map embeddings (N, D) to the plane, (N, 2), by t-SNE or UMAP with a fixed random state.

    Raises:
        InputError: another reducer, fewer than four rows, or "umap" without the package umap-learn.
    """
    one_of("reducer", reducer, ("tsne", "umap"))
    check_embeddings(z)
    if len(z) < 4:
        raise InputError(f"a map of embeddings needs 4 rows or more; got {len(z)}")
    array = z.detach().float().cpu().numpy()
    if reducer == "umap":
        try:
            from umap import UMAP
        except ImportError as error:
            raise InputError("reducer 'umap' needs the extra package: pip install umap-learn") from error
        return np.asarray(
            UMAP(random_state=seed, n_neighbors=min(15, len(z) - 1)).fit_transform(array), np.float32
        )
    from sklearn.manifold import TSNE

    perplexity = min(30.0, (len(z) - 1) / 3)
    start = "pca" if z.shape[1] > 1 else "random"
    return np.asarray(
        TSNE(perplexity=perplexity, init=start, random_state=seed).fit_transform(array), np.float32
    )


def tsne_figure(
    panels: Mapping[str, tuple[Tensor, Tensor]],
    classes: Sequence[str],
    *,
    reducer: str = "tsne",
    seed: int = 0,
    max_points: int = 2000,
    knn: Mapping[str, float] | None = None,
) -> Figure:
    """Maps of embeddings, one panel each, two a row, coloured and labelled by class.

    The title of a panel gives silhouette and kNN accuracy in the embedding space itself, not on the map; kNN is by
    the panel's other points (leave-one-out) unless `knn` holds the panel's figure.

    Args:
        panels: name ("train, before pretraining") to embeddings (N, D) and labels int (N,), 0..C-1.
        classes: the C class names.
        max_points: points drawn and scored a panel, a random part fixed by `seed` where there are more.
        knn: kNN accuracy (0..1) by panel, if measured elsewhere.

    Raises:
        InputError: no panel, embeddings with NaN, labels outside 0..C-1.
    """
    if not panels:
        raise InputError("a map of embeddings needs at least one panel: {name: (embeddings, labels)}")
    columns = min(2, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = new_figure(5.2 * columns, 4.9 * rows)
    for place, (name, (z, y)) in enumerate(panels.items(), start=1):
        check_embeddings(z, y, f"embeddings of panel {name!r}")
        kept = subsample(len(z), max_points, seed)
        z, y = z.detach().cpu()[kept], y.cpu()[kept]
        axes = figure.add_subplot(rows, columns, place)
        _scatter(axes, project(z, reducer, seed), y.numpy(), classes)
        if knn is not None and name in knn:
            measured = f"kNN {knn[name]:.1%}"
        else:
            measured = f"kNN (leave-one-out) {knn_leave_one_out(z, y):.1%}"
        axes.set_title(f"{name}\nsilhouette {silhouette(z, y):.2f}, {measured}", fontsize=10, color=INK)
    method = {"tsne": "t-SNE", "umap": "UMAP"}[reducer]
    figure.supxlabel(f"{method} of at most {max_points:,} embeddings a panel", fontsize=8, color=INK)
    return figure


def _scatter(axes: Axes, points: NDArray[np.float32], y: NDArray[np.int64], classes: Sequence[str]) -> None:
    """Points by class, each class named at the medoid of its points: no legend to look up."""
    if len(y) and not 0 <= y.min() <= y.max() < len(classes):
        raise InputError(
            f"labels must be 0..{len(classes) - 1}, one class name each; got {y.min()}..{y.max()}"
        )
    from matplotlib.patheffects import withStroke

    for label in np.unique(y):
        mine = points[y == label]
        colour = COLOURS[label % len(COLOURS)]
        marker = MARKERS[label // len(COLOURS) % len(MARKERS)]
        axes.scatter(mine[:, 0], mine[:, 1], s=7, c=colour, marker=marker, alpha=0.65, linewidths=0)
    for label in np.unique(y):  # after all points, so that no point hides a name
        mine = points[y == label]
        middle = mine[np.abs(mine - np.median(mine, axis=0)).sum(axis=1).argmin()]
        colour = COLOURS[label % len(COLOURS)]
        outline = [withStroke(linewidth=3, foreground="white")]
        axes.text(middle[0], middle[1], classes[label], color=colour, fontsize=9, weight="bold",
                  ha="center", va="center", path_effects=outline)  # fmt: skip
    axes.set_xticks([])
    axes.set_yticks([])


def read_metrics(path: Path | str) -> dict[str, tuple[NDArray[np.int64], NDArray[np.float64]]]:
    """Read `metrics.jsonl` into "split/name" -> (steps, values); a torn last line is left out with a warning.

    Raises:
        InputError: the file cannot be read, or a line before the last is not a metric.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read metrics {path}: {error}") from error
    series: dict[str, dict[int, float]] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            key, step, value = f"{entry['split']}/{entry['name']}", int(entry["step"]), float(entry["value"])
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines):
                log.warning("%s: the last line is torn and left out", path)
                break
            raise InputError(f"{path}: line {number} is not a metric (step, split, name, value)") from error
        series.setdefault(key, {})[step] = value
    return {
        key: (
            np.array(sorted(found), np.int64),
            np.array([found[step] for step in sorted(found)], np.float64),
        )
        for key, found in series.items()
    }


def curves_figure(runs: Mapping[str, Sequence[Path | str]], metrics: Sequence[str]) -> Figure:
    """Curves of logged metrics, a panel a metric: a line for the mean over seeds, a band from lowest to highest.

    Args:
        runs: method to the `metrics.jsonl` files of its seeds.
        metrics: "split/name", for example "train/loss".

    Raises:
        InputError: no file holds any of the metrics (the line names those that are there).
    """
    read = {method: [read_metrics(path) for path in paths] for method, paths in runs.items()}
    there = sorted({key for seeds in read.values() for seed in seeds for key in seed})
    shown = [metric for metric in metrics if metric in there]
    if not shown:
        raise InputError(
            f"none of the metrics {', '.join(metrics)} was logged; there are: {', '.join(there) or 'none'}"
        )
    figure = new_figure(6.4 * len(shown), 4.2)
    for place, metric in enumerate(shown, start=1):
        axes = figure.add_subplot(1, len(shown), place)
        ends: list[tuple[float, float, str, str]] = []
        for position, (method, seeds) in enumerate(read.items()):
            curves = [seed[metric] for seed in seeds if metric in seed]
            if curves:
                ends.append((*_curve(axes, curves, COLOURS[position % len(COLOURS)], position), method))
        _end_labels(axes, ends)
        axes.set_title(metric, fontsize=11, color=INK)
        axes.set_xlabel("step", color=INK)
        _plain(axes)
    most = max(len(seeds) for seeds in read.values())
    figure.supxlabel(
        f"line: mean over seeds (up to {most}); band: lowest to highest seed", fontsize=8, color=INK
    )
    return figure


def _curve(
    axes: Axes, curves: Sequence[tuple[NDArray[np.int64], NDArray[np.float64]]], colour: str, position: int
) -> tuple[float, float, str]:
    """Draw mean and band on the steps that all seeds cover; returns the last point and the colour."""
    last = min(int(steps[-1]) for steps, _ in curves)
    first = max(int(steps[0]) for steps, _ in curves)
    grid = np.unique(np.concatenate([steps for steps, _ in curves]))
    grid = grid[(grid >= first) & (grid <= last)]
    if grid.size == 0:
        raise InputError(
            f"the seeds of a curve share no step: the latest starts at {first}, the first ends at {last}"
        )
    values = np.stack([np.interp(grid, steps, value) for steps, value in curves])
    mean = values.mean(axis=0)
    style = ("-", "--", "-.", ":")[position // len(COLOURS) % 4]
    axes.plot(grid, mean, color=colour, linestyle=style, linewidth=1.6)
    if len(curves) > 1:
        axes.fill_between(grid, values.min(axis=0), values.max(axis=0), color=colour, alpha=0.18, linewidth=0)
    return float(grid[-1]), float(mean[-1]), colour


def _end_labels(axes: Axes, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Name each curve at its end, pushed apart so that no two names overlap."""
    low, high = axes.get_ylim()
    gap = (high - low) * 0.055
    finite = sorted((end for end in ends if math.isfinite(end[1])), key=lambda end: end[1])
    previous = -math.inf
    for x, y, colour, method in finite:
        previous = max(y, previous + gap)
        axes.annotate(method, (x, y), (1.02, previous), xycoords="data", textcoords=axes.get_yaxis_transform(),
                      color=colour, fontsize=8.5, va="center", annotation_clip=False,
                      arrowprops={"arrowstyle": "-", "color": colour, "lw": 0.6})  # fmt: skip


def confusion_figure(y: Tensor, predicted: Tensor, classes: Sequence[str], title: str = "") -> Figure:
    """Confusion matrix: a row a true class, cells in per cent of that class's examples.

    Args:
        y: int (N,), 0..C-1.
        predicted: int (N,), 0..C-1.

    Raises:
        InputError: lengths differ, or a label lies outside 0..C-1.
    """
    counts = confusion(y, predicted, len(classes)).double()
    share = (100 * counts / counts.sum(dim=1, keepdim=True).clamp(min=1)).numpy()
    size = 2.6 + 0.55 * len(classes)
    figure = new_figure(size + 0.6, size)
    axes = figure.add_subplot()
    axes.imshow(share, cmap="Blues", vmin=0, vmax=100)
    if len(classes) <= 25:
        for (row, column), value in np.ndenumerate(share):
            if value >= 0.5:
                colour = "white" if value > 55 else INK
                axes.text(column, row, f"{value:.0f}", ha="center", va="center", fontsize=8, color=colour)
    axes.set_xticks(range(len(classes)), classes, rotation=45, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(len(classes)), classes)
    axes.set_xlabel("predicted", color=INK)
    axes.set_ylabel("true class", color=INK)
    right = float(counts.diagonal().sum() / counts.sum().clamp(min=1))
    axes.set_title(
        f"{title + ': ' if title else ''}{right:.1%} of {len(y):,} right; cells in % of the row", fontsize=10
    )
    return figure


def comparison_figure(
    rows: Mapping[str, Interval],
    *,
    published: Mapping[str, float] | None = None,
    title: str = "test accuracy",
) -> Figure:
    """Bars of accuracy with their 95% intervals over seeds, in the order given; a published figure is a diamond.

    Args:
        rows: method to its interval (fractions); a single seed has a bar without interval.
        published: method to the published fraction.

    Raises:
        InputError: there are no rows.
    """
    if not rows:
        raise InputError("a comparison needs at least one method")
    figure = new_figure(7.6, 1.3 + 0.42 * len(rows))
    axes = figure.add_subplot()
    names = list(rows)
    for place, (name, interval) in enumerate(rows.items()):
        half = 100 * interval.half_width if interval.known else 0.0
        mean = 100 * interval.mean
        axes.barh(place, mean, height=0.62, color="#88CCEE")
        if interval.known:
            axes.errorbar(mean, place, xerr=half, color=INK, capsize=3, linewidth=1.2)
        text = f"{mean:.1f}" + (f" ± {half:.1f}" if interval.known else " (one seed)")
        right = max(mean + half, 100 * (published or {}).get(name, 0.0))
        axes.text(right + 1.5, place, text, va="center", fontsize=9, color=INK)
        if published and name in published:
            axes.plot(100 * published[name], place, "D", color="#882255", markersize=6)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, 118)
    axes.set_xticks(range(0, 101, 20))
    note = "; diamond: published" if published and any(name in published for name in names) else ""
    axes.set_xlabel(f"{title}, %, with the 95% interval over seeds{note}", color=INK)
    _plain(axes)
    return figure
