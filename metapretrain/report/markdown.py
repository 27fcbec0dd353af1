"""How a report is shown to readers: Markdown."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from metapretrain.evaluation.intervals import Interval, mean_interval
from metapretrain.report.layout import BUDGET, Column, Layout
from metapretrain.report.rows import Group, Row

MARK = "†"
STAR, OTHER = " \\*", "‡"
BAR = "\\|"


def shown(interval: Interval | None, percent: bool = True, sign: str = "") -> str:
    """`80.12 ± 0.43` in per cent, else `0.801 ± 0.004`; `-` where nothing was measured.

    Example:
        >>> interval = mean_interval([0.70, 0.72, 0.74])
        >>> shown(interval), shown(interval, percent=False), shown(mean_interval([0.5]), False, "+"), shown(None)
        ('72.00 ± 4.97', '0.720 ± 0.050', '+0.500', '-')
    """
    if interval is None:
        return "-"
    scale, digits = (100, 2) if percent else (1, 3)
    text = f"{round(scale * interval.mean, 9 if percent else 11):{sign}.{digits}f}"  # equal means are shown alike
    return f"{text} ± {scale * interval.half_width:.{digits}f}" if interval.known else text


def printable(line: str) -> str:
    r"""One line of Markdown that a terminal and a browser show as it is: no control characters, HTML or links.

    Example:
        >>> printable("a\nb<script>"), printable("a < b, [c](d)")
        ('a\\nb\\<script>', 'a < b, [c]\\(d)')
    """
    whole = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in line)
    return re.sub(r"<(?=[A-Za-z/!?])|(?<=\])[(\[]", r"\\\g<0>", whole)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table and an empty one; all columns but the first are set right.

    Example:
        >>> markdown_table(["method", "%"], [["a", "1"]])
        ['| method | % |', '| --- | ---: |', '| a | 1 |', '']
    """
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return [*(f"| {' | '.join(cell.replace('|', BAR) for cell in cells)} |" for cells in lines), ""]


def shown_columns(columns: Sequence[Column], rows: Sequence[Row]) -> list[Column]:
    """The columns without the optional ones that no row has."""
    return [c for c in columns if not c.optional or any(c.name in row.scores for row in rows)]


def figure_text(column: Column, interval: Interval | None, sign: str = "") -> str:
    """A mean as its column shows it."""
    return shown(interval, column.percent, sign)


def limits(column: Column, interval: Interval | None) -> str:
    """Lower and upper limit of an interval, as its column shows means; `-` where there is none."""
    if interval is None or not interval.known:
        return "-"
    low, high = interval.low, interval.high
    return f"{100 * low:.2f} to {100 * high:.2f}" if column.percent else f"{low:.3f} to {high:.3f}"


def _column_table(group: Group, columns: Sequence[Column], cell: Callable[[Row, Column], str]) -> list[str]:
    """A row per method, a cell per column."""
    header = ["method", *(heading(group, column) for column in columns)]
    return markdown_table(header, [[row.method, *(cell(row, column) for column in columns)] for row in group.rows])


def published_text(column: Column, value: float | None) -> str:
    """A published number with the digits that papers print, `-` where there is none."""
    if value is None:
        return "-"
    return f"{100 * value:.1f}" if column.percent else f"{value:.3f}"


def heading(group: Group, column: Column) -> str:
    """The heading, with the number of examples where all methods have the same and a mark for the group's remark."""
    title = f"{column.title} {MARK}" if column.marked and group.remark else column.title
    if not group.layout.several or column.examples is None:
        return title
    numbers = {row.examples.get(column.name) for row in group.rows if column.name in row.scores}
    number = numbers.pop() if len(numbers) == 1 else None
    return f"{title} (n = {number:,})" if number else title


def differences_section(group: Group) -> list[str]:
    """Paired differences to each baseline, if there is another row."""
    if not group.baselines or len(group.rows) < 2:
        return []
    if group.layout.several:
        return [line for place in range(len(group.baselines)) for line in _differences_to(group, place)]
    main = group.layout.column(group.layout.main)
    header = [f"minus {name}, over {what}" for name in group.baselines for what in ("seeds", "images")]
    rows = []
    for row in group.rows:
        cells = [
            cell
            for one in row.differences
            for cell in ((figure_text(main, one.over_seeds, "+"), shown(one.over_images, sign="+")) if one else "--")
        ]
        rows.append([row.method, *cells])
    legend = (
        f"Paired differences of {main.drawn or main.title}{', in points' * main.percent}, ± half-width of the 95% "
        "interval. Over seeds: Student t over the differences on the same seeds. Over images: Student t over the "
        "images' differences, each the mean over those seeds (no bootstrap)."
    )
    return ["Paired differences:", "", *markdown_table(["method", *header], rows), legend, ""]


