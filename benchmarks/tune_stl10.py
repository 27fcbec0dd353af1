"""The trials that chose recipe "strong": as many for the supervised row as for PRL, scored on validation images only.

python benchmarks/tune_stl10.py --data-dir DIR
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from metapretrain.errors import InputError
from metapretrain.options import Parser, common_options, main_guard, names
from metapretrain.training.sweep import run_jobs, slots

# Recipe "strong" before the trials: a trial changes one choice or two of it. `P.` stands for the phase of the row.
BASE = [
    "supervised.weight_decay=5e-4", "prl.lr=0.1", "prl.weight_decay=5e-4", "unfrozen.lr=0.01",
    "unfrozen.weight_decay=5e-4", "pretrain_share=0.9", "proto.query_fraction=0.25",
]  # fmt: skip
ROWS = {"supervised": "supervised-resnet18", "prl": "prl-query-frozen-linear"}
FIRST = {
    "base": [], "lr-low": ["P.lr=0.05"], "lr-high": ["P.lr=0.2"], "decay": ["P.weight_decay=1e-3"],
    "heavy": ["P.augment=heavy"], "unsmoothed": ["P.label_smoothing=0"],
}  # fmt: skip
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
EPOCHS = {"first": 150, "second": 100}


def trials(rounds: Sequence[str]) -> dict[str, list[str]]:
    """Return `{name: options}` of every trial."""
    found = {}
    for turn in rounds:
        for phase, changes in TRIALS[turn].items():
            for tag, chosen in changes.items():
                row = ROWS[phase].replace("frozen", "unfrozen") if tag.startswith("unfrozen") else ROWS[phase]
                settings = [
                    f"epochs={EPOCHS[turn]}",
                    *(change.replace("P.", f"{phase}.", 1) for change in chosen),
                ]
                name = f"{turn}-{phase}-{tag}"
                found[name] = ["--methods", row, "--tag", f"tune-{name}", "--set", *settings]
    return found


def options_of(argv: Sequence[str] | None) -> Namespace:
    """Read the command line."""
    parser = Parser(description=__doc__)
    common_options(parser, "stl10")
    parser.add_argument("--compile", action="store_true", help="compile the encoder and the augmentation (GPU)")
    parser.add_argument("--rounds", type=names("round", TRIALS), default=list(TRIALS), metavar="A,B|all", help="which")
    return parser.parse_args(argv)


@main_guard
def main(argv: Sequence[str] | None = None) -> int:
    """Run all trials, several side by side where there are several GPUs, and print their table."""
    options = options_of(argv)
    if options.data_dir is None and not options.dry_run:
        raise InputError("tuning needs --data-dir, the folder that holds STL-10")
    script = [
        sys.executable,
        str(Path(__file__).with_name("run_stl10.py")),
        "--recipe",
        "strong",
        "--validate",
        "--job",
    ]
    shared = [
        "--data-dir",
        str(options.data_dir),
        "--out",
        str(options.out),
        "--precision",
        options.precision,
    ]
    shared += [
        "--seeds",
        *map(str, options.seeds),
        *["--compile"] * options.compile,
        *["--resume"] * options.resume,
        *["--smoke"] * options.smoke,
    ]
    shared += ["--device", options.device]
    jobs = {name: [*script, *shared, *chosen] for name, chosen in trials(options.rounds).items()}
    if options.dry_run:
        print("\n".join(" ".join(command[1:]) for command in jobs.values()))
        return 0
    run_jobs(jobs, slots(options.device, options.jobs_per_device), options.out / "stl10" / "logs")
    print(table(options.out / "stl10"))
    return 0


def table(root: Path) -> str:
    """Write the trials' validation accuracies as JSON below `root` and return them as lines, best first."""
    found = {}
    for file in root.glob("stl10-strong-tune-*/*/result.json"):
        try:
            result = json.loads(file.read_text())
            if not result["method"].startswith("pretrain-"):
                trial = f"{result['recipe'].removeprefix('strong-tune-')} seed {result['seed']}"
                scores = {name: value for name, value in result["metrics"].items() if name.startswith("validation")}
                found[trial] = {**scores, "validation_accuracy": float(scores["validation_accuracy"])}
        except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
            raise InputError(f"{file} is no result of a trial ({error!r}); remove its folder and --resume") from None
    best = sorted(found.items(), key=lambda item: -item[1]["validation_accuracy"])
    (root / "tuning.json").write_text(json.dumps(dict(best), indent=1) + "\n")
    return "\n".join(f"{name}: {values}" for name, values in best)


if __name__ == "__main__":
    sys.exit(main())
