"""How a report's table is written for programs: JSON and CSV, in fractions."""

from __future__ import annotations

import csv
import io
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from metapretrain.evaluation.intervals import Interval

if TYPE_CHECKING:
    from metapretrain.evaluation.report import Group, Table
    from metapretrain.evaluation.rows import Difference, Row

BUDGET = {
    "encoder passes": "encoder_passes",
    "updates": "updates",
    "pretraining": "pretrain_updates",
    "fine-tuning": "finetune_updates",
}  # of the Markdown table, and of the file


def _json_intervals(intervals: dict[str, Interval]) -> dict[str, Any]:
    return {name: interval.to_json() for name, interval in intervals.items()}


def _json_difference(difference: Difference | None) -> dict[str, Any] | None:
    if difference is None:
        return None
    found = {
        "baseline": difference.baseline,
        "seeds": difference.seeds,
        "over_seeds": difference.over_seeds.to_json() if difference.over_seeds else None,
        "over_images": difference.over_images.to_json() if difference.over_images else None,
    }
    return found | ({"columns": _json_intervals(difference.columns)} if difference.columns else {})


def _json_row(group: Group, row: Row) -> dict[str, Any]:
    main = group.layout.main
    if group.layout.several:
        measured: dict[str, Any] = {
            "scores": _json_intervals(row.scores),
            "examples": row.examples,
            "example_intervals": _json_intervals(row.test_sets),
        }
    else:
        test_set = row.test_sets.get(main)
        measured = {
            "accuracy": _json_intervals(row.scores),
            "test_images": row.examples.get(main),
            "test_set": test_set.to_json() if test_set else None,
        }
    return {
        "method": row.method,
        "seeds": row.seeds,
        **measured,
        "differences": [_json_difference(difference) for difference in row.differences],
        "budget": row.budget,
        "wall_s": row.wall_s,
        "devices": row.devices,
        **({} if row.tokens_per_s is None else {"tokens_per_s": row.tokens_per_s, "padding_share": row.padding_share}),
        "published": _json_published(group, row),
    }


def _json_published(group: Group, row: Row) -> dict[str, Any] | None:
    if row.published is None:
        return None
    about = {"source": row.published.source or "paper", "comparable": row.published.comparable}
    return {**row.published.scores, **(about if group.layout.several else {})}


def _json_group(group: Group) -> dict[str, Any]:
    about: dict[str, Any] = {"benchmark": group.benchmark, "dataset": group.dataset, "recipe": group.recipe}
    if group.encoder:
        about["encoder"] = group.encoder
    about |= {"baselines": group.baselines, "rows": [_json_row(group, row) for row in group.rows]}
    if group.layout.several:
        about |= {"majority": group.majority, "remark": group.remark}
    return about | {
        "pretraining": [_json_row(group, row) for row in group.pretraining],
        "claims": [asdict(claim) | {"over_seeds": claim.over_seeds.to_json()} for claim in group.claims],
        "notes": group.notes,
    }


def json_object(table: Table) -> dict[str, Any]:
    """The whole report as one JSON object; scores and differences are fractions or correlations."""
    groups = [_json_group(group) for group in table.groups]
    return {"schema": 1, "groups": groups, "incomplete": table.incomplete, "problems": table.problems}


def _measured(name: str, interval: Interval | None) -> dict[str, object]:
    known = interval is not None and interval.known
    return {
        name: interval.mean if interval else None,
        f"{name}_half_width": interval.half_width if interval and known else None,
    }


def _csv_row(group: Group, row: Row, kind: str) -> dict[str, object]:
    layout = group.layout
    record: dict[str, object] = {
        "benchmark": group.benchmark, "dataset": group.dataset, "recipe": group.recipe, "kind": kind,
        "method": row.method, "seeds": " ".join(map(str, row.seeds)), "n_seeds": len(row.seeds),
    }  # fmt: skip
    if group.encoder:
        record["encoder"] = group.encoder
    if not layout.several:
        record["test_images"] = row.examples.get(layout.main)
    for column in layout.all_columns:
        record |= _measured(column.name, row.scores.get(column.name))
    for column in layout.columns:
        if column.interval or column.parts:
            test_set = row.test_sets.get(column.name)
            begin = f"{column.name}_examples" if layout.several else "test_set"
            record |= {f"{begin}_n": row.examples.get(column.name)} if layout.several and column.examples else {}
            record |= {f"{begin}_low": test_set.low if test_set else None}
            record |= {f"{begin}_high": test_set.high if test_set else None}
    for place, difference in enumerate(row.differences, start=1):
        if difference is None:
            continue
        record[f"baseline_{place}"] = difference.baseline
        record |= _measured(f"difference_{place}_seeds", difference.over_seeds)
        if not layout.several:
            record |= _measured(f"difference_{place}_images", difference.over_images)
        for name, interval in difference.columns.items():
            record |= _measured(f"difference_{place}_{name}", interval)
    for name in BUDGET.values():
        record[name] = " ".join(map(str, row.budget.get(name, [])))
    record |= {"wall_s": row.wall_s, "devices": "; ".join(row.devices)}
    return record | {f"published_{name}": value for name, value in (_json_published(group, row) or {}).items()}


def csv_text(table: Table) -> str:
    """The rows of all groups as CSV, fractions; an empty cell is a figure that was not measured."""
    records = [
        _csv_row(group, row, kind)
        for group in table.groups
        for kind, rows in (("", group.rows), ("pretraining", group.pretraining))
        for row in rows
    ]
    columns = list(dict.fromkeys(name for record in records for name in record))
    file = io.StringIO()
    writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return file.getvalue()
