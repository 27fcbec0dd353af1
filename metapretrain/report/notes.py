"""What a reader must know before comparing the rows of a report; `NOTES` are those that a layout names."""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from metapretrain.evaluation.metrics import main_scores
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
        notes.append(f"{method}: {numbers} test episodes a run{told}; {kind}.")
    return notes


def table_notes(layout: Layout, rows: Sequence[Row], by_method: Runs, baselines: Sequence[str]) -> list[str]:
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
                notes.append(f"{row.method} less {baseline}: no common seed, so no paired difference.")
                continue
            if set(row.seeds) != set(by_method[baseline]):
                seeds = " ".join(map(str, difference.seeds))
                notes.append(f"{row.method} less {baseline}: on the common seeds only ({seeds}).")
            if difference.over_images is None and not layout.several:
                unmatched.setdefault(baseline, []).append(row.method)
    told = (f"No predictions of the same images as {base}'s: {', '.join(names)}." for base, names in unmatched.items())
    return [*notes, *told]


def published_notes(
    layout: Layout, rows: Sequence[Row], by_method: Runs, published: Mapping[str, Published]
) -> list[str]:
    """What is to be known of the published rows, and their figures on test sets that no run here sees."""
    cited = [name for name in published if name in by_method]
    notes = []
    if cited and layout.published_about:
        ours = counts_of((run for seeds in by_method.values() for run in seeds.values()), layout.published_count)
        ours = f"; here: {ours}" if ours else ""
        notes.append(f"{layout.published_about}{ours}.")
    for told in dict.fromkeys(row.other_data for row in rows if row.other_data):
        names = [row.method for row in rows if row.other_data == told]
        which = f": {', '.join(names)}" if len(names) < len(cited) else ""
        notes.append(f"{OTHER} Published for other rows ({told}), so no comparison on the same ones{which}.")
    for name in cited:
        told = " / ".join(published_text(layout.column(key), value) for key, value in published[name].test.items())
        if told:
            source = published[name].source or "paper"
            notes.append(f"The {source}'s {name} on its test set, which no run here sees: {told}.")
    return notes


def reads_notes(by_method: Runs, layout: Layout) -> list[str]:
    """What each pretraining read and cost: reads, passes and seconds, means over seeds."""
    trained = {}
    for name, runs in by_method.items():
        budgets = [run.get("budget", {}) for run in runs.values()]
        costs = [[one.get(f"pretrain_{of}", 0) for one in budgets] for of in ("reads", "passes")]
        costs.append([run.get("pretrain_wall_s") or 0.0 for run in runs.values()])
        read, passes, wall = (sum(part) / len(part) for part in costs)
        if round(read):
            trained[name] = (round(read), round(passes), wall)
    if not trained:
        return []
    each = (f"{name} {reads:,} reads, {passes:,} passes, {s:,.0f} s" for name, (reads, passes, s) in trained.items())
    equal = "Equal reads" if len({read for read, _, _ in trained.values()}) == 1 else "Unequal reads"
    every = [passes for _, passes, _ in trained.values()]
    if equal.startswith("Un") and min(every) > 0.99 * max(every):
        equal = "Unequal reads, but equal passes"
    return [
        f"Pretraining, once for all sets, mean over seeds. {equal} (support and query rows); a pass is a sequence "
        f"going forward or backward once, backward in second order counts twice: {'; '.join(each)}."
    ]


def aim_notes(by_method: Runs, layout: Layout) -> list[str]:
    """Whether each row exceeds the baselines by the layout's aim: shown, ruled out or neither, over common seeds."""
    column, notes = layout.column(layout.main), []
    scale, unit = (100, " points") if column.percent else (1, "")
    for base in (name for names in layout.baselines for name in names if name in by_method):
        for name in (one for one in by_method if one != base):
            gap = paired(by_method[name], by_method[base], column.metric)
            if gap is None or not gap.known:
                continue
            told = "at least that is shown" if gap.low >= layout.aim else "neither shown nor ruled out"
            told = "that is ruled out" if gap.high < layout.aim else told
            limits = f"{scale * gap.mean:+.2f}{unit} (95%: {scale * gap.low:+.2f} to {scale * gap.high:+.2f})"
            notes.append(
                f"{name} less {base}, {layout.main}: {limits}, {gap.n} paired seeds; the aim is {scale * layout.aim:g}"
                f"{unit}: {told}."
            )
    return notes


