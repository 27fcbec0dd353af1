"""The part of a report that compares its rows: paired differences, claims and order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from metapretrain.evaluation.cells import figure_text, heading, markdown_table, percent, shown_columns

if TYPE_CHECKING:
    from metapretrain.evaluation.report import Group


def differences_section(group: Group) -> list[str]:
    """Paired differences to each baseline, if there is another row."""
    if not group.baselines or len(group.rows) < 2:
        return []
    if group.layout.several:
        return [line for place in range(len(group.baselines)) for line in _differences_to(group, place)]
    header = ["method"]
    for name in group.baselines:
        header += [f"less {name}, over seeds", f"less {name}, over images"]
    rows = []
    for row in group.rows:
        cells = [row.method]
        for difference in row.differences:
            seeds = percent(difference.over_seeds, "+") if difference else "-"
            cells += [seeds, percent(difference.over_images, "+") if difference else "-"]
        rows.append(cells)
    legend = (
        "Paired differences of test accuracy, in points, ± half-width of the 95% interval. Over seeds: "
        "Student t over the differences on the same seeds. Over images: Student t over the images' "
        "differences, each the mean over those seeds (no bootstrap)."
    )
    return ["Paired differences:", "", *markdown_table(header, rows), legend, ""]


def _differences_to(group: Group, place: int) -> list[str]:
    columns = shown_columns([group.layout.column(name) for name in group.layout.compared], group.rows)
    rows = []
    for row in group.rows:
        difference = row.differences[place]
        if difference is not None:
            cells = [figure_text(column, difference.columns.get(column.name), "+") for column in columns]
            rows.append([row.method, str(len(difference.seeds)), *cells])
    if not rows:
        return []
    header = ["method", "common seeds", *(heading(group, replace(column, examples=None)) for column in columns)]
    legend = "Mean ± half-width of the 95% interval, Student t over the differences on the same seeds; % in points."
    return [f"Paired differences, less {group.baselines[place]}:", "", *markdown_table(header, rows), legend, ""]


def order_section(group: Group) -> list[str]:
    """The rows from worst to best by the main column, and the published ones among them."""
    main = group.layout.main
    ours = {row.method: row.scores[main].mean for row in group.rows if main in row.scores}
    theirs = {
        row.method: row.published.scores.get(main) for row in group.rows if row.published and row.published.comparable
    }
    cited = {name: value for name, value in theirs.items() if value is not None and name in ours}
    if not group.layout.several or len(ours) < 2:
        return []
    told = f"Order by {main}: {_ordered(ours)}."
    if len(cited) > 1:
        mine, their = (_ordered({name: scores[name] for name in cited}) for scores in (ours, cited))
        told += f" The published rows among them, here: {mine}; as published: {their}."
    return [told, ""]


def _ordered(scores: Mapping[str, float]) -> str:
    """The names from the lowest to the highest score, equal ones joined by =."""
    names = sorted(scores, key=scores.__getitem__)
    told = names[0]
    for before, name in pairwise(names):
        told += f" {'=' if scores[before] == scores[name] else '<'} {name}"
    return told


def claims_section(group: Group) -> list[str]:
    """A line a claim about two families of methods."""
    lines = []
    for claim in group.claims:
        pairs = f"{claim.better} of {claim.pairs} pairs above 0"
        seeds = f"{len(claim.seeds)} common seed{'s' if len(claim.seeds) != 1 else ''}"
        told = f"{claim.first} less {claim.second}, mean over pairs of methods: "
        told += f"{percent(claim.over_seeds, '+')} points ({pairs}, {seeds})"
        if claim.published is not None:
            told += f"; published {100 * claim.published:+.2f} ({claim.published_better} of {claim.pairs})"
        lines += [f"{told}.", ""]
    return lines
