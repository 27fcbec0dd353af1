"""A row of a report: the means of a method over its seeds, its differences to the baselines, and claims on pairs."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from metapretrain.evaluation import intervals
from metapretrain.report.layout import Claim, Layout, Published, Result, Runs, Seeds
from metapretrain.report.results import data_of, is_finite, unpack


@dataclass(frozen=True)
class Difference:
    """Means of a method minus those of a baseline, on the seeds that both have."""

    baseline: str
    seeds: list[int]
    over_seeds: intervals.Interval | None  # Student's t over seeds, of the layout's main column, where both have it
    over_images: intervals.Interval | None  # Student's t over per-image differences, each the mean over seeds
    columns: dict[str, intervals.Interval]  # over seeds, of the columns that the layout compares


@dataclass(frozen=True)
class Row:
    """One method of a group of runs; accuracies are fractions. Keys are names of the layout's columns."""

    method: str
    seeds: list[int]
    scores: dict[str, intervals.Interval]  # over seeds, where measured
    examples: dict[str, int]  # that it was measured on, where all seeds have the same number
    test_sets: dict[str, intervals.Interval]  # over these examples, at the mean over seeds
    differences: list[Difference | None]  # one a baseline; None for the baseline itself and other settings
    budget: dict[str, list[int]]  # name -> the different values over seeds
    wall_s: float | None  # mean over seeds
    devices: list[str]
    published: Published | None
    setting: str = ""  # rows are paired within one
    tokens_per_s: float | None = None  # mean over seeds; padding left out
    padding_share: float | None = None  # likewise, 0..1
    other_data: str = ""  # how the counts differ from those that the published figures are of


def make_row(
    layout: Layout, method: str, runs: Seeds, differences: list[Difference | None], published: Published | None
) -> Row:
    """Return the row of one method; a difference each baseline, see `make_difference`."""
    seeds = sorted(runs)
    scores = {}
    for column in layout.all_columns:
        values = [runs[seed]["metrics"].get(column.metric) for seed in seeds]
        if known := [float(value) for value in values if value is not None]:
            scores[column.name] = intervals.mean_interval(known)
    examples: dict[str, int] = {}
    for column in layout.columns:
        name = column.examples
        counts = {run.get("counts", {}).get(name) or run.get("correct", {}).get("n") for run in runs.values()}
        if name and len(counts := counts - {0, None}) == 1:
            examples[column.name] = int(counts.pop())
    budgets = [run.get("budget", {}) for run in runs.values()]
    budget = {}
    for name in sorted({name for one in budgets for name in one}):
        budget[name] = sorted(int(value) for value in {one.get(name) for one in budgets} - {None})
    devices = sorted({str(run["device"]) for run in runs.values() if run.get("device")})
    wall, speed, padding = (_mean_of(runs, name) for name in ("wall_s", "tokens_per_s", "padding_share"))
    test_sets = _test_sets(layout, scores, examples)
    costs = (budget, wall, devices, published, setting_of(runs), speed, padding)
    here = {name: counts_of(runs.values(), name) or "not told" for name in layout.published_counts if published}
    differ = {name: n for name, n in layout.published_counts.items() if name in here and here[name] != f"{n:,}"}
    other = "; ".join(f"{name.replace('_', ' ')} {n:,}, here {here[name]}" for name, n in differ.items())
    return Row(method, seeds, scores, examples, test_sets, differences, *costs, other)


def counts_of(runs: Iterable[Result], name: str) -> str:
    """The different values of an entry of "counts"."""
    return " or ".join(f"{n:,}" for n in sorted({run.get("counts", {}).get(name) for run in runs} - {None}))


def setting_of(runs: Seeds) -> str:
    """What the results of a method's runs call their setting, "" where they name none."""
    return str(runs[min(runs)].get("setting") or "")


def by_seed(results: Iterable[Result]) -> dict[str, dict[int, Result]]:
    """Results by method and seed."""
    found: dict[str, dict[int, Result]] = {}
    for result in results:
        found.setdefault(result["method"], {})[result["seed"]] = result
    return found


def paired(mine: Seeds, theirs: Seeds, metric: str, every: bool = False) -> intervals.Interval | None:
    """Differences of a metric over the seeds on which both have it (`every`: if on all common ones), or None."""
    seeds = sorted(set(mine) & set(theirs))
    pairs = [(mine[seed]["metrics"].get(metric), theirs[seed]["metrics"].get(metric)) for seed in seeds]
    known = [pair for pair in pairs if None not in pair]
    if not known or (every and len(known) < len(pairs)):
        return None
    return intervals.paired_interval([pair[0] for pair in known], [pair[1] for pair in known])


def _mean_of(runs: Seeds, name: str) -> float | None:
    """Mean over the seeds whose result has a number of this name."""
    given = [run.get(name) for run in runs.values()]
    known = [float(value) for value in given if is_finite(value)]
    return float(np.mean(known)) if known else None