def diverged_notes(by_method: Runs, layout: Layout) -> list[str]:
    """How many trainings of each row diverged."""
    lost = {n: sum(run.get("budget", {}).get("diverged", 0) for run in by_method[n].values()) for n in by_method}
    told = "; ".join(f"{name} {count:,}" for name, count in lost.items() if count)
    begin = "Trainings that diverged, of pretraining and of all seeds and sets; the best before that was kept, or the "
    return [f"{begin}start: {told}."] if told else []


SIMILARITY = re.compile(r"(^|[/:_-])(all-(minilm|mpnet|distilroberta|roberta)|paraphrase-)|^minilm$", re.IGNORECASE)


def encoder_remark(encoder: str, told: str) -> str:
    """What a reader must know (`told`) of an encoder that was trained for sentence similarity, else ""."""
    if not encoder:
        return f"These results do not name their encoder. MiniLM (all-MiniLM-L6-v2) {told}."
    known = encoder == "minilm" or encoder.lower().endswith("all-minilm-l6-v2")
    name = "MiniLM (all-MiniLM-L6-v2)" if known else encoder
    return f"{name} {told}." if SIMILARITY.search(encoder) else ""


def tasks_notes(by_method: Runs, layout: Layout) -> list[str]:
    """Which rows were not measured on all tasks, and whose means are over other tasks."""
    notes = []
    tasks: dict[str, list[str]] = {}
    partly = []
    for name, runs in by_method.items():
        whole = [run for run in runs.values() if run["metrics"].get(layout.column(layout.main).metric) is not None]
        partly += [name] * (len(whole) < len(runs))
        measured = [{metric: 0.0 for metric, value in run["metrics"].items() if value is not None} for run in whole]
        for told in {" ".join(sorted(main_scores(metrics))) or "unknown" for metrics in measured}:
            tasks.setdefault(told, []).append(name)
    if partly:
        notes.append(f"Not on all tasks, so without an {layout.main} figure: {', '.join(partly)}.")
    if len(tasks) > 1:
        told = "; ".join(f"{', '.join(names)}: {which}" for which, names in tasks.items())
        notes.append(f"The {layout.main} figures are means over different tasks. {told}.")
    return notes


NEAR = 0.02  # of uniform's minimum


def against(run: Result, uniform: Result) -> dict[str, float]:
    """A run's final target loss less uniform's final and lowest, mean loss over the compute of both, and its cost."""
    curves = [one["curve"] for one in (run, uniform)]
    losses = [np.array([math.inf if loss is None else loss for loss in curve["target_loss"]]) for curve in curves]
    compute = [np.array(curve["compute_units"], float) for curve in curves]
    grid = np.unique(np.concatenate(compute))
    grid = grid[(grid >= max(c[0] for c in compute)) & (grid <= min(c[-1] for c in compute))]
    areas = [np.trapezoid(np.interp(grid, c, of), grid) for c, of in zip(compute, losses, strict=True)]
    return {
        "end": losses[0][-1] - losses[1][-1],
        "minimum": losses[0][-1] - losses[1][1:].min(),  # 0: before any update
        "area": (areas[0] - areas[1]) / (grid[-1] - grid[0]),
        "updates": curves[0]["updates"][-1] / curves[1]["updates"][-1],
        "compute": compute[0][-1] / compute[1][-1],
    }


