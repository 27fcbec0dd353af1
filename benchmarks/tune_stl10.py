"""The trials that chose recipe "strong": as many for the supervised row as for PRL, scored on validation images only.

python benchmarks/tune_stl10.py --data-dir DIR
python benchmarks/tune_stl10.py --data-dir DIR --rounds joint
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
from metapretrain.options import Parser, common_options, main_guard, names

# Recipe "strong" before the trials: a trial changes one choice or two of it. `P.` stands for the phase of the row.
BASE = [
    "supervised.weight_decay=5e-4",
    "prl.lr=0.1",
    "prl.weight_decay=5e-4",
    "unfrozen.lr=0.01",
    "unfrozen.weight_decay=5e-4",
    "pretrain_share=0.9",
    "proto.query_fraction=0.25",
]
ROWS = {"supervised": "supervised-resnet18", "prl": "prl-query-frozen-linear", "joint": "ce-prl"}
FIRST = {
    "base": [],
    "lr-low": ["P.lr=0.05"],
    "lr-high": ["P.lr=0.2"],
    "decay": ["P.weight_decay=1e-3"],
    "heavy": ["P.augment=heavy"],
    "unsmoothed": ["P.label_smoothing=0"],
}
TRIALS: dict[str, dict[str, dict[str, list[str]]]] = {
    "first": {
        "supervised": {**FIRST, "batch-256": ["batch_size=256", "P.lr=0.2"]},
        "prl": {**FIRST, "cosine": ["proto.distance=cosine", "proto.temperature=0.1"]},
    },
    "second": {
        "supervised": {
            "average": ["P.ema=0.999"],
            "average-decay": ["P.ema=0.999", "P.weight_decay=1e-3"],
            "high-decay": ["P.lr=0.2", "P.weight_decay=1e-3"],
            "plain": ["P.augment=plain"],
            "balanced": ["balanced=true", "batch_size=130"],
            "smoother": ["P.label_smoothing=0.2"],
            "more-decay": ["P.weight_decay=2e-3"],
        },
        "prl": {
            "memory": ["P.lr=0.05", "proto.memory=epoch"],
            "half-query": ["P.lr=0.05", "proto.query_fraction=0.5"],
            "low-cosine": ["P.lr=0.05", "proto.distance=cosine", "proto.temperature=0.1"],
            "plain": ["P.lr=0.05", "P.augment=plain"],
            "average": ["P.lr=0.05", "P.ema=0.999"],
            "unfrozen-high": ["P.lr=0.05", "pretrain_share=0.5", "unfrozen.lr=0.1"],
            "unfrozen-low": ["P.lr=0.05", "pretrain_share=0.5", "unfrozen.lr=0.03"],
        },
    },
}
# The weight of prototypes beside cross entropy, and as many trials of cross entropy alone; recipe "strong" as it is.
JOINT = {
    "joint": {
        "joint": {f"weight-{weight}": [f"joint_weight={weight}"] for weight in (0.1, 0.3, 0.5, 0.7)},
        "supervised": {
            f"smoothing-{smoothing}": [f"P.label_smoothing={smoothing}"] for smoothing in (0, 0.05, 0.1, 0.2)
        },
    }
}
ROUNDS = TRIALS | JOINT
EPOCHS = {"first": 150, "second": 100, "joint": 100}


def trials(rounds: Sequence[str]) -> dict[str, list[str]]:
    """Return `{name: options}` of every trial."""
    found = {}
    for turn in rounds:
        for phase, changes in ROUNDS[turn].items():
            for tag, chosen in changes.items():
                row = ROWS[phase].replace("frozen", "unfrozen") if tag.startswith("unfrozen") else ROWS[phase]
                settings = [f"epochs={EPOCHS[turn]}", *(change.replace("P.", f"{phase}.", 1) for change in chosen)]
                name = f"{turn}-{phase}-{tag}"
                found[name] = ["--methods", row, "--tag", f"tune-{name}", "--set", *settings]
    return found


def options_of(argv: Sequence[str] | None) -> Namespace:
    """Read the command line."""
    parser = Parser(description=__doc__)
    common_options(parser, "stl10", tag=False)
    parser.add_argument("--compile", action="store_true", help="compile the encoder and the augmentation (GPU)")
    told = "of the recipe: first, second (default: both); joint: the weight of prototypes in ce-prl"
    parser.add_argument("--rounds", type=names("round", ROUNDS), default=list(TRIALS), metavar="A,B|all", help=told)
    options: Namespace = parser.parse_args(argv)
    return options


@main_guard
def main(argv: Sequence[str] | None = None) -> int:
    """Run all trials, several side by side where there are several GPUs, and print their table."""
    options = options_of(argv)
    if options.data_dir is None and not options.dry_run:
        raise InputError("tuning needs --data-dir, the folder that holds STL-10")
    root = folder_of("run_stl10.py", options)
    try:
        run_trials("run_stl10.py", trials(options.rounds), options, ["--compile"] * options.compile)
    finally:  # the trials that are done count though others failed, or all were stopped
        if root.is_dir() and not options.dry_run:
            print(table(root))
            if "joint" in options.rounds:
                print(f"{root / 'joint.txt'}: {chosen(root)}")
    return 0


def chosen(root: Path) -> str:
    """The changes of the best trial of each phase of round "joint" below `root`, by its mean over seeds, for `--set`.

    They are written to `joint.txt`.
    """
    scores = json.loads((root / "tuning.json").read_text(encoding="utf-8"))
    found: list[str] = []
    for phase, tried in JOINT["joint"].items():
        by_seed: dict[tuple[str, str], dict[str, float]] = {}
        for name, values in scores.items():
            recipe, _, seed = name.partition(" seed ")
            tag = recipe.removesuffix("-smoke").partition(f"joint-{phase}-")[2]
            by_seed.setdefault((phase, seed), {})[tag] = values["validation_accuracy"]
        for tag in list(means_of(by_seed, tried)[0])[:1]:
            found += [change.replace("P.", f"{phase}.", 1) for change in tried[tag]]
    (root / "joint.txt").write_text(" ".join(found) + "\n", encoding="utf-8")
    return " ".join(found)


def table(root: Path) -> str:
    """Write the trials' validation accuracies as JSON below `root` and return them as lines, best first."""

    def read(result: Any) -> tuple[str, dict[str, Any]] | None:
        if result["method"].startswith("pretrain-"):
            return None
        scores = {name: value for name, value in result["metrics"].items() if name.startswith("validation")}
        return f"{result['recipe'].removeprefix('strong-tune-')} seed {result['seed']}", scores

    return score_table(root, "stl10-strong-tune-*/*/result.json", "validation_accuracy", read)


if __name__ == "__main__":
    sys.exit(main())
