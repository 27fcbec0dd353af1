"""Write the tables of docs/results.md anew from docs/results/*.json.

    python docs/build_results.py          # rewrite docs/results.md
    python docs/build_results.py --check  # exit 1 if it would change

The text between `<!-- NAME -->` and `<!-- /NAME -->` is the table of docs/results/NAME.json; the rest is written by
hand.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from metapretrain.errors import InputError
from metapretrain.files import write_file
from metapretrain.options import main_guard
from metapretrain.report.layout import Layout
from metapretrain.report.results import bundle, collect
from metapretrain.report.table import build_table

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent / "benchmarks"))

import report_fewshot  # noqa: E402
import report_prompts  # noqa: E402
import report_schedule  # noqa: E402
import report_stl10  # noqa: E402
import report_text  # noqa: E402
from run_scale import scaling_table  # noqa: E402

LAYOUTS: dict[str, Layout] = {
    "fewshot": report_fewshot.LAYOUT,
    "prompts": report_prompts.LAYOUT,
    "schedule": report_schedule.LAYOUT,
    "stl10": report_stl10.LAYOUT,
    "text": report_text.LAYOUT,
}


def table(name: str) -> str:
    """Return the Markdown of one result file.

    Raises:
        InputError: it is not there, damaged, or of another kind than its name says.
    """
    file = DOCS / "results" / f"{name}.json"
    try:
        return table_of(name, file)
    except InputError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise InputError(f"{file.name} is damaged or of another kind than its name says: {error!r}") from error


def table_of(name: str, file: Path) -> str:
    """Return the Markdown of the result file `file`; its kind is told by its name."""
    if name.endswith("-tuning"):
        return tuning(name, json.loads(file.read_text(encoding="utf-8")))
    if name.startswith("speed-"):
        return speed(json.loads(file.read_text(encoding="utf-8")))
    if name == "scale":
        return scaling_table(json.loads(file.read_text(encoding="utf-8")))
    if name.endswith("-sweeps"):
        return sweeps(collect(file).results)
    text = build_table(collect(file), LAYOUTS[name.split("-")[0]]).markdown()
    if len(re.findall(r"^## ", text, flags=re.MULTILINE)) > 1:  # which table is which must stay readable
        return re.sub(r"^## ", "#### ", text, flags=re.MULTILINE).strip()
    return re.sub(r"^## .*\n+", "", text).strip()


def keep_layouts() -> None:
    """Put the benchmarks' layouts into the bundles, so that `metapretrain report` makes the same tables of them."""
    for file in sorted(DOCS.glob("results/*.json")):
        if '"schema"' in file.read_text(encoding="utf-8"):
            results = collect(file).results
            layout = LAYOUTS[file.name.split("-")[0]].to_json()
            if any(result.get("layout") != layout for result in results):
                bundle([{**result, "layout": layout} for result in results], file)


def tuning(name: str, trials: dict[str, dict[str, float]]) -> str:
    """Return the table of a file of trials, whose metrics are of validation rows and named as those of the report."""
    if not trials:
        raise InputError(f"{name}.json holds no trial")
    columns = {column.metric: column for column in LAYOUTS[name.split("-")[0]].all_columns}
    measured = sorted(next(iter(trials.values())), key=lambda metric: metric not in columns)  # validation's own first
    known = {metric: columns.get(metric) or columns.get(metric.removeprefix("validation_")) for metric in measured}
    shown = {metric: column for metric, column in known.items() if column is not None}
    lines = [f"| trial | {' | '.join(column.title for column in shown.values())} |", "| --- |" + " ---: |" * len(shown)]
    for trial, scores in trials.items():
        cells = [
            f"{100 * scores[metric]:.1f}" if column.percent else f"{scores[metric]:.3f}"
            for metric, column in shown.items()
        ]
        lines.append(f"| {trial.removesuffix(' seed 0')} | {' | '.join(cells)} |")
    return "\n".join(lines)