def schedule_notes(by_method: Runs, layout: Layout) -> list[str]:
    """Rows' target losses beside those of their baseline, and their distance to the best fixed source, by setting."""
    notes = []
    for setting in layout.settings:
        rows = {name: runs for name, runs in by_method.items() if setting_of(runs) == setting}
        base = next((name for names in layout.baselines for name in names if name in rows), "")
        uniform = rows.get(base, {})
        losses = {seed: run.get("curve", {}).get("target_loss") or [None] for seed, run in sorted(uniform.items())}
        fell = [seed for seed, of in losses.items() if None not in (of[0], of[-1]) and of[-1] < of[0]]
        if len(fell) < len(uniform):
            notes.append(
                f"The target loss of {base} did not fall on {len(uniform) - len(fell)} of {len(uniform)} "
                "seeds, which are left out where others are compared to it."
            )
        for name, runs in rows.items():
            seeds = [seed for seed in fell if len(runs.get(seed, {}).get("curve", {}).get("updates", ())) > 1]
            if not seeds or runs is uniform:
                continue
            found = [against(runs[seed], uniform[seed]) for seed in seeds]
            mean = {what: float(np.mean([one[what] for one in found])) for what in found[0]}
            near = sum(one["minimum"] <= NEAR for one in found)
            notes.append(
                f"{name} less {base}, target loss: final {mean['end']:+.3f}, final less the lowest of {base} "
                f"{mean['minimum']:+.3f} (at most {NEAR} on {near} of {len(found)} seeds), mean over the compute that "
                f"both spent {mean['area']:+.3f}; with {100 * mean['updates']:.0f}% of its updates and "
                f"{100 * mean['compute']:.0f}% of its compute."
            )
        notes += _beside_fixed(rows, layout, setting)
    return notes + _between_settings(by_method, layout)


def is_fixed(runs: Mapping[int, Result]) -> bool:
    """Whether a row's scheduler always takes one source."""
    return all(run.get("scheduler") == "fixed" for run in runs.values())


def _beside_fixed(rows: Runs, layout: Layout, setting: str) -> list[str]:
    """The fixed row with the best mean of the validation figures, and the others less it."""
    fixed = {name: runs for name, runs in rows.items() if is_fixed(runs)}
    metric, means = f"validation_{layout.column(layout.main).metric}", {}
    for name, runs in fixed.items():
        values = [run["metrics"].get(metric) for run in runs.values()]
        if None not in values:
            means[name] = float(np.mean(values))
    if not means:
        return []
    best = max(means, key=means.__getitem__)
    told = f"Of {len(fixed)} fixed sources ({setting}), validation picks {best}."
    return [told, *(line for name in rows if name not in fixed for line in _gap(rows, layout, name, best))]


def _between_settings(rows: Runs, layout: Layout) -> list[str]:
    """The same scheduler in the first setting and in the others: what looking at the targets gives, say."""
    found: dict[tuple[Any, ...], dict[str, str]] = {}
    for name, runs in rows.items():
        run = runs[min(runs)]
        same = (
            *(run.get(what) for what in ("scheduler", "source", "block", "options")),
            run["budget"].get("pretrain_updates"),
        )
        found.setdefault(same, {})[setting_of(runs)] = name
    notes = []
    for by_setting in found.values():
        names = [by_setting[setting] for setting in layout.settings if setting in by_setting]
        notes += [line for other in names[1:] for line in _gap(rows, layout, names[0], other)]
    return notes


def _gap(rows: Runs, layout: Layout, name: str, other: str) -> list[str]:
    """A line with the paired difference of two rows' main figures, if they have seeds in common."""
    gap = paired(rows[name], rows[other], layout.column(layout.main).metric)
    if gap is None:
        return []
    limits = f" (95%: {100 * gap.low:+.2f} to {100 * gap.high:+.2f})" if gap.known else ""
    return [f"{name} less {other}, {layout.main}: {100 * gap.mean:+.2f} points{limits}, {gap.n} seeds."]


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
                begin = f"{method}: {column.title} less that of recipe {other[2]}"
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


NOTES: Mapping[str, Callable[[Runs, Layout], list[str]]] = {
    "tasks": tasks_notes,
    "reads": reads_notes,
    "diverged": diverged_notes,
    "aim": aim_notes,
    "schedule": schedule_notes,
}
