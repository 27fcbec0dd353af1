"""Learning rate as a function of the step, so that a resumed run needs no scheduler state."""

from __future__ import annotations

import math

from metapretrain.errors import one_of

SCHEDULES = ("constant", "cosine", "linear", "wsd")


def learning_rate(
    step: int, steps: int, *, peak: float, schedule: str = "cosine", warmup: int = 0, decay: float = 0.2
) -> float:
    """Learning rate of update `step` (counted from 0) out of `steps`.

    Args:
        peak: the rate after the warm-up.
        schedule: `constant`; `cosine` or `linear` to zero at the last step; `wsd`: warm-up, stable, then a linear
            decay over the last share `decay` of the steps (Hu et al., 2024, "MiniCPM").
        warmup: updates of linear warm-up.

    Raises:
        InputError: unknown schedule.

    Example:
        >>> [round(learning_rate(s, 10, peak=1.0, warmup=2), 2) for s in (0, 1, 2, 9)]
        [0.5, 1.0, 1.0, 0.04]
    """
    one_of("schedule", schedule, SCHEDULES)
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    if schedule == "cosine":
        return peak * 0.5 * (1 + math.cos(math.pi * done))
    if schedule == "linear":
        return peak * (1 - done)
    if schedule == "wsd":
        return peak * min(1.0, (1 - done) / decay)
    return peak
