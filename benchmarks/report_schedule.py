"""The table of `run_schedule.py`: downstream tasks and their mean, what the choice of sources cost, and its curves.

python benchmarks/report_schedule.py runs/schedule/texts-paper   # draw the plots of finished runs again
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ctrl_c  # noqa: F401
import numpy as np
from schedule_experiment import downstream_column

from metapretrain.errors import InputError
from metapretrain.options import Parser, main_guard
from metapretrain.report.figures import (
    COLOURS,
    INK,
    MARKERS,
    end_labels,
    line_style,
    literal,
    new_figure,
    panels,
    plain,
    save_figure,
)
from metapretrain.report.layout import Column, Layout, Result, Runs
from metapretrain.report.notes import NOTES
from metapretrain.report.results import collect
from metapretrain.report.rows import paired, setting_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DOWNSTREAM = {
    "wic": "accuracy",
    "mrpc": "accuracy",
    "qnli": "accuracy",
    "rte": "accuracy",
    "cola": "matthews",
    "conll04": "f1",
    "conll2003": "f1",
    "squad": "f1",
    "cb": "accuracy",
    "copa": "accuracy",
}

LAYOUT = Layout(
    columns=(
        Column("downstream", "downstream", "downstream %", drawn="mean over downstream tasks"),
        *(downstream_column(task, metric) for task, metric in DOWNSTREAM.items()),
    ),
    main="downstream",
    legend=(
        "Test parts of tasks that were no target, after fine-tuning with the same small budget; mean ± half-width of "
        "the 95% interval over seeds (Student t). Downstream: plain mean of the tasks' numbers."
    ),
    further=(
        Column("target_loss", "target_loss", "target loss", False),
        Column("target_loss_area", "target_loss_area", "target loss, mean over compute", False, True),
        Column("labels", "labels", "labels read", False, True),
        Column("probe_share", "probe_share", "probes, % of compute"),
        Column("taylor_rank_correlation", "taylor_rank_correlation", "Taylor: rank correlation", False, True),
        Column("taylor_regret", "taylor_regret", "Taylor: regret", False, True),
        Column("peak_memory", "peak_memory_mib", "peak memory, MiB", False, True),
        Column("validation_downstream", "validation_downstream", "validation: downstream %"),
    ),
    further_legend=(
        "Target loss: mean over the setting's targets on examples that no utility saw; the settings aware and agnostic "
        "have other targets. Labels read: the most examples of labelled targets that training and probes read. "
        "Taylor: agreement of its utilities with exact ones on the same batches, mean over the evaluations; "
        "the regret is 0 where its first source is the best one and 1 where it is the worst."
    ),
    baselines=(("uniform-aware",), ("uniform-agnostic",)),
    first_row=True,
    compared=("downstream", *DOWNSTREAM),
    notes=("schedule",),
    part="test",
    settings=("aware", "agnostic"),
)

GREY = "#BBBBBB"
AXES = {"updates": "source updates", "compute_units": "compute: forward passes of a batch, probes included"}


def plot_schedule(root: Path) -> list[Path]:
    """Draw `figures/target-loss-SETTING.png` and `shares-SETTING.png` for the complete runs below `root`.

    Runs of several recipes, encoders or data sets have plots of their own, with these in their names.

    Raises:
        InputError: there is no complete run with a curve, or a file cannot be written.
    """
    groups: dict[str, dict[str, dict[str, dict[int, Any]]]] = {}
    for result in collect(root).results:
        if "curve" in result:
            kind = "-".join(str(result[key]) for key in ("dataset", "recipe", "encoder") if result.get(key))
            rows = groups.setdefault(kind, {}).setdefault(result["setting"], {})
            rows.setdefault(result["method"], {})[result["seed"]] = result
    if not groups:
        raise InputError(f"no complete scheduling run in {root}")
    written = []
    for kind, by_setting in groups.items():  # curves of two recipes are no comparison
        suffix = f"-{kind.replace('/', '-')}" if kind and len(groups) > 1 else ""
        for setting, rows in by_setting.items():
            figures = {"target-loss": loss_figure(rows), "shares": shares_figure(rows)}
            written += [
                save_figure(one, root / "figures" / f"{name}-{setting}{suffix}.png") for name, one in figures.items()
            ]
    return written


def loss_figure(rows: Runs) -> Figure:
    """Target loss of each method, mean over seeds: a panel against source updates, one against all compute.

    Methods that always take one source are grey and named where they end, if there are others.
    """
    fixed = [method for method, seeds in rows.items() if is_fixed(seeds)]
    coloured = [method for method in rows if method not in fixed] or fixed
    figure, all_axes = panels(2, 2, 6.5, 4.6)
    for axes, (axis, title) in zip(all_axes, AXES.items(), strict=True):
        ends = []
        for method, seeds in rows.items():
            curves = [run["curve"] for run in seeds.values()]
            length = min(len(curve["updates"]) for curve in curves)
            x, y = (
                np.mean([np.array(curve[part][:length], np.float64) for curve in curves], axis=0)
                for part in (axis, "target_loss")
            )
            if method not in coloured:
                axes.plot(x, y, color=GREY, linewidth=0.9, zorder=1)
                if length:
                    ends.append((float(x[-1]), float(y[-1]), GREY, method.removeprefix("fixed-").rpartition("-")[0]))
                continue
            number = coloured.index(method)
            style = {"marker": MARKERS[number % len(MARKERS)], "markersize": 3, "linewidth": 1.3}
            axes.plot(x, y, **line_style(number), **style, label=method)  # type: ignore[arg-type]
        axes.set_xlabel(title, color=INK)
        axes.set_ylabel("target loss, mean over targets", color=INK)
        plain(axes)
        if axis == "updates":
            axes.set_title("grey: one source only" * bool(ends), fontsize=8, color=INK)
            end_labels(axes, ends)
    all_axes[-1].legend(loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False, fontsize=8)
    return literal(figure)


def shares_figure(rows: Runs) -> Figure:
    """The part of all updates so far that each source had, of each method's first seed: a panel per method."""
    first: dict[str, Mapping[str, Any]] = {method: seeds[min(seeds)]["curve"] for method, seeds in rows.items()}
    shown = {method: curve for method, curve in first.items() if not is_fixed(rows[method])} or first
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
        axes.set_xlabel("source updates", fontsize=9, color=INK)
        axes.set_ylabel("share of the updates so far", fontsize=9, color=INK)
        plain(axes)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize=8)
    return literal(figure)


