"""Figures: what they show, read back from the figure's own parts, and that no global state is left."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from metapretrain.errors import InputError
from metapretrain.evaluation.intervals import mean_interval
from metapretrain.evaluation.representation import knn_leave_one_out, silhouette
from metapretrain.report import figures
from metapretrain.report.figures import (
    COLOURS,
    comparison_figure,
    confusion_figure,
    curves_figure,
    over_seeds,
    project,
    read_curves,
    save_figure,
    tsne_figure,
    usable_reducer,
)

NAMES = ["cat", "dog", "ship"]


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def blobs(n: int = 60) -> tuple[torch.Tensor, torch.Tensor]:
    y = torch.arange(n) % 3
    return torch.eye(3, 8)[y] * 4 + torch.randn(n, 8, generator=torch.Generator().manual_seed(0)), y


def test_maps_have_titles_names_and_fixed_points() -> None:
    z, y = blobs()
    noise = torch.randn(60, 8, generator=torch.Generator().manual_seed(1))
    figure = tsne_figure({"train, before": (noise, y), "train, after": (z, y)}, NAMES)
    before, after = (axes.get_title() for axes in figure.axes)
    for title, told, points in (("before", before, noise), ("after", after, z)):
        right = f"kNN (leave-one-out, k = 19) {knn_leave_one_out(points, y, 19):.1%}"  # 20 rows per class
        assert told == f"train, {title}\nsilhouette {silhouette(points, y):.2f}, {right}"
    assert sorted(texts(figure)) == sorted(NAMES * 2)
    np.testing.assert_array_equal(project(z), project(z))


def test_neighbours_of_few_rows_per_class_are_not_outvoted() -> None:
    z, y = blobs(9)
    (axes,) = tsne_figure({"train": (z, y)}, NAMES).axes
    assert axes.get_title().endswith("kNN (leave-one-out, k = 2) 100.0%")


@pytest.mark.parametrize(("letters", "apart"), [(5, False), (17, True)])
def test_long_names_are_moved_apart(letters: int, apart: bool) -> None:
    places = {0: np.zeros(2, np.float32), 1: np.array([0.2, 0.0], np.float32)}
    (_, low), (_, high) = figures._spread(places, np.ones(2, np.float32), letters).values()
    assert (high - low >= 0.03) is apart


def test_maps_draw_no_more_than_asked() -> None:
    z, y = blobs()
    figure = tsne_figure({"test": (z, y)}, NAMES, max_points=30)
    assert sum(len(points.get_offsets()) for points in figure.axes[0].collections) == 30


def test_maps_of_collapsed_and_tiny_embeddings() -> None:
    tsne_figure({"collapsed": (torch.zeros(12, 4), torch.arange(12) % 3)}, NAMES)
    figure = tsne_figure({"tiny": (torch.randn(5, 1), torch.zeros(5, dtype=torch.int64))}, NAMES)
    assert "silhouette undefined" in figure.axes[0].get_title()


def test_names_on_a_map_do_not_overlap() -> None:
    angle = torch.linspace(0, 6.28, 90)  # a ring on which all classes have the same middle
    z = torch.stack([angle.cos(), angle.sin()], dim=1)
    figure = tsne_figure({"ring": (z.repeat_interleave(3, 0), torch.arange(270) % 3)}, NAMES)
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in figure.axes[0].texts]
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


def write_metrics(run: Path, values: dict[int, float | None], name: str = "loss") -> Path:
    entries = [{"step": step, "split": "train", "name": name, "value": value} for step, value in values.items()]
    run.mkdir()
    (run / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return run


def test_curves_show_mean_and_band(tmp_path: Path) -> None:
    runs = {
        "a": [write_metrics(tmp_path / "0", {0: 4.0, 10: 2.0}), write_metrics(tmp_path / "1", {0: 2.0, 10: 1.0})],
        "b": [write_metrics(tmp_path / "2", {0: 9.0, 10: 9.0})],
    }
    figure = curves_figure(runs, ["train/loss", "test/absent"])
    (axes,) = figure.axes
    first, second = axes.lines
    assert first.get_xydata().tolist() == [[0, 3], [10, 1.5]]  # type: ignore[union-attr]
    assert second.get_xydata().tolist() == [[0, 9], [10, 9]]  # type: ignore[union-attr]
    (band,) = axes.collections
    assert {tuple(point) for point in band.get_paths()[0].vertices.tolist()} >= {(0, 2), (0, 4), (10, 1), (10, 2)}
    assert sorted(texts(figure)) == ["a", "b"]


def test_lines_from_curves_to_their_names_do_not_look_like_curves(tmp_path: Path) -> None:
    from matplotlib.text import Annotation

    runs = {f"m{i}": [write_metrics(tmp_path / str(i), {0: 4.0, 10 + i: 2.0})] for i in range(12)}
    (axes,) = curves_figure(runs, ["train/loss"]).axes
    leaders = [text.arrow_patch for text in axes.texts if isinstance(text, Annotation) and text.arrow_patch]
    assert len(leaders) == 12
    for leader in leaders:
        assert to_hex(leader.get_edgecolor()).upper() not in COLOURS and leader.get_linestyle() in (":", "dotted")
        assert leader.get_linewidth() < axes.lines[0].get_linewidth() / 2


def test_a_run_in_progress_does_not_cut_the_others_short() -> None:
    long, short = (np.array([0, 10, 20]), np.array([1.0, 2.0, 3.0])), (np.array([0, 5]), np.array([3.0, 3.0]))
    grid, values = over_seeds([long, short])
    assert grid.tolist() == [0, 5, 10, 20]
    np.testing.assert_array_equal(values, [[1, 1.5, 2, 3], [3, 3, np.nan, np.nan]])


def test_a_value_that_was_not_finite_leaves_a_gap(tmp_path: Path) -> None:
    run = write_metrics(tmp_path / "a", {0: 1.0, 5: None, 10: 2.0})
    steps, values = read_curves(run)["train/loss"]
    assert steps.tolist() == [0, 5, 10]
    np.testing.assert_array_equal(values, [1, np.nan, 2])
    (axes,) = curves_figure({"a": [run]}, ["train/loss"]).axes
    assert axes.lines[0].get_xydata().tolist() == [[0, 1], [10, 2]]  # type: ignore[union-attr]


def test_values_of_a_diverged_run_beyond_what_can_be_drawn_leave_a_gap(tmp_path: Path) -> None:
    run = write_metrics(tmp_path / "a", {0: 1e308, 1: 2.0, 2: -1e308})
    figure = curves_figure({"prl": [run]}, ["train/loss"])
    assert figure.axes[0].lines[0].get_ydata().tolist() == [2.0]
    save_figure(figure, tmp_path / "curves.png")


def test_damaged_lines_are_left_out_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = write_metrics(tmp_path / "a", {0: 1.0, 5: 2.0, 9: 3.0})
    file = run / "metrics.jsonl"
    file.write_text('{"step": 1}\n' + file.read_text()[:-9])  # the last one torn by a kill
    with caplog.at_level(logging.WARNING):
        steps, values = read_curves(run)["train/loss"]
    assert (steps.tolist(), values.tolist()) == ([0, 5], [1.0, 2.0])
    assert "1 damaged lines are left out" in caplog.text


def test_confusion_cells_are_per_cent_of_the_row() -> None:
    y, predicted = torch.tensor([0, 0, 0, 0, 1, 2]), torch.tensor([0, 0, 0, 1, 1, 0])
    figure = confusion_figure(y, predicted, NAMES)
    assert texts(figure) == ["75", "25", "100", "100"]
    assert figure.axes[0].get_title() == "66.7% of 6 right; cells in % of the row"


def test_comparison_shows_intervals_and_published() -> None:
    rows = {"simclr": mean_interval([0.60, 0.62, 0.64]), "own": mean_interval([0.7])}
    figure = comparison_figure(rows, published={"simclr": 0.646, "absent": 0.1})
    assert texts(figure) == ["62.0 ± 5.0", "70.0 (one seed)"]
    dots = [line for line in figure.axes[0].lines if line.get_marker() == "o"]
    assert [float(line.get_xdata()[0]) for line in dots] == pytest.approx([62, 70])  # type: ignore[index]
    diamonds = [line for line in figure.axes[0].lines if line.get_marker() == "D"]
    assert [float(line.get_xdata()[0]) for line in diamonds] == pytest.approx([64.6])  # type: ignore[index]


def test_saved_whole_and_unknown_to_pyplot(tmp_path: Path, modules_after: Callable[..., set[str]]) -> None:
    figure = confusion_figure(torch.tensor([0, 1]), torch.tensor([0, 1]), NAMES[:2])
    path = save_figure(figure, tmp_path / "new" / "confusion.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [file.name for file in path.parent.iterdir()] == ["confusion.png"]
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write"):
        save_figure(figure, tmp_path / "file" / "x.png")
    program = (
        "import torch; from metapretrain.report.figures import confusion_figure as c; "
        "c(torch.tensor([0]), torch.tensor([0]), ['a'])"
    )
    assert {"matplotlib.figure"} == {"matplotlib.figure", "matplotlib.pyplot"} & modules_after(program)


def half(z: Any) -> Any:
    return z[:, :2]


def test_without_umap_maps_are_by_tsne_and_say_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "umap", None)
    z, y = blobs()
    assert usable_reducer("tsne") == "tsne" and usable_reducer("umap") == "tsne"
    assert "pip install umap-learn" in caplog.text
    assert (project(z, "umap") == project(z, "tsne")).all()
    figure = tsne_figure({"a": (z, y)}, NAMES, reducer="umap")
    assert figure.get_suptitle().startswith("t-SNE of")
    monkeypatch.setitem(sys.modules, "umap", SimpleNamespace(UMAP=lambda **_: SimpleNamespace(fit_transform=half)))
    assert tsne_figure({"a": (z, y)}, NAMES, reducer="umap").get_suptitle().startswith("UMAP of")
    with pytest.raises(InputError, match="did you mean 'tsne'"):
        project(blobs()[0], "t-sne")


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    z, y = blobs()
    run = write_metrics(tmp_path / "run", {0: 1.0})
    broken = z.clone()
    broken[3] = float("nan")
    cases = [
        (lambda: tsne_figure({}, NAMES), "at least one panel"),
        (lambda: tsne_figure({"train": (z, y)}, NAMES[:2]), r"labels must be 0\.\.1"),
        (lambda: tsne_figure({"train": (broken, y)}, NAMES), "panel 'train'.*NaN.*first row 3"),
        (lambda: project(z[:3]), "4 rows or more"),
        (lambda: curves_figure({"a": [run]}, ["train/los"]), "there are: train/loss"),
        (lambda: comparison_figure({}), "at least one method"),
    ]
    for call, match in cases:
        with pytest.raises(InputError, match=match) as caught:
            call()
        assert "\n" not in str(caught.value)
