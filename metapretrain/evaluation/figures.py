"""Figures of a run: maps of embeddings, confusion matrix and comparison; curves are in `curves`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from metapretrain.errors import InputError, one_of
from metapretrain.evaluation.canvas import COLOURS, INK, MARKERS, darker, new_figure, plain
from metapretrain.evaluation.intervals import Interval
from metapretrain.evaluation.predictions import confusion
from metapretrain.evaluation.representation import check_embeddings, knn_leave_one_out, silhouette, subsample

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

REDUCERS = {"tsne": "t-SNE", "umap": "UMAP"}


def check_reducer(name: str) -> None:
    """Raise InputError unless `name` is a reducer that is installed."""
    one_of("reducer", name, REDUCERS)
    if name == "umap":
        try:
            import umap  # noqa: F401
        except ImportError as error:
            raise InputError("reducer 'umap' needs the extra package: pip install umap-learn") from error


def project(z: Tensor, reducer: str = "tsne", seed: int = 0) -> NDArray[np.float32]:
    """Map embeddings (N, D) to the plane, (N, 2), by t-SNE or UMAP with a fixed random state.

    t-SNE does 500 iterations, which is where nearly all of its time goes: 500 rows take a second.

    Raises:
        InputError: another reducer, fewer than four rows, or "umap" without the package umap-learn.
    """
    check_reducer(reducer)
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
    panels: Mapping[str, tuple[Tensor, Tensor]],
    classes: Sequence[str],
    *,
    reducer: str = "tsne",
    seed: int = 0,
    max_points: int = 2000,
    knn: Mapping[str, float] | None = None,
) -> Figure:
    """Maps of embeddings, one panel each, two a row, coloured and labelled by class.

    The title of a panel gives silhouette and kNN accuracy in the embedding space itself, not on the map; kNN
    is by the panel's other points (leave-one-out) unless `knn` holds the panel's figure.

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
        axes.set_title(f"{name}\n{_tightness(z, y)}, {measured}", fontsize=10, color=INK)
    figure.supxlabel(f"{REDUCERS[reducer]} of at most {max_points:,} embeddings a panel", fontsize=8, color=INK)
    return figure


def _tightness(z: Tensor, y: Tensor) -> str:
    defined = 2 <= len(torch.unique(y)) < len(y)
    return f"silhouette {silhouette(z, y):.2f}" if defined else "silhouette undefined"


def _scatter(axes: Axes, points: NDArray[np.float32], y: NDArray[np.int64], classes: Sequence[str]) -> None:
    """Points by class, each class named at the medoid of its points: no legend to look up."""
    if len(y) and not 0 <= y.min() <= y.max() < len(classes):
        raise InputError(
            f"labels must be 0..{len(classes) - 1}, one class name each; got {y.min()}..{y.max()}"
        )
    from matplotlib.patheffects import withStroke

    middles, size = {}, min(12, max(6, 6000 / len(points)))
    for label in np.unique(y):
        mine = points[y == label]
        colour = COLOURS[label % len(COLOURS)]
        marker = MARKERS[label // len(COLOURS) % len(MARKERS)]
        axes.scatter(mine[:, 0], mine[:, 1], s=size, c=colour, marker=marker, alpha=0.65, linewidths=0)
        middles[label] = mine[np.abs(mine - np.median(mine, axis=0)).sum(axis=1).argmin()]
    outline = [withStroke(linewidth=3, foreground="white")]
    for label, (x, height) in _spread(middles, np.ptp(points, axis=0)).items():
        axes.text(x, height, classes[label], color=darker(COLOURS[label % len(COLOURS)]), fontsize=9,
                  weight="bold", ha="center", va="center", path_effects=outline)  # fmt: skip
    axes.set_xticks([])
    axes.set_yticks([])


def _spread(
    places: dict[int, NDArray[np.float32]], extent: NDArray[np.float32]
) -> dict[int, tuple[float, float]]:
    """Move the places of names up until no two overlap, lowest first."""
    wide, high = 0.16 * float(extent[0]), 0.035 * float(extent[1])
    placed: dict[int, tuple[float, float]] = {}
    for label, (x, y) in sorted(places.items(), key=lambda item: float(item[1][1])):
        height = float(y)
        for other_x, other_y in sorted(placed.values(), key=lambda place: place[1]):
            if abs(other_x - x) < wide and abs(other_y - height) < high:
                height = other_y + high
        placed[label] = float(x), height
    return placed


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
    """Accuracies as dots with 95% intervals over seeds, in the order given; published figures as diamonds.

    The axis is fitted to the figures and does not begin at 0, so that intervals are seen.

    Args:
        rows: method to its interval (fractions); a single seed has a dot without interval.
        published: method to the published fraction.

    Raises:
        InputError: there are no rows.
    """
    if not rows:
        raise InputError("a comparison needs at least one method")
    cited = {name: 100 * value for name, value in (published or {}).items() if name in rows}
    figure = new_figure(8.2, 1.3 + 0.42 * len(rows))
    axes = figure.add_subplot()
    for place, (name, interval) in enumerate(rows.items()):
        half = 100 * interval.half_width if interval.known else None
        mean = 100 * interval.mean
        axes.axhline(place, color="#DDDDDD", linewidth=0.8, zorder=0)
        shown = None if half is None else [[min(half, mean)], [min(half, 100 - mean)]]  # 0 to 100% is all there is
        axes.errorbar(
            mean, place, xerr=shown, fmt="o", color="#332288", capsize=3, linewidth=1.4, markersize=5
        )
        text = f"{mean:.1f} (one seed)" if half is None else f"{mean:.1f} ± {half:.1f}"
        axes.text(1.02, place, text, transform=axes.get_yaxis_transform(), va="center", fontsize=9, color=INK)
        if name in cited:
            axes.plot(cited[name], place + 0.26, "D", mfc="none", color="#CC6677", markersize=5, mew=1.3)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.margins(x=0.08)
    note = "; diamond: published" if cited else ""
    axes.set_xlabel(f"{title}, %; dot: mean, line: 95% interval over seeds{note}", color=INK)
    plain(axes)
    return figure
