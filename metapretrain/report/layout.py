"""How the tables of a benchmark are laid out: columns, baselines, published figures, notes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

Result = dict[str, Any]  # the JSON object of a run
Runs = Mapping[str, Mapping[int, Result]]  # method -> seed -> result
Notes = Callable[[Runs, "Mapping[str, Published]"], list[str]]


@dataclass(frozen=True)
class Column:
    """One metric of a table.

    Args:
        name: in CSV and JSON.
        metric: entry of a result's "metrics".
        title: heading in Markdown.
        percent: shown times 100 with two digits, else as it is with three.
        optional: shown only where a row has it.
        examples: entry of "counts" with the number of examples that it was measured on, or None.
        interval: of these examples: `proportion` (Wilson), `correlation` (Fisher's z), or None.
        parts: columns whose plain mean this is; its interval over examples follows from theirs.
        marked: the group's remark, if there is one, bears on it.
        drawn: what a figure of it is called.
        legend: said below the table that shows it.
    """

    name: str
    metric: str
    title: str
    percent: bool = True
    optional: bool = False
    examples: str | None = None
    interval: str | None = None
    parts: tuple[str, ...] = ()
    marked: bool = False
    drawn: str = ""
    legend: str = ""


@dataclass(frozen=True)
class Layout:
    """The tables of a benchmark.

    Args:
        columns: of the main table.
        main: rows are ranked and drawn by it; every complete run has it, or some of the parts that it means over.
        legend: said below the main table.
        further: columns of a second table; its legend follows.
        baselines: for each comparison the names that its baseline may have; the first one present is used.
        first_row: take the first row as baseline where none of the names is present.
        compared: columns of the paired differences over seeds, each a table column; empty: the main one only, in
            one table, beside the difference over examples.
        published: heading of the published figures; `cited` are the columns that they are of.
        star: what the star at a published row means.
        aliases: method to another one that is the same by construction, so that one run makes two rows.
        majority: begin of the metrics' names for the row of the majority class, or None.
        open: from the names of metrics, a column for each task of theirs; those that are not listed are added.
        notes: from the runs and the published rows of their data set, more lines below the tables.
        part: of the data, that figures with intervals over examples are of.
        settings: last parts of the methods' names, in the order of the table: rows are paired within a setting.
    """

    columns: tuple[Column, ...]
    main: str
    legend: str
    further: tuple[Column, ...] = ()
    further_legend: str = ""
    baselines: tuple[tuple[str, ...], ...] = ()
    first_row: bool = False
    compared: tuple[str, ...] = ()
    published: str = "published"
    cited: tuple[str, ...] = ()
    star: str = "not comparable with the other rows"
    aliases: Mapping[str, str] = field(default_factory=dict)
    majority: str | None = None
    open: Callable[[Collection[str]], list[Column]] | None = None
    notes: Notes | None = None
    part: str = "dev"
    settings: tuple[str, ...] = ()

    @property
    def several(self) -> bool:
        """Whether a row is several figures of equal standing, not one accuracy with companions."""
        return bool(self.compared)

    @property
    def all_columns(self) -> tuple[Column, ...]:
        """The columns of both tables."""
        return self.columns + self.further

    def setting(self, method: str) -> int:
        """Place of a method's setting, or the number of settings for a method of none."""
        ends = [place for place, setting in enumerate(self.settings) if method.endswith(f"-{setting}")]
        return ends[0] if ends else len(self.settings)

    def column(self, name: str) -> Column:
        """The column of that name."""
        return next(column for column in self.all_columns if column.name == name)


@dataclass(frozen=True)
class Published:
    """One row as printed.

    Args:
        scores: column of `columns.Layout` to figure, fractions or correlations; None where none was printed.
        source: `poster`, for a row that stands beside rows of another print; "" for the main one.
        comparable: False for a row that was made otherwise than the others, which the print marks by a star.
    """

    scores: Mapping[str, float | None]
    source: str = ""
    comparable: bool = True


BUDGET = {
    "encoder passes": "encoder_passes",
    "updates": "updates",
    "pretraining": "pretrain_updates",
    "fine-tuning": "finetune_updates",
}  # of the Markdown table, and of the file
