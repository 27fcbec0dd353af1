"""Notes under the table of runs with a schedule: their figures less those of the same rows with the uniform one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from metapretrain.evaluation.cells import percent, plain
from metapretrain.evaluation.columns import layout_of
from metapretrain.evaluation.faults import is_finite
from metapretrain.evaluation.intervals import paired_interval
from metapretrain.evaluation.results import Result

Key = tuple[str, str, str, str]
UNIFORM = "uniform"


def schedule_pairs(groups: Mapping[Key, Sequence[Result]]) -> dict[Key, list[str]]:
    """Return notes for each group of results whose recipe differs from another's by its schedule alone.

    Args:
        groups: results by benchmark, dataset, recipe and encoder. The recipe's name holds that of the schedule, which a
            result's `schedule` tells.

    Example:
        >>> def run(name, seed, accuracy):
        ...     told = {"name": name, "updates": {"prl": 3, "simclr": 1}, "probe_share": 0.2}
        ...     return {"method": "a", "seed": seed, "metrics": {"test_accuracy": accuracy}, "schedule": told}
        >>> uniform, exp3 = ("stl10", "d", "paper-uniform", ""), ("stl10", "d", "paper-exp3", "")
        >>> groups = {uniform: [run("uniform", 0, 0.70), run("uniform", 1, 0.72)], exp3: [run("exp3", 0, 0.75)]}
        >>> for note in schedule_pairs(groups)[exp3]:
        ...     print(note)
        a: updates prl 75%, simclr 25%; probes 20% of the compute of its training, on top of the budget.
        a: test % less that of recipe paper-uniform, paired over seeds: +5.00 (1 seed).
    """
    notes: dict[Key, list[str]] = {}
    for key, results in groups.items():
        told = [result for result in results if isinstance(result.get("schedule"), Mapping)]
        names = {str(result["schedule"].get("name")) for result in told} - {UNIFORM}
        if len(names) != 1:
            continue
        benchmark, dataset, recipe, encoder = key
        slug = re.sub(r"[^\w.+-]", "-", names.pop())
        other = (benchmark, dataset, recipe.replace(slug, UNIFORM, 1), encoder)
        if slug in recipe and other in groups:
            notes[key] = _choices(told) + _notes(results, groups[other], other)
    return notes


def _notes(results: Sequence[Result], uniform: Sequence[Result], other: Key) -> list[str]:
    layout = layout_of(other[0], [name for result in results for name in result["metrics"]])
    column = layout.column(layout.main)
    shown = percent if column.percent else plain
    before = {(run["method"], run["seed"]): run["metrics"].get(column.metric) for run in uniform}
    pairs: dict[str, list[tuple[float, float]]] = {}
    for run in results:
        value, base = run["metrics"].get(column.metric), before.get((run["method"], run["seed"]))
        if value is not None and base is not None:
            pairs.setdefault(run["method"], []).append((value, base))
    notes = []
    for method, values in sorted(pairs.items()):
        less = paired_interval([value for value, _ in values], [base for _, base in values])
        notes.append(
            f"{method}: {column.title} less that of recipe {other[2]}, paired over seeds: {shown(less, '+')} "
            f"({len(values)} seed{'s' * (len(values) > 1)})."
        )
    return notes


def _choices(told: Sequence[Result]) -> list[str]:
    """What was chosen and what the probes cost, over all seeds."""
    notes = []
    for method in sorted({result["method"] for result in told}):
        runs = [result["schedule"] for result in told if result["method"] == method]
        counts: dict[str, float] = {}
        for run in runs:
            for name, count in _numbers(run.get("updates")).items():
                counts[name] = counts.get(name, 0) + count
        total = max(1, sum(counts.values()))
        shares = ", ".join(f"{name} {100 * count / total:.0f}%" for name, count in counts.items())
        probes = sum(_numbers(run).get("probe_share", 0.0) for run in runs) / len(runs)
        notes.append(
            f"{method}: updates {shares}; probes {100 * probes:.0f}% of the compute of its training, on top of the "
            "budget."
        )
    return notes


def _numbers(found: Any) -> dict[str, float]:
    """The entries that are numbers: a damaged or foreign result may hold anything."""
    given = found.items() if isinstance(found, Mapping) else ()
    return {name: value for name, value in given if is_finite(value)}
