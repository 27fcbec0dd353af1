"""The plots of docs/results/, one per topic, from the result files; build_results.py draws them."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import table_transfer
from result_files import best_fewshot_rows, content, group_of, runs_of, shots, source, speed_ratios
from speed_scale import HALF_BATCH

from metapretrain.evaluation.intervals import Interval
from metapretrain.files import write_file
from metapretrain.report.figures import COLOURS, INK, MARKERS, literal, new_figure, plain
from metapretrain.report.rows import Group

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Point = tuple[float, float, float]  # the value and the ends of its interval
INTERVAL = "ours, 95% interval over seeds"
FREE = "1 process, half the batch, times 2"


@dataclass(frozen=True)
class Panel:
    """Values by label, of one series or several; the order of the labels is that of the first series that has them."""

    title: str
    axis: str
    series: Mapping[str, Mapping[str, Point]]
    log: bool = False  # ratios: a logarithmic axis with a line at 1

    @property
    def labels(self) -> list[str]:
        """The labels from the top to the bottom."""
        return list(dict.fromkeys(label for points in self.series.values() for label in points))


def point(interval: Interval, scale: float = 1.0) -> Point:
    """An interval to draw, of which nothing but the mean may be known."""
    low, high = (interval.low, interval.high) if interval.known else (interval.mean, interval.mean)
    return scale * interval.mean, scale * low, scale * high


def methods_panel(group: Group, title: str, column: str = "", untuned: str = "") -> Panel:
    """The methods of a group by a column, beside what was published."""
    chosen = group.layout.column(column or group.layout.main)
    scale = 100.0 if chosen.percent else 1.0
    ours, printed = {}, {}
    for row in group.rows:
        label = row.method + " (untuned)" * bool(untuned and row.method.startswith(untuned))
        if chosen.name in row.scores:
            ours[label] = point(row.scores[chosen.name], scale)
            if row.published and (value := row.published.scores.get(chosen.name)) is not None:
                printed[label] = (scale * value,) * 3
    found = {INTERVAL: ours} | ({"published": printed} if printed else {})
    axis = chosen.drawn or chosen.title.removesuffix(" %")
    return Panel(title, axis + " %" * chosen.percent, found)


def stl10() -> list[Panel]:
    """Test accuracy by method and recipe."""
    strong = methods_panel(group_of("stl10-strong"), "STL-10, recipe strong", untuned="prl-standard-")
    return [methods_panel(group_of("stl10-paper"), "STL-10, recipe paper"), strong]


def few_shot() -> list[Panel]:
    """Test accuracy by set and setting."""
    found: dict[str, tuple[dict[str, Point], dict[str, Point]]] = {}
    for (dataset, recipe, method), row in best_fewshot_rows().items():
        name, _, setting = dataset.rpartition("-")
        ours, printed = found.setdefault(f"{name}, {shots(setting)}", ({}, {}))
        label = f"{method}, {recipe}"
        ours[label] = point(row.scores["test"], 100)
        if row.published and (value := row.published.scores.get("test")) is not None:
            printed[label] = (100 * value,) * 3
    return [
        Panel(name, "test accuracy %", {INTERVAL: ours} | ({"published": printed} if printed else {}))
        for name, (ours, printed) in found.items()
    ]


def text() -> list[Panel]:
    """Overall number by method, recipe and encoder."""
    titles = {
        "text-paper": "recipe paper, MiniLM",
        "text-strong": "recipe strong, MiniLM",
        "text-strong-bert-tiny": "recipe strong, BERT-tiny",
    }
    return [methods_panel(group_of(name), title) for name, title in titles.items()]


def prompts() -> list[Panel]:
    """Mean accuracy by method at equal reads."""
    titles = {"prompts-equal": "16,000 reads", "prompts-40000-reads": "40,000 reads"}
    return [methods_panel(group_of(name), title) for name, title in titles.items()]


def schedules() -> list[Panel]:
    """Final target loss by scheduler and setting."""
    titles = {
        "schedule-aware": "aware, encoder from scratch",
        "schedule-agnostic": "agnostic, encoder from scratch",
        "schedule-minilm": "aware, MiniLM",
    }
    return [methods_panel(group_of(name), title, "target_loss") for name, title in titles.items()]


def speed() -> list[Panel]:
    """Ratios to the best peer, by machine: by default, recorded, compiled and recorded."""
    kinds = {"default": "ours by default", "recorded": "recorded as a CUDA graph", "compiled": "compiled and recorded"}
    titles = {
        "one CPU thread": ("speed-cpu",),
        "one H200, other peers than JAX": ("speed-h200",),
        "one H200, beside JAX": ("speed-h200-jax", "speed-h200-84", "speed-h200-t5-jax", "speed-h200-prompts-compiled"),
    }
    panels = []
    for title, files in titles.items():
        series: dict[str, dict[str, Point]] = {told: {} for told in kinds.values()}
        for label, peer, _, _, of in (line for name in files for line in speed_ratios(content(source(name)))):
            if "beside JAX" in title and not peer.startswith("jax"):
                continue  # its half precision, which JAX did not run
            for kind, told in kinds.items():
                if kind in of:
                    series[told][label] = (of[kind][1],) * 3
        panels.append(
            Panel(
                title, "times the best peer's speed", {told: points for told, points in series.items() if points}, True
            )
        )
    return panels


def several_gpus() -> list[Panel]:
    """Speed of one process and of several, each on a GPU of its own; one with half the batch counts twice."""
    rows = [row for row in content(source("speed-h200-x2"))["rows"] if not row["missing"]]
    series: dict[str, dict[str, Point]] = {}
    for row in rows:
        base = next(one["median"] for one in rows if (one["row"], one["name"]) == (row["row"], "1 process"))
        label = row["row"].removeprefix("scale-")
        name, times = (FREE, 2) if row["name"] == HALF_BATCH else (row["name"], 1)
        points = tuple(times * row[value] / base for value in ("median", "low", "high"))
        series.setdefault(name, {})[label] = points
    return [Panel("training, H200s", "times one recorded process; bars: range of five timings", series, True)]


def transfer(name: str, make: Callable[[Sequence[Any]], list[table_transfer.Panel]]) -> list[table_transfer.Panel]:
    """Panels of runs that may not have been made yet."""
    return make(runs_of(source(name)).results) if source(name).is_file() else []


PLOTS: dict[str, Callable[[], Sequence[Panel | table_transfer.Panel]]] = {
    "results-stl10": stl10,
    "results-few-shot": few_shot,
    "results-text": text,
    "results-prompts": prompts,
    "results-schedules": schedules,
    "results-speed": speed,
    "results-several-gpus": several_gpus,
    "results-transfer-labels": lambda: transfer("transfer-labels", table_transfer.label_panels),
    "results-transfer-encoders": lambda: transfer("transfer-encoders", table_transfer.encoder_panels),
}


def digest(panels: Sequence[Panel | table_transfer.Panel]) -> str:
    """A checksum of what a plot shows, to six digits."""
    told = json.dumps([asdict(panel) for panel in panels], default=str)
    rounded = json.dumps(json.loads(told, parse_float=lambda number: f"{float(number):.6g}"))
    return hashlib.sha256(rounded.encode()).hexdigest()


def figure_of(panels: Sequence[Panel]) -> Figure:
    """The panels beside each other, at most two in a row, with a legend of all series below."""
    from matplotlib.ticker import LogLocator

    columns = min(2, len(panels))
    bands = [panels[at : at + columns] for at in range(0, len(panels), columns)]
    heights = [0.9 + 0.24 * max(len(panel.labels) for panel in band) for band in bands]
    figure = new_figure(5.2 * columns, sum(heights) + 0.35)
    grid = figure.add_gridspec(len(bands), columns, height_ratios=heights)
    told = list(dict.fromkeys(name for panel in panels for name in panel.series))
    handles = {}
    for place, panel in enumerate(panels):
        axes = figure.add_subplot(grid[divmod(place, columns)])
        at = {label: -row for row, label in enumerate(panel.labels)}
        for name, points in panel.series.items():
            style = told.index(name)
            ends = [
                [value - low for value, low, _ in points.values()],
                [high - value for value, _, high in points.values()],
            ]
            handles[name] = axes.errorbar(
                [value for value, _, _ in points.values()],
                [at[label] for label in points],
                xerr=ends,
                fmt=MARKERS[style],
                color=COLOURS[(0, 3, 2, 5, 6)[style]],
                markerfacecolor=COLOURS[0] if style == 0 else "white",
                markersize=5,
                capsize=2,
                linewidth=1.2,
            )
        axes.set_yticks(list(at.values()), list(at), fontsize=8)
        axes.set_ylim(-len(at) + 0.4, 0.6)
        axes.set_title(panel.title, fontsize=9, color=INK)
        axes.set_xlabel(panel.axis, fontsize=8, color=INK)
        axes.grid(axis="x", color="0.9", linewidth=0.6)
        axes.set_axisbelow(True)
        if panel.log:
            axes.set_xscale("log")
            axes.axvline(1, color="0.6", linewidth=1)
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.xaxis.set_minor_formatter(lambda value, _: "")
        axes.tick_params(labelsize=8)
        plain(axes)
    drawn: list[Any] = list(handles.values())
    figure.legend(drawn, list(handles), loc="outside lower center", ncols=len(told) if len(told) < 4 else 2, fontsize=8)
    return literal(figure)


def svg(panels: Sequence[Panel | table_transfer.Panel]) -> str:
    """The plot as SVG, with the checksum of what it shows; equal values make equal text."""
    import matplotlib as mpl

    written = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": "metapretrain", "svg.fonttype": "none", "font.family": "sans-serif"}):
        about = {"Date": None, "Description": f"sha256 of the values: {digest(panels)}"}
        own = [panel for panel in panels if isinstance(panel, Panel)]
        others = [panel for panel in panels if isinstance(panel, table_transfer.Panel)]
        figure = figure_of(own) if own else table_transfer.figure_of(others)
        figure.savefig(written, format="svg", metadata=about)
    return "\n".join(line.rstrip() for line in written.getvalue().splitlines()) + "\n"


def draw(folder: Path) -> None:
    """Write the plots; those whose values are as they were are left alone."""
    for path in outdated(folder):
        write_file(path, svg(PLOTS[path.stem]()))


def outdated(folder: Path) -> list[Path]:
    """The plots that are not there or show other values than the result files."""
    shown = {folder / f"{name}.svg": panels for name, make in PLOTS.items() if (panels := make())}
    return [
        path
        for path, panels in shown.items()
        if not path.is_file() or digest(panels) not in path.read_text(encoding="utf-8")
    ]
