"""What a reader must know before comparing the rows of a report."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from metapretrain.evaluation.intervals import paired_interval
from metapretrain.evaluation.metrics import main_scores
from metapretrain.report.layout import Layout, Published, Result, Runs
from metapretrain.report.markdown import percent, plain, published_text
from metapretrain.report.results import data_of, is_finite
from metapretrain.report.rows import Row


def episode_notes(by_method: Mapping[str, Mapping[int, Result]]) -> list[str]:
    """Return a line for each method whose results were measured over episodes, in the order of their names.

    Example:
        >>> run = {"metrics": {"test_accuracy": 0.9, "test_ci95": 0.002}, "counts": {"test_episodes": 600}}
        >>> episode_notes({"maml": {0: {**run, "transductive": True}}})
        ['maml: 600 test episodes a run, \u00b1 0.20 points over episodes; transductive.']
    """
    notes = []
    for method in sorted(by_method):
        runs = by_method[method].values()
        numbers = sorted({run.get("counts", {}).get("test_episodes") for run in runs} - {None})
        if not numbers:
            continue
        widths = [run["metrics"].get("test_ci95") for run in runs]
        known = [float(width) for width in widths if width is not None]
        told = f", \u00b1 {100 * sum(known) / len(known):.2f} points over episodes" if known else ""
        kinds = {bool(run.get("transductive")) for run in runs}
        kind = "some runs transductive" if len(kinds) > 1 else "transductive" if True in kinds else "not transductive"
        notes.append(f"{method}: {' or '.join(f'{n:,}' for n in numbers)} test episodes a run{told}; {kind}.")
    return notes


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


PAPER = (
    "The paper: T5-base, 5 seeds, Amazon-2 of Zhang et al. (2015), which is another set than here; its PPT was "
    "pretrained on pseudo labels, its MetaPT(Y), beside metapt-kmeans, on 650,000 reviews of Yelp."
)


def prompt_notes(by_method: Runs, published: Mapping[str, Published]) -> list[str]:
    """Return the notes below the tables.

    Args:
        by_method: method to seed to result.
        published: method to the paper's figures, for the data set of these runs.
    """
    notes = [PAPER] if any(name in published for name in by_method) else []
    costs = {name: _cost(runs) for name, runs in by_method.items()}
    trained = {name: cost for name, cost in costs.items() if cost[0]}
    if trained:
        reads = {cost[0] for cost in trained.values()}
        told = "; ".join(
            f"{name} {read:,} reads, {passes:,} passes, {wall:,.0f} s" for name, (read, passes, wall) in trained.items()
        )
        equal = "Equal reads" if len(reads) == 1 else "Unequal reads"
        notes.append(
            f"Pretraining, once for all sets, mean over seeds. {equal} (support and query rows); a pass is a sequence "
            f"going forward or backward once, backward in second order counts twice: {told}."
        )
    lost = {
        name: sum(run.get("budget", {}).get("diverged", 0) for run in runs.values()) for name, runs in by_method.items()
    }
    if any(lost.values()):
        told = "; ".join(f"{name} {count:,}" for name, count in lost.items() if count)
        notes.append(
            "Trainings that diverged, of pretraining and of all seeds and sets; the best before that was kept, or the "
            f"start: {told}."
        )
    return notes


def _cost(runs: Mapping[int, Result]) -> tuple[int, int, float]:
    """Reads, passes and seconds of pretraining, means over seeds."""
    count = max(1, len(runs))
    budgets = [run.get("budget", {}) for run in runs.values()]
    reads, passes = (sum(budget.get(f"pretrain_{of}", 0) for budget in budgets) / count for of in ("reads", "passes"))
    return round(reads), round(passes), sum(run.get("pretrain_wall_s") or 0.0 for run in runs.values()) / count


SIMILARITY = re.compile(r"(^|[/:_-])(all-(minilm|mpnet|distilroberta|roberta)|paraphrase-)|^minilm$", re.IGNORECASE)
SEEN = (
    "was trained for sentence similarity, on data that holds Quora's duplicate questions: its PARA and STS figures, "
    "and the overall ones, are no comparison with an encoder that saw none, such as the paper's BERT-base"
)


def encoder_remark(encoder: str) -> str:
    """Return what a reader of PARA and STS figures must know of the encoder; "" where there is nothing.

    Args:
        encoder: name or path as in the results, "" where they name none.

    Example:
        >>> encoder_remark("minilm")[:52], encoder_remark("bert-base-uncased")
        ('MiniLM (all-MiniLM-L6-v2) was trained for sentence s', '')
    """
    if not encoder:
        return f"These results do not name their encoder. MiniLM (all-MiniLM-L6-v2) {SEEN}."
    if SIMILARITY.search(encoder) is None:
        return ""
    known = encoder == "minilm" or encoder.lower().endswith("all-minilm-l6-v2")
    return f"{'MiniLM (all-MiniLM-L6-v2)' if known else encoder} {SEEN}."


def text_notes(by_method: Runs, published: Mapping[str, Published]) -> list[str]:
    """Return the notes below the tables: training pairs, the paper's other figures, tasks that differ.

    Args:
        by_method: method to seed to result.
        published: method to the paper's figures, for the data set of these runs.
    """
    notes = []
    cited = [published[name] for name in by_method if name in published]
    if cited:
        pairs = sorted(
            {run.get("counts", {}).get("para_train") for runs in by_method.values() for run in runs.values()} - {None}
        )
        ours = f"; here: {' or '.join(f'{n:,}' for n in pairs)}" if pairs else ""
        notes.append(f"The paper: BERT-base, no seeds named, 141k PARA pairs to train on{ours}.")
    from metapretrain.report.layouts import TEXT_TEST

    for name, figures in TEXT_TEST.items():
        if name in by_method and name in published:
            source = published[name].source or "paper"
            notes.append(f"The {source}'s {name} on its test set, which no run here sees: {figures_of(figures)}.")
    tasks: dict[str, list[str]] = {}
    partly = []
    for name, runs in by_method.items():
        whole = [run for run in runs.values() if run["metrics"].get("overall") is not None]
        partly += [name] * (len(whole) < len(runs))
        for told in {_tasks_of(run) for run in whole}:
            tasks.setdefault(told, []).append(name)
    if partly:
        notes.append(f"Not on all tasks, so without an overall figure: {', '.join(partly)}.")
    if len(tasks) > 1:
        told = "; ".join(f"{', '.join(names)}: {which}" for which, names in tasks.items())
        notes.append(f"The overall figures are means over different tasks. {told}.")
    return notes


def _tasks_of(run: Result) -> str:
    metrics = {name: 0.0 for name, value in run["metrics"].items() if value is not None}
    return " ".join(sorted(main_scores(metrics))) or "unknown"


def figures_of(scores: Mapping[str, float | None]) -> str:
    """`49.0 / 82.5 / 0.857 / 0.724`: figures of the text table's columns as the paper prints them.

    Example:
        >>> figures_of({"sst": 0.49, "sts": 0.857, "overall": None})
        '49.0 / 0.857 / -'
    """
    from metapretrain.report.layouts import OVERALL, TASKS

    columns = {column.name: column for column in (*TASKS, OVERALL)}
    return " / ".join(published_text(columns[name], value) for name, value in scores.items())


class Reached(NamedTuple):
    """What a run had spent when its target loss was as low as that of uniform choice.

    Attributes:
        updates: source updates, as a part of what uniform had made then; NaN where the loss was never as low.
        compute: the same of all compute, probes and fitting of heads included.
    """

    updates: float
    compute: float


def reached(run: Result, uniform: Result, *, lowest: bool = False) -> Reached:
    """Compare the curves of two runs of one seed, at the evaluations of `run` after its first update.

    Args:
        lowest: with the lowest target loss that uniform choice ever had, and what it had spent then; else with its
            loss at the end, which may have risen again.

    Example:
        >>> uniform = {"curve": {"updates": [0, 100], "compute_units": [0, 300], "target_loss": [2.0, 1.0]}}
        >>> run = {"curve": {"updates": [0, 50, 100], "compute_units": [0, 240, 480], "target_loss": [2.0, 0.9, 0.8]}}
        >>> reached(run, uniform)
        Reached(updates=0.5, compute=0.8)
    """
    curve, reference = run["curve"], uniform["curve"]
    goal = -1
    if lowest:
        goal = min(range(1, len(reference["updates"])), key=lambda place: _number(reference["target_loss"][place]))
    low = [_number(loss) <= _number(reference["target_loss"][goal]) for loss in curve["target_loss"]]
    low[:1] = [False]  # before any update
    if not any(low):
        return Reached(math.nan, math.nan)
    place = low.index(True)
    return Reached(*(curve[name][place] / reference[name][goal] for name in ("updates", "compute_units")))


def _number(loss: float | None) -> float:
    """A loss that was not finite is stored as None."""
    return math.inf if loss is None else loss


def schedule_notes(by_method: Runs) -> list[str]:
    """Lines for a report: how soon rows reach uniform's target loss, and their distance to the best fixed source."""
    notes = []
    for setting in ("aware", "agnostic"):
        rows = {name: runs for name, runs in by_method.items() if name.endswith(f"-{setting}")}
        uniform = rows.get(f"uniform-{setting}", {})
        fell = [seed for seed in sorted(uniform) if _fell(uniform[seed])]
        if len(fell) < len(uniform):
            notes.append(
                f"The target loss of uniform-{setting} did not fall on {len(uniform) - len(fell)} of {len(uniform)} "
                "seeds, which are left out where others are compared to it."
            )
        for name, runs in rows.items():
            seeds = [seed for seed in fell if seed in runs and "curve" in runs[seed]]
            if seeds and runs is not uniform:
                end = [reached(runs[seed], uniform[seed]) for seed in seeds]
                low = [reached(runs[seed], uniform[seed], lowest=True) for seed in seeds]
                notes.append(_told(name, f"final target loss of uniform-{setting}", end))
                if any(math.isfinite(one.updates) for one in end):
                    notes.append(_told(name, f"lowest target loss of uniform-{setting}", low))
        notes += _beside_fixed(rows, setting)
    return notes + _aware_less_agnostic(by_method)


