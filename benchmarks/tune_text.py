"""The trials that choose recipe "strong" of the text benchmark: as many for each row, scored on held-out training rows.

python benchmarks/tune_text.py --data-dir DIR --jobs-per-device 4
python benchmarks/tune_text.py --data-dir DIR --trials levers
python benchmarks/tune_text.py --data-dir DIR --trials prototypes --encoder bert-tiny
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ctrl_c  # noqa: F401
from run_text import METHODS
from tuning import folder_of, means_of, run_trials, score_table

from metapretrain.errors import InputError, one_of
from metapretrain.options import Parser, common_options, main_guard, positive_int

# What the trials start from and change; recipe "strong" is what they chose.
START = (
    "scheduler=",
    "multiple=8",
    "pretrain_share=0.5",
    "joint.lr=5e-5",
    "joint.label_smoothing=0",
    "pretrain.lr=5e-5",
    "finetune.lr=5e-5",
)
# One task an update, each as often as it has rows: a batch of each in every update goes through SST five times as often
# as through PARA. Updates are as many, and have the rows of one task.
PROPORTIONAL = ("scheduler=proportional", "multiple=16")
RATES = ("1e-4", "2e-4")


def shared_trials(*phases: str) -> dict[str, list[str]]:
    """Trials that every row gets: rates, and which task next; `phases` are the row's own."""

    def rate(value: str) -> list[str]:
        return [f"{phase}.lr={value}" for phase in phases]

    return {
        "base": [],
        **{f"lr-{value}": rate(value) for value in RATES},
        "proportional-lr-5e-5": [*PROPORTIONAL],
        **{f"proportional-lr-{value}": [*PROPORTIONAL, *rate(value)] for value in RATES},
        "proportional-dropout": [*PROPORTIONAL, *rate("1e-4"), "dropout=0.2"],
    }


def prototype_trials(options: str) -> dict[str, list[str]]:
    """Trials of a prototypical row; `options` names its part of the recipe."""
    usual = [*PROPORTIONAL, "pretrain.lr=1e-4", "finetune.lr=1e-4"]
    return {
        **shared_trials("pretrain", "finetune"),
        "proportional-warm": [*usual, f"{options}.temperature=16"],
        "proportional-balanced": [*usual, "balanced=true"],
        "proportional-short": [*usual, "pretrain_share=0.25"],
    }


TRIALS: dict[str, dict[str, list[str]]] = {
    "cross": {
        **shared_trials("joint"),
        "proportional-cosine": [*PROPORTIONAL, "joint.lr=1e-4", "joint.schedule=cosine"],
        "proportional-balanced": [*PROPORTIONAL, "joint.lr=1e-4", "balanced_finetune=true"],
        "proportional-smoothed": [*PROPORTIONAL, "joint.lr=1e-4", "joint.label_smoothing=0.1"],
    },
    "proto": prototype_trials("proto"),
    "proto-query": prototype_trials("query"),
}

# What recipe "strong" took over untried: the share of query rows and the distance. Without
# QQP's pairs these are 1,035 updates, a quarter of the 4,548 of the recipe with them, at four times its rate.
SHORT = ("epochs=3", "joint.lr=4e-4", "pretrain.lr=4e-4", "finetune.lr=4e-4")


def distance(options: str, name: str, temperature: float) -> list[str]:
    """Changes of a distance; a temperature of 0.7 spreads BERT-tiny's logits as 8 does for squared distances."""
    return [f"{options}.distance={name}", f"{options}.temperature={temperature}"]


PROTOTYPES: dict[str, dict[str, list[str]]] = {
    "cross": {"short": []},
    "pretrain-ce": {"short": []},
    "proto": {"short": [], "short-euclidean": distance("proto", "euclidean", 0.7)},
    "proto-query": {
        "short": [],
        "short-support": ["query.query_fraction=0.25"],
        "short-euclidean": distance("query", "euclidean", 0.7),
        "short-euclidean-sharp": distance("query", "euclidean", 0.35),
    },
}

# Levers that every row with an encoder that learns can take, in each of its phases; rdrop not over a frozen encoder.
# Decay 0.99, so that the average forgets the start within the phase.
LEVERS = {
    "plain": ["label_smoothing=0"],
    "smoothed": ["label_smoothing=0.1"],
    "averaged": ["label_smoothing=0", "ema=0.99"],
    "rdrop": ["label_smoothing=0", "rdrop=1"],
    "together": ["label_smoothing=0.1", "ema=0.99", "rdrop=1"],
}


def settings(lever: str, phases: Sequence[str] = ("joint", "pretrain", "finetune", "frozen")) -> list[str]:
    """The changes of a lever in each of the phases."""
    found = [f"{phase}.{one}" for phase in phases for one in LEVERS[lever]]
    return [one for one in found if one != "frozen.rdrop=1"]


