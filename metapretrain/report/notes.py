"""What a reader must know before comparing the methods of a report; `NOTES` are those that a layout names."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from metapretrain.report.layout import Layout, Published, Result, Runs
from metapretrain.report.markdown import OTHER, figure_text, published_text
from metapretrain.report.results import data_of, is_finite
from metapretrain.report.rows import Row, by_seed, counts_of, paired, setting_of


def episode_notes(by_method: Runs) -> list[str]:
    """A line for each method whose results were measured over episodes."""
    notes = []
    for method in sorted(by_method):
        runs = by_method[method].values()
        if not (numbers := counts_of(runs, "test_episodes")):
            continue
        known = [float(width) for run in runs if (width := run["metrics"].get("test_ci95")) is not None]
        told = f", \u00b1 {100 * sum(known) / len(known):.2f} points over episodes" if known else ""
        kinds = {bool(run.get("transductive")) for run in runs}
        kind = "some runs transductive" if len(kinds) > 1 else "transductive" if True in kinds else "not transductive"
        notes.append(f"{method}: {numbers} test episodes per run{told}; {kind}.")
    return notes


def table_notes(layout: Layout, rows: Sequence[Row], by_method: Runs, baselines: Sequence[str]) -> list[str]:
    """Return a line for each thing that makes methods hard to compare: budgets, devices, data, seeds."""
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
    if single := [row.method for row in rows if len(row.seeds) == 1]:
        notes.append(f"One seed, so no interval over seeds: {', '.join(single)}.")
    return notes


def _data_notes(by_method: Runs) -> list[str]:
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


def _pairing_notes(layout: Layout, rows: Sequence[Row], by_method: Runs, baselines: Sequence[str]) -> list[str]:
    notes = []
    unmatched: dict[str, list[str]] = {}
    for row in rows:
        for baseline, difference in zip(baselines, row.differences, strict=True):
            if row.method == baseline or row.setting != setting_of(by_method[baseline]):
                continue
            if difference is None:
                notes.append(f"{row.method} minus {baseline}: no common seed, so no paired difference.")
                continue
            if set(row.seeds) != set(by_method[baseline]):
                seeds = " ".join(map(str, difference.seeds))
                notes.append(f"{row.method} minus {baseline}: on the common seeds only ({seeds}).")
            if difference.over_images is None and not layout.several:
                unmatched.setdefault(baseline, []).append(row.method)
    begin = "Predictions are not of the same images as"
    told = (f"{begin} {base}'s, so no difference over images: {', '.join(names)}." for base, names in unmatched.items())
    return [*notes, *told]


def published_notes(
    layout: Layout, rows: Sequence[Row], by_method: Runs, published: Mapping[str, Published]
) -> list[str]:
    """What is to be known of the published numbers, and those on test sets that no run here sees."""
    cited = [name for name in published if name in by_method]
    notes = []
    if cited and layout.published_about:
        ours = counts_of((run for seeds in by_method.values() for run in seeds.values()), layout.published_count)
        ours = f"; here: {ours}" if ours else ""
        notes.append(f"{layout.published_about}{ours}.")
    for told in dict.fromkeys(row.other_data for row in rows if row.other_data):
        names = [row.method for row in rows if row.other_data == told]
        which = f": {', '.join(names)}" if len(names) < len(cited) else ""
        notes.append(f"{OTHER} The published numbers are of other data ({told}), so not of the same examples{which}.")
    for name in cited:
        told = " / ".join(published_text(layout.column(key), value) for key, value in published[name].test.items())
        if told:
            source = published[name].source or "paper"
            notes.append(f"The {source}'s {name} on its test set, which no run here sees: {told}.")
    return notes


def aim_notes(by_method: Runs, layout: Layout) -> list[str]:
    """Whether each method exceeds the baselines by the layout's aim: shown, ruled out or neither, over common seeds."""
    column, notes = layout.column(layout.main), []
    scale, unit = (100, " points") if column.percent else (1, "")
    aim = f"{scale * layout.aim:g}{unit[:-1] if scale * layout.aim == 1 else unit}"
    for base in (name for names in layout.baselines for name in names if name in by_method):
        for name in (one for one in by_method if one != base):
            gap = paired(by_method[name], by_method[base], column.metric)
            if gap is None or not gap.known:
                continue
            told = "at least that is shown" if gap.low >= layout.aim else "neither shown nor ruled out"
            told = "that is ruled out" if gap.high < layout.aim else told
            limits = f"{scale * gap.mean:+.2f}{unit} (95%: {scale * gap.low:+.2f} to {scale * gap.high:+.2f})"
            begin = f"{name} minus {base}, {layout.main}: {limits}, {gap.n} paired seeds"
            notes.append(f"{begin}; the aim is {aim}: {told}.")
    return notes


