"""Figures 2 and 3 of Huang et al.: run_prompts.py for several values of one number of its recipe, in one plot.

    python benchmarks/sweep_prompts.py examples --data-dir DIR --seeds 0 1 2
    python benchmarks/sweep_prompts.py clusters --data-dir DIR --values 3 10 30 --resume

All other options are those of run_prompts.py.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ctrl_c  # noqa: F401
import numpy as np
import run_prompts

from metapretrain.checks import require
from metapretrain.errors import InputError
from metapretrain.experiments.prompts.recipe import PromptRecipe
from metapretrain.files import read_json
from metapretrain.options import Parser, main_guard
from metapretrain.report.figures import COLOURS, INK, MARKERS, literal, new_figure, plain, save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Sweep:
    """What is changed, through which values ("none": all there are), for which methods, and what its axis says."""

    setting: str
    values: tuple[str, ...]
    methods: str
    label: str


SWEEPS = {
    "examples": Sweep("examples", ("10", "40", "160", "640", "2560"), "ft,ppt,metapt-kmeans", "examples to tune on"),
    "rows": Sweep("rows", ("1000", "5000", "10000", "none"), "metapt-kmeans", "pretraining examples"),
    "clusters": Sweep("meta.clusters", ("3", "6", "10", "30"), "metapt-kmeans", "clusters of pretraining examples"),
}


def sweep_figure(values: Mapping[str, Mapping[float, Sequence[float]]], x_label: str, y_label: str) -> Figure:
    """Mean over seeds in %, with bars from the lowest to the highest seed, a line per method, on a logarithmic axis.

    Args:
        values: fractions of each method, by the number that was changed, one per seed.

    Raises:
        InputError: there is no value.

    Example:
        >>> figure = sweep_figure({"pt": {10: [0.2, 0.3], 40: [0.4]}}, "examples", "accuracy")
        >>> [line.get_ydata().tolist() for line in figure.axes[0].get_lines()][0]
        [25.0, 40.0]
    """
    if not any(values.values()):
        raise InputError("there is no finished run to draw")
    figure = new_figure(7.5, 4.2)
    axes = figure.add_subplot()
    for number, (row, points) in enumerate(values.items()):
        x = sorted(points)
        y = [100 * float(np.mean(points[at])) for at in x]
        spread = [
            [max(0.0, mean - 100 * min(points[at])) for mean, at in zip(y, x, strict=True)],
            [max(0.0, 100 * max(points[at]) - mean) for mean, at in zip(y, x, strict=True)],
        ]
        style, marker = ("-", "--", "-.", ":")[number // len(COLOURS) % 4], MARKERS[number % len(MARKERS)]
        axes.errorbar(
            x,
            y,
            spread,
            color=COLOURS[number % len(COLOURS)],
            linestyle=style,
            marker=marker,
            markersize=4,
            linewidth=1.3,
            capsize=2,
            label=row,
        )
    ticks = sorted({at for points in values.values() for at in points})
    axes.set_xscale("log")
    axes.set_xticks(ticks, [f"{at:,.0f}" for at in ticks], minor=False)
    axes.minorticks_off()
    axes.set_xlabel(x_label, color=INK)
    axes.set_ylabel(f"{y_label} %", color=INK)
    several = max(len(seeds) for points in values.values() for seeds in points.values())
    told = f"mean over seeds (up to {several}); bars: lowest to highest seed" if several > 1 else "one seed"
    axes.set_title(told, fontsize=8, color=INK)
    plain(axes)
    axes.legend(loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False, fontsize=8)
    return literal(figure)


@main_guard
def main(argv: Sequence[str] | None = None) -> int:
    """Run the points of a sweep one after the other and draw them."""
    parser = Parser(add_help=False)
    parser.add_argument("sweep", choices=SWEEPS, help="what is changed; name it first")
    parser.add_argument("--values", nargs="+", metavar="N", help="in place of those of the paper")
    own, rest = run_prompts.own_options(parser, __doc__, argv)
    sweep, name = SWEEPS[own.sweep], "-".join(filter(None, [own.tag, own.sweep]))
    points: dict[str, list[str]] = {}
    recipes: dict[PromptRecipe, str] = {}
    for value in own.values or sweep.values:
        usual = ["--methods", sweep.methods, "--sets", "sst5"]  # first: of an option given twice the last one counts
        points[value] = [*usual, *rest, "--tag", f"{name}-{value}", "--set", f"{sweep.setting}={value}"]
        options = run_prompts.options_of(points[value])
        if (same := recipes.setdefault(run_prompts.recipe_of(options), value)) != value:
            raise InputError(f"--values {same} and {value} are the same number; leave one of them out")
        try:  # what cannot be run is refused before all runs
            experiment = run_prompts.experiment_of(options)
            rows = {method: run_prompts.ROWS[method] for method in options.methods}
            if not options.dry_run:
                experiment.check(rows, options.seeds)
        except InputError as error:
            raise InputError(f"--values {value}: {error}") from None
    if not options.dry_run:
        require("matplotlib.figure", "the plot of a sweep")
    found: dict[str, dict[float, dict[int, float]]] = {}
    lender: list[str] = []
    for value, given in points.items():
        options = run_prompts.options_of(given := [*lender, *given])
        if sweep.setting == "examples" and not lender and not options.dry_run:
            lender = ["--pretrained", str(run_prompts.root_of(options))]  # of the first value: all start from the same
        if status := run_prompts.main(given):
            return status
        for result in [] if options.dry_run else results_of(options):
            at = float(result["counts"]["pretraining"]) if sweep.setting == "rows" else float(value)
            metric = result["metrics"][metric_of(options)]
            found.setdefault(result["method"], {}).setdefault(at, {})[result["seed"]] = float(metric)
    if not options.dry_run:
        scores = {row: {at: list(of.values()) for at, of in points.items()} for row, points in found.items()}
        figure = sweep_figure(scores, sweep.label, metric_of(options).replace("_", " "))
        print(f"figure   {save_figure(figure, options.out / 'prompts' / f'sweep-{name}.png')}")
    return 0


def metric_of(options: Namespace) -> str:
    """What is drawn."""
    return "validation_mean_accuracy" if options.validate else "mean_accuracy"


def results_of(options: Namespace) -> list[dict[str, Any]]:
    """The results of the rows and seeds that were asked for; a table's folder may hold others."""
    found = [read_json(file) or {} for file in sorted(run_prompts.root_of(options).glob("*/result.json"))]
    return [one for one in found if one.get("method") in options.methods and one.get("seed") in options.seeds]


if __name__ == "__main__":
    sys.exit(main())
