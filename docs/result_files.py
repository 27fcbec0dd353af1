"""What the result files docs/results/*.json hold: runs as tables, speeds as ratios, pairs of methods with p-values."""

from __future__ import annotations

import itertools
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from metapretrain.errors import InputError
from metapretrain.evaluation.intervals import Interval
from metapretrain.report.layout import Layout
from metapretrain.report.results import Collection, bundle, collect
from metapretrain.report.rows import Group, Row, by_seed, paired, setting_of
from metapretrain.report.table import GROUP, Table, build_table

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent / "benchmarks"))

import report_fewshot  # noqa: E402
import report_prompts  # noqa: E402
import report_schedule  # noqa: E402
import report_stl10  # noqa: E402
import report_text  # noqa: E402
from speed_scale import HALF_BATCH  # noqa: E402

TRANSFER = ("transfer-labels", "transfer-encoders")  # results of one question, in tables of their own

LAYOUTS: dict[str, Layout] = {
    "prompts": report_prompts.LAYOUT,
    "schedule": report_schedule.LAYOUT,
    "stl10": report_stl10.LAYOUT,
    "text": report_text.LAYOUT,
}


def source(name: str) -> Path:
    """The result file of this name."""
    return DOCS / "results" / f"{name}.json"


def names() -> list[str]:
    """The names of all result files."""
    return sorted(path.stem for path in DOCS.glob("results/*.json"))


def text_of(page: Path) -> str:
    """The text of a page; raises InputError where it is no UTF-8."""
    try:
        return page.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"docs/results/{page.name} is no UTF-8 text: {error.reason} at byte {error.start}") from error


@cache
def content(file: Path) -> Any:
    """What a result file holds.

    Raises:
        InputError: it is not there or no JSON.
    """
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"docs/results/{file.name} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise InputError(f"docs/results/{file.name} is damaged: {error}") from error


def is_bundle(name: str) -> bool:
    """Whether a result file holds runs."""
    return isinstance(content(source(name)), list)


def benchmark_of(name: str) -> str:
    """The benchmark of a result file: that of its runs, else the first word of its name."""
    if is_bundle(name):
        return str(runs_of(source(name)).results[0]["benchmark"])
    found = content(source(name))
    if not isinstance(found, dict):
        raise InputError(f"docs/results/{name}.json is damaged or of an unknown kind")
    return "fewshot" if "ways" in found else "speed" if "shapes" in found else name.split("-")[0]


def layout_of(result: Mapping[str, Any]) -> Layout:
    """The layout of a run's table; that of few-shot runs holds what is published for their set and backbone."""
    if result["benchmark"] == "fewshot":
        return report_fewshot.layout_of(result["dataset"].rpartition("-")[0], result["recipe"])
    return LAYOUTS[result["benchmark"]]


def _known(result: Mapping[str, Any]) -> bool:
    return bool(result.get("recipe") and result.get("dataset")) and result.get("benchmark") in {*LAYOUTS, "fewshot"}


@cache
def runs_of(file: Path) -> Collection:
    """The runs of a bundle, each with today's layout of its benchmark.

    Raises:
        InputError: one is damaged or of no benchmark; no page may leave it out in silence.
    """
    found = collect(file)
    faults = [*found.problems, *found.incomplete]
    faults += [f"{one['method']} is of no known benchmark" for one in found.results if not _known(one)]
    if faults:
        raise InputError(f"docs/results/{file.name}: runs that cannot be shown: {len(faults)}, first {faults[0]}")
    return replace(found, results=[{**one, "layout": layout_of(one).to_json()} for one in found.results])


@cache
def table_of(file: Path) -> Table:
    """The table of a bundle."""
    return build_table(runs_of(file))


def keep_layouts() -> None:
    """Put the benchmarks' layouts into the bundles, so that `metapretrain report` makes the same tables of them."""
    for file in filter(is_bundle, names()):
        if collect(source(file)).results != runs_of(source(file)).results:
            bundle(runs_of(source(file)).results, source(file))


def shots(setting: str) -> str:
    """A setting in words.

    Example:
        >>> shots("20w5s")
        '20-way 5-shot'
    """
    return re.sub(r"^(\d+)w(\d+)s$", r"\1-way \2-shot", setting)


# Speed.


def is_speed(found: Any) -> bool:
    """Whether `run_speed.py` wrote this file."""
    return isinstance(found, dict) and "rows" in found and all("median" in row for row in found["rows"])


HALF = re.compile(r"\b(bf16|bfloat16)\b")
RECORDED = re.compile(r"(?<!no )CUDA graph")


def speed_ratios(measured: Mapping[str, Any]) -> Iterator[tuple[str, str, float, str, dict[str, tuple[str, float]]]]:
    """Benchmark, best peer, its rate, unit, and of ours by kind the contender and its ratio to that peer.

    Kinds are `default`, `recorded` and `compiled` (and recorded) and `fastest`; a contender in half precision is
    compared with a peer in half precision only.
    """
    found: dict[tuple[str, bool], list[Mapping[str, Any]]] = {}
    for row in measured["rows"]:
        if not row["missing"]:
            found.setdefault((row["row"], bool(HALF.search(row["name"]))), []).append(row)
    for (name, half), rows in found.items():
        peers = [row for row in rows if not row["ours"]]
        ours = [row for row in rows if row["ours"] and row["name"] != HALF_BATCH]
        if not peers or not ours:
            continue
        peer = max(peers, key=lambda row: row["median"])
        of: dict[str, tuple[str, float]] = {}
        for row in ours:
            compiled, recorded = "compiled" in row["name"], RECORDED.search(row["name"])
            kind = "compiled" if compiled and recorded else "recorded" if recorded else "" if compiled else "default"
            usual = "auto" in row["name"] or ("exact" in row["name"] and "target_losses" in row["name"])
            if kind and (kind not in of or usual):
                of[kind] = (row["name"], row["median"] / peer["median"])
        best = max(ours, key=lambda row: row["median"])
        of["fastest"] = (best["name"], best["median"] / peer["median"])
        yield f"{name}{', bf16' * half}", peer["name"], peer["median"], peer["unit"], of