def lever_trials(row: str) -> dict[str, list[str]]:
    """The levers of a row: each in all phases of the row."""
    method = METHODS[row]
    phases = ["joint"] if method.pretraining is None else ["pretrain", "frozen" if method.frozen else "finetune"]
    return {lever: settings(lever, phases) for lever in LEVERS}


LEARNING = [row for row, method in METHODS.items() if method.trained and (method.pretraining or not method.frozen)]
SETS = {
    "recipe": (START, TRIALS),
    "prototypes": (SHORT, PROTOTYPES),
    "levers": ((), {row: lever_trials(row) for row in LEARNING}),
}


def trials(rows: Sequence[str], chosen: str = "recipe") -> dict[str, list[str]]:
    """Return `{name: options}` of every trial of the rows in one of :data:`SETS`."""
    start, known = SETS[chosen]
    found = {}
    for row in rows:
        for tag, changes in known[row].items():
            name = f"{row}-{tag}"
            found[name] = ["--methods", row, "--tag", f"tune-{name}", "--set", *start, *changes]
    return found


def options_of(argv: Sequence[str] | None) -> Namespace:
    """Read the command line."""
    parser = Parser(description=__doc__)
    common_options(parser, "text", methods=LEARNING, tag=False)
    parser.add_argument(
        "--trials",
        choices=tuple(SETS),
        default="recipe",
        help="what is tried: the recipe's phases (default); query rows and distance, with fewer updates; or label "
        "smoothing, averaged weights and R-Drop (levers)",
    )
    parser.add_argument("--epochs", type=positive_int, metavar="N", help="of each trial (default: those of the set)")
    parser.add_argument("--qqp", type=Path, metavar="DIR", help="more paraphrases for training: GLUE's QQP files")
    parser.add_argument("--encoder", metavar="NAME", help="see run_text.py")
    options: Namespace = parser.parse_args(argv)
    known = SETS[options.trials][1]
    if options.methods == LEARNING:  # all; of the levers, pcgrad needs another schedule
        options.methods = [row for row in options.methods if row in known and not METHODS[row].surgery]
    for row in options.methods:
        one_of(f"row of --trials {options.trials}", row, known)
    return options


@main_guard
def main(argv: Sequence[str] | None = None) -> int:
    """Run all trials, several side by side, and print their table."""
    options = options_of(argv)
    if options.data_dir is None and not (options.dry_run or options.smoke):
        raise InputError("tuning needs --data-dir, the folder of CS224N's files")
    given = {"--qqp": options.qqp, "--encoder": options.encoder}
    more = [word for name, value in given.items() if value is not None for word in (name, str(value))]
    chosen = trials(options.methods, options.trials)
    if options.epochs is not None:
        chosen = {name: [*words, f"epochs={options.epochs}"] for name, words in chosen.items()}
    root = folder_of("run_text.py", options)
    try:
        run_trials("run_text.py", chosen, options, more)
    finally:  # the trials that are done count though others failed, or all were stopped
        if root.is_dir() and not options.dry_run:
            print(table(root))
            if options.trials == "levers":
                print(lever_means(root))
    return 0


def lever_means(root: Path) -> str:
    """Mean over rows and seeds of each lever's validation score below `root`, best first: one choice for all rows.

    Only rows and seeds that have all levers are in the means. The best one's changes are written to `levers.txt`,
    for `--set`.
    """
    found: dict[tuple[str, str], dict[str, float]] = {}
    for name, scores in json.loads((root / "tuning.json").read_text(encoding="utf-8")).items():
        recipe, row, _, seed = name.split(" ")[1:]
        lever = recipe.partition(f"-tune-{row}-")[2].removesuffix("-smoke")
        if lever in LEVERS:
            found.setdefault((row, seed), {})[lever] = scores["overall"]
    means, count = means_of(found, LEVERS)
    if means:
        (root / "levers.txt").write_text(" ".join(settings(next(iter(means)))) + "\n", encoding="utf-8")
    told = [f"{lever} ({', '.join(LEVERS[lever])}): {mean:.4f}" for lever, mean in means.items()]
    return "\n".join([f"validation, mean over {count} rows and seeds with all levers:", *told])


def table(root: Path) -> str:
    """Write the trials' validation scores as JSON below `root` and return them as lines, best first."""

    def read(result: Any) -> tuple[str, dict[str, Any]] | None:
        if result["kind"] != "tuning":
            return None
        names = ("overall", "sst_accuracy", "para_accuracy", "sts_pearson", "nearest_prototype_overall")
        scores = {name: round(float(result["metrics"][name]), 4) for name in names}
        return f"{result['dataset']} {result['recipe']} {result['method']} seed {result['seed']}", scores

    return score_table(root, "*-tune-*/*/result.json", "overall", read)


if __name__ == "__main__":
    sys.exit(main())
