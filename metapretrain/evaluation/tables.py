"""How a report's table is shown: Markdown, CSV and JSON."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from metapretrain.evaluation.intervals import Interval

if TYPE_CHECKING:
    from metapretrain.evaluation.report import Difference, Group, Row, Table

METRICS = ("test", "train", "nearest_prototype", "knn", "validation", "corrupt")
BUDGET = ("encoder_passes", "updates", "pretrain_updates", "finetune_updates")


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


def _cells(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    rule = ["---"] + ["---:"] * (len(header) - 1)
    return [_cells(header), _cells(rule), *(_cells(row) for row in rows), ""]


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


def _section(group: Group) -> list[str]:
    title = ", ".join(dict.fromkeys(part for part in (group.benchmark, group.dataset, group.recipe) if part))
    lines = [f"## {title or 'results'}", ""]
    if group.rows:
        lines += [*_accuracy(group), *_differences(group), *_claims(group)]
        lines += ["Cost of one run (mean over seeds):", "", *_cost(group.rows)]
    if group.pretraining:
        lines += ["Pretraining only, shared by the rows above:", "", *_cost(group.pretraining)]
    lines += [f"- {note}" for note in group.notes]
    return [*lines, ""] if group.notes else lines


def _accuracy(group: Group) -> list[str]:
    header = [
        "method",
        "seeds",
        "test %",
        "test images",
        "test set 95%",
        "train %",
        "nearest prototype %",
        "kNN %",
        "validation %",
    ]
    shown = ["train", "nearest_prototype", "knn", "validation"]
    corrupted = any("corrupt" in row.accuracy for row in group.rows)
    if corrupted:
        header.append("corrupted %")
        shown.append("corrupt")
    cited = any(row.published for row in group.rows)
    rows = []
    for row in group.rows:
        wilson = row.test_set
        cells = [
            row.method,
            str(len(row.seeds)),
            percent(row.accuracy.get("test")),
            f"{row.test_images:,}" if row.test_images else "-",
            f"{100 * wilson.low:.2f} to {100 * wilson.high:.2f}" if wilson else "-",
            *(percent(row.accuracy.get(metric)) for metric in shown),
        ]
        if cited:
            pair = row.published
            known = [f"{100 * value:.1f}" for value in pair or () if value is not None]
            cells.append(" / ".join(known) or "-")
        rows.append(cells)
    legend = (
        "Mean ± half-width of the 95% interval over seeds (Student t). Test set 95%: Wilson interval at the "
        "mean, for the number of test images. Nearest prototype: the class of the nearest mean training "
        "embedding, without a head. Validation: training images held back for choices."
    )
    if corrupted:
        legend += " Corrupted: test images, mean over the standard corruptions and their severities."
    return [*_table([*header, "published test / train"] if cited else header, rows), legend, ""]


def _differences(group: Group) -> list[str]:
    if not group.baselines or len(group.rows) < 2:
        return []
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
    return ["Paired differences:", "", *_table(header, rows), legend, ""]


def _claims(group: Group) -> list[str]:
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


def _budget(row: Row, name: str) -> str:
    return " or ".join(f"{value:,}" for value in row.budget.get(name, [])) or "-"


def _cost(rows: Sequence[Row]) -> list[str]:
    header = [
        "method",
        "seeds",
        "encoder passes",
        "updates",
        "pretraining",
        "fine-tuning",
        "wall time",
        "device",
    ]
    lines = []
    for row in rows:
        wall = "-" if row.wall_s is None else f"{row.wall_s:,.1f} s"
        counts = [_budget(row, name) for name in BUDGET]
        lines.append([row.method, str(len(row.seeds)), *counts, wall, ", ".join(row.devices) or "-"])
    return _table(header, lines)


def _json_difference(difference: Difference | None) -> dict[str, Any] | None:
    if difference is None:
        return None
    images = difference.over_images
    return {
        "baseline": difference.baseline,
        "seeds": difference.seeds,
        "over_seeds": difference.over_seeds.to_json(),
        "over_images": images.to_json() if images else None,
    }


def _json_row(row: Row) -> dict[str, Any]:
    return {
        "method": row.method,
        "seeds": row.seeds,
        "accuracy": {name: interval.to_json() for name, interval in row.accuracy.items()},
        "test_images": row.test_images,
        "test_set": row.test_set.to_json() if row.test_set else None,
        "differences": [_json_difference(difference) for difference in row.differences],
        "budget": row.budget,
        "wall_s": row.wall_s,
        "devices": row.devices,
        "published": row.published._asdict() if row.published else None,
    }


def json_object(table: Table) -> dict[str, Any]:
    """The whole report as one JSON object; accuracies and differences are fractions."""
    groups = [
        {
            "benchmark": group.benchmark,
            "dataset": group.dataset,
            "recipe": group.recipe,
            "baselines": group.baselines,
            "rows": [_json_row(row) for row in group.rows],
            "pretraining": [_json_row(row) for row in group.pretraining],
            "claims": [asdict(claim) | {"over_seeds": claim.over_seeds.to_json()} for claim in group.claims],
            "notes": group.notes,
        }
        for group in table.groups
    ]
    return {"schema": 1, "groups": groups, "incomplete": table.incomplete, "problems": table.problems}


def _csv_row(group: Group, row: Row, kind: str) -> dict[str, object]:
    record: dict[str, object] = {
        "benchmark": group.benchmark, "dataset": group.dataset, "recipe": group.recipe, "kind": kind,
        "method": row.method, "seeds": " ".join(map(str, row.seeds)), "n_seeds": len(row.seeds),
        "test_images": row.test_images,
    }  # fmt: skip
    for metric in METRICS:
        measured = row.accuracy.get(metric)
        record[metric] = measured.mean if measured else None
        record[f"{metric}_half_width"] = measured.half_width if measured and measured.known else None
    record["test_set_low"] = row.test_set.low if row.test_set else None
    record["test_set_high"] = row.test_set.high if row.test_set else None
    for place, difference in enumerate(row.differences, start=1):
        if difference is None:
            continue
        record[f"baseline_{place}"] = difference.baseline
        for name, interval in (("seeds", difference.over_seeds), ("images", difference.over_images)):
            record[f"difference_{place}_{name}"] = interval.mean if interval else None
            known = interval is not None and interval.known
            record[f"difference_{place}_{name}_half_width"] = (
                interval.half_width if interval and known else None
            )
    for name in BUDGET:
        record[name] = " ".join(map(str, row.budget.get(name, [])))
    record |= {"wall_s": row.wall_s, "devices": "; ".join(row.devices)}
    record |= {
        f"published_{name}": value
        for name, value in (row.published._asdict() if row.published else {}).items()
    }
    return record


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
