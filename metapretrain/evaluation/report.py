"""The table of a benchmark: mean and interval over seeds, and paired differences to the baselines."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from metapretrain.errors import InputError
from metapretrain.evaluation import table_files, tables
from metapretrain.evaluation.claims import FAMILIES, Claim, compare_families
from metapretrain.evaluation.columns import Layout, layout_of
from metapretrain.evaluation.notes import table_notes
from metapretrain.evaluation.published import PUBLISHED, Published, published_for
from metapretrain.evaluation.results import Collection, Result, collect
from metapretrain.evaluation.rows import Row, make_difference, make_row
from metapretrain.evaluation.schedule_pairs import schedule_pairs
from metapretrain.evaluation.text_notes import encoder_remark
from metapretrain.training.files import write_file


@dataclass(frozen=True)
class Group:
    """Runs that may be compared: the same benchmark, dataset, recipe and, where they name one, encoder."""

    benchmark: str
    dataset: str
    recipe: str
    encoder: str
    layout: Layout
    baselines: list[str]
    rows: list[Row]
    pretraining: list[Row]
    claims: list[Claim]
    notes: list[str]
    majority: dict[str, float]  # column to the figure of the majority class, where the results hold it
    remark: str  # bears on the marked columns; "" for none


@dataclass(frozen=True)
class Table:
    """What `build_table` made; `.markdown()`, `.csv()` and `.json()` show the same figures."""

    groups: list[Group]
    incomplete: list[str]
    problems: list[str]

    def markdown(self) -> str:
        """The table for readers, percentages."""
        return tables.markdown(self)

    def csv(self) -> str:
        """A line a method, fractions."""
        return table_files.csv_text(self)

    def json(self) -> str:
        """Everything, fractions."""
        return json.dumps(table_files.json_object(self), indent=1, allow_nan=False) + "\n"


def build_table(
    collection: Collection | Sequence[Result],
    *,
    published: Mapping[str, Mapping[str, Published]] | None = None,
    baselines: Sequence[Sequence[str]] | None = None,
) -> Table:
    """Turn results into a table, a group for each benchmark, dataset, recipe and encoder.

    Args:
        collection: from `collect`, or a list of results.
        published: dataset to method to the published figures; by default those of the papers.
        baselines: for each comparison the names a baseline may have; the first one present is used. By default
            those of the benchmark's `columns.Layout`.

    Raises:
        InputError: a result holds impossible figures (a list of results that did not come from `collect`).
    """
    if not isinstance(collection, Collection):
        collection = Collection(list(collection))
    cited = PUBLISHED if published is None else published
    grouped: dict[tuple[str, str, str, str], list[Result]] = {}
    for result in collection.results:
        grouped.setdefault(_group_key(result), []).append(result)
    groups = []
    pairs = schedule_pairs(grouped)
    for key in sorted(grouped):
        group = _group(key, grouped[key], published_for(key[1], key[2], cited), baselines)
        group.notes.extend(pairs.get(key, []))
        groups.append(group)
    return Table(groups, collection.incomplete, collection.problems)


def _group_key(result: Result) -> tuple[str, str, str, str]:
    benchmark, dataset, recipe, encoder = (
        str(result.get(key) or "") for key in ("benchmark", "dataset", "recipe", "encoder")
    )
    return benchmark, dataset, recipe, encoder


def _group(
    key: tuple[str, str, str, str],
    results: Sequence[Result],
    published: Mapping[str, Published],
    baselines: Sequence[Sequence[str]] | None,
) -> Group:
    by_method: dict[str, dict[int, Result]] = {}
    shared: dict[str, dict[int, Result]] = {}
    for result in results:
        kind = shared if result.get("kind") == "pretraining" else by_method
        kind.setdefault(result["method"], {})[result["seed"]] = result
    rows_of = [run for runs in by_method.values() for run in runs.values()]
    layout = layout_of(key[0], [name for run in rows_of for name in run["metrics"]])
    aliases = {name: other for name, other in layout.aliases.items() if other in by_method and name not in by_method}
    by_method |= {name: by_method[other] for name, other in aliases.items()}
    order = {name: place for place, name in enumerate(published)}
    names = sorted(by_method, key=lambda name: (layout.setting(name), order.get(name, len(order)), name))
    wanted = layout.baselines if baselines is None else baselines
    present = [name for names in wanted if (name := next(iter(n for n in names if n in by_method), None)) is not None]
    if not present and layout.first_row:
        main = layout.column(layout.main).metric
        present = [n for n in names if any(run["metrics"].get(main) is not None for run in by_method[n].values())][:1]
    rows = []
    for name in names:
        peers = [base != name and layout.setting(base) == layout.setting(name) for base in present]
        differences = [
            make_difference(layout, by_method, name, base) if peer else None
            for base, peer in zip(present, peers, strict=True)
        ]
        rows.append(make_row(layout, name, by_method[name], differences, published.get(name)))
    pretraining = [make_row(layout, name, shared[name], [], None) for name in sorted(shared)]
    families = [compare_families(by_method, published, *pair) for pair in FAMILIES] if not layout.several else []
    claims = [claim for claim in families if claim is not None]
    notes = [f"{name} is {other} by construction: one run, two names." for name, other in aliases.items()]
    notes += table_notes(layout, rows, by_method, present)
    notes += layout.notes(by_method, published) if layout.notes else []
    majority = _majority(layout, rows_of, notes) if layout.majority else {}
    marked = any(column.marked for column in layout.all_columns)
    remark = encoder_remark(key[3]) if marked else ""
    return Group(*key, layout, present, rows, pretraining, claims, notes, majority, remark)


def _majority(layout: Layout, runs: Sequence[Result], notes: list[str]) -> dict[str, float]:
    """The majority class's figures, where all runs tell the same; a note where they do not."""
    found = {}
    for column in layout.columns:
        values = {run["metrics"].get(f"{layout.majority}{column.metric}") for run in runs} - {None}
        if len(values) > 1:
            notes.append(f"The runs tell {len(values)} figures of the majority class for {column.title}.")
        elif values:
            found[column.name] = float(values.pop())
    return found


def write(
    root: Path | str,
    out: Path | str | None = None,
    *,
    published: Mapping[str, Mapping[str, Published]] | None = None,
    baselines: Sequence[Sequence[str]] | None = None,
) -> str:
    """Write `table.md`, `table.csv` and `table.json` for the results under `root` and return the Markdown.

    Args:
        root: a folder of runs, a folder of bundles, or one bundle (see `collect`).
        out: where to write; by default the folder `report` beside the runs.

    Raises:
        InputError: nothing to report, or the folder cannot be written.
    """
    root = Path(root)
    table = build_table(collect(root), published=published, baselines=baselines)
    folder = Path(out) if out is not None else (root if root.is_dir() else root.parent) / "report"
    if folder.exists() and not folder.is_dir():
        raise InputError(f"cannot write the report to {folder}: it is a file; name a folder")
    text = table.markdown()
    write_file(folder / "table.md", text)
    write_file(folder / "table.csv", table.csv())
    write_file(folder / "table.json", table.json())
    return text
