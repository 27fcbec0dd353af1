"""How a table is laid out: columns, baselines, published figures, notes. A benchmark hands its own in; runs keep it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from reprlib import repr as shortened
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from metapretrain.errors import InputError, one_of
from metapretrain.files import write_file

Result = dict[str, Any]  # the JSON object of a run
Seeds = Mapping[int, Result]  # the runs of a method by seed
Runs = Mapping[str, Seeds]
FILE = Path("report", "layout.json")  # in the folder of a table


@dataclass(frozen=True)
class Column:
    """One metric of a table."""

    name: str  # in CSV and JSON
    metric: str  # entry of a result's "metrics"
    title: str  # heading in Markdown
    percent: bool = True  # shown times 100 with two digits, else as it is with three
    optional: bool = False  # shown only where a row has it
    examples: str | None = None  # entry of "counts" with the number of examples that it was measured on
    interval: str | None = None  # over these examples: `proportion` (Wilson) or `correlation` (Fisher's z)
    parts: tuple[str, ...] = ()  # columns whose plain mean this is; its interval over examples follows from theirs
    marked: bool = False  # the group's remark, if there is one, bears on it
    drawn: str = ""  # what a figure of it is called
    legend: str = ""  # said below the table that shows it
    lower_is_better: bool = False


@dataclass(frozen=True)
class Published:
    """Published numbers of one method."""

    scores: Mapping[str, float | None]  # column to figure, fractions or correlations; None where none was printed
    source: str = ""  # of a row of another print than the others, such as `poster`
    comparable: bool = True  # False for a row that was made otherwise than the others, which a star marks
    test: Mapping[str, float | None] = field(default_factory=dict)  # on a test set that no run here sees


@dataclass(frozen=True)
class Claim:
    """A print's claim that the first method of each pair is better; `first` and `second` name both sides."""

    first: str
    second: str
    pairs: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Layout:
    """The tables of a benchmark.

    Raises InputError: `main`, `compared`, `cited` or a column's `parts` name no column.
    """

    columns: tuple[Column, ...]  # of the main table
    main: str  # rows are ranked and drawn by it; every complete run has it, or some of its parts
    legend: str = ""  # said below the main table
    further: tuple[Column, ...] = ()  # of a second table
    further_legend: str = ""
    baselines: tuple[tuple[str, ...], ...] = ()  # names that each may have; the first one present is used
    aim: float = 0.0  # by which a row is to exceed each baseline in the main column, for the note "aim"
    first_row: bool = False  # is the baseline where none of the names is present
    compared: tuple[str, ...] = ()  # columns of the paired differences; empty: the main one, over examples too
    published: Mapping[str, Mapping[str, Published]] = field(default_factory=dict)  # by data set and method
    published_title: str = "published"
    published_counts: Mapping[str, int] = field(default_factory=dict)  # "counts" that published figures are of
    published_about: str = ""  # said of them below the table
    published_count: str = ""  # the number of "counts" that is said with it
    cited: tuple[str, ...] = ()  # columns of the published figures
    star: str = "not comparable with the other methods"  # what the star at a published method means
    aliases: Mapping[str, str] = field(default_factory=dict)  # method to another that is the same by construction
    majority: str | None = None  # begin of the metrics' names for the row of the majority class
    open: bool = False  # runs may have other tasks: the parts of a mean are those that were measured
    claims: tuple[Claim, ...] = ()  # that the print makes
    notes: tuple[str, ...] = ()  # names in `metapretrain.report.notes.NOTES`, computed from the runs
    similarity: str = ""  # what is to be known of an encoder trained for sentence similarity, after its name
    part: str = "dev"  # of the data, that figures with intervals over examples are of
    title: str = ""  # begins the heading of a table; empty: the benchmark's name
    settings: tuple[str, ...] = ()  # the results' "setting", in order of the table: rows are paired within one

    def __post_init__(self) -> None:
        names = [column.name for column in self.all_columns]
        for name in (self.main, *self.compared, *self.cited, *(part for c in self.all_columns for part in c.parts)):
            one_of("column", name, names)

    @property
    def several(self) -> bool:
        """Whether a row is several figures of equal standing, not one accuracy with companions."""
        return bool(self.compared)

    @property
    def all_columns(self) -> tuple[Column, ...]:
        """The columns of both tables."""
        return self.columns + self.further

    def column(self, name: str) -> Column:
        """The column of that name."""
        return next(column for column in self.all_columns if column.name == name)

    def with_tasks(self, tasks: Iterable[Column]) -> Layout:
        """Add a column for each task that has none, behind the other tasks and before the means."""
        listed = {column.metric for column in self.columns}
        added = sorted((one for one in tasks if one.metric not in listed), key=lambda column: column.name)
        if not added:
            return self
        compared = {*self.compared, *(column.name for column in added)}
        columns = sorted((*self.columns, *added), key=lambda column: bool(column.parts))
        ordered = tuple(column.name for column in (*columns, *self.further) if column.name in compared)
        return replace(self, columns=tuple(columns), compared=ordered)

    def measured(self, metrics: Iterable[str]) -> Layout:
        """Return the layout whose means are over the tasks that were measured, if it is open."""
        if not self.open:
            return self
        known = set(metrics)
        tasks = [column.name for column in self.columns if not column.parts and column.metric in known]

        def mean(column: Column) -> Column:
            left_out = column.name.partition("_without_")[2]
            return replace(column, parts=tuple(name for name in tasks if name != left_out)) if column.parts else column

        return replace(self, columns=tuple(map(mean, self.columns)), further=tuple(map(mean, self.further)))

    def to_json(self) -> Any:
        """The layout as JSON, without what is as usual."""
        return _told(self)

    @staticmethod
    def from_json(found: Any) -> Layout:
        """Return the layout that `to_json` told.

        Raises InputError: a field that a layout has not, one that is missing, or a value of another kind.

        Example:
            >>> layout = Layout((Column("rmse", "test_rmse", "RMSE", percent=False, lower_is_better=True),), "rmse")
            >>> Layout.from_json(json.loads(json.dumps(layout.to_json()))) == layout
            True
        """
        layout: Layout = _read(Layout, found, "layout")
        return layout