def _test_sets(
    layout: Layout, scores: Mapping[str, intervals.Interval], examples: Mapping[str, int]
) -> dict[str, intervals.Interval]:
    """Intervals over the examples, at the mean over seeds."""
    found: dict[str, intervals.Interval] = {}
    for column in layout.columns:
        if column.interval and column.name in scores and column.name in examples:
            mean, n = scores[column.name].mean, examples[column.name]
            proportion = column.interval == "proportion"
            found[column.name] = (
                intervals.proportion_interval(mean * n, n) if proportion else intervals.correlation_interval(mean, n)
            )
    for column in layout.all_columns:
        if column.parts and column.name in scores and all(part in found for part in column.parts):
            found[column.name] = intervals.independent_mean_interval([found[part] for part in column.parts])
    return found


def make_difference(layout: Layout, by_method: Runs, method: str, baseline: str) -> Difference | None:
    """Return the differences of two methods on the seeds that both have, or None where there is none."""
    mine, theirs = by_method[method], by_method[baseline]
    seeds = sorted(set(mine) & set(theirs))
    if not seeds:
        return None
    over_seeds, *others = (
        paired(mine, theirs, layout.column(name).metric, every=True) for name in (layout.main, *layout.compared)
    )
    columns = {name: one for name, one in zip(layout.compared, others, strict=True) if one is not None}
    packed = [[runs[seed].get("correct", {}) for seed in seeds] for runs in (mine, theirs)]
    images = {(part.get("images"), part.get("n")) for side in packed for part in side}
    data = {data_of(runs[seed]) for runs in (mine, theirs) for seed in seeds}
    over_images = None
    if len(images) == 1 and len(data) == 1 and (None, None) not in images:
        first, second = (np.stack([unpack(part) for part in side]) for side in packed)
        over_images = intervals.paired_images_interval(first, second)
    return Difference(baseline, seeds, over_seeds, over_images, columns)


@dataclass(frozen=True)
class Measured:
    """A print's claim on pairs of methods, measured on the seeds that all have: means over the pairs."""

    first: str
    second: str
    pairs: int
    better: int  # pairs whose mean over seeds is on the side that the claim says
    seeds: list[int]
    over_seeds: intervals.Interval
    published: float | None
    published_better: int | None


def measure_claim(layout: Layout, claim: Claim, by_method: Runs, published: Mapping[str, Published]) -> Measured | None:
    """Compare the methods of each pair that is there on the seeds that all share; None where there are none."""
    pairs = [pair for pair in claim.pairs if all(name in by_method for name in pair)]
    seeds = sorted(set.intersection(*(set(by_method[name]) for pair in pairs for name in pair))) if pairs else []
    if not seeds:
        return None
    main = layout.column(layout.main)
    scores = np.array(
        [[[float(by_method[name][seed]["metrics"][main.metric]) for seed in seeds] for name in pair] for pair in pairs]
    )
    gaps, sign = scores[:, 0] - scores[:, 1], -1 if main.lower_is_better else 1  # (pairs, seeds)
    printed = [[row.scores.get(main.name) for name in pair if (row := published.get(name))] for pair in pairs]
    known = all(len(pair) == 2 and None not in pair for pair in printed)
    cited = [float(pair[0] or 0) - float(pair[1] or 0) for pair in printed] if known else None
    return Measured(
        first=claim.first,
        second=claim.second,
        pairs=len(pairs),
        better=int((sign * gaps.mean(axis=1) > 0).sum()),
        seeds=seeds,
        over_seeds=intervals.mean_interval(gaps.mean(axis=0)),
        published=float(np.mean(cited)) if cited else None,
        published_better=sum(sign * gap > 0 for gap in cited) if cited else None,
    )


@dataclass(frozen=True)
class Group:
    """Runs that may be compared: the same benchmark, dataset, recipe and, where they name one, encoder."""

    benchmark: str
    dataset: str
    recipe: str
    encoder: str
    layout: Layout
    baselines: list[str]
    rows: list[Row]
    pretraining: list[Row]
    claims: list[Measured]
    notes: list[str]
    majority: dict[str, float]  # column to the figure of the majority class, where the results hold it
    remark: str  # bears on the marked columns; "" for none

    def figures(self) -> tuple[dict[str, intervals.Interval], dict[str, float]]:
        """The main numbers by method, and the published ones of these methods that may be compared with them."""
        main = self.layout.main
        ours = {row.method: row.scores[main] for row in self.rows if main in row.scores}
        rows = {row.method: row.published for row in self.rows if row.published and not row.other_data}
        theirs = {n: value for n, row in rows.items() if row.comparable and (value := row.scores.get(main)) is not None}
        return ours, {name: value for name, value in theirs.items() if name in ours}
