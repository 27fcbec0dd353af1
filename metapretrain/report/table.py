"""The table of a benchmark: means and intervals over seeds, paired differences to baselines; as Markdown, JSON, CSV."""

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any

from metapretrain.errors import InputError
from metapretrain.evaluation.intervals import Interval
from metapretrain.files import write_file
from metapretrain.report import markdown
from metapretrain.report.layout import BUDGET, Layout, Result, general_layout
from metapretrain.report.notes import NOTES, Key, encoder_remark, published_notes, schedule_pairs, table_notes
from metapretrain.report.results import Collection, collect
from metapretrain.report.rows import Group, Row, by_seed, make_difference, make_row, measure_claim, setting_of

GROUP = ("benchmark", "dataset", "recipe", "encoder")


def _json(value: Any) -> Any:
    """Intervals and dataclasses as JSON, wherever they stand; a layout that compares no columns has none."""
    if isinstance(value, Interval):
        return value.to_json()
    if is_dataclass(value):
        value = {name: one for name, one in vars(value).items() if name != "columns" or one}
    if isinstance(value, dict):
        return {name: _json(one) for name, one in value.items()}
    return [_json(one) for one in value] if isinstance(value, list) else value


def _json_row(group: Group, row: Row) -> dict[str, Any]:
    main = group.layout.main
    measured: dict[str, Any] = {"scores": row.scores, "examples": row.examples, "example_intervals": row.test_sets}
    if not group.layout.several:
        images, test_set = row.examples.get(main), row.test_sets.get(main)
        measured = {"accuracy": row.scores, "test_images": images, "test_set": test_set}
    tokens = {} if row.tokens_per_s is None else {"tokens_per_s": row.tokens_per_s, "padding_share": row.padding_share}
    return {
        "method": row.method,
        "seeds": row.seeds,
        **measured,
        "differences": row.differences,
        "budget": row.budget,
        "wall_s": row.wall_s,
        "devices": row.devices,
        **tokens,
        "published": _published(group, row),
    }


def _published(group: Group, row: Row) -> dict[str, Any] | None:
    if row.published is None:
        return None
    comparable = row.published.comparable and not row.other_data
    about = {"source": row.published.source or "paper", "comparable": comparable} if group.layout.several else {}
    return {**row.published.scores, **about, **({"other_data": row.other_data} if row.other_data else {})}


def _json_group(group: Group) -> dict[str, Any]:
    several, encoder = group.layout.several, {"encoder": group.encoder} if group.encoder else {}
    return {
        "benchmark": group.benchmark,
        "dataset": group.dataset,
        "recipe": group.recipe,
        **encoder,
        "baselines": group.baselines,
        "rows": [_json_row(group, row) for row in group.rows],
        **({"majority": group.majority, "remark": group.remark} if several else {}),
        "pretraining": [_json_row(group, row) for row in group.pretraining],
        "claims": group.claims,
        "notes": group.notes,
    }


def _measured(name: str, interval: Interval | None) -> dict[str, object]:
    half_width = interval.half_width if interval and interval.known else None
    return {name: interval.mean if interval else None, f"{name}_half_width": half_width}


def _csv_row(group: Group, row: Row, kind: str) -> dict[str, object]:
    layout = group.layout
    record: dict[str, object] = {
        "benchmark": group.benchmark,
        "dataset": group.dataset,
        "recipe": group.recipe,
        "kind": kind,
        "method": row.method,
        "seeds": " ".join(map(str, row.seeds)),
        "n_seeds": len(row.seeds),
        **({"encoder": group.encoder} if group.encoder else {}),
        **({} if layout.several else {"test_images": row.examples.get(layout.main)}),
    }
    for column in layout.all_columns:
        record |= _measured(column.name, row.scores.get(column.name))
    for column in layout.columns:
        if column.interval or column.parts:
            test_set = row.test_sets.get(column.name)
            begin = f"{column.name}_examples" if layout.several else "test_set"
            record |= {f"{begin}_n": row.examples.get(column.name)} if layout.several and column.examples else {}
            record |= {f"{begin}_{end}": getattr(test_set, end, None) for end in ("low", "high")}
    for place, difference in enumerate(row.differences, start=1):
        if difference is not None:
            record[f"baseline_{place}"] = difference.baseline
            images = {} if layout.several else {"images": difference.over_images}
            for name, interval in {"seeds": difference.over_seeds, **images, **difference.columns}.items():
                record |= _measured(f"difference_{place}_{name}", interval)
    for name in BUDGET.values():
        record[name] = " ".join(map(str, row.budget.get(name, [])))
    record |= {"wall_s": row.wall_s, "devices": "; ".join(row.devices)}
    return record | {f"published_{name}": value for name, value in (_published(group, row) or {}).items()}


def _cell(value: object) -> object:
    value = float(f"{value:.12g}") if isinstance(value, float) else value  # more digits depend on the machine
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) else value


@dataclass(frozen=True)
class Table:
    """What `build_table` made; `.markdown()`, `.csv()` and `.json()` show the same numbers."""

    groups: list[Group]
    incomplete: list[str]
    problems: list[str]

    def markdown(self) -> str:
        """The table for readers, percentages."""
        return markdown.markdown(self.groups, self.incomplete, self.problems)

    def csv(self) -> str:
        """Rows of all groups, fractions of 12 digits, empty where not measured; an apostrophe: a text is no formula."""
        records = [
            _csv_row(group, row, kind)
            for group in self.groups
            for kind, rows in (("", group.rows), ("pretraining", group.pretraining))
            for row in rows
        ]
        columns = list(dict.fromkeys(name for record in records for name in record))
        file = io.StringIO()
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        lines: list[dict[str, object]] = [{name: name for name in columns}, *records]
        writer.writerows({name: _cell(value) for name, value in line.items()} for line in lines)
        return file.getvalue()

    def json(self) -> str:
        """Everything in one JSON object; scores and differences are fractions or correlations."""
        groups = [_json_group(group) for group in self.groups]
        found = {"schema": 1, "groups": groups, "incomplete": self.incomplete, "problems": self.problems}
        return json.dumps(_json(found), indent=1, allow_nan=False) + "\n"


