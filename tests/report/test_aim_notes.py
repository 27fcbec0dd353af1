"""What a table says of an advantage that was aimed at: shown, ruled out, or neither."""

from __future__ import annotations

from typing import Any

import pytest
from report_prompts import reads_notes

from metapretrain.report.layout import Column, Layout
from metapretrain.report.notes import aim_notes

LAYOUT = Layout((Column("mean", "mean_accuracy", "mean %"),), "mean", baselines=(("ppt",), ("absent",)), aim=0.01)


def runs(*scores: float, passes: int = 100, reads: int = 10) -> dict[int, Any]:
    budget = {"pretrain_reads": reads, "pretrain_passes": passes}
    return {seed: {"metrics": {"mean_accuracy": score}, "budget": budget} for seed, score in enumerate(scores)}


@pytest.mark.parametrize(
    ("ahead", "told"),
    [
        (
            (0.02, 0.021, 0.019, 0.02),
            "+2.00 points (95%: +1.87 to +2.13), 4 paired seeds; the aim is 1 point: at least",
        ),
        ((0.001, 0.002, 0.0, 0.001), "+0.10 points (95%: -0.03 to +0.23), 4 paired seeds; the aim is 1 point: that is"),
        ((0.03, -0.03, 0.02, 0.0), "the aim is 1 point: neither shown nor ruled out."),
    ],
)
def test_the_aim_is_shown_ruled_out_or_neither(ahead: tuple[float, ...], told: str) -> None:
    base = (0.5, 0.6, 0.7, 0.8)
    found = aim_notes({"ppt": runs(*base), "row": runs(*(b + a for b, a in zip(base, ahead, strict=True)))}, LAYOUT)
    assert len(found) == 1 and found[0].startswith("row minus ppt, mean: ") and told in found[0]
    assert aim_notes({"ppt": runs(0.5), "row": runs(0.6)}, LAYOUT) == []  # one seed has no interval


def test_equal_passes_are_told_where_reads_differ() -> None:
    def begin(passes: int) -> str:
        return reads_notes({"ppt": runs(0.5), "row": runs(0.5, passes=passes, reads=7)}, LAYOUT)[0]

    assert "Unequal reads, but equal passes (" in begin(100) and "Unequal reads (" in begin(90)
