"""Fill the table of docs/fewshot.md: python benchmarks/table_fewshot.py RESULTS ... [--page docs/fewshot.md].

RESULTS are folders of runs or files such as docs/results/fewshot-fc100.json; of a method in several, the last counts.
A recipe that ends with a precision (`--tag bf16`) is a row of the same backbone; of several in a folder the last by
name counts.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import ctrl_c  # noqa: F401
from report_fewshot import PHOTOS, SHOTS, without_tag

from metapretrain.errors import InputError
from metapretrain.evaluation.intervals import mean_interval
from metapretrain.files import write_file
from metapretrain.options import Parser, main_guard
from metapretrain.report.results import collect

BEGIN, END = "<!-- table -->\n", "<!-- end of table -->\n"
NAMES = {"cifar-fs": "CIFAR-FS", "fc100": "FC100", "conv4": "conv4", "resnet12": "ResNet-12"}
# How a training differs from the default, by what its command says; conv4 alone starts from random weights by default.
TRAININGS = {"": "", "turns=true": ", rotations", "pretrained=true": ", from supervised"}
Scores = dict[tuple[str, str, str, str], list[float]]  # of the seeds, by data set, backbone, training and method


def scores_of(paths: Sequence[Path]) -> Scores:
    """The test accuracies of all seeds; says which results are left out, and raises InputError if all are."""
    found: Scores = {}
    for path in paths:
        read: Scores = defaultdict(list)
        collected = collect(path)
        if left_out := [*collected.problems, *collected.incomplete]:
            print(f"{path}: {len(left_out)} results left out, first {left_out[0]}", file=sys.stderr)
        for result in collected.results:
            if not (result.get("recipe") and result.get("dataset")) or result["metrics"].get("test_accuracy") is None:
                continue  # of another kind
            training = next(name for name in reversed(TRAININGS) if name in result.get("command", ""))
            key = result["recipe"], result["dataset"], training, result["method"]
            read[key].append(result["metrics"]["test_accuracy"])
        for (recipe, dataset, training, method), accuracies in sorted(read.items()):  # conv4-bf16 after conv4
            backbone = without_tag(recipe.partition("-pre")[0])
            found[dataset, backbone, training, method] = accuracies
    if not found:
        raise InputError(f"no complete few-shot run in {', '.join(map(str, paths))}; the page is left as it is")
    return found


def cell(accuracies: Sequence[float]) -> str:
    """Mean and half-width of the 95% interval over the seeds in %, or `not run yet`."""
    if not accuracies:
        return "not run yet"
    interval = mean_interval(accuracies)
    return f"{100 * interval.mean:.1f}" + f" ± {100 * interval.half_width:.1f}" * (len(accuracies) > 1)


def table(scores: Scores) -> str:
    """The table of all published methods and of `maml`, `maml++` and `supervised-centroid` where they have been run."""
    lines = ["| set, backbone | method | 1-shot | published | 5-shot | published |", "|---|---|---:|---:|---:|---:|"]
    for (dataset, backbone), published in PHOTOS.items():
        named = dict.fromkeys([*published, "r2d2", "maml-transductive", "maml", "maml++", "supervised-centroid"])
        ours = {
            (training, row): [scores.get((f"{dataset}-{shots}", backbone, training, row), []) for shots in SHOTS[:2]]
            for training in TRAININGS
            for row in named
        }
        label = ""
        for (training, row), (one, five) in ours.items():
            missing = row in published and not training and not any(any(ours[other, row]) for other in TRAININGS)
            if one or five or missing:
                name = f"{NAMES[dataset]}, {NAMES[backbone]}{TRAININGS[training]}"
                theirs = [f"{100 * score:.1f}" for score in published[row][:2]] if row in published else ["", ""]
                shown = "" if name == label else name
                lines.append(f"| {shown} | `{row}` | {cell(one)} | {theirs[0]} | {cell(five)} | {theirs[1]} |")
                label = name
    return "\n".join(lines) + "\n"


@main_guard
def main(argv: Sequence[str] | None = None) -> int:
    """Rewrite what stands between the marks of the page."""
    parser = Parser(prog="table_fewshot.py", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULTS", help="folders of runs, files of results")
    parser.add_argument("--page", type=Path, default=Path("docs/fewshot.md"), help="default: docs/fewshot.md")
    options = parser.parse_args(argv)
    text = options.page.read_text(encoding="utf-8", errors="replace") if options.page.is_file() else ""
    if "\ufffd" in text:
        raise InputError(f"{options.page} is not UTF-8 text; save it as such, or give another --page")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise InputError(f"{options.page} has no table between {BEGIN.strip()} and {END.strip()}; --page names another")
    write_file(options.page, before + BEGIN + table(scores_of(options.results)) + END + after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
