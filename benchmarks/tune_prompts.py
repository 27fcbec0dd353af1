"""The trials of the prompts benchmark's recipe "fair": three for each way to pretrain, scored on validation rows.

python benchmarks/tune_prompts.py --data-dir DIR --seeds 0 1 2 --precision bf16 --jobs-per-device 3
python benchmarks/run_prompts.py --data-dir DIR --recipe fair --set $(cat runs/prompts/chosen.txt)
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ctrl_c  # noqa: F401
from tuning import folder_of, means_of, run_trials, score_table

from metapretrain.errors import InputError
from metapretrain.options import Parser, common_options, main_guard, positive_int

# A choice of the recipe: the rows that it concerns, and its values. Rows of one choice have the same one.
CHOICES = {
    "mixed.lr": (("ppt", "multitask"), ("1e-3", "3e-3", "1e-2")),
    "meta.inner_lr": (("metapt-kmeans",), ("0.03", "0.1", "0.3")),
    "fair.rate": (("reptile-kmeans",), ("0.3", "0.6", "1")),
}
METRIC = "validation_mean_accuracy"


def trials(more: Sequence[str] = ()) -> dict[str, list[str]]:
    """Return `{name: options}` of every trial; `more` are changes of the recipe that all have."""
    found = {}
    for choice, (rows, values) in CHOICES.items():
        for row in rows:
            for value in values:
                name = f"{row}-{value}"
                found[name] = ["--methods", row, "--tag", f"tune-{name}", "--set", *more, f"{choice}={value}"]
    return found


def options_of(argv: Sequence[str] | None) -> Namespace:
    """Read the command line."""
    parser = Parser(description=__doc__)
    common_options(parser, "prompts", tag=False)
    parser.add_argument("--model", metavar="NAME", help="see run_prompts.py")
    parser.add_argument("--reads", type=positive_int, default=4000, metavar="N", help="of each trial (4000)")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", dest="changes", help="change the recipe")
    options: Namespace = parser.parse_args(argv)
    return options


@main_guard
def main(argv: Sequence[str] | None = None) -> int:
    """Run all trials, several side by side, and print their table and what they choose."""
    options = options_of(argv)
    if options.data_dir is None and not (options.dry_run or options.smoke):
        raise InputError("tuning needs --data-dir, the folder of the sets")
    more = ["--reads", str(options.reads)] * (not options.smoke) + ["--model", options.model] * bool(options.model)
    root = folder_of("run_prompts.py", options)
    try:
        run_trials("run_prompts.py", trials(options.changes), options, more, recipe="fair")
    finally:  # the trials that are done count though others failed, or all were stopped
        if root.is_dir() and not options.dry_run:
            print(table(root))
            print(chosen(root))
            print(f"the best of each, for --set: {root / 'chosen.txt'}")
    return 0


def chosen(root: Path) -> str:
    """The mean over rows and seeds of each value's score below `root`; the best ones are written to `chosen.txt`."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for name, scores in json.loads((root / "tuning.json").read_text(encoding="utf-8")).items():
        recipe, row, seed = name.split(" ")
        value = recipe.partition(f"-tune-{row}-")[2].removesuffix("-smoke")
        found.setdefault((row, seed), {})[value] = scores[METRIC]
    best, told = [], []
    for choice, (rows, values) in CHOICES.items():
        means, _ = means_of({key: scores for key, scores in found.items() if key[0] in rows}, values)
        best += [f"{choice}={value}" for value in list(means)[:1]]
        told += [f"{choice}={value}: {mean:.4f}" for value, mean in means.items()]
    (root / "chosen.txt").write_text(" ".join(best) + "\n", encoding="utf-8")
    return "\n".join(["validation, mean over rows and seeds:", *told])


def table(root: Path) -> str:
    """Write the trials' validation accuracies as JSON below `root` and return them as lines, best first."""

    def read(result: Any) -> tuple[str, dict[str, Any]] | None:
        if result["kind"] != "tuning":
            return None
        score = round(float(result["metrics"][METRIC]), 4)
        return f"{result['recipe']} {result['method']} {result['seed']}", {METRIC: score}

    return score_table(root, "*-tune-*/*/result.json", METRIC, read)


if __name__ == "__main__":
    sys.exit(main())