def build_table(collection: Collection | Sequence[Result], layout: Layout | None = None) -> Table:
    """Turn results into a table, a group for each benchmark, dataset, recipe and encoder.

    `layout` is of all groups, in place of the results' own; results that have none get a column for each metric.
    Raises InputError: a layout names a note that there is not.
    """
    if not isinstance(collection, Collection):
        collection = Collection(list(collection))
    grouped: dict[Key, list[Result]] = {}
    for result in collection.results:
        benchmark, dataset, recipe, encoder = (str(result.get(name) or "") for name in GROUP)
        grouped.setdefault((benchmark, dataset, recipe, encoder), []).append(result)
    layouts = {key: _layout_of(results, layout) for key, results in grouped.items()}
    pairs = schedule_pairs(grouped, layouts)
    groups = []
    for key in sorted(grouped):
        group = _group(key, grouped[key], layouts[key])
        group.notes.extend(pairs.get(key, []))
        groups.append(group)
    return Table(groups, collection.incomplete, collection.problems)


def _layout_of(results: Sequence[Result], layout: Layout | None) -> Layout:
    """The layout that was handed in, else the results' own, else one of their metrics."""
    rows = [result for result in results if result.get("kind") != "pretraining"]
    names = {name for result in rows for name, value in result["metrics"].items() if value is not None}
    kept = next((result["layout"] for result in results if "layout" in result), None)
    own = layout or (general_layout(names) if kept is None else Layout.from_json(kept))
    return own.measured(names)


def _group(key: Key, results: Sequence[Result], layout: Layout) -> Group:
    shared = by_seed(result for result in results if result.get("kind") == "pretraining")
    by_method = by_seed(result for result in results if result.get("kind") != "pretraining")
    rows_of = [run for runs in by_method.values() for run in runs.values()]
    published = {} if "smoke" in key[2].split("-") else layout.published.get(key[1], {})  # a smoke run sees a part
    aliases = {name: other for name, other in layout.aliases.items() if other in by_method and name not in by_method}
    by_method |= {name: by_method[other] for name, other in aliases.items()}
    order = {name: place for place, name in enumerate(published)}
    settings = {name: place for place, name in enumerate(layout.settings)}
    setting = {name: setting_of(runs) for name, runs in by_method.items()}
    names = sorted(by_method, key=lambda name: (order.get(name, len(order)), name))
    names.sort(key=lambda name: settings.get(setting[name], len(settings)))
    present = [name for names in layout.baselines if (name := next(filter(by_method.__contains__, names), ""))]
    if not present and layout.first_row:
        main = layout.column(layout.main).metric
        present = [n for n in names if {run["metrics"].get(main) for run in by_method[n].values()} - {None}][:1]
    rows = []
    for name in names:
        differences = [
            make_difference(layout, by_method, name, base) if base != name and setting[base] == setting[name] else None
            for base in present
        ]
        rows.append(make_row(layout, name, by_method[name], differences, published.get(name)))
    pretraining = [make_row(layout, name, shared[name], [], None) for name in sorted(shared)]
    claims = [one for claim in layout.claims if (one := measure_claim(layout, claim, by_method, published)) is not None]
    notes = [f"{name} is {other} by construction: one run, two names." for name, other in aliases.items()]
    notes += table_notes(layout, rows, by_method, present)
    notes += published_notes(layout, rows, by_method, published)
    for note in layout.notes:
        notes += NOTES[note](by_method, layout) if note in NOTES else []
    if unknown := ", ".join(repr(note) for note in layout.notes if note not in NOTES):
        way = f"`metapretrain report --plugin benchmarks/report_{key[0]}.py RUNS`"
        notes.append(f"Notes left out, computed by the file of their benchmark: {unknown}; show them by {way}.")
    majority = {}
    for column in layout.columns if layout.majority else ():
        values = {run["metrics"].get(f"{layout.majority}{column.metric}") for run in rows_of} - {None}
        if len(values) > 1:
            notes.append(f"The runs hold {len(values)} different numbers of the majority class for {column.title}.")
        elif values:
            majority[column.name] = float(values.pop())
    marked = layout.similarity and any(column.marked for column in layout.all_columns)
    remark = encoder_remark(key[3], layout.similarity) if marked else ""
    return Group(*key, layout, present, rows, pretraining, claims, notes, majority, remark)


def write(root: Path | str, out: Path | str | None = None, layout: Layout | None = None) -> str:
    """Write `table.md`, `table.csv` and `table.json` for the results under `root` (see `collect`); return the Markdown.

    `out` is by default the folder `report` beside the runs; `layout` is that of `build_table`.
    Raises InputError: nothing to report, or the folder cannot be written.
    """
    root = Path(root)
    table = build_table(collect(root), layout)
    folder = Path(out) if out is not None else (root if root.is_dir() else root.parent) / "report"
    if folder.exists() and not folder.is_dir():
        raise InputError(f"cannot write the report to {folder}: it is a file; name a folder")
    text = table.markdown()
    write_file(folder / "table.md", text)
    write_file(folder / "table.csv", table.csv())
    write_file(folder / "table.json", table.json())
    return text
