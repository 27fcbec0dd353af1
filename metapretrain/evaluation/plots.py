"""The figures of a folder of runs: curves over seeds and the comparison of methods."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from metapretrain.errors import InputError
from metapretrain.evaluation.canvas import save_figure
from metapretrain.evaluation.curves import curves_figure, read_curves
from metapretrain.evaluation.figures import check_reducer, comparison_figure, tsne_figure
from metapretrain.evaluation.report import build_table
from metapretrain.evaluation.results import collect
from metapretrain.evaluation.schedule_figures import plot_schedule
from metapretrain.training.metrics_file import METRICS
from metapretrain.training.projector import POINTS, read_embeddings

USUAL = r".*/(loss.*|target_loss|.*accuracy|.*pearson|overall)"  # what is drawn when no metrics are named
PANELS = 4


def plot(root: Path | str, out: Path | str | None = None, metrics: Sequence[str] = ()) -> list[Path]:
    """Draw the curves and, where results are complete, the comparison of every group of runs below `root`.

    A group is the runs ``<method>-s<seed>`` of one folder.

    Args:
        root: a run's folder or one with runs at any depth.
        out: where the figures go; by default the folder ``figures`` beside the runs (in a run, its own).
        metrics: ``split/name`` each, one panel a metric; by default the first four scores and losses.

    Finished scheduling runs also get their target loss against all compute, and their sources over time.

    Returns:
        The files written.

    Raises:
        InputError: there are no runs, no such metric was logged, or a file cannot be written.
    """
    root = Path(root)
    groups = runs_by_group(root)
    written = []
    for folder, runs in groups.items():
        place = _place(folder, root, Path(out) if out is not None else None)
        shown = metrics or usual_metrics([run for seeds in runs.values() for run in seeds])
        written.append(save_figure(curves_figure(runs, shown), place / "curves.png"))
        written += _comparison(folder, place)
    return written


def redraw_maps(root: Path | str, reducer: str) -> list[Path]:
    """Draw the maps of the embeddings that the runs below `root` kept, into each run's ``figures/<reducer>.png``.

    Args:
        reducer: ``tsne`` or ``umap``.

    Returns:
        The files written.

    Raises:
        InputError: the reducer is unknown or not installed, no run kept embeddings, or a file cannot be written.
    """
    check_reducer(reducer)
    written = []
    for run in sorted({path.parent.parent.parent for path in Path(root).rglob(f"projector/*/{POINTS}")}):
        panels, classes = _panels(run)
        figure = tsne_figure(panels, classes, reducer=reducer)
        written.append(save_figure(figure, run / "figures" / f"{reducer}.png"))
    if not written:
        raise InputError(f"no run in {root} kept embeddings; a pretraining does, where figures are drawn")
    return written


def _panels(run: Path) -> tuple[dict[str, tuple[Tensor, Tensor]], list[str]]:
    """Points and labels of each embedding of a run, "before" ones first, and the names of the classes."""
    kept = read_embeddings(run)
    classes = sorted({word for _, words in kept.values() for word in words})
    number = {name: place for place, name in enumerate(classes)}
    panels = {}
    for name in sorted(kept, key=lambda name: ("before" not in name, "test" in name, name)):
        z, words = kept[name]
        panels[name.replace("-", " ")] = (z, torch.tensor([number[word] for word in words]))
    return panels, classes


def runs_by_group(root: Path) -> dict[Path, dict[str, list[Path]]]:
    """The run folders below `root` that logged anything: folder of a group to method to its seeds' folders.

    Raises:
        InputError: there are none.
    """
    if not root.is_dir():
        raise InputError(f"no such folder: {root}; name a run's folder or one with runs below it")
    groups: dict[Path, dict[str, list[Path]]] = {}
    for run in sorted(file.parent for file in root.rglob(METRICS)):
        group = root if run == root else run.parent
        groups.setdefault(group, {}).setdefault(method_of(run.resolve().name), []).append(run)
    if not groups:
        raise InputError(f"no runs in {root}: no {METRICS} at any depth")
    return groups


def method_of(run: str) -> str:
    """The method in a run's folder name.

    Example:
        >>> method_of("prl-query-s12"), method_of("other")
        ('prl-query', 'other')
    """
    return re.sub(r"-s\d+$", "", run)


def usual_metrics(runs: Sequence[Path]) -> list[str]:
    """The first scores and losses logged in `runs`: those of heads, then those of prototypes, then losses.

    Where there are none, the accuracies of single data sets. What was logged once is left out where others are curves.
    """
    there: dict[str, int] = {}
    for run in runs:
        for name, (steps, _) in read_curves(run).items():
            there[name] = max(there.get(name, 0), len(steps))
    names = [name for name in sorted(there) if re.fullmatch(USUAL, name)]
    names = names or [name for name in sorted(there) if "/accuracy_" in name]
    names = [name for name in names if there[name] > 1] or names  # a figure of the end is no curve
    return sorted(names, key=lambda name: ("/loss" in name, "nearest_prototype" in name))[:PANELS] or ["train/loss"]


def _place(folder: Path, root: Path, out: Path | None) -> Path:
    return folder / "figures" if out is None else out / folder.relative_to(root)


def _comparison(folder: Path, place: Path) -> list[Path]:
    try:
        found = collect(folder)
        table = build_table(found)
    except InputError:  # a run in progress has curves but no result yet
        return []
    written = plot_schedule(folder, place) if any("curve" in result for result in found.results) else []
    for group in table.groups:
        main = group.layout.column(group.layout.main)
        rows = {row.method: row.scores[main.name] for row in group.rows if main.name in row.scores}
        printed = {
            row.method: row.published.scores.get(main.name)
            for row in group.rows
            if row.published and row.published.comparable
        }
        cited = {name: value for name, value in printed.items() if value is not None}
        if rows:
            kind = "-".join(filter(None, (group.recipe or "all", group.encoder.replace("/", "-"))))
            name = "comparison.png" if len(table.groups) == 1 else f"comparison-{kind}.png"
            figure = comparison_figure(rows, published=cited, title=f"{main.drawn}, {group.dataset}")
            written.append(save_figure(figure, place / name))
    return written
