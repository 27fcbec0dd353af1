"""All rows and seeds of an experiment, one after the other or side by side, and their table."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from metapretrain.checks import check_device, check_precision
from metapretrain.evaluation.robustness import corrupt_runs
from metapretrain.experiments.base import Experiment, Machine
from metapretrain.training.logs import METRICS
from metapretrain.training.sweep import run_jobs, slots


def machine_of(options: Namespace) -> Machine:
    """Return the machine that the common options name, and this process's rank under `accelerate launch`."""
    device = check_device(options.device)
    check_precision(options.precision, device)
    rank, world = 0, 1
    if "WORLD_SIZE" in os.environ:
        from metapretrain.training.devices import make_accelerator

        accelerator = make_accelerator(device, options.precision)
        rank, world = accelerator.process_index, accelerator.num_processes
    graph = False if getattr(options, "no_cuda_graph", False) else None
    compiled, local = (getattr(options, name, False) for name in ("compile", "local_batchnorm"))
    return Machine(device, options.precision, compiled, graph, local, rank, world)


def run_table(
    experiment: Experiment[Any, Any, Any, Any, Any],
    methods: Mapping[str, Any],
    options: Namespace,
    command: Sequence[str],
) -> int:
    """Run the rows of `options.methods` for `options.seeds`, then write and print the table.

    Args:
        methods: every row that the benchmark knows, by name.
        command: script or module with the options that every job gets; jobs that run side by side add their rows.

    Raises:
        InputError: a run would be refused (before anything is trained), or some jobs failed.
    """
    chosen = {name: methods[name] for name in options.methods}
    if options.dry_run:
        lines = experiment.plan(chosen)
        counts = ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in experiment.data.counts.items())
        print(f"{experiment.root}: seeds {' '.join(map(str, options.seeds))}; {counts}")
        print("\n".join(lines))
        return 0
    experiment.check(chosen, options.seeds)
    places = slots(options.device, options.jobs_per_device)
    if len(places) > 1 and experiment.machine.world == 1 and not options.job:
        run_jobs(_jobs(chosen, options, command), places, experiment.root / "logs")
    else:
        for batch in experiment.work(chosen, options.seeds):
            for result in experiment.run(batch):
                if result.get("kind") == "tuning":
                    print(f"{result['method']} seed {result['seed']}, validation only: {result['metrics']}")
    if not len(experiment.data.test):
        return 0
    if experiment.machine.rank == 0 and not options.job:
        if getattr(options, "corrupt", False):
            device = experiment.machine.device
            for run, scores in corrupt_runs(experiment.root, lambda *_: experiment.data.test, device):
                print(f"{run.name}: accuracy {scores['corrupt_accuracy']:.4f} under corruption")
        experiment.save_layout()
        show(experiment.root, experiment.figures)
    return 0


def show(root: Path, figures: int | None) -> None:
    """Write the table and the curves of the runs below `root` and print them with what to look at next."""
    from metapretrain.report.figures import plot
    from metapretrain.report.table import write

    print(f"\n{write(root)}")
    print(f"table    {root / 'report' / 'table.md'}")
    logged = any(root.rglob(METRICS))  # a row that trains nothing has no curves
    for file in plot(root) if figures is not None and logged else []:
        print(f"figure   {file}")
    for file in sorted(root.glob("*/figures/*.png")):
        print(f"figure   {file}")
    print(f"curves   tensorboard --logdir {root}")


def _jobs(chosen: Mapping[str, Any], options: Namespace, command: Sequence[str]) -> dict[str, list[str]]:
    """One job a seed and pretraining: its rows wait for the same encoder; supervised rows stand alone."""
    jobs = {}
    groups: dict[str, list[str]] = {}
    for name, method in chosen.items():
        groups.setdefault(method.pretraining or name, []).append(name)
    for seed in options.seeds:
        for group, names in groups.items():
            jobs[f"{group}-s{seed}"] = [
                sys.executable,
                *command,
                "--methods",
                ",".join(names),
                "--seeds",
                str(seed),
                "--jobs-per-device",
                "1",
                "--job",
                *["--no-figures"] * (seed != options.seeds[0]),
            ]
    return jobs
