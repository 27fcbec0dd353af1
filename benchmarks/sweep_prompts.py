"""Figures 2 and 3 of Huang et al.: run_prompts.py for several values of one number of its recipe, in one figure.

    python benchmarks/sweep_prompts.py examples --data-dir DIR --seeds 0 1 2
    python benchmarks/sweep_prompts.py clusters --data-dir DIR --values 3 10 30 --resume

Options that are not listed here go to run_prompts.py.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

try:
    import run_prompts
except ModuleNotFoundError:  # imported as benchmarks.sweep_prompts, as tests do
    from benchmarks import run_prompts

from metapretrain.evaluation.canvas import save_figure
from metapretrain.evaluation.sweep_figures import sweep_figure
from metapretrain.options import main_guard
from metapretrain.training.files import read_json


@dataclass(frozen=True)
class Sweep:
    """What is changed, through which values ("none": all there are), for which rows, and what its axis says."""

    setting: str
    values: tuple[str, ...]
    methods: str
    label: str


SWEEPS = {
    "examples": Sweep("examples", ("10", "40", "160", "640", "2560"), "ft,ppt,metapt-kmeans", "examples to tune on"),
    "rows": Sweep("rows", ("1000", "5000", "10000", "none"), "metapt-kmeans", "pretraining rows"),
    "clusters": Sweep("meta.clusters", ("3", "6", "10", "30"), "metapt-kmeans", "meta tasks K"),
}


@main_guard
def main(argv: Sequence[str] | None = None) -> int:
    """Run the points of a sweep one after the other and draw them."""
    parser = ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("sweep", choices=SWEEPS)
    parser.add_argument("--values", nargs="+", metavar="N", help="in place of those of the figure")
    own, rest = parser.parse_known_args(argv)
    sweep = SWEEPS[own.sweep]
    rest = rest if "--methods" in rest else [*rest, "--methods", sweep.methods]
    rest = rest if "--sets" in rest else [*rest, "--sets", "sst5"]
    found: dict[str, dict[float, list[float]]] = {}
    metric = ""
    for value in own.values or sweep.values:
        given = [*rest, "--tag", f"{own.sweep}-{value}", "--set", f"{sweep.setting}={value}"]
        options = run_prompts.options_of(given)
        if status := run_prompts.main(given):
            return status
        if options.dry_run:
            continue
        metric = "validation_mean_accuracy" if options.validate else "mean_accuracy"
        results = [read_json(file) or {} for file in sorted(run_prompts.root_of(options).glob("*/result.json"))]
        for result in results:
            if result.get("method") in options.methods and result.get("seed") in options.seeds:
                at = float(result["counts"]["pretraining"]) if sweep.setting == "rows" else float(value)
                found.setdefault(result["method"], {}).setdefault(at, []).append(_value(result, metric))
    if metric:
        file = options.out / "prompts" / f"sweep-{own.sweep}.png"
        print(f"figure   {save_figure(sweep_figure(found, sweep.label, metric.replace('_', ' ')), Path(file))}")
    return 0


def _value(result: Mapping[str, Any], metric: str) -> float:
    return float(result["metrics"][metric])


if __name__ == "__main__":
    sys.exit(main())