SIMILARITY = re.compile(r"(^|[/:_-])(all-(minilm|mpnet|distilroberta|roberta)|paraphrase-)|^minilm$", re.IGNORECASE)


def encoder_remark(encoder: str, told: str) -> str:
    """What a reader must know (`told`) of an encoder that was trained for sentence similarity, else ""."""
    if not encoder:
        return f"These results do not name their encoder. MiniLM (all-MiniLM-L6-v2) {told}."
    known = encoder == "minilm" or encoder.lower().endswith("all-minilm-l6-v2")
    name = "MiniLM (all-MiniLM-L6-v2)" if known else encoder
    return f"{name} {told}." if SIMILARITY.search(encoder) else ""


Key = tuple[str, str, str, str]
UNIFORM = "uniform"


def schedule_pairs(groups: Mapping[Key, Sequence[Result]], layouts: Mapping[Key, Layout]) -> dict[Key, list[str]]:
    """Return notes for each group of results whose recipe differs from another's by its schedule's name alone."""
    notes: dict[Key, list[str]] = {}
    for key, results in groups.items():
        told = [result for result in results if isinstance(result.get("schedule"), Mapping)]
        names = {str(result["schedule"].get("name")) for result in told} - {UNIFORM}
        if len(names) != 1:
            continue
        benchmark, dataset, recipe, encoder = key
        slug = re.sub(r"[^\w.+-]", "-", names.pop())
        other = (benchmark, dataset, recipe.replace(slug, UNIFORM, 1), encoder)
        if slug not in recipe or other not in groups:
            continue
        notes[key] = _choices(told)
        column, base, mine = layouts[key].column(layouts[key].main), by_seed(groups[other]), by_seed(results)
        for method in sorted(mine.keys() & base.keys()):
            if (gap := paired(mine[method], base[method], column.metric)) is not None:
                shown = f"{figure_text(column, gap, '+')} ({gap.n} seed{'s' * (gap.n > 1)})"
                begin = f"{method}: {column.title} minus that of recipe {other[2]}"
                notes[key].append(f"{begin}, paired over seeds: {shown}.")
    return notes


def _choices(told: Sequence[Result]) -> list[str]:
    """What was chosen and what the probes cost, over all seeds."""
    notes = []
    for method, seeds in sorted(by_seed(told).items()):
        runs = [run["schedule"] for run in seeds.values()]
        counts: Counter[str] = Counter()
        for run in runs:
            counts.update(_numbers(run.get("updates")))
        total = max(1, sum(counts.values()))
        shares = ", ".join(f"{name} {100 * count / total:.0f}%" for name, count in counts.items())
        probes = f"{100 * sum(_numbers(run).get('probe_share', 0.0) for run in runs) / len(runs):.0f}%"
        training = f"probes {probes} of the compute of its training, on top of the budget"
        notes.append(f"{method}: updates {shares}; {training}.")
    return notes


def _numbers(found: Any) -> dict[str, float]:
    """The entries that are numbers: a damaged or foreign result may hold anything."""
    given = found.items() if isinstance(found, Mapping) else ()
    return {name: value for name, value in given if is_finite(value)}


NOTES: dict[str, Callable[[Runs, Layout], list[str]]] = {"aim": aim_notes}  # a benchmark adds its own
