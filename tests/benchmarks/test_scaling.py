"""The table of runs that several processes shared."""

from __future__ import annotations

from typing import Any

from run_scale import scaling_table


def row(processes: int, values: list[float], rate: float, *, graph: bool = False) -> dict[str, Any]:
    seeds = list(range(len(values)))
    return {
        "row": "simclr",
        "unit": "images",
        "batch": 512,
        "processes": processes,
        "cuda_graph": graph,
        "metric": "test_accuracy",
        "seeds": seeds,
        "values": values,
        "rates": [rate] * len(seeds),
        "wall_s": [10.0] * len(seeds),
    }


def cells(rows: list[dict[str, Any]]) -> list[list[str]]:
    text = scaling_table({"hardware": "here", "versions": "torch", "rows": rows})
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()[2:] if line.startswith("|")]


def test_rows_are_compared_with_one_process_and_its_graph() -> None:
    one, same, worse = [0.70, 0.72, 0.74], [0.71, 0.72, 0.73], [0.60, 0.61, 0.64]
    given = [row(4, worse, 4000, graph=True), row(2, same, 3000, graph=True), row(1, one[:1], 1000)]
    shown = cells([*given, row(1, one, 2000, graph=True)])
    assert [line[1:3] for line in shown] == [["1", "yes"], ["1", "no"], ["2", "yes"], ["4", "yes"]]
    assert [line[4] for line in shown] == ["1.00", "0.50", "1.50", "2.00"]
    assert [line[-1] for line in shown] == ["-", "-", "yes", "no"]
    # differences +0.01, 0, -0.01: t(2) 4.303 x 0.01 / sqrt 3
    assert shown[2][-2] == "+0.00 ± 2.48"
    assert shown[1][-2] == "+0.00"  # one seed has no interval


def test_rows_without_any_graph_are_compared_with_one_process() -> None:
    assert [line[4] for line in cells([row(2, [0.5], 300), row(1, [0.5], 200)])] == ["1.00", "1.50"]


def test_without_one_process_there_is_nothing_to_compare_with() -> None:
    (line,) = cells([row(2, [0.5], 100)])
    assert line[4] == line[-1] == line[-2] == "-"
