"""Convergence curves of finished text runs: a panel per folder, so that loading strategies stand side by side.

Pretraining comes first on a method's axis of updates; until its heads are trained, it is scored by nearest prototypes
(dotted).

    python benchmarks/plot_text.py runs/text/cs224n-paper-longest runs/text/cs224n-paper-shortest
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ctrl_c  # noqa: F401
import numpy as np
from run_text import METHODS

from metapretrain.errors import InputError
from metapretrain.options import Parser, main_guard, names
from metapretrain.report.figures import (
    INK,
    Curve,
    line_style,
    literal,
    over_seeds,
    panels,
    plain,
    read_curves,
    save_figure,
)

PRETRAINING, HEADS = "validation/nearest_prototype_overall", "validation/overall"


def curves_of(folder: Path, method: str) -> tuple[list[Curve], list[Curve]]:
    """The curves of a method's seeds in a folder of runs: of its pretraining (none without one), and of its heads."""
    before, after = [], []
    for run in sorted(folder.glob(f"{method}-s*")):
        seed = run.name.removeprefix(f"{method}-s")
        logged = read_curves(run)
        if not seed.isdigit() or HEADS not in logged:
            continue
        spent, name = 0, METHODS[method].pretraining
        if name is not None:
            own = read_curves(folder / f"pretrain-{name}-s{seed}")
            before.append(own[PRETRAINING])
            spent = max(int(steps[-1]) for steps, _ in own.values())
        steps, values = logged[HEADS]
        counted = steps[0] > spent  # by runs since 0.2.0, whose steps follow those of pretraining
        after.append((steps if counted else steps + spent, values))
    return before, after


def convergence_figure(folders: Sequence[Path], methods: Sequence[str]) -> Any:
    """Validation score by updates, pretraining included: a panel per folder, a colour per method.

    InputError: a folder has no curves of a method.
    """
    figure, all_axes = panels(len(folders), 2, 6.0, 4.2)
    for axes, folder in zip(all_axes, folders, strict=True):
        for place, method in enumerate(methods):
            before, after = curves_of(folder, method)
            if not after:
                raise InputError(f"no curves of {method} in {folder}: give folders of run_text.py that have its runs")
            style = line_style(place)
            for curves, dashes in ((before, ":"), (after, "-")):
                if not curves:
                    continue
                grid, values = over_seeds(curves)
                label = f"{method}, {len(curves)} seed(s)" if curves is after else None
                axes.plot(grid, np.nanmean(values, 0), color=style["color"], linestyle=dashes, marker=".", label=label)
                axes.fill_between(grid, np.nanmin(values, 0), np.nanmax(values, 0), color=style["color"], alpha=0.15)
        axes.set(title=folder.name, xlabel="updates, pretraining included", ylabel="validation: overall")
        axes.legend(frameon=False, loc="best")
        plain(axes)
    low, high = (pick(axes.get_ylim()[end] for axes in all_axes) for pick, end in ((min, 0), (max, 1)))
    for axes in all_axes:
        axes.set_ylim(low, high)
    note = "dotted: pretraining, scored by nearest prototypes; line: mean over seeds; band: lowest to highest seed"
    figure.supxlabel(note, fontsize=8, color=INK)
    return literal(figure)


def options_of(argv: Sequence[str] | None) -> Namespace:
    """Read the command line."""
    parser = Parser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="a table's folder of run_text.py")
    known = [name for name, method in METHODS.items() if method.trained]
    parser.add_argument("--methods", type=names("method", known), default=["cross", "proto"], metavar="A,B|all")
    parser.add_argument("--out", type=Path, default=Path("convergence.png"), metavar="FILE", help="(convergence.png)")
    options: Namespace = parser.parse_args(argv)
    return options


@main_guard
def main(argv: Sequence[str] | None = None) -> int:
    """Draw the figure and print where it is."""
    options = options_of(argv)
    print(save_figure(convergence_figure(options.folders, options.methods), options.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