def _differences_to(group: Group, place: int) -> list[str]:
    columns = shown_columns([group.layout.column(name) for name in group.layout.compared], group.rows)
    rows = []
    for row in group.rows:
        if difference := row.differences[place]:
            cells = [figure_text(column, difference.columns.get(column.name), "+") for column in columns]
            rows.append([row.method, str(len(difference.seeds)), *cells])
    if not rows:
        return []
    header = ["method", "common seeds", *(heading(group, replace(column, examples=None)) for column in columns)]
    legend = "Mean ± half-width of the 95% interval, Student t over the differences on the same seeds"
    legend += "; % in points." if any(column.percent for column in columns) else "."
    return [f"Paired differences, minus {group.baselines[place]}:", "", *markdown_table(header, rows), legend, ""]


def order_section(group: Group) -> list[str]:
    """The methods from worst to best by the main column, and the published ones among them."""
    main, (rows, cited) = group.layout.main, group.figures()
    ours = {name: interval.mean for name, interval in rows.items()}
    if not group.layout.several or len(ours) < 2:
        return []
    falling = group.layout.column(main).lower_is_better
    told = f"Order by {main}: {_ordered(ours, falling)}."
    if len(cited) > 1:
        mine, their = (_ordered({name: scores[name] for name in cited}, falling) for scores in (ours, cited))
        told += f" The published methods among them, here: {mine}; as published: {their}."
    return [told, ""]


def _ordered(scores: Mapping[str, float], falling: bool) -> str:
    """The names from the worst to the best score, equal ones joined by =."""
    names = sorted(scores, key=scores.__getitem__, reverse=falling)
    told = names[0]
    for before, name in pairwise(names):
        told += f" {'=' if scores[before] == scores[name] else '>' if falling else '<'} {name}"
    return told


def claims_section(group: Group) -> list[str]:
    """A line for each claim of the publication."""
    main = group.layout.column(group.layout.main)
    lines = []
    for claim in group.claims:
        pairs = f"{claim.better} of {claim.pairs} pairs {'below' if main.lower_is_better else 'above'} 0"
        seeds = f"{len(claim.seeds)} common seed{'s' * (len(claim.seeds) != 1)}"
        figure = f"{figure_text(main, claim.over_seeds, '+')}{' points' * main.percent} ({pairs}, {seeds})"
        if claim.published is not None:
            printed = figure_text(main, mean_interval([claim.published]), "+")
            figure += f"; published {printed} ({claim.published_better} of {claim.pairs})"
        lines += [f"{claim.first} minus {claim.second}, mean over pairs of methods: {figure}.", ""]
    return lines


def markdown(groups: Sequence[Group], incomplete: Sequence[str] = (), problems: Sequence[str] = ()) -> str:
    """The whole report as Markdown: a section for each group, then what was left out."""
    lines = [line for group in groups for line in _section(group)] or ["No complete run yet.", ""]
    for title, names in (("Incomplete runs, not in the table", incomplete), ("Problems", problems)):
        lines += [f"{title}: {len(names)}", "", *(f"- {name}" for name in names), ""] if names else []
    return "\n".join(map(printable, lines)).rstrip() + "\n"


def _section(group: Group) -> list[str]:
    about = (group.layout.title or group.benchmark, group.dataset, group.recipe, group.encoder)
    title = ", ".join(dict.fromkeys(filter(None, about)))
    lines = [f"## {title or 'results'}", ""]
    if "smoke" in group.recipe.split("-"):
        lines += ["Smoke runs: tiny, to see that everything works. Their numbers mean nothing.", ""]
    if group.rows:
        for section in (scores_section, _further, differences_section, claims_section, order_section):
            lines += section(group)
        lines += ["Cost of one run (mean over seeds):", "", *_cost(group.rows, bool(group.pretraining))]
    if group.pretraining:
        lines += ["Pretraining only, shared by the methods above:", "", *_cost(group.pretraining, False)]
    lines += [f"- {note}" for note in group.notes]
    return [*lines, ""] if group.notes else lines