# Pairs of methods, and the correction for comparing many.


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values corrected for their number, so that the chance of any false one stays below the level (Holm 1979).

    Example:
        >>> holm([0.01, 0.04, 0.03])
        [0.03, 0.06, 0.06]
    """
    corrected, highest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[place]))
        corrected[place] = highest
    return corrected


def p_value(gap: Interval) -> float:
    """Of a paired t test, two-sided.

    Example:
        >>> from metapretrain.evaluation.intervals import mean_interval
        >>> f"{p_value(mean_interval([1.0, 2.0, 3.0])):.4f}"
        '0.0742'
    """
    from scipy.special import stdtr

    if gap.sd == 0:
        return float(gap.mean == 0)
    return float(2 * stdtr(gap.n - 1, -abs(gap.mean) / gap.sd * math.sqrt(gap.n)))


Pair = tuple[str, str, Interval, float, float]  # first less second, p-value, corrected p-value


def pairs_of(name: str, group: Group) -> list[Pair]:
    """Every pair of a group's methods with two common seeds or more, the clearest difference first."""
    key = (group.benchmark, group.dataset, group.recipe, group.encoder)
    mine = [r for r in runs_of(source(name)).results if tuple(str(r.get(of) or "") for of in GROUP) == key]
    runs = by_seed(result for result in mine if result.get("kind") != "pretraining")
    metric = group.layout.column(group.layout.main).metric
    order = {row.method: row.scores[group.layout.main].mean for row in group.rows if group.layout.main in row.scores}
    methods = sorted(order.keys() & runs.keys(), key=lambda method: (-order[method], method))
    found = []
    for first, second in itertools.combinations(methods, 2):
        gap = paired(runs[first], runs[second], metric) if setting_of(runs[first]) == setting_of(runs[second]) else None
        if gap is not None and gap.known:
            found.append((first, second, gap, p_value(gap)))
    corrected = holm([one[3] for one in found])
    return sorted(((*one, p) for one, p in zip(found, corrected, strict=True)), key=lambda pair: pair[3])


# Single numbers, for plots and the summary.


def group_of(name: str, recipe: str = "") -> Group:
    """The group of a bundle, of this recipe where it has several.

    Raises InputError: there is none, or several and no recipe is named.
    """
    groups = [group for group in table_of(source(name)).groups if group.rows and recipe in ("", group.recipe)]
    if len(groups) != 1:
        raise InputError(f"docs/results/{name}.json has {len(groups)} tables of recipe {recipe!r}; one is needed")
    return groups[0]


def score(name: str, method: str, column: str = "") -> Interval:
    """The mean of a method over seeds."""
    group = group_of(name)
    row = next((row for row in group.rows if row.method == method), None)
    if row is None or (column or group.layout.main) not in row.scores:
        raise InputError(f"docs/results/{name}.json has no {column or group.layout.main} of {method}")
    return row.scores[column or group.layout.main]


def less(name: str, first: str, second: str, *recipes: str, column: str = "") -> Interval:
    """The paired difference of two methods, of two recipes where they are named."""
    group = group_of(name, recipes[0] if recipes else "")
    metric = group.layout.column(column or group.layout.main).metric
    runs = [result for result in runs_of(source(name)).results if result.get("kind") != "pretraining"]
    mine, theirs = (
        by_seed(result for result in runs if not recipes or result["recipe"] == recipes[place])[method]
        for place, method in enumerate((first, second))
    )
    gap = paired(mine, theirs, metric)
    if gap is None:
        raise InputError(f"docs/results/{name}.json has no common seed of {first} and {second}")
    return gap


def best_fewshot_rows() -> dict[tuple[str, str, str], Row]:
    """By set and setting, backbone and method the row of all files with the best mean on validation episodes."""
    found: dict[tuple[str, str, str], tuple[float, Row]] = {}
    for name in filter(is_bundle, names()):
        for group in table_of(source(name)).groups if benchmark_of(name) == "fewshot" and name not in TRANSFER else ():
            for row in group.rows:
                value = row.scores["validation"].mean if "validation" in row.scores else 0.0
                key = (group.dataset, report_fewshot.without_tag(group.recipe), row.method)
                found[key] = max(found.get(key, (value, row)), (value, row), key=lambda pair: pair[0])
    order = {setting: place for place, setting in enumerate(report_fewshot.SHOTS)}

    def place_of(key: tuple[str, str, str]) -> tuple[str, str, str, int]:
        dataset, _, setting = key[0].rpartition("-")
        return dataset, key[1], key[2], order.get(setting, len(order))

    return {key: found[key][1] for key in sorted(found, key=place_of)}