def _fell(run: Result) -> bool:
    losses = run.get("curve", {}).get("target_loss", [])
    first, last = (losses[0], losses[-1]) if losses else (None, None)
    return bool(first is not None and last is not None and last < first)


def _scored(runs: Mapping[int, Result]) -> set[int]:
    return {seed for seed, run in runs.items() if run["metrics"].get("downstream") is not None}


def _told(name: str, goal: str, found: list[Reached]) -> str:
    there = [one for one in found if math.isfinite(one.updates)]
    if not there:
        return f"{name} never reached the {goal} ({len(found)} seeds)."
    updates, compute = (np.mean([getattr(one, part) for one in there]) for part in ("updates", "compute"))
    return (
        f"{name} reached the {goal} on {len(there)} of {len(found)} seeds, after {100 * updates:.0f}% of its source "
        f"updates and {100 * compute:.0f}% of its compute up to there, on average."
    )


def picked(rows: Runs) -> str | None:
    """The fixed row with the best mean of the validation figures, if there is one.

    Example:
        >>> runs = {"fixed-a-aware": {0: {"metrics": {"validation_downstream": 0.4}}},
        ...         "fixed-b-aware": {0: {"metrics": {"validation_downstream": 0.5}}}}
        >>> picked(runs)
        'fixed-b-aware'
    """
    means = {}
    for name, runs in rows.items():
        values = [run["metrics"].get("validation_downstream") for run in runs.values()]
        if name.startswith("fixed-") and values and None not in values:
            means[name] = float(np.mean(values))
    return max(means, key=lambda name: means[name]) if means else None


