"""A metric of each row against a number of the recipe, such as the examples to tune on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from metapretrain.errors import InputError
from metapretrain.evaluation.canvas import COLOURS, INK, MARKERS, new_figure, plain

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def sweep_figure(values: Mapping[str, Mapping[float, Sequence[float]]], x_label: str, y_label: str) -> Figure:
    """Mean over seeds with bars of one standard deviation, a line a row, on a logarithmic axis.

    Args:
        values: of each row, by the number that was changed, one a seed.

    Raises:
        InputError: there is no value.

    Example:
        >>> figure = sweep_figure({"pt": {10: [0.2, 0.3], 40: [0.4]}}, "examples", "accuracy")
        >>> [line.get_ydata().tolist() for line in figure.axes[0].get_lines()][0]
        [0.25, 0.4]
    """
    if not any(values.values()):
        raise InputError("there is no finished run to draw")
    figure = new_figure(7.5, 4.2)
    axes = figure.add_subplot()
    for number, (row, points) in enumerate(values.items()):
        x = sorted(points)
        y = [float(np.mean(points[at])) for at in x]
        spread = [float(np.std(points[at], ddof=1)) if len(points[at]) > 1 else 0.0 for at in x]
        style, marker = ("-", "--", "-.", ":")[number // len(COLOURS) % 4], MARKERS[number % len(MARKERS)]
        axes.errorbar(
            x, y, spread, color=COLOURS[number % len(COLOURS)], linestyle=style, marker=marker, markersize=4,
            linewidth=1.3, capsize=2, label=row,
        )  # fmt: skip
    ticks = sorted({at for points in values.values() for at in points})
    axes.set_xscale("log")
    axes.set_xticks(ticks, [f"{at:,.0f}" for at in ticks], minor=False)
    axes.minorticks_off()
    axes.set_xlabel(x_label, color=INK)
    axes.set_ylabel(y_label, color=INK)
    plain(axes)
    axes.legend(loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False, fontsize=8)
    return figure
