"""The cells of a Markdown table: figures, headings and rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from metapretrain.evaluation.intervals import Interval
from metapretrain.evaluation.layout import Column

if TYPE_CHECKING:
    from metapretrain.evaluation.report import Group
    from metapretrain.evaluation.rows import Row

MARK = "†"
STAR = " \\*"


def percent(interval: Interval | None, sign: str = "") -> str:
    """`80.12 ± 0.43` in per cent, without an interval where there is none, `-` where nothing was measured.

    Example:
        >>> from metapretrain.evaluation.intervals import mean_interval
        >>> percent(mean_interval([0.70, 0.72, 0.74])), percent(None)
        ('72.00 ± 4.97', '-')
    """
    if interval is None:
        return "-"
    text = f"{round(100 * interval.mean, 9):{sign}.2f}"  # rounded so that equal means are shown alike
    return f"{text} ± {100 * interval.half_width:.2f}" if interval.known else text


def plain(interval: Interval | None, sign: str = "") -> str:
    """`0.724 ± 0.012`: a correlation or a mean of several metrics, as `percent` else.

    Example:
        >>> from metapretrain.evaluation.intervals import mean_interval
        >>> plain(mean_interval([0.70, 0.72, 0.74])), plain(mean_interval([0.5]), "+")
        ('0.720 ± 0.050', '+0.500')
    """
    if interval is None:
        return "-"
    text = f"{round(interval.mean, 11):{sign}.3f}"
    return f"{text} ± {interval.half_width:.3f}" if interval.known else text


def _cells(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table and an empty one; all columns but the first are set right.

    Example:
        >>> markdown_table(["method", "%"], [["a", "1"]])
        ['| method | % |', '| --- | ---: |', '| a | 1 |', '']
    """
    rule = ["---"] + ["---:"] * (len(header) - 1)
    return [_cells(header), _cells(rule), *(_cells(row) for row in rows), ""]


def shown_columns(columns: Sequence[Column], rows: Sequence[Row]) -> list[Column]:
    """The columns without the optional ones that no row has."""
    return [c for c in columns if not c.optional or any(c.name in row.scores for row in rows)]


def figure_text(column: Column, interval: Interval | None, sign: str = "") -> str:
    """A figure as its column shows it."""
    return percent(interval, sign) if column.percent else plain(interval, sign)


def published_text(column: Column, value: float | None) -> str:
    """A published figure with the digits that papers print, `-` where there is none.

    Example:
        >>> published_text(Column("sst", "sst_accuracy", "SST %"), 0.49), published_text(Column("f", "f", "F"), None)
        ('49.0', '-')
    """
    if value is None:
        return "-"
    return f"{100 * value:.1f}" if column.percent else f"{value:.3f}"


def heading(group: Group, column: Column) -> str:
    """The heading, with the number of examples where all rows have the same and a mark for the group's remark."""
    title = f"{column.title} {MARK}" if column.marked and group.remark else column.title
    if not group.layout.several or column.examples is None:
        return title
    numbers = {row.examples.get(column.name) for row in group.rows if column.name in row.scores}
    number = numbers.pop() if len(numbers) == 1 else None
    return f"{title} (n = {number:,})" if number else title