def _beside_fixed(rows: Runs, setting: str) -> list[str]:
    best = picked(rows)
    if best is None:
        return []
    count = sum(name.startswith("fixed-") for name in rows)
    notes = [f"Of {count} fixed sources ({setting}), validation picks {best}."]
    return notes + [line for name in rows if not name.startswith("fixed-") for line in _gap(rows, name, best)]


def _aware_less_agnostic(rows: Runs) -> list[str]:
    """The same scheduler in both settings: what looking at the targets, and their training parts, gives."""
    others = {name: f"{name.removesuffix('-aware')}-agnostic" for name in rows if name.endswith("-aware")}
    return [line for name, other in others.items() if other in rows for line in _gap(rows, name, other)]


def _gap(rows: Runs, name: str, other: str) -> list[str]:
    """A line with the paired difference of two rows downstream, if they have seeds in common."""
    seeds = sorted(_scored(rows[name]) & _scored(rows[other]))
    if not seeds:
        return []
    mine, theirs = ([rows[row][seed]["metrics"]["downstream"] for seed in seeds] for row in (name, other))
    gap = paired_interval(mine, theirs)
    limits = f" (95%: {100 * gap.low:+.2f} to {100 * gap.high:+.2f})" if gap.known else ""
    return [f"{name} less {other}, downstream: {100 * gap.mean:+.2f} points{limits}, {len(seeds)} seeds."]


