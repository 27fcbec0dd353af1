"""The trials that chose recipe "strong": as many for the supervised row as for PRL, scored on validation images only.

python benchmarks/tune_stl10.py --data-dir DIR
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from metapretrain.options import Parser, common_options, main_guard
from metapretrain.training.sweep import run_jobs, slots

# 1,000 of the 5,000 training images are held back and a third of the budget is spent. One choice differs a trial.
COMMON = ["validation=1000", "epochs=150"]
PHASE = {
    "base": [],
    "lr-low": ["lr=0.05"],
    "lr-high": ["lr=0.2"],
    "decay": ["weight_decay=1e-3"],
    "heavy": ["augment=heavy"],
    "average": ["ema=0.999"],
    "unsmoothed": ["label_smoothing=0"],
}
ROWS = {
    "supervised-resnet18": ("supervised", {"batch-256": ["batch_size=256", "supervised.lr=0.2"]}),
    "prl-query-frozen-linear": (
        "prl", {"cosine": ["proto.distance=cosine", "proto.temperature=0.1"]}
    ),
}  # fmt: skip


def trials() -> dict[str, list[str]]:
    """Return `{name: options}` of every trial."""
    found = {}
    for row, (phase, own) in ROWS.items():
        changes = {
            tag: [f"{phase}.{change}" for change in change_list] for tag, change_list in PHASE.items()
        } | own
        for tag, change_list in changes.items():
            found[f"{phase}-{tag}"] = [
                "--methods",
                row,
                "--tag",
                f"tune-{tag}",
                "--set",
                *COMMON,
                *change_list,
            ]
    return found


@main_guard
def main(argv: Sequence[str] | None = None) -> int:
    """Run all trials, several side by side where there are several GPUs, and print their table."""
    parser = Parser(description=__doc__)
    common_options(parser, "stl10")
    parser.add_argument(
        "--compile", action="store_true", help="compile the encoder and the augmentation (GPU)"
    )
    options = parser.parse_args(argv)
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
    ]
    shared += ["--device", options.device]
    jobs = {name: [*script, *shared, *chosen] for name, chosen in trials().items()}
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
        result = json.loads(file.read_text())
        phase = ROWS.get(result["method"], (None,))[0]
        if phase is not None:
            trial = f"{phase} {result['recipe'].removeprefix('strong-tune-')} seed {result['seed']}"
            found[trial] = {
                name: value for name, value in result["metrics"].items() if name.startswith("validation")
            }
    best = sorted(found.items(), key=lambda item: -item[1]["validation_accuracy"])
    (root / "tuning.json").write_text(json.dumps(dict(best), indent=1) + "\n")
    return "\n".join(f"{name}: {values}" for name, values in best)


if __name__ == "__main__":
    sys.exit(main())
