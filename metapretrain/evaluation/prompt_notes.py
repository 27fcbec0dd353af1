"""What must stand beside the figures of the prompts benchmark: what pretraining cost, and how the paper's differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from metapretrain.evaluation.layout import Result, Runs

if TYPE_CHECKING:
    from metapretrain.evaluation.published import Published

PAPER = (
    "The paper: T5-base, 5 seeds, Amazon-2 of Zhang et al. (2015), which is another set than here; its PPT was "
    "pretrained on pseudo labels, its MetaPT(Y), beside metapt-kmeans, on 650,000 reviews of Yelp."
)


def prompt_notes(by_method: Runs, published: Mapping[str, Published]) -> list[str]:
    """Return the notes below the tables.

    Args:
        by_method: method to seed to result.
        published: method to the paper's figures, for the data set of these runs.
    """
    notes = [PAPER] if any(name in published for name in by_method) else []
    costs = {name: _cost(runs) for name, runs in by_method.items()}
    trained = {name: cost for name, cost in costs.items() if cost[0]}
    if trained:
        reads = {cost[0] for cost in trained.values()}
        told = "; ".join(
            f"{name} {read:,} reads, {passes:,} passes, {wall:,.0f} s" for name, (read, passes, wall) in trained.items()
        )
        equal = "Equal reads" if len(reads) == 1 else "Unequal reads"
        notes.append(
            f"Pretraining, once for all sets, mean over seeds. {equal} (support and query rows); a pass is a sequence "
            f"going forward or backward once, backward in second order counts twice: {told}."
        )
    lost = {
        name: sum(run.get("budget", {}).get("diverged", 0) for run in runs.values()) for name, runs in by_method.items()
    }
    if any(lost.values()):
        told = "; ".join(f"{name} {count:,}" for name, count in lost.items() if count)
        notes.append(
            "Trainings that diverged, of pretraining and of all seeds and sets; the best before that was kept, or the "
            f"start: {told}."
        )
    return notes


def _cost(runs: Mapping[int, Result]) -> tuple[int, int, float]:
    """Reads, passes and seconds of pretraining, means over seeds."""
    count = max(1, len(runs))
    budgets = [run.get("budget", {}) for run in runs.values()]
    reads, passes = (sum(budget.get(f"pretrain_{of}", 0) for budget in budgets) / count for of in ("reads", "passes"))
    return round(reads), round(passes), sum(run.get("pretrain_wall_s") or 0.0 for run in runs.values()) / count
