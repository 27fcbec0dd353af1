"""The canvas of all figures: Agg, no global state, colours that stay apart for colour-blind readers."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from metapretrain.training.files import write_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Paul Tol's "muted" scheme and black: ten colours that stay apart for colour-blind readers.
COLOURS = (
    "#332288", "#DDCC77", "#117733", "#CC6677", "#88CCEE",
    "#882255", "#44AA99", "#999933", "#AA4499", "#000000",
)  # fmt: skip
MARKERS = "osD^vPX<>*"
INK = "#333333"


def new_figure(width: float, height: float) -> Figure:
    """A figure in inches on an Agg canvas, known to no global list, so that none is ever left open."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Figure, path: Path | str) -> Path:
    """Write a PNG, whole or not at all.

    Raises:
        InputError: the folder cannot be made or written.
    """
    png = io.BytesIO()
    figure.savefig(png, format="png")
    return write_file(Path(path), png.getvalue())


def darker(colour: str) -> str:
    """The colour for text on white: mixed with black until it reads.

    Example:
        >>> darker("#DDCC77"), darker("#332288")
        ('#90854E', '#332288')
    """
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    light = 0.299 * red + 0.587 * green + 0.114 * blue
    share = min(1.0, 130 / max(light, 1))
    return "#" + "".join(f"{round(share * part):02X}" for part in (red, green, blue))


def plain(axes: Axes) -> None:
    """Leave out the frame's upper and right side."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(colors=INK)
