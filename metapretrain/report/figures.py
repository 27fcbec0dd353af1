"""Plots of a run and of a folder of runs: maps of embeddings, confusion, comparison, curves."""

from __future__ import annotations

import io
import logging
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from metapretrain.checks import lacking
from metapretrain.errors import InputError, one_of
from metapretrain.evaluation.intervals import Interval
from metapretrain.evaluation.predictions import confusion
from metapretrain.evaluation.representation import check_embeddings, knn_leave_one_out, silhouette, subsample
from metapretrain.files import write_file
from metapretrain.report.results import collect
from metapretrain.report.table import build_table
from metapretrain.training.logs import METRICS, POINTS, read_embeddings, read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


log = logging.getLogger(__name__)

# Paul Tol's "muted" scheme and black: ten colours that stay apart for colour-blind readers.
COLOURS = ("#332288", "#DDCC77", "#117733", "#CC6677", "#88CCEE", "#882255", "#44AA99", "#999933", "#AA4499", "#000000")
MARKERS = "osD^vPX<>*"
INK = "#333333"


def new_figure(width: float, height: float) -> Figure:
    """A figure in inches on an Agg canvas, known to no global list, so that none is ever left open."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def literal(figure: Figure) -> Figure:
    """The figure with its texts as they are: a `$` in a name begins no formula."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_parse_math(False)
    return figure


