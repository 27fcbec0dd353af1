"""Rows with a schedule beside the same rows with the uniform one."""

from __future__ import annotations

from typing import Any

import pytest
from report_stl10 import LAYOUT

from metapretrain.report.notes import schedule_pairs
from metapretrain.report.table import build_table


def run(schedule: str, seed: int, accuracy: float, recipe: str = "strong-{}-t") -> list[dict[str, Any]]:
    slug = schedule.replace(":", "-").replace("=", "-")
    about = {"benchmark": "stl10", "dataset": "d", "recipe": recipe.format(slug), "seed": seed}
    told = {"name": schedule, "updates": {"supervised": 1, "simclr": 3}, "probe_share": 0.25}
    row = {"method": "scheduled", "kind": "row", "metrics": {"test_accuracy": accuracy}, "counts": {}, "budget": {}}
    before = {"method": "pretrain-scheduled", "kind": "pretraining", "metrics": {}, "counts": {}, "budget": {}}
    return [{**about, **row}, {**about, **before, "schedule": told}]


def test_differences_are_paired_by_seed() -> None:
    uniform = [result for seed in range(3) for result in run("uniform", seed, 0.5 + 0.1 * seed)]
    other = [result for seed in (2, 1, 0) for result in run("utility:alpha=0.1", seed, 0.51 + 0.1 * seed)]
    text = build_table(uniform + other, LAYOUT).markdown()
    assert text.count("minus that of recipe strong-uniform-t, paired over seeds: +1.00 ± 0.00 (3 seeds)") == 1
    assert "updates supervised 25%, simclr 75%; probes 25% of the compute" in text


def test_other_recipes_are_not_compared() -> None:
    results = run("uniform", 0, 0.5) + run("utility", 0, 0.6, "paper-{}")
    keys = {
        ("stl10", "d", result["recipe"], ""): [r for r in results if r["recipe"] == result["recipe"]]
        for result in results
    }
    assert schedule_pairs(keys, dict.fromkeys(keys, LAYOUT)) == {}


@pytest.mark.parametrize("damage", [{"updates": [1]}, {"updates": {"simclr": "x"}}, {"probe_share": "x"}])
def test_a_damaged_schedule_is_passed_over(damage: dict[str, Any]) -> None:
    row, before = run("exp3", 0, 0.6)
    before["schedule"] |= damage
    text = build_table([*run("uniform", 0, 0.5), row, before], LAYOUT).markdown()
    assert "minus that of recipe strong-uniform-t, paired over seeds: +10.00 (1 seed)" in text