def sweeps(results: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of runs of `sweep_prompts.py`, whose recipes end with what was changed and its value."""
    found: dict[tuple[str, str, float], list[float]] = {}
    for result in results:
        _, sweep, value = result["recipe"].rsplit("-", 2)
        at = float(result["counts"]["pretraining"]) if sweep == "rows" else float(value)
        found.setdefault((sweep, result["method"], at), []).append(100 * result["metrics"]["mean_accuracy"])
    lines = ["| what was changed | row | at: mean accuracy % (seeds) |", "| --- | --- | --- |"]
    for sweep, row in dict.fromkeys((sweep, row) for sweep, row, _ in found):
        points = sorted((at, values) for (one, other, at), values in found.items() if (one, other) == (sweep, row))
        cells = [f"{at:,.0f}: {sum(values) / len(values):.1f} ({len(values)})" for at, values in points]
        lines.append(f"| {sweep} | {row} | {'; '.join(cells)} |")
    return "\n".join(lines)


def speed(measured: dict[str, Any]) -> str:
    """Return the tables of a file that `benchmarks/run_speed.py --out` wrote; rows that were skipped are left out."""
    rows = []
    for row in measured["rows"]:
        if row["missing"]:
            continue
        note = f" ({row['note']})" if row.get("note") else ""
        differs = "" if row["difference"] is None else f"{row['difference']:.0e}"
        rows.append(
            f"| {row['row']} | {row['name']}{note} | {plain(row['median'])} {row['unit']} "
            f"| {plain(row['low'])} to {plain(row['high'])} | {row['ratio']:.2f} | {differs} |"
        )
    lines = ["| row | contender | median a second | range | to the best peer | differs by |"]
    lines += ["| --- | --- | ---: | ---: | ---: | ---: |", *rows]
    if measured.get("memory"):
        lines += ["", "| row | contender | peak of a meta-step, MiB | left after 50 episodes, MiB | to the best peer |"]
        lines += ["| --- | --- | ---: | ---: | ---: |"]
        lines += [
            f"| {row['row']} | {row['name']} | {row['peak']:,.1f} | {row['left']:.2f} | {row['ratio']:.2f} |"
            for row in measured["memory"]
            if not row["missing"]
        ]
    about = f"{measured['hardware']}; load of the machine {measured['load']}; {measured['versions']}"
    return "\n".join([*lines, "", f"{about}; commit {measured['commit']}."])


def plain(value: float) -> str:
    """Return a rate with at least three figures: `279,993`, `1.43`.

    Example:
        >>> plain(279992.98), plain(1.427)
        ('279,993', '1.43')
    """
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def rebuilt(text: str) -> str:
    """Return `text` with every marked block replaced by its table.

    Raises:
        InputError: a mark is damaged or has lost its other one; such a block would stay as it is or take text with it.
    """
    opened = None
    for line in text.splitlines():
        if not line.lstrip().startswith("<!--"):
            continue
        mark = re.fullmatch(r"<!-- (/?)(\S+) -->", line)
        if mark is None or (mark[2] if mark[1] else None) != opened:
            raise InputError(f"docs/results.md: {line} is no mark, or <!-- NAME --> and <!-- /NAME --> are no pair")
        opened = None if mark[1] else mark[2]
    if opened is not None:
        raise InputError(f"docs/results.md: <!-- {opened} --> has no <!-- /{opened} -->")
    return re.sub(
        r"(<!-- (\S+) -->\n).*?(<!-- /\2 -->)", lambda m: f"{m[1]}\n{table(m[2])}\n\n{m[3]}", text, flags=re.DOTALL
    )


@main_guard
def main(argv: Sequence[str] | None = None) -> int:
    """Rebuild or check docs/results.md."""
    check = "--check" in (sys.argv[1:] if argv is None else argv)
    if not check:
        keep_layouts()
    page = DOCS / "results.md"
    before = page.read_text(encoding="utf-8")
    after = rebuilt(before)
    if check:
        print("docs/results.md is up to date" if before == after else "docs/results.md differs: run without --check")
        return int(before != after)
    write_file(page, after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