def scores_section(group: Group) -> list[str]:
    """The main table and what its numbers are."""
    layout = group.layout
    columns = shown_columns(layout.columns, group.rows)
    cited = any(row.published for row in group.rows)
    header = ["method", "seeds"]
    for column in columns:
        header.append(heading(group, column))
        if not layout.several and column.interval:
            header += [f"{column.name} images", f"{column.name} set 95%"]
    rows = []
    if group.majority:
        known = {name: mean_interval([value]) for name, value in group.majority.items()}
        rows = [["majority class", "-", *(figure_text(column, known.get(column.name)) for column in columns)]]
        rows[0] += ["-"] * cited
    for row in group.rows:
        cells = [row.method, str(len(row.seeds))]
        for column in columns:
            cells.append(figure_text(column, row.scores.get(column.name)))
            if not layout.several and column.interval:
                images = row.examples.get(column.name)
                cells += [f"{images:,}" if images else "-", limits(column, row.test_sets.get(column.name))]
        rows.append([*cells, _published(layout, row)] if cited else cells)
    legend = " ".join([layout.legend, *(column.legend for column in columns if column.legend)])
    falling = [column.title for column in columns if column.lower_is_better]
    legend += f" Lower is better: {', '.join(falling)}." * bool(falling)
    if any(row.published and not row.published.comparable for row in group.rows):
        legend += f"{STAR}: {layout.star}."
    lines = [*markdown_table(header + [layout.published_title] * cited, rows), legend, ""]
    return [*lines, f"{MARK} {group.remark}", ""] if group.remark else lines


def _published(layout: Layout, row: Row) -> str:
    scores = row.published.scores if row.published else {}
    known = {name: scores.get(name) for name in layout.cited}
    told = [published_text(layout.column(name), value) for name, value in known.items() if value is not None]
    if not told or row.published is None:
        return "-"
    source = f" ({row.published.source})" if row.published.source else ""
    return f"{' / '.join(told)}{source}{'' if row.published.comparable else STAR}{f' {OTHER}' * bool(row.other_data)}"


def _further(group: Group) -> list[str]:
    """The second table, and the intervals over examples of the first one's numbers."""
    lines = []
    if columns := shown_columns(group.layout.further, group.rows):
        table = _column_table(group, columns, lambda row, column: figure_text(column, row.scores.get(column.name)))
        legend = " ".join([group.layout.further_legend, *(column.legend for column in columns if column.legend)])
        lines += ["Further numbers:", "", *table, legend, ""]
    columns = [c for c in group.layout.all_columns if any(c.name in row.test_sets for row in group.rows)]
    if group.layout.several and columns:
        table = _column_table(group, columns, lambda row, column: limits(column, row.test_sets.get(column.name)))
        lines += [f"95% intervals over the {group.layout.part} examples, at the mean over seeds:", "", *table]
        told = "Pearson: Fisher's z; " * any("Pearson" in column.title for column in columns)
        told += "means: from the intervals of their parts, whose examples are different."
        lines += [f"Accuracy: Wilson; {told}", ""]
    return lines


def _cost(rows: Sequence[Row], shares: bool) -> list[str]:
    """The table of budgets and times; `shares`: passes and updates hold a pretraining whose time stands apart."""
    wall_time = "wall time without pretraining" if shares else "wall time"
    budget = {title: name for title, name in BUDGET.items() if any(row.budget.get(name) for row in rows)}
    header = ["method", "seeds", *budget, wall_time, "device"]
    tokens = any(row.tokens_per_s is not None for row in rows)
    header += ["tokens per second", "padding, %"] * tokens
    lines = []
    for row in rows:
        wall = "-" if row.wall_s is None else f"{row.wall_s:,.1f} s"
        counts = [" or ".join(f"{value:,}" for value in row.budget.get(name, [])) or "-" for name in budget.values()]
        lines.append([row.method, str(len(row.seeds)), *counts, wall, ", ".join(row.devices) or "-"])
        if tokens:
            lines[-1].append("-" if row.tokens_per_s is None else f"{row.tokens_per_s:,.0f}")
            lines[-1].append("-" if row.padding_share is None else f"{100 * row.padding_share:.1f}")
    return markdown_table(header, lines)
