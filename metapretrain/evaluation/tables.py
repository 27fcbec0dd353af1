"""How a report's table is shown to readers: Markdown; `table_files` writes it for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from metapretrain.evaluation.cells import (
    MARK,
    STAR,
    figure_text,
    heading,
    markdown_table,
    published_text,
    shown_columns,
)
from metapretrain.evaluation.columns import Column, Layout
from metapretrain.evaluation.comparisons import claims_section, differences_section, order_section
from metapretrain.evaluation.intervals import Interval, mean_interval
from metapretrain.evaluation.table_files import BUDGET

if TYPE_CHECKING:
    from metapretrain.evaluation.report import Group, Table
    from metapretrain.evaluation.rows import Row


def markdown(table: Table) -> str:
    """The whole report as Markdown: a section a group, then what was left out."""
    lines: list[str] = []
    for group in table.groups:
        lines += _section(group)
    if not table.groups:
        lines += ["No complete run yet.", ""]
    if table.incomplete:
        lines += [f"Incomplete runs, not in the table: {len(table.incomplete)}", ""]
        lines += [f"- {name}" for name in table.incomplete] + [""]
    if table.problems:
        lines += [f"Problems: {len(table.problems)}", ""]
        lines += [f"- {problem}" for problem in table.problems] + [""]
    return "\n".join(lines).rstrip() + "\n"


def _about(group: Group) -> tuple[str, ...]:
    return group.benchmark, group.dataset, group.recipe, group.encoder


def _section(group: Group) -> list[str]:
    title = ", ".join(dict.fromkeys(part for part in _about(group) if part))
    lines = [f"## {title or 'results'}", ""]
    if "smoke" in group.recipe.split("-"):
        lines += ["Smoke runs: tiny, to see that everything works. Their figures mean nothing.", ""]
    if group.rows:
        lines += [
            *_scores(group),
            *_further(group),
            *differences_section(group),
            *claims_section(group),
            *order_section(group),
        ]
        lines += ["Cost of one run (mean over seeds):", "", *_cost(group.rows, bool(group.pretraining))]
    if group.pretraining:
        lines += ["Pretraining only, shared by the rows above:", "", *_cost(group.pretraining, False)]
    lines += [f"- {note}" for note in group.notes]
    return [*lines, ""] if group.notes else lines


def _limits(column: Column, interval: Interval | None) -> str:
    if interval is None or not interval.known:
        return "-"
    low, high = interval.low, interval.high
    return f"{100 * low:.2f} to {100 * high:.2f}" if column.percent else f"{low:.3f} to {high:.3f}"


def _scores(group: Group) -> list[str]:
    """The main table and what its figures are."""
    layout = group.layout
    columns = shown_columns(layout.columns, group.rows)
    header = ["method", "seeds"]
    for column in columns:
        header.append(heading(group, column))
        if not layout.several and column.interval:
            header += [f"{column.name} images", f"{column.name} set 95%"]
    cited = any(row.published for row in group.rows)
    rows = [_majority(group, columns, cited)] if group.majority else []
    for row in group.rows:
        cells = [row.method, str(len(row.seeds))]
        for column in columns:
            cells.append(figure_text(column, row.scores.get(column.name)))
            if not layout.several and column.interval:
                images = row.examples.get(column.name)
                cells += [f"{images:,}" if images else "-", _limits(column, row.test_sets.get(column.name))]
        rows.append([*cells, _published(layout, row)] if cited else cells)
    legend = layout.legend
    legend += "".join(f" {column.legend}" for column in columns if column.legend)
    if any(row.published and not row.published.comparable for row in group.rows):
        legend += f"{STAR}: {layout.star}."
    lines = [*markdown_table([*header, layout.published] if cited else header, rows), legend, ""]
    return [*lines, f"{MARK} {group.remark}", ""] if group.remark else lines


def _majority(group: Group, columns: Sequence[Column], cited: bool) -> list[str]:
    known = {name: mean_interval([value]) for name, value in group.majority.items()}
    figures = [figure_text(column, known.get(column.name)) for column in columns]
    return ["majority class", "-", *figures, *["-"] * cited]


def _published(layout: Layout, row: Row) -> str:
    if row.published is None:
        return "-"
    known = {name: row.published.scores.get(name) for name in layout.cited}
    told = [published_text(layout.column(name), value) for name, value in known.items() if value is not None]
    source = f" ({row.published.source})" if row.published.source else ""
    return f"{' / '.join(told)}{source}{'' if row.published.comparable else STAR}" if told else "-"


def _further(group: Group) -> list[str]:
    """The second table, and the intervals over examples of the first one's figures."""
    columns = shown_columns(group.layout.further, group.rows)
    lines = []
    if columns:
        header = ["method", *(heading(group, column) for column in columns)]
        rows = [[row.method, *(figure_text(c, row.scores.get(c.name)) for c in columns)] for row in group.rows]
        legend = " ".join([group.layout.further_legend, *(column.legend for column in columns if column.legend)])
        lines += ["Further figures:", "", *markdown_table(header, rows), legend, ""]
    columns = [c for c in group.layout.all_columns if any(c.name in row.test_sets for row in group.rows)]
    if group.layout.several and columns:
        header = ["method", *(heading(group, column) for column in columns)]
        rows = [[row.method, *(_limits(c, row.test_sets.get(c.name)) for c in columns)] for row in group.rows]
        title = f"95% over the {group.layout.part} examples, at the mean over seeds:"
        lines += [title, "", *markdown_table(header, rows)]
        pearson = "Pearson: Fisher's z; " * any("Pearson" in column.title for column in columns)
        lines += [f"Accuracy: Wilson; {pearson}means: from those of their parts, whose examples are different.", ""]
    return lines


def _budget(row: Row, name: str) -> str:
    return " or ".join(f"{value:,}" for value in row.budget.get(name, [])) or "-"


def _cost(rows: Sequence[Row], shares: bool) -> list[str]:
    """The table of budgets and times; `shares`: passes and updates hold a pretraining whose time stands apart."""
    wall_time = "wall time without pretraining" if shares else "wall time"
    budget = {title: name for title, name in BUDGET.items() if any(row.budget.get(name) for row in rows)}
    header = ["method", "seeds", *budget, wall_time, "device"]
    tokens = any(row.tokens_per_s is not None for row in rows)
    header += ["tokens a second", "padding, %"] * tokens
    lines = []
    for row in rows:
        wall = "-" if row.wall_s is None else f"{row.wall_s:,.1f} s"
        counts = [_budget(row, name) for name in budget.values()]
        speed = "-" if row.tokens_per_s is None else f"{row.tokens_per_s:,.0f}"
        padding = "-" if row.padding_share is None else f"{100 * row.padding_share:.1f}"
        told = [row.method, str(len(row.seeds)), *counts, wall, ", ".join(row.devices) or "-"]
        lines.append([*told, *[speed, padding] * tokens])
    return markdown_table(header, lines)