def panels(count: int, most: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    """A figure of `count` panels of a size in inches, at most `most` beside each other."""
    columns = min(most, count)
    rows = math.ceil(count / columns)
    figure = new_figure(width * columns, height * rows)
    return figure, [figure.add_subplot(rows, columns, place) for place in range(1, count + 1)]


def save_figure(figure: Figure, path: Path | str) -> Path:
    """Write a PNG, whole or not at all."""
    png = io.BytesIO()
    figure.savefig(png, format="png")
    return write_file(Path(path), png.getvalue())


def darker(colour: str) -> str:
    """The colour for text on white: mixed with black until it reads."""
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    share = min(1.0, 130 / max(0.299 * red + 0.587 * green + 0.114 * blue, 1))
    return "#" + "".join(f"{round(share * part):02X}" for part in (red, green, blue))


def plain(axes: Axes) -> None:
    """Leave out the frame's upper and right side."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK)


def line_style(place: int) -> dict[str, Any]:
    """Colour and dashes of one of many curves."""
    return {"color": COLOURS[place % len(COLOURS)], "linestyle": ("-", "--", "-.", ":")[place // len(COLOURS) % 4]}


REDUCERS = {"tsne": "t-SNE", "umap": "UMAP"}


def usable_reducer(name: str) -> str:
    """Return what maps are drawn by: `tsne` in place of `umap`, with a warning, where umap-learn is not installed."""
    if one_of("reducer", name, REDUCERS) == "umap" and (why := lacking("umap")) is not None:
        log.warning("maps are drawn by t-SNE in place of %s", why)
        return "tsne"
    return name


def project(z: Tensor, reducer: str = "tsne", seed: int = 0) -> NDArray[np.float32]:
    """Map embeddings (N, D) to the plane, (N, 2), by UMAP or 500 iterations of t-SNE with a fixed random state.

    Without the package umap-learn, t-SNE stands in for UMAP. Raises InputError: another reducer, or fewer than 4 rows.
    """
    reducer = usable_reducer(reducer)
    check_embeddings(z)
    if len(z) < 4:
        raise InputError(f"a map of embeddings needs 4 rows or more; got {len(z)}")
    array = z.detach().float().cpu().numpy()
    if reducer == "umap":
        from umap import UMAP

        umap = UMAP(random_state=seed, n_neighbors=min(15, len(z) - 1), n_jobs=1)
        return np.asarray(umap.fit_transform(array), np.float32)
    if not array.std(axis=0).any():  # all at one point, as a collapsed encoder leaves them
        return np.zeros((len(array), 2), np.float32)
    from sklearn.manifold import TSNE

    start = "pca" if z.shape[1] > 1 else "random"
    perplexity = min(30.0, (len(z) - 1) / 3)
    tsne = TSNE(perplexity=perplexity, init=start, random_state=seed, max_iter=500, angle=0.7)
    return np.asarray(tsne.fit_transform(array), np.float32)


def tsne_figure(
    maps: Mapping[str, tuple[Tensor, Tensor]], classes: Sequence[str], *, reducer: str = "tsne", max_points: int = 2000
) -> Figure:
    """Maps of embeddings by class, titled with silhouette and kNN accuracy of the embeddings themselves.

    `maps`: name ("train, before pretraining") to embeddings (N, D) and labels int (N,), 0..C-1; `max_points` are drawn
    and scored per panel. Raises InputError: no panel, embeddings with NaN, labels outside 0..C-1.
    """
    if not maps:
        raise InputError("a map of embeddings needs at least one panel: {name: (embeddings, labels)}")
    reducer = usable_reducer(reducer)
    figure, all_axes = panels(len(maps), 2, 5.2, 4.9)
    for axes, (name, (z, y)) in zip(all_axes, maps.items(), strict=True):
        check_embeddings(z, y, f"embeddings of panel {name!r}")
        kept = subsample(len(z), max_points)
        z, y = z.detach().cpu()[kept], y.cpu()[kept]
        _scatter(axes, project(z, reducer), y.numpy(), classes)
        tight = f"{silhouette(z, y):.2f}" if 2 <= len(torch.unique(y)) < len(y) else "undefined"
        smallest = int(torch.unique(y, return_counts=True)[1].min())
        k = max(1, min(20, smallest - 1))  # more would outvote a small class by the others
        measured = f"kNN (leave-one-out, k = {k}) {knn_leave_one_out(z, y, k):.1%}"
        axes.set_title(f"{name}\nsilhouette {tight}, {measured}", fontsize=10, color=INK)
    figure.suptitle(f"{REDUCERS[reducer]} of at most {max_points:,} embeddings per panel", fontsize=11, color=INK)
    return literal(figure)


def _scatter(axes: Axes, points: NDArray[np.float32], y: NDArray[np.int64], classes: Sequence[str]) -> None:
    """Points by class, each class named at the medoid of its points: no legend to look up."""
    if len(y) and not 0 <= y.min() <= y.max() < len(classes):
        raise InputError(f"labels must be 0..{len(classes) - 1}, one class name each; got {y.min()}..{y.max()}")
    from matplotlib.patheffects import withStroke

    middles, size = {}, min(12, max(6, 6000 / len(points)))
    for label in np.unique(y):
        mine = points[y == label]
        colour = COLOURS[label % len(COLOURS)]
        marker = MARKERS[label // len(COLOURS) % len(MARKERS)]
        axes.scatter(mine[:, 0], mine[:, 1], s=size, c=colour, marker=marker, alpha=0.65, linewidths=0)
        middles[label] = mine[np.abs(mine - np.median(mine, axis=0)).sum(axis=1).argmin()]
    drawn: dict[str, Any] = {"weight": "bold", "ha": "center", "va": "center", "fontsize": 9}
    drawn["path_effects"] = [withStroke(linewidth=3, foreground="white")]
    width = max((len(classes[label]) for label in middles), default=0)
    for label, (x, height) in _spread(middles, np.ptp(points, axis=0), width).items():
        axes.text(x, height, classes[label], color=darker(COLOURS[label % len(COLOURS)]), **drawn)
    axes.set(xticks=[], yticks=[])


def _spread(
    places: dict[int, NDArray[np.float32]], extent: NDArray[np.float32], letters: int
) -> dict[int, tuple[float, float]]:
    """Move the places of names of at most so many letters up until no two overlap, lowest first."""
    wide, high = max(0.16, 0.02 * letters) * float(extent[0]), 0.035 * float(extent[1])
    placed: dict[int, tuple[float, float]] = {}
    for label, (x, y) in sorted(places.items(), key=lambda item: float(item[1][1])):
        height = float(y)
        for other_x, other_y in sorted(placed.values(), key=lambda place: place[1]):
            if abs(other_x - x) < wide and abs(other_y - height) < high:
                height = other_y + high
        placed[label] = float(x), height
    return placed


def confusion_figure(y: Tensor, predicted: Tensor, classes: Sequence[str]) -> Figure:
    """Confusion matrix of labels and predictions, both int (N,), 0..C-1: cells in per cent of the true class.

    Raises InputError: lengths differ, or a label lies outside 0..C-1.
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
    axes.set_title(f"{right:.1%} of {len(y):,} right; cells in % of the row", fontsize=10)
    return literal(figure)


def comparison_figure(
    rows: Mapping[str, Interval],
    *,
    published: Mapping[str, float] | None = None,
    title: str = "test accuracy",
    percent: bool = True,
) -> Figure:
    """Means by method as dots with 95% intervals over seeds, and published numbers as diamonds.

    `percent`: they are fractions, shown as per cent. The axis does not begin at 0, so that intervals are seen.
    Raises InputError: there are no rows.
    """
    if not rows:
        raise InputError("a comparison needs at least one method")
    scale, digits = (100, 1) if percent else (1, 3)
    cited = {name: scale * value for name, value in (published or {}).items() if name in rows}
    figure = new_figure(8.2, 1.3 + 0.42 * len(rows))
    axes = figure.add_subplot()
    for place, (name, interval) in enumerate(rows.items()):
        mean, half = scale * interval.mean, scale * interval.half_width
        limits = [[min(half, mean)], [min(half, 100 - mean)]] if percent else half  # 0 to 100% is all there is
        axes.axhline(place, color="#DDDDDD", linewidth=0.8, zorder=0)
        bars = limits if interval.known else None
        axes.errorbar(mean, place, xerr=bars, fmt="o", color="#332288", capsize=3, linewidth=1.4, markersize=5)
        text = f"{mean:.{digits}f} " + (f"± {half:.{digits}f}" if interval.known else "(one seed)")
        axes.text(1.02, place, text, transform=axes.get_yaxis_transform(), va="center", fontsize=9, color=INK)
        if name in cited:
            axes.plot(cited[name], place + 0.26, "D", mfc="none", color="#CC6677", markersize=5, mew=1.3)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.margins(x=0.08)
    note = "; diamond: published" if cited else ""
    axes.set_xlabel(f"{title}{', %' * percent}; dot: mean, line: 95% interval over seeds{note}", color=INK)
    plain(axes)
    return literal(figure)


DRAWN = 1e100  # of a diverged run: axes to the largest float64 have no ticks that could be computed
Curve = tuple[NDArray[np.int64], NDArray[np.float64]]  # steps, values


def read_curves(run: Path | str) -> dict[str, Curve]:
    """What a run logged: "split/name" -> (steps int64 (S,) in order, values float64 (S,)); NaN where not finite."""
    series: dict[str, dict[int, float]] = {}
    for line in read_metrics(run):
        series.setdefault(f"{line['split']}/{line['name']}", {})[line["step"]] = line["value"]
    return {
        key: (np.array(sorted(found), np.int64), np.array([found[step] for step in sorted(found)], np.float64))
        for key, found in series.items()
    }


def curves_figure(runs: Mapping[str, Sequence[Path | str]], metrics: Sequence[str]) -> Figure:
    """Curves of logged metrics such as "train/loss", a panel per metric: mean and range over a method's runs.

    Raises InputError: no run logged any of the metrics (the line names those that are there).
    """
    read = {method: [read_curves(folder) for folder in folders] for method, folders in runs.items()}
    there = sorted({key for seeds in read.values() for seed in seeds for key in seed})
    shown = [metric for metric in metrics if metric in there]
    if not shown:
        raise InputError(f"none of the metrics {', '.join(metrics)} is logged; there are: {', '.join(there) or 'none'}")
    figure, all_axes = panels(len(shown), 2, 6.4, 4.2)
    for axes, metric in zip(all_axes, shown, strict=True):
        ends: list[tuple[float, float, str, str]] = []
        for position, (method, seeds) in enumerate(read.items()):
            curves = [seed[metric] for seed in seeds if metric in seed]
            if curves:
                ends.append((*_curve(axes, curves, position), method))
        end_labels(axes, ends)
        axes.set_title(metric, fontsize=11, color=INK)
        axes.set_xlabel("step", color=INK)
        plain(axes)
    most = max(len(seeds) for seeds in read.values())
    told = f"line: mean over seeds (up to {most}); band: lowest to highest seed"
    figure.supxlabel(told if most > 1 else "one seed", fontsize=8, color=INK)
    return literal(figure)


def over_seeds(curves: Sequence[Curve]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Curves of seeds at all their steps: steps (S,), values (seeds, S), interpolated; NaN outside a curve's steps."""
    grid = np.unique(np.concatenate([steps for steps, _ in curves]))
    return grid, np.stack([np.interp(grid, *curve, left=np.nan, right=np.nan) for curve in curves])


def _curve(axes: Axes, curves: Sequence[Curve], position: int) -> tuple[float, float, str]:
    """Draw mean and band; return the last point and the colour."""
    grid, values = over_seeds(curves)
    values[np.abs(values) > DRAWN] = np.nan
    kept = ~np.isnan(values).all(axis=0)
    grid, values = grid[kept], values[:, kept]
    if grid.size == 0:
        return math.nan, math.nan, INK
    mean, style = np.nanmean(values, axis=0), line_style(position)
    axes.plot(grid, mean, **style, linewidth=1.6)
    if len(curves) > 1:
        low, high = np.nanmin(values, axis=0), np.nanmax(values, axis=0)
        axes.fill_between(grid, low, high, color=style["color"], alpha=0.18, linewidth=0)
    return float(grid[-1]), float(mean[-1]), style["color"]


def end_labels(axes: Axes, ends: Sequence[tuple[float, float, str, str]]) -> None:
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
        drawn: dict[str, Any] = {"va": "center", "color": darker(colour), "fontsize": 8.5, "annotation_clip": False}
        leader = {"arrowstyle": "-", "color": "#BBBBBB", "lw": 0.5, "linestyle": ":", "relpos": (0, 0.5)}
        axes.annotate(method, (x, y), (1.02, height), textcoords=axes.get_yaxis_transform(), arrowprops=leader, **drawn)


USUAL = r".*/(loss.*|target_loss|.*accuracy|.*pearson|overall)"  # what is drawn when no metrics are named
PANELS = 4


def plot(root: Path | str, out: Path | str | None = None, metrics: Sequence[str] = ()) -> list[Path]:
    """Draw the curves and, where results are complete, the comparison of every group of runs below `root`.

    A group is the runs ``<method>-s<seed>`` of one folder. The files written are returned; `out` is by default the
    folder ``figures`` beside the runs, `metrics` (``split/name``, a panel each) the first four scores and losses.
    Raises InputError: there are no runs, no such metric was logged, or a file cannot be written.
    """
    root = Path(root)
    groups = runs_by_group(root)
    written = []
    for folder, runs in groups.items():
        place = folder / "figures" if out is None else Path(out) / folder.relative_to(root)
        shown = metrics or usual_metrics([run for seeds in runs.values() for run in seeds])
        written.append(save_figure(curves_figure(runs, shown), place / "curves.png"))
        written += _comparison(folder, place)
    return written


def redraw_maps(root: Path | str, reducer: str) -> list[Path]:
    """Draw the maps of the embeddings that the runs below `root` kept, into each run's ``figures/<reducer>.png``.

    Raises InputError: the reducer is unknown, no run kept embeddings, or a file cannot be written.
    """
    reducer = usable_reducer(reducer)
    written = []
    for run in sorted({path.parent.parent.parent for path in Path(root).rglob(f"projector/*/{POINTS}")}):
        kept = read_embeddings(run)
        classes = sorted({word for _, words in kept.values() for word in words})
        maps = {}
        for name in sorted(kept, key=lambda name: ("before" not in name, "test" in name, name)):
            z, words = kept[name]
            maps[name.replace("-", " ")] = (z, torch.tensor([classes.index(word) for word in words]))
        figure = tsne_figure(maps, classes, reducer=reducer)
        figure.suptitle(run.resolve().name, fontsize=11, parse_math=False)
        written.append(save_figure(figure, run / "figures" / f"{reducer}.png"))
    if not written:
        raise InputError(f"no run in {root} kept embeddings; a pretraining does, where figures are drawn")
    return written


def runs_by_group(root: Path) -> dict[Path, dict[str, list[Path]]]:
    """The run folders below `root` that logged anything: folder of a group to method to its seeds' folders."""
    if not root.is_dir():
        raise InputError(f"no such folder: {root}; name a run's folder or one with runs below it")
    groups: dict[Path, dict[str, list[Path]]] = {}
    for run in sorted(file.parent for file in root.rglob(METRICS)):
        group = root if run == root else run.parent
        groups.setdefault(group, {}).setdefault(re.sub(r"-s\d+$", "", run.resolve().name), []).append(run)
    if not groups:
        raise InputError(f"no runs in {root}: no {METRICS} at any depth")
    return groups


def usual_metrics(runs: Sequence[Path]) -> list[str]:
    """The first scores and losses logged in `runs`, else accuracies of single sets; what was logged once comes last."""
    there: dict[str, int] = {}
    for run in runs:
        for name, (steps, _) in read_curves(run).items():
            there[name] = max(there.get(name, 0), len(steps))
    names = [name for name in sorted(there) if re.fullmatch(USUAL, name)]
    names = names or [name for name in sorted(there) if "/accuracy_" in name]
    names = [name for name in names if there[name] > 1] or names  # a figure of the end is no curve
    return sorted(names, key=lambda name: ("/loss" in name, "nearest_prototype" in name))[:PANELS] or ["train/loss"]


def _comparison(folder: Path, place: Path) -> list[Path]:
    try:
        table = build_table(collect(folder))
    except InputError:  # a run in progress has curves but no result yet
        return []
    written = []
    for group in table.groups:
        main, (rows, cited) = group.layout.column(group.layout.main), group.figures()
        if rows:
            kind = "-".join(filter(None, (group.recipe or "all", group.encoder.replace("/", "-"))))
            name = "comparison.png" if len(table.groups) == 1 else f"comparison-{kind}.png"
            title = f"{main.drawn or main.title.removesuffix(' %')}, {group.dataset}"
            figure = comparison_figure(rows, published=cited, title=title, percent=main.percent)
            written.append(save_figure(figure, place / name))
    return written
