"""The table of a benchmark: mean and interval over seeds, and paired differences to the baselines."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from metapretrain.errors import InputError
from metapretrain.evaluation import tables
from metapretrain.evaluation.claims import FAMILIES, Claim, compare_families
from metapretrain.evaluation.episode_notes import episode_notes
from metapretrain.evaluation.intervals import (
    Interval,
    mean_interval,
    paired_images_interval,
    paired_interval,
    proportion_interval,
)
from metapretrain.evaluation.published import PUBLISHED, Published, published_for
from metapretrain.evaluation.results import Collection, Result, collect, data_of, unpack
from metapretrain.training.files import write_file

# For each comparison the first of these methods that a group of runs has.
BASELINES = (("supervised-resnet18", "supervised"), ("simclr", "simclr-unfrozen", "simclr-frozen"))


@dataclass(frozen=True)
class Difference:
    """Accuracy of a method less that of a baseline, on the seeds that both have."""

    baseline: str
    seeds: list[int]
    over_seeds: Interval  # Student's t over seeds
    over_images: Interval | None  # Student's t over per-image differences, each the mean over seeds


@dataclass(frozen=True)
class Row:
    """One method of a group of runs; accuracies are fractions."""

    method: str
    seeds: list[int]
    accuracy: dict[str, Interval]  # by tables.METRICS, where measured
    test_images: int | None
    test_set: Interval | None  # Wilson at the mean over seeds
    differences: list[Difference | None]  # one a baseline; None for the baseline itself
    budget: dict[str, list[int]]  # name -> the different values over seeds
    wall_s: float | None  # mean over seeds
    devices: list[str]
    published: Published | None


@dataclass(frozen=True)
class Group:
    """Runs that may be compared: the same benchmark, dataset and recipe."""

    benchmark: str
    dataset: str
    recipe: str
    baselines: list[str]
    rows: list[Row]
    pretraining: list[Row]
    claims: list[Claim]
    notes: list[str]


@dataclass(frozen=True)
class Table:
    """What `build_table` made; `.markdown()`, `.csv()` and `.json()` show the same figures."""

    groups: list[Group]
    incomplete: list[str]
    problems: list[str]

    def markdown(self) -> str:
        """The table for readers, percentages."""
        return tables.markdown(self)

    def csv(self) -> str:
        """A line a method, fractions."""
        return tables.csv_text(self)

    def json(self) -> str:
        """Everything, fractions."""
        return json.dumps(tables.json_object(self), indent=1, allow_nan=False) + "\n"


def build_table(
    collection: Collection | Sequence[Result],
    *,
    published: Mapping[str, Mapping[str, Published]] | None = None,
    baselines: Sequence[Sequence[str]] = BASELINES,
) -> Table:
    """Turn results into a table, a group for each benchmark, dataset and recipe.

    Args:
        collection: from `collect`, or a list of results.
        published: dataset to method to the published figures; by default those of the papers.
        baselines: for each comparison the names a baseline may have; the first one present is used.

    Raises:
        InputError: a result holds impossible figures (a list of results that did not come from `collect`).
    """
    if not isinstance(collection, Collection):
        collection = Collection(list(collection))
    cited = PUBLISHED if published is None else published
    keys = sorted({_group_key(result) for result in collection.results})
    groups = []
    for key in keys:
        mine = [result for result in collection.results if _group_key(result) == key]
        groups.append(_group(key, mine, published_for(key[1], key[2], cited), baselines))
    return Table(groups, collection.incomplete, collection.problems)


def _group_key(result: Result) -> tuple[str, str, str]:
    return (
        str(result.get("benchmark") or ""),
        str(result.get("dataset") or ""),
        str(result.get("recipe") or ""),
    )


def _group(
    key: tuple[str, str, str],
    results: Sequence[Result],
    published: Mapping[str, Published],
    baselines: Sequence[Sequence[str]],
) -> Group:
    by_method: dict[str, dict[int, Result]] = {}
    shared: dict[str, dict[int, Result]] = {}
    for result in results:
        kind = shared if result.get("kind") == "pretraining" else by_method
        kind.setdefault(result["method"], {})[result["seed"]] = result
    chosen = [next((name for name in names if name in by_method), None) for names in baselines]
    present = [name for name in chosen if name is not None]
    order = {name: place for place, name in enumerate(published)}
    names = sorted(by_method, key=lambda name: (order.get(name, len(order)), name))
    rows = []
    for name in names:
        differences = [None if base == name else _difference(by_method, name, base) for base in present]
        rows.append(_row(name, by_method[name], differences, published.get(name)))
    pretraining = [_row(name, shared[name], [], None) for name in sorted(shared)]
    families = [compare_families(by_method, published, *pair) for pair in FAMILIES]
    claims = [claim for claim in families if claim is not None]
    return Group(*key, present, rows, pretraining, claims, _notes(rows, by_method, present))


def _row(
    method: str, runs: Mapping[int, Result], differences: list[Difference | None], published: Published | None
) -> Row:
    seeds = sorted(runs)
    accuracy = {}
    for metric in tables.METRICS:
        values = [runs[seed]["metrics"].get(f"{metric}_accuracy") for seed in seeds]
        known = [float(value) for value in values if value is not None]
        if known:
            accuracy[metric] = mean_interval(known)
    counts = {run.get("counts", {}).get("test") or run.get("correct", {}).get("n") for run in runs.values()}
    images = counts.pop() if len(counts) == 1 else None
    test_set = None
    if images and "test" in accuracy:
        test_set = proportion_interval(accuracy["test"].mean * images, images)
    names = sorted({name for run in runs.values() for name in run.get("budget", {})})
    budget = {}
    for name in names:
        found = {run["budget"].get(name) for run in runs.values() if "budget" in run} - {None}
        budget[name] = sorted(int(value) for value in found)
    walls = [float(run["wall_s"]) for run in runs.values() if run.get("wall_s") is not None]
    devices = sorted({str(run["device"]) for run in runs.values() if run.get("device")})
    wall = float(np.mean(walls)) if walls else None
    return Row(method, seeds, accuracy, images, test_set, differences, budget, wall, devices, published)


def _difference(
    by_method: Mapping[str, Mapping[int, Result]], method: str, baseline: str
) -> Difference | None:
    mine, theirs = by_method[method], by_method[baseline]
    seeds = sorted(set(mine) & set(theirs))
    if not seeds:
        return None
    a, b = ([float(runs[seed]["metrics"]["test_accuracy"]) for seed in seeds] for runs in (mine, theirs))
    packed = [[runs[seed].get("correct", {}) for seed in seeds] for runs in (mine, theirs)]
    images = {(part.get("images"), part.get("n")) for side in packed for part in side}
    data = {data_of(runs[seed]) for runs in (mine, theirs) for seed in seeds}
    over_images = None
    if len(images) == 1 and len(data) == 1 and (None, None) not in images:
        first, second = (np.stack([unpack(part) for part in side]) for side in packed)
        over_images = paired_images_interval(first, second)
    return Difference(baseline, seeds, paired_interval(a, b), over_images)


def _notes(
    rows: Sequence[Row], by_method: Mapping[str, Mapping[int, Result]], baselines: Sequence[str]
) -> list[str]:
    """What a reader must know before comparing the rows."""
    notes = []
    passes = {row.method: row.budget.get("encoder_passes", []) for row in rows}
    if len({value for values in passes.values() for value in values}) > 1:
        told = "; ".join(
            f"{name} {', '.join(f'{v:,}' for v in values)}" for name, values in passes.items() if values
        )
        notes.append(f"Unequal budgets, not a comparison at equal cost. Encoder passes: {told}.")
    if any(passes.values()) and not all(passes.values()):
        notes.append(f"No encoder passes recorded: {', '.join(name for name, v in passes.items() if not v)}.")
    devices = sorted({device for row in rows for device in row.devices})
    if len(devices) > 1:
        told = "; ".join(f"{row.method}: {', '.join(row.devices)}" for row in rows if row.devices)
        notes.append(f"Several devices, so wall times are not comparable: {told}.")
    images = sorted({row.test_images for row in rows if row.test_images})
    episodes = episode_notes(by_method)
    if not episodes and (len(images) > 1 or any(row.test_images is None for row in rows)):
        told = "; ".join(f"{row.method} {row.test_images or 'unknown or several'}" for row in rows)
        notes.append(f"The numbers of test images differ: {told}.")
    notes += [*episodes, *_data_notes(by_method), *_pairing_notes(rows, by_method, baselines)]
    single = [row.method for row in rows if len(row.seeds) == 1]
    if single:
        notes.append(f"One seed, so no interval over seeds: {', '.join(single)}.")
    return notes


def _data_notes(by_method: Mapping[str, Mapping[int, Result]]) -> list[str]:
    """Runs may be of folders of one name whose files differ."""
    methods: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for name, runs in by_method.items():
        for data in {data_of(run) for run in runs.values()}:
            methods.setdefault(data, []).append(name)
    if len(methods) < 2:
        return []
    told = "; ".join(", ".join(names) for names in methods.values())
    return [f"Not a comparison on the same data: the checksums of the data files differ between {told}."]


def _pairing_notes(
    rows: Sequence[Row], by_method: Mapping[str, Mapping[int, Result]], baselines: Sequence[str]
) -> list[str]:
    notes = []
    unmatched: dict[str, list[str]] = {}
    for row in rows:
        for baseline, difference in zip(baselines, row.differences, strict=True):
            if row.method == baseline:
                continue
            if difference is None:
                notes.append(f"{row.method} less {baseline}: no common seed, so no paired difference.")
                continue
            if set(row.seeds) != set(by_method[baseline]):
                seeds = " ".join(map(str, difference.seeds))
                notes.append(f"{row.method} less {baseline}: on the common seeds only ({seeds}).")
            if difference.over_images is None:
                unmatched.setdefault(baseline, []).append(row.method)
    for baseline, methods in unmatched.items():
        notes.append(f"No predictions of the same images as {baseline}'s: {', '.join(methods)}.")
    return notes


def write(
    root: Path | str,
    out: Path | str | None = None,
    *,
    published: Mapping[str, Mapping[str, Published]] | None = None,
    baselines: Sequence[Sequence[str]] = BASELINES,
) -> str:
    """Write `table.md`, `table.csv` and `table.json` for the results under `root` and return the Markdown.

    Args:
        root: a folder of runs, a folder of bundles, or one bundle (see `collect`).
        out: where to write; by default the folder `report` beside the runs.

    Raises:
        InputError: nothing to report, or the folder cannot be written.
    """
    root = Path(root)
    table = build_table(collect(root), published=published, baselines=baselines)
    folder = Path(out) if out is not None else (root if root.is_dir() else root.parent) / "report"
    if folder.exists() and not folder.is_dir():
        raise InputError(f"cannot write the report to {folder}: it is a file; name a folder")
    text = table.markdown()
    write_file(folder / "table.md", text)
    write_file(folder / "table.csv", table.csv())
    write_file(folder / "table.json", table.json())
    return text
