"""What a reader must know before comparing the rows of a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from metapretrain.evaluation.columns import Layout
from metapretrain.evaluation.episode_notes import episode_notes
from metapretrain.evaluation.results import Result, data_of
from metapretrain.evaluation.rows import Row


def table_notes(
    layout: Layout, rows: Sequence[Row], by_method: Mapping[str, Mapping[int, Result]], baselines: Sequence[str]
) -> list[str]:
    """Return a line for each thing that makes rows hard to compare: budgets, devices, data, seeds."""
    notes = []
    passes = {row.method: row.budget.get("encoder_passes", []) for row in rows}
    if len({value for values in passes.values() for value in values}) > 1:
        told = "; ".join(f"{name} {', '.join(f'{v:,}' for v in values)}" for name, values in passes.items() if values)
        notes.append(f"Unequal budgets, not a comparison at equal cost. Encoder passes: {told}.")
    if any(passes.values()) and not all(passes.values()):
        notes.append(f"No encoder passes recorded: {', '.join(name for name, v in passes.items() if not v)}.")
    devices = sorted({device for row in rows for device in row.devices})
    if len(devices) > 1:
        told = "; ".join(f"{row.method}: {', '.join(row.devices)}" for row in rows if row.devices)
        notes.append(f"Several devices, so wall times are not comparable: {told}.")
    episodes = episode_notes(by_method)
    for column in layout.columns:
        if column.examples and not episodes:
            measured = [row for row in rows if not column.optional or column.name in row.scores]
            numbers = {row.method: row.examples.get(column.name) for row in measured}
            if len(set(numbers.values())) > 1 or None in numbers.values():
                told = "; ".join(f"{name} {number or 'unknown or several'}" for name, number in numbers.items())
                what = f"{column.title.split()[0]} examples" if layout.several else "test images"
                notes.append(f"The numbers of {what} differ: {told}.")
    notes += [*episodes, *_data_notes(by_method), *_pairing_notes(layout, rows, by_method, baselines)]
    single = [row.method for row in rows if len(row.seeds) == 1]
    if single:
        notes.append(f"One seed, so no interval over seeds: {', '.join(single)}.")
    return notes


def _data_notes(by_method: Mapping[str, Mapping[int, Result]]) -> list[str]:
    """Runs may be of folders of one name whose files differ."""
    notes = []
    for own in (False, True):
        methods: dict[tuple[tuple[str, str], ...], list[str]] = {}
        for name, runs in by_method.items():
            for data in {data_of(run, own) for run in runs.values()} - ({()} if own else set()):
                methods.setdefault(data, []).append(name)
        if len(methods) > 1:
            told = "; ".join(", ".join(names) for names in methods.values())
            notes.append(f"Not a comparison on the same data: the checksums of the data files differ between {told}.")
    return notes


def _pairing_notes(
    layout: Layout, rows: Sequence[Row], by_method: Mapping[str, Mapping[int, Result]], baselines: Sequence[str]
) -> list[str]:
    notes = []
    unmatched: dict[str, list[str]] = {}
    for row in rows:
        for baseline, difference in zip(baselines, row.differences, strict=True):
            if row.method == baseline or layout.setting(row.method) != layout.setting(baseline):
                continue
            if difference is None:
                notes.append(f"{row.method} less {baseline}: no common seed, so no paired difference.")
                continue
            if set(row.seeds) != set(by_method[baseline]):
                seeds = " ".join(map(str, difference.seeds))
                notes.append(f"{row.method} less {baseline}: on the common seeds only ({seeds}).")
            if difference.over_images is None and not layout.several:
                unmatched.setdefault(baseline, []).append(row.method)
    for baseline, methods in unmatched.items():
        notes.append(f"No predictions of the same images as {baseline}'s: {', '.join(methods)}.")
    return notes