@main_guard
def main(argv: Sequence[str] | None = None) -> int:
    """Draw the plots of the folders that are named."""
    parser = Parser(prog="report_schedule.py", description="Draw target losses and sources of finished runs.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="FOLDER", help="folder of runs of run_schedule.py")
    for folder in parser.parse_args(argv).runs:
        for file in plot_schedule(folder):
            print(f"figure   {file}")
    return 0


NEAR = 0.02  # of uniform's minimum


def against(run: Result, uniform: Result) -> dict[str, float]:
    """A run's final target loss minus uniform's final and lowest, mean loss over the compute of both, and its cost."""
    curves = [one["curve"] for one in (run, uniform)]
    losses = [np.array([math.inf if loss is None else loss for loss in curve["target_loss"]]) for curve in curves]
    compute = [np.array(curve["compute_units"], float) for curve in curves]
    grid = np.unique(np.concatenate(compute))
    grid = grid[(grid >= max(c[0] for c in compute)) & (grid <= min(c[-1] for c in compute))]
    areas = [np.trapezoid(np.interp(grid, c, of), grid) for c, of in zip(compute, losses, strict=True)]
    return {
        "end": losses[0][-1] - losses[1][-1],
        "minimum": losses[0][-1] - losses[1][1:].min(),  # 0: before any update
        "area": (areas[0] - areas[1]) / (grid[-1] - grid[0]),
        "updates": curves[0]["updates"][-1] / curves[1]["updates"][-1],
        "compute": compute[0][-1] / compute[1][-1],
    }


def schedule_notes(by_method: Runs, layout: Layout) -> list[str]:
    """Target losses beside those of the baseline, and the distance to the best fixed source, by setting."""
    notes = []
    for setting in layout.settings:
        rows = {name: runs for name, runs in by_method.items() if setting_of(runs) == setting}
        base = next((name for names in layout.baselines for name in names if name in rows), "")
        uniform = rows.get(base, {})
        losses = {seed: run.get("curve", {}).get("target_loss") or [None] for seed, run in sorted(uniform.items())}
        fell = [seed for seed, of in losses.items() if None not in (of[0], of[-1]) and of[-1] < of[0]]
        if len(fell) < len(uniform):
            notes.append(
                f"The target loss of {base} did not fall on {len(uniform) - len(fell)} of {len(uniform)} "
                "seeds, which are left out where others are compared to it."
            )
        for name, runs in rows.items():
            seeds = [seed for seed in fell if len(runs.get(seed, {}).get("curve", {}).get("updates", ())) > 1]
            if not seeds or runs is uniform:
                continue
            found = [against(runs[seed], uniform[seed]) for seed in seeds]
            mean = {what: float(np.mean([one[what] for one in found])) for what in found[0]}
            near = sum(one["minimum"] <= NEAR for one in found)
            notes.append(
                f"{name} minus {base}, target loss: final {mean['end']:+.3f}, final minus the lowest of {base} "
                f"{mean['minimum']:+.3f} (at most {NEAR} on {near} of {len(found)} seeds), mean over the compute that "
                f"both spent {mean['area']:+.3f}; with {100 * mean['updates']:.0f}% of its updates and "
                f"{100 * mean['compute']:.0f}% of its compute."
            )
        notes += _beside_fixed(rows, layout, setting)
    return notes + _between_settings(by_method, layout)


def is_fixed(runs: Mapping[int, Result]) -> bool:
    """Whether a method's scheduler always takes one source."""
    return all(run.get("scheduler") == "fixed" for run in runs.values())


def _beside_fixed(rows: Runs, layout: Layout, setting: str) -> list[str]:
    """The fixed row with the best mean of the validation numbers, and the others minus it."""
    fixed = {name: runs for name, runs in rows.items() if is_fixed(runs)}
    metric, means = f"validation_{layout.column(layout.main).metric}", {}
    for name, runs in fixed.items():
        values = [run["metrics"].get(metric) for run in runs.values()]
        if None not in values:
            means[name] = float(np.mean(values))
    if not means:
        return []
    best = max(means, key=means.__getitem__)
    told = f"Of {len(fixed)} fixed sources ({setting}), validation picks {best}."
    return [told, *(line for name in rows if name not in fixed for line in _gap(rows, layout, name, best))]


def _between_settings(rows: Runs, layout: Layout) -> list[str]:
    """The same scheduler in the first setting and in the others: what looking at the targets gives, say."""
    found: dict[tuple[Any, ...], dict[str, str]] = {}
    for name, runs in rows.items():
        run = runs[min(runs)]
        same = (
            *(run.get(what) for what in ("scheduler", "source", "block", "options")),
            run["budget"].get("pretrain_updates"),
        )
        found.setdefault(same, {})[setting_of(runs)] = name
    notes = []
    for by_setting in found.values():
        names = [by_setting[setting] for setting in layout.settings if setting in by_setting]
        notes += [line for other in names[1:] for line in _gap(rows, layout, names[0], other)]
    return notes


def _gap(rows: Runs, layout: Layout, name: str, other: str) -> list[str]:
    """A line with the paired difference of two rows' main numbers, if they have seeds in common."""
    gap = paired(rows[name], rows[other], layout.column(layout.main).metric)
    if gap is None:
        return []
    limits = f" (95%: {100 * gap.low:+.2f} to {100 * gap.high:+.2f})" if gap.known else ""
    return [f"{name} minus {other}, {layout.main}: {100 * gap.mean:+.2f} points{limits}, {gap.n} seeds."]


NOTES["schedule"] = schedule_notes


if __name__ == "__main__":
    sys.exit(main())
