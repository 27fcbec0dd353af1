"""What a report says of scheduling runs: when a row reaches uniform's loss, and the fixed source validation picks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import report_schedule as notes
from report_schedule import LAYOUT
from schedule_experiment import downstream_column

from metapretrain.report.table import build_table


def run(method: str, seed: int, losses: list[float], cost: float = 3.0, score: float = 0.5) -> dict[str, Any]:
    updates = [10 * place for place in range(len(losses))]
    return {
        "schema": 1,
        "status": "complete",
        "benchmark": "schedule",
        "dataset": "texts",
        "recipe": "paper",
        "encoder": "small",
        "kind": "row",
        "method": method,
        "seed": seed,
        "setting": method.rpartition("-")[2],
        "scheduler": "fixed" if method.startswith("fixed-") else method.rpartition("-")[0],
        "source": method.split("-")[1] if method.startswith("fixed-") else None,
        "metrics": {
            "downstream": score,
            "validation_downstream": score + 0.1,
            "wic_accuracy": score,
            "target_loss": losses[-1] if losses else None,
            "probe_share": 0.1,
        },
        "counts": {"wic_test": 638},
        "wall_s": 1.0,
        "budget": {"encoder_passes": 100, "updates": max(updates, default=0)},
        "curve": {"updates": updates, "compute_units": [cost * u for u in updates], "target_loss": losses},
    }


def schedule_notes(by_method: dict[str, dict[int, Any]]) -> list[str]:
    return notes.schedule_notes(by_method, LAYOUT)


def grouped(*runs: dict[str, Any]) -> dict[str, dict[int, Any]]:
    found: dict[str, dict[int, Any]] = {}
    for one in runs:
        found.setdefault(one["method"], {})[one["seed"]] = one
    return found


def test_losses_beside_those_of_uniform() -> None:
    notes = schedule_notes(
        grouped(
            run("uniform-aware", 0, [3.0, 2.0, 1.0, 1.5]),
            run("uniform-aware", 1, [3.0, 2.0, 1.0, 1.5]),
            run("softmax-aware", 0, [3.0, 1.0, 1.01], cost=6),
            run("softmax-aware", 1, [3.0, 1.0, 1.03], cost=6),
        )
    )
    # compute 0, 60, 120 against 0, 30, 60, 90; over 0 to 90: 120 + 30.075 or 30.225 less 157.5
    assert notes == [
        "softmax-aware minus uniform-aware, target loss: final -0.480, final minus the lowest of uniform-aware +0.020 "
        "(at most 0.02 on 1 of 2 seeds), mean over the compute that both spent -0.082; with 67% of its updates and "
        "133% of its compute."
    ]


def test_areas_are_those_of_a_fine_grid() -> None:
    one, other = run("exp3-aware", 0, [3.0, 2.5, 1.0, 2.0], cost=7), run("uniform-aware", 0, [3.0, 2.0, 0.9, 1.5])
    grid = np.linspace(0, 90, 200_001)
    means = [np.interp(grid, run["curve"]["compute_units"], run["curve"]["target_loss"]).mean() for run in (one, other)]
    assert notes.against(one, other)["area"] == pytest.approx(means[0] - means[1], abs=1e-4)
    one["curve"]["target_loss"][-1] = None  # it was not finite
    assert notes.against(one, other)["end"] == math.inf


def test_a_loss_that_does_not_fall_is_no_measure() -> None:
    notes = schedule_notes(grouped(run("uniform-aware", 0, [1.0, 2.0]), run("exp3-aware", 0, [1.0, 0.5])))
    assert len(notes) == 1 and "did not fall on 1 of 1 seeds" in notes[0]


def test_the_fixed_source_that_validation_picks() -> None:
    rows = [run("fixed-mlm-aware", seed, [2.0, 1.0], score=0.50) for seed in range(3)]
    rows += [run("fixed-order-aware", seed, [2.0, 1.0], score=0.40) for seed in range(3)]
    rows += [run("utility-taylor-aware", seed, [2.0, 1.0], score=0.49 + 0.01 * seed) for seed in range(3)]
    notes = schedule_notes(grouped(*rows))
    assert notes[0] == "Of 2 fixed sources (aware), validation picks fixed-mlm-aware."
    # differences -1, 0, 1 points: t(2) = 4.303 times 1 / sqrt(3)
    told = "utility-taylor-aware minus fixed-mlm-aware, downstream: +0.00 points (95%: -2.48 to +2.48)"
    assert notes[1].startswith(told)


def test_the_table_of_a_scheduling_benchmark() -> None:
    text = build_table([run(f"{name}-aware", 0, [2.0, 1.0]) for name in ("uniform", "exp3")], LAYOUT).markdown()
    header = next(line for line in text.splitlines() if line.startswith("| method | seeds | downstream"))
    assert header == "| method | seeds | downstream % | wic accuracy % (n = 638) |"
    assert "95% intervals over the test examples" in text and "Paired differences, minus uniform-aware" in text
    assert "MiniLM" not in text and "overall" not in text


def test_downstream_tasks_of_ones_own_get_columns() -> None:
    extra = {
        "boolq_accuracy": 0.7,
        "boolq_f1": 0.6,
        "boolq_matthews": 0.2,
        "ner_f1": 0.9,
        "ner_accuracy": 0.95,
        "swag_accuracy": 0.3,
        "validation_swag_accuracy": 0.4,
        "wic_f1": 0.1,
    }
    runs = [run(f"{name}-aware", 0, [2.0, 1.0]) for name in ("uniform", "exp3")]
    for one in runs:
        one["metrics"] |= extra
        one["counts"] |= {"boolq_test": 200}
    own = (("ner", "f1"), ("swag", "accuracy"), ("boolq", "accuracy"), ("wic", "accuracy"))
    layout = LAYOUT.with_tasks(downstream_column(*task) for task in own)
    text = build_table(runs, layout).markdown()
    headers = [line for line in text.splitlines() if line.startswith("| method |") and "boolq" in line]
    tasks = "wic accuracy % (n = 638) | boolq accuracy % (n = 200) | ner F1 % | swag accuracy % |"
    assert headers[0] == f"| method | seeds | downstream % | {tasks}"
    assert "| exp3-aware | 1 | 50.00 | 50.00 | 70.00 | 90.00 | 30.00 |" in text
    compared = "downstream % | wic accuracy % | boolq accuracy % | ner F1 % | swag accuracy % |"
    assert f"| method | common seeds | {compared}" in headers


def test_curves_of_one_point_and_rows_without_a_score_say_nothing() -> None:
    first, fixed = run("uniform-aware", 0, [3.0]), run("fixed-a-aware", 0, [3.0, 2.0])
    first["metrics"]["downstream"] = None
    notes = schedule_notes(grouped(first, run("exp3-aware", 0, []), fixed))
    assert notes[0].startswith("The target loss of uniform-aware did not fall on 1 of 1 seeds")
    assert not any("uniform-aware minus" in note for note in notes)
    assert not any("exp3-aware minus uniform" in note for note in notes)


def test_a_row_cut_short_is_not_compared() -> None:
    assert schedule_notes(grouped(run("uniform-aware", 0, [3.0, 2.0]), run("exp3-aware", 0, []))) == []


def test_settings_stand_apart() -> None:
    table = build_table(
        [
            run(f"{name}-{setting}", seed, [3.0, 2.0], score=score)
            for seed in (0, 1)
            for setting, score in (("agnostic", 0.4), ("aware", 0.5))
            for name in ("uniform", "utility-exact")
        ],
        LAYOUT,
    )
    (group,) = table.groups
    assert [row.method for row in group.rows] == [
        "uniform-aware",
        "utility-exact-aware",
        "uniform-agnostic",
        "utility-exact-agnostic",
    ]
    compared = {row.method: [d and d.baseline for d in row.differences] for row in group.rows}
    assert compared == {
        "uniform-aware": [None, None],
        "utility-exact-aware": ["uniform-aware", None],
        "uniform-agnostic": [None, None],
        "utility-exact-agnostic": [None, "uniform-agnostic"],
    }
    assert not any("no common seed" in note for note in group.notes)
    told = "utility-exact-aware minus utility-exact-agnostic, downstream: +10.00 points (95%: +10.00 to +10.00), "
    assert f"{told}2 seeds." in group.notes
    text = table.markdown()
    assert text.index("minus uniform-aware:") < text.index("minus uniform-agnostic:")
