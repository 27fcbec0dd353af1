"""What scheduling runs are compared by: when they reach the loss of uniform choice, and the best fixed source."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from metapretrain.evaluation.intervals import paired_interval
from metapretrain.evaluation.layout import Result, Runs


class Reached(NamedTuple):
    """What a run had spent when its target loss was as low as that of uniform choice.

    Attributes:
        updates: source updates, as a part of what uniform had made then; NaN where the loss was never as low.
        compute: the same of all compute, probes and fitting of heads included.
    """

    updates: float
    compute: float


def reached(run: Result, uniform: Result, *, lowest: bool = False) -> Reached:
    """Compare the curves of two runs of one seed, at the evaluations of `run` after its first update.

    Args:
        lowest: with the lowest target loss that uniform choice ever had, and what it had spent then; else with its
            loss at the end, which may have risen again.

    Example:
        >>> uniform = {"curve": {"updates": [0, 100], "compute_units": [0, 300], "target_loss": [2.0, 1.0]}}
        >>> run = {"curve": {"updates": [0, 50, 100], "compute_units": [0, 240, 480], "target_loss": [2.0, 0.9, 0.8]}}
        >>> reached(run, uniform)
        Reached(updates=0.5, compute=0.8)
    """
    curve, reference = run["curve"], uniform["curve"]
    goal = -1
    if lowest:
        goal = min(range(1, len(reference["updates"])), key=lambda place: _number(reference["target_loss"][place]))
    low = [_number(loss) <= _number(reference["target_loss"][goal]) for loss in curve["target_loss"]]
    low[:1] = [False]  # before any update
    if not any(low):
        return Reached(math.nan, math.nan)
    place = low.index(True)
    return Reached(*(curve[name][place] / reference[name][goal] for name in ("updates", "compute_units")))


def _number(loss: float | None) -> float:
    """A loss that was not finite is stored as None."""
    return math.inf if loss is None else loss


def schedule_notes(by_method: Runs) -> list[str]:
    """Lines for a report: how soon rows reach uniform's target loss, and their distance to the best fixed source."""
    notes = []
    for setting in ("aware", "agnostic"):
        rows = {name: runs for name, runs in by_method.items() if name.endswith(f"-{setting}")}
        uniform = rows.get(f"uniform-{setting}", {})
        fell = [seed for seed in sorted(uniform) if _fell(uniform[seed])]
        if len(fell) < len(uniform):
            notes.append(
                f"The target loss of uniform-{setting} did not fall on {len(uniform) - len(fell)} of {len(uniform)} "
                "seeds, which are left out where others are compared to it."
            )
        for name, runs in rows.items():
            seeds = [seed for seed in fell if seed in runs and "curve" in runs[seed]]
            if seeds and runs is not uniform:
                end = [reached(runs[seed], uniform[seed]) for seed in seeds]
                low = [reached(runs[seed], uniform[seed], lowest=True) for seed in seeds]
                notes.append(_told(name, f"final target loss of uniform-{setting}", end))
                if any(math.isfinite(one.updates) for one in end):
                    notes.append(_told(name, f"lowest target loss of uniform-{setting}", low))
        notes += _beside_fixed(rows, setting)
    return notes + _aware_less_agnostic(by_method)


def _fell(run: Result) -> bool:
    losses = run.get("curve", {}).get("target_loss", [])
    first, last = (losses[0], losses[-1]) if losses else (None, None)
    return bool(first is not None and last is not None and last < first)


def _scored(runs: Mapping[int, Result]) -> set[int]:
    return {seed for seed, run in runs.items() if run["metrics"].get("downstream") is not None}


def _told(name: str, goal: str, found: list[Reached]) -> str:
    there = [one for one in found if math.isfinite(one.updates)]
    if not there:
        return f"{name} never reached the {goal} ({len(found)} seeds)."
    updates, compute = (np.mean([getattr(one, part) for one in there]) for part in ("updates", "compute"))
    return (
        f"{name} reached the {goal} on {len(there)} of {len(found)} seeds, after {100 * updates:.0f}% of its source "
        f"updates and {100 * compute:.0f}% of its compute up to there, on average."
    )


def picked(rows: Runs) -> str | None:
    """The fixed row with the best mean of the validation figures, if there is one.

    Example:
        >>> runs = {"fixed-a-aware": {0: {"metrics": {"validation_downstream": 0.4}}},
        ...         "fixed-b-aware": {0: {"metrics": {"validation_downstream": 0.5}}}}
        >>> picked(runs)
        'fixed-b-aware'
    """
    means = {}
    for name, runs in rows.items():
        values = [run["metrics"].get("validation_downstream") for run in runs.values()]
        if name.startswith("fixed-") and values and None not in values:
            means[name] = float(np.mean(values))
    return max(means, key=lambda name: means[name]) if means else None


def _beside_fixed(rows: Runs, setting: str) -> list[str]:
    best = picked(rows)
    if best is None:
        return []
    count = sum(name.startswith("fixed-") for name in rows)
    notes = [f"Of {count} fixed sources ({setting}), validation picks {best}."]
    return notes + [line for name in rows if not name.startswith("fixed-") for line in _gap(rows, name, best)]


def _aware_less_agnostic(rows: Runs) -> list[str]:
    """The same scheduler in both settings: what looking at the targets, and their training parts, gives."""
    others = {name: f"{name.removesuffix('-aware')}-agnostic" for name in rows if name.endswith("-aware")}
    return [line for name, other in others.items() if other in rows for line in _gap(rows, name, other)]


def _gap(rows: Runs, name: str, other: str) -> list[str]:
    """A line with the paired difference of two rows downstream, if they have seeds in common."""
    seeds = sorted(_scored(rows[name]) & _scored(rows[other]))
    if not seeds:
        return []
    mine, theirs = ([rows[row][seed]["metrics"]["downstream"] for seed in seeds] for row in (name, other))
    gap = paired_interval(mine, theirs)
    limits = f" (95%: {100 * gap.low:+.2f} to {100 * gap.high:+.2f})" if gap.known else ""
    return [f"{name} less {other}, downstream: {100 * gap.mean:+.2f} points{limits}, {len(seeds)} seeds."]