def _told(value: Any) -> Any:
    """A dataclass as JSON, without the fields that are as usual; a mapping as pairs, whose order a bundle keeps."""
    if is_dataclass(value) and not isinstance(value, type):
        found = {}
        for one in fields(value):
            usual = one.default_factory() if one.default_factory is not MISSING else one.default
            if (given := getattr(value, one.name)) != usual:
                found[one.name] = _told(given)
        return found
    if isinstance(value, Mapping):
        return [[key, _told(one)] for key, one in value.items()]
    return [_told(one) for one in value] if isinstance(value, tuple) else value


def _read(kind: Any, value: Any, place: str) -> Any:
    """Return a value of JSON as what a field's type says; `place` is where it stands."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is UnionType:  # such as str | None
        return None if value is None else _read(inner[0], value, place)
    if origin is tuple and isinstance(value, list):
        return tuple(_read(inner[0], one, f"{place}[{number}]") for number, one in enumerate(value))
    if origin is Mapping and isinstance(value, list) and all(isinstance(one, list) and len(one) == 2 for one in value):
        return {_read(str, key, f"a key of {place}"): _read(inner[1], one, f"{place}.{key}") for key, one in value}
    if is_dataclass(kind) and isinstance(value, dict):
        kinds = get_type_hints(kind)
        for name in value:
            one_of(f"field of {place}", name, kinds)
        for one in fields(kind):
            if one.name not in value and one.default is MISSING and one.default_factory is MISSING:
                raise InputError(f"{place} has no {one.name!r}")
        return kind(**{name: _read(kinds[name], one, f"{place}.{name}") for name, one in value.items()})  # type: ignore[operator]
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf:
        return float(value)
    if kind in (str, bool, int) and type(value) is kind:
        return value
    raise InputError(f"{place} is {shortened(value)}; it must be {WORDS.get(origin or kind, 'a JSON object')}")


WORDS = {tuple: "a list", Mapping: "a list of pairs", str: "text", bool: "true or false"}
WORDS |= {float: "a number", int: "a whole number"}


def save_layout(layout: Layout, table: Path) -> Path:
    """Keep the layout of the runs in the folder of a table, from which their report is made."""
    return write_file(table / FILE, json.dumps(layout.to_json(), indent=1, ensure_ascii=False) + "\n")


def general_layout(metrics: Iterable[str]) -> Layout:
    """The layout of results that have none: a column for each metric, ranked by the first test metric."""
    columns = []
    for name in sorted(metrics, key=lambda name: (name != "test_accuracy", not name.startswith("test_"), name)):
        share = name.endswith(("accuracy", "_f1"))
        columns.append(Column(name, name, name.replace("_", " ") + " %" * share, percent=share, optional=True))
    columns = columns or [Column("test_accuracy", "test_accuracy", "test accuracy %", optional=True)]
    told = "These runs keep no layout (report/layout.json), so every number that they hold is shown; "
    legend = told + "mean ± half-width of the 95% interval over seeds (Student t)."
    main = columns[0].name
    return Layout(tuple(columns), main, legend, compared=(main,), first_row=True)


BUDGET = {
    "encoder passes": "encoder_passes",
    "updates": "updates",
    "pretraining": "pretrain_updates",
    "fine-tuning": "finetune_updates",
}  # of the Markdown table, and of the file
