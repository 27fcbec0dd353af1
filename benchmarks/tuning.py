"""What the scripts of trials share: every trial a job of a benchmark's script, and the table of their scores."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from metapretrain.errors import InputError
from metapretrain.experiments.command import run_jobs, slots


def run_trials(
    script: str, trials: Mapping[str, Sequence[str]], options: Namespace, more: Iterable[str], recipe: str = "strong"
) -> bool:
    """Run the trials `{name: options}` of a recipe side by side; with --dry-run print them and return False.

    `more` are options of the script that all trials have, besides those that every benchmark has.
    """
    command = [sys.executable, str(Path(__file__).with_name(script)), "--recipe", recipe, "--validate", "--job"]
    if options.data_dir is not None:
        command += ["--data-dir", str(options.data_dir)]
    command += [*more, "--out", str(options.out), "--precision", options.precision, "--device", options.device]
    command += ["--seeds", *map(str, options.seeds), *["--resume"] * options.resume, *["--smoke"] * options.smoke]
    jobs = {name: [*command, *chosen] for name, chosen in trials.items()}
    if options.dry_run:
        print("\n".join(" ".join(job[1:]) for job in jobs.values()))
        return False
    run_jobs(jobs, slots(options.device, options.jobs_per_device), folder_of(script, options) / "logs")
    return True


def folder_of(script: str, options: Namespace) -> Path:
    """Where the results of the script's runs are: ``run_text.py`` writes to ``OUT/text``."""
    folder: Path = options.out / script.removeprefix("run_").removesuffix(".py")
    return folder


def score_table(root: Path, pattern: str, main: str, read: Callable[[Any], tuple[str, dict[str, Any]] | None]) -> str:
    """Write the trials' scores as JSON below `root` and return them as lines, best first by the score `main`.

    `read` gives a trial's name and scores from its result.json, or None for a result that is no trial.

    Raises:
        InputError: a result that cannot be read.
    """
    found: dict[str, dict[str, Any]] = {}
    for file in root.glob(pattern):
        try:
            trial = read(json.loads(file.read_text(encoding="utf-8")))
            if trial is not None:
                found[trial[0]] = {**trial[1], main: float(trial[1][main])}
        except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
            raise InputError(f"{file} is no result of a trial ({error!r}); remove its folder and --resume") from None
    best = sorted(found.items(), key=lambda item: -item[1][main])
    (root / "tuning.json").write_text(json.dumps(dict(best), indent=1) + "\n", encoding="utf-8")
    return "\n".join(f"{name}: {values}" for name, values in best)


def means_of(
    found: Mapping[tuple[str, str], Mapping[str, float]], choices: Iterable[str]
) -> tuple[dict[str, float], int]:
    """Return the mean score of each of the `choices`, best first, and of how many (row, seed) it is.

    `found` has the scores of each row and seed by choice; those that lack a choice are left out.

    Example:
        >>> means_of({("cross", "0"): {"a": 0.5, "b": 1.0}, ("cross", "1"): {"a": 9.0}}, ["a", "b"])
        ({'b': 1.0, 'a': 0.5}, 1)
    """
    names = list(choices)
    whole = [scores for scores in found.values() if {*names} <= scores.keys()]
    means = {name: sum(scores[name] for scores in whole) / len(whole) for name in names} if whole else {}
    return dict(sorted(means.items(), key=lambda item: -item[1])), len(whole)