Key = tuple[str, str, str, str]
UNIFORM = "uniform"


def schedule_pairs(groups: Mapping[Key, Sequence[Result]]) -> dict[Key, list[str]]:
    """Return notes for each group of results whose recipe differs from another's by its schedule alone.

    Args:
        groups: results by benchmark, dataset, recipe and encoder. The recipe's name holds that of the schedule, which a
            result's `schedule` tells.

    Example:
        >>> def run(name, seed, accuracy):
        ...     told = {"name": name, "updates": {"prl": 3, "simclr": 1}, "probe_share": 0.2}
        ...     return {"method": "a", "seed": seed, "metrics": {"test_accuracy": accuracy}, "schedule": told}
        >>> uniform, exp3 = ("stl10", "d", "paper-uniform", ""), ("stl10", "d", "paper-exp3", "")
        >>> groups = {uniform: [run("uniform", 0, 0.70), run("uniform", 1, 0.72)], exp3: [run("exp3", 0, 0.75)]}
        >>> for note in schedule_pairs(groups)[exp3]:
        ...     print(note)
        a: updates prl 75%, simclr 25%; probes 20% of the compute of its training, on top of the budget.
        a: test % less that of recipe paper-uniform, paired over seeds: +5.00 (1 seed).
    """
    notes: dict[Key, list[str]] = {}
    for key, results in groups.items():
        told = [result for result in results if isinstance(result.get("schedule"), Mapping)]
        names = {str(result["schedule"].get("name")) for result in told} - {UNIFORM}
        if len(names) != 1:
            continue
        benchmark, dataset, recipe, encoder = key
        slug = re.sub(r"[^\w.+-]", "-", names.pop())
        other = (benchmark, dataset, recipe.replace(slug, UNIFORM, 1), encoder)
        if slug in recipe and other in groups:
            notes[key] = _choices(told) + _notes(results, groups[other], other)
    return notes


def _notes(results: Sequence[Result], uniform: Sequence[Result], other: Key) -> list[str]:
    from metapretrain.report.layouts import layout_of

    layout = layout_of(other[0], [name for result in results for name in result["metrics"]])
    column = layout.column(layout.main)
    shown = percent if column.percent else plain
    before = {(run["method"], run["seed"]): run["metrics"].get(column.metric) for run in uniform}
    pairs: dict[str, list[tuple[float, float]]] = {}
    for run in results:
        value, base = run["metrics"].get(column.metric), before.get((run["method"], run["seed"]))
        if value is not None and base is not None:
            pairs.setdefault(run["method"], []).append((value, base))
    notes = []
    for method, values in sorted(pairs.items()):
        less = paired_interval([value for value, _ in values], [base for _, base in values])
        notes.append(
            f"{method}: {column.title} less that of recipe {other[2]}, paired over seeds: {shown(less, '+')} "
            f"({len(values)} seed{'s' * (len(values) > 1)})."
        )
    return notes


def _choices(told: Sequence[Result]) -> list[str]:
    """What was chosen and what the probes cost, over all seeds."""
    notes = []
    for method in sorted({result["method"] for result in told}):
        runs = [result["schedule"] for result in told if result["method"] == method]
        counts: dict[str, float] = {}
        for run in runs:
            for name, count in _numbers(run.get("updates")).items():
                counts[name] = counts.get(name, 0) + count
        total = max(1, sum(counts.values()))
        shares = ", ".join(f"{name} {100 * count / total:.0f}%" for name, count in counts.items())
        probes = sum(_numbers(run).get("probe_share", 0.0) for run in runs) / len(runs)
        notes.append(
            f"{method}: updates {shares}; probes {100 * probes:.0f}% of the compute of its training, on top of the "
            "budget."
        )
    return notes


def _numbers(found: Any) -> dict[str, float]:
    """The entries that are numbers: a damaged or foreign result may hold anything."""
    given = found.items() if isinstance(found, Mapping) else ()
    return {name: value for name, value in given if is_finite(value)}
