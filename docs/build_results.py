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
from pathlib import Path
from typing import Any

from metapretrain.evaluation.report import build_table
from metapretrain.evaluation.results import collect

DOCS = Path(__file__).resolve().parent


def table(name: str) -> str:
    """Return the Markdown of one result file."""
    file = DOCS / "results" / f"{name}.json"
    if name.endswith("-tuning"):
        rows = [
            f"| {trial.removesuffix(' seed 0')} | {100 * score['validation_accuracy']:.1f} "
            f"| {100 * score['validation_nearest_prototype_accuracy']:.1f} |"
            for trial, score in json.loads(file.read_text()).items()
        ]
        return "\n".join(["| trial | validation % | nearest prototype % |", "| --- | ---: | ---: |", *rows])
    if name.startswith("speed-"):
        return speed(json.loads(file.read_text()))
    return re.sub(r"^## .*\n+", "", build_table(collect(file)).markdown()).strip()


def speed(measured: dict[str, Any]) -> str:
    """Return the table of a file that `benchmarks/run_speed.py --out` wrote; rows that were skipped are left out."""
    rows = [
        f"| {row['row']} | {row['name']} | {plain(row['median'])} {row['unit']} "
        f"| {plain(row['low'])} to {plain(row['high'])} | {row['ratio']:.2f} |"
        for row in measured["rows"]
        if not row["missing"]
    ]
    head = ["| row | contender | median a second | range | to the best peer |", "| --- | --- | ---: | ---: | ---: |"]
    about = f"{measured['hardware']}; load of the machine {measured['load']}; {measured['versions']}."
    return "\n".join([*head, *rows, "", about])


def plain(value: float) -> str:
    """Return a rate with at least three figures: `279,993`, `1.43`.

    Example:
        >>> plain(279992.98), plain(1.427)
        ('279,993', '1.43')
    """
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def rebuilt(text: str) -> str:
    """Return `text` with every marked block replaced by its table."""
    return re.sub(
        r"(<!-- (\S+) -->\n).*?(<!-- /\2 -->)", lambda m: f"{m[1]}\n{table(m[2])}\n\n{m[3]}", text, flags=re.DOTALL
    )


def main(argv: list[str]) -> int:
    """Rebuild or check docs/results.md."""
    page = DOCS / "results.md"
    before = page.read_text()
    after = rebuilt(before)
    if "--check" in argv:
        print("docs/results.md is up to date" if before == after else "docs/results.md differs: run without --check")
        return int(before != after)
    page.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
