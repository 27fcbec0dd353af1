"""The table of runs that several processes shared: what they reached and how fast they were, beside one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from metapretrain.evaluation.intervals import mean_interval, paired_interval
from metapretrain.report.markdown import markdown_table, percent, plain

HEADER = (
    "row",
    "processes",
    "CUDA graph",
    "trained a second",
    "times one process",
    "seconds a run",
    "reached",
    "seeds",
    "less one process, paired",
    "its interval holds 0",
)
LEGEND = (
    "One batch an update (in brackets: images, tasks, rows; the precision), shared by the processes. Trained a second: "
    "mean over seeds; times one process: without a CUDA graph, as several processes run. Seconds a run: training, "
    "evaluation and scoring, without the start. Reached: mean ± half-width of the 95% interval over seeds (Student t); "
    "less one process: over the same seeds, in points of an accuracy."
)


def scaling_table(measured: Mapping[str, Any]) -> str:
    """Return the Markdown of a file that `benchmarks/run_scale.py --results` wrote.

    Args:
        measured: hardware and versions in words, and `rows`: each with row, unit, batch, processes, cuda_graph, metric,
            and a list a seed of seeds, values, rates (units a second) and wall_s.

    Example:
        >>> row = {"row": "maml", "unit": "tasks", "batch": 8, "cuda_graph": False, "metric": "test_accuracy"}
        >>> one = {**row, "processes": 1, "seeds": [0, 1], "values": [0.9, 0.8], "rates": [50, 50], "wall_s": [3, 3]}
        >>> two = {**one, "processes": 2, "values": [0.8, 0.9], "rates": [75, 75], "wall_s": [2, 2]}
        >>> print(scaling_table({"hardware": "", "versions": "", "rows": [one, two]}).splitlines()[3])
        | maml (8) | 2 | no | 75 tasks | 1.50 | 2.0 | test accuracy, %: 85.00 ± 63.53 | 2 | +0.00 ± 127.06 | yes |
    """
    rows = sorted(measured["rows"], key=lambda row: (row["row"], row["processes"], not row["cuda_graph"]))
    alone = {row["row"]: row for row in rows if row["processes"] == 1 and not row["cuda_graph"]}
    lines = markdown_table(HEADER, [_cells(row, alone.get(row["row"])) for row in rows])
    about = f"{LEGEND} {measured['hardware']}; {measured['versions']}."
    return "\n".join([*lines, about])


def _cells(row: Mapping[str, Any], alone: Mapping[str, Any] | None) -> list[str]:
    rate, wall = (sum(row[name]) / len(row[name]) for name in ("rates", "wall_s"))
    shown = percent if "accuracy" in row["metric"] else plain
    about = ", ".join(map(str, filter(None, (row["batch"], row.get("precision")))))
    cells = [f"{row['row']} ({about})", str(row["processes"]), "yes" if row["cuda_graph"] else "no"]
    cells += [f"{rate:,.0f} {row['unit']}", _speedup(rate, alone), f"{wall:,.1f}"]
    metric = row["metric"].replace("_", " ") + ", %" * (shown is percent)
    cells += [f"{metric}: {shown(mean_interval(row['values']))}", str(len(row["seeds"]))]
    if alone is None or alone is row:
        return [*cells, "-", "-"]
    before = dict(zip(alone["seeds"], alone["values"], strict=True))
    both = [(value, before[s]) for s, value in zip(row["seeds"], row["values"], strict=True) if s in before]
    if not both:
        return [*cells, "-", "-"]
    less = paired_interval([a for a, _ in both], [b for _, b in both])
    verdict = ("yes" if less.low <= 0 <= less.high else "no") if less.known else "-"
    return [*cells, shown(less, "+"), verdict]


def _speedup(rate: float, alone: Mapping[str, Any] | None) -> str:
    return "-" if alone is None else f"{rate * len(alone['rates']) / sum(alone['rates']):.2f}"
