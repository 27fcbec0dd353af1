"""What a report says of scheduling runs: when a row reaches uniform's loss, and the fixed source validation picks."""

from __future__ import annotations

from typing import Any

from report_schedule import LAYOUT

from metapretrain.experiments.schedule.experiment import downstream_column
from metapretrain.report import notes
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


def test_when_a_row_reaches_the_loss_of_uniform() -> None:
    notes = schedule_notes(
        grouped(
            run("uniform-aware", 0, [3.0, 2.0, 1.5, 1.0]),
            run("uniform-aware", 1, [3.0, 2.0, 1.5, 1.0]),
            run("utility-exact-aware", 0, [3.0, 1.0, 0.9, 0.8], cost=6),
            run("utility-exact-aware", 1, [3.0, 2.5, 1.0, 2.0], cost=6),
            run("exp3-aware", 0, [3.0, 2.5, 2.0, 1.5]),
        )
    )
    assert notes == [
        "utility-exact-aware reached the final target loss of uniform-aware on 2 of 2 seeds, after 50% of its source "
        "updates and 100% of its compute up to there, on average.",
        "utility-exact-aware reached the lowest target loss of uniform-aware on 2 of 2 seeds, after 50% of its source "
        "updates and 100% of its compute up to there, on average.",
        "exp3-aware never reached the final target loss of uniform-aware (1 seeds).",
    ]


def test_the_lowest_loss_of_uniform_and_what_it_had_cost_then() -> None:
    notes = schedule_notes(
        grouped(
            run("uniform-aware", 0, [3.0, 2.0, 0.9, 1.5]),
            run("utility-exact-aware", 0, [3.0, 1.0, 0.9, 2.0], cost=6),
            run("utility-taylor-aware", 0, [3.0, 1.0, 1.4, 2.0]),
        )
    )
    assert notes[1].startswith("utility-exact-aware reached the lowest") and "after 100% of its source" in notes[1]
    assert "200% of its compute up to there" in notes[1]
    assert notes[3] == "utility-taylor-aware never reached the lowest target loss of uniform-aware (1 seeds)."


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
    told = "utility-taylor-aware less fixed-mlm-aware, downstream: +0.00 points (95%: -2.48 to +2.48)"
    assert notes[1].startswith(told)


def test_the_table_of_a_scheduling_benchmark() -> None:
    text = build_table([run(f"{name}-aware", 0, [2.0, 1.0]) for name in ("uniform", "exp3")], LAYOUT).markdown()
    header = next(line for line in text.splitlines() if line.startswith("| method | seeds | downstream"))
    assert header == "| method | seeds | downstream % | wic accuracy % (n = 638) |"
    assert "95% over the test examples" in text and "Paired differences, less uniform-aware" in text
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
    assert not any("uniform-aware less" in note for note in notes)
    assert not any("exp3-aware reached" in note for note in notes)


def test_a_row_cut_short_reached_nothing() -> None:
    notes = schedule_notes(grouped(run("uniform-aware", 0, [3.0, 2.0]), run("exp3-aware", 0, [])))
    assert notes == ["exp3-aware never reached the final target loss of uniform-aware (1 seeds)."]


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
    told = "utility-exact-aware less utility-exact-agnostic, downstream: +10.00 points (95%: +10.00 to +10.00), "
    assert f"{told}2 seeds." in group.notes
    text = table.markdown()
    assert text.index("less uniform-aware:") < text.index("less uniform-agnostic:")
