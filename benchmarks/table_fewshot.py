"""Fill the table of docs/fewshot.md with finished runs: python benchmarks/table_fewshot.py runs [docs/fewshot.md]."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from report_fewshot import PHOTOS, SHOTS

from metapretrain.evaluation.intervals import mean_interval

BEGIN, END = "<!-- table -->\n", "<!-- end of table -->\n"
NAMES = {"cifar-fs": "CIFAR-FS", "fc100": "FC100", "conv4": "conv4", "resnet12": "ResNet-12"}


def cell(table: Path, row: str) -> str:
    """Mean and half-width of the 95% interval over the seeds of a row in %, or `not run yet`."""
    files = sorted(table.glob(f"{row}-s*/result.json"))
    found = [json.loads(file.read_text())["metrics"]["test_accuracy"] for file in files]
    if not found:
        return "not run yet"
    interval = mean_interval(found)
    return f"{100 * interval.mean:.1f}" + f" ± {100 * interval.half_width:.1f}" * (len(found) > 1)


def table(runs: Path) -> str:
    """The table of all published rows and of `maml`, `maml++` and `supervised-centroid` where they have been run."""
    lines = ["| set, backbone | method | 1-shot | published | 5-shot | published |", "|---|---|---:|---:|---:|---:|"]
    for (dataset, backbone), published in PHOTOS.items():
        folders = [runs / "fewshot" / f"{dataset}-{setting}-{backbone}" for setting in SHOTS[:2]]
        shown = f"{NAMES[dataset]}, {NAMES[backbone]}"
        for row in dict.fromkeys([*published, "r2d2", "maml-transductive", "maml", "maml++", "supervised-centroid"]):
            ours = [cell(folder, row) for folder in folders]
            theirs = [f"{100 * score:.1f}" for score in published[row][:2]] if row in published else ["", ""]
            if row in published or ours != ["not run yet"] * 2:
                lines.append(f"| {shown} | `{row}` | {ours[0]} | {theirs[0]} | {ours[1]} | {theirs[1]} |")
                shown = ""
    return "\n".join(lines) + "\n"


def main(argv: list[str]) -> int:
    """Rewrite what stands between the marks of the page."""
    runs, page = Path(argv[0]), Path(argv[1] if len(argv) > 1 else "docs/fewshot.md")
    before, _, rest = page.read_text().partition(BEGIN)
    page.write_text(before + BEGIN + table(runs) + END + rest.partition(END)[2])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
