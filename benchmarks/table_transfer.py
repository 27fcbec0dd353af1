"""Does pretraining by prototypes transfer? Tables and plots by labels per class, and of the encoders on other classes.

    python benchmarks/table_transfer.py runs --out transfer

RESULTS are folders of runs or files of `metapretrain report --bundle`. Runs of `run_stl10.py --labels-per-class N` make
the first tables, those of `run_fewshot.py --encoder` over their encoders the second; other runs are left out.
"""

from __future__ import annotations

import re
import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ctrl_c  # noqa: F401

from metapretrain.errors import InputError
from metapretrain.evaluation.intervals import Interval, mean_interval
from metapretrain.files import write_file
from metapretrain.models.pretrained import ENCODER_HEADS
from metapretrain.options import Parser, main_guard
from metapretrain.report.figures import COLOURS, INK, MARKERS, literal, panels, plain, save_figure
from metapretrain.report.layout import Result, Seeds
from metapretrain.report.markdown import markdown_table, printable, shown
from metapretrain.report.results import Collection, bundle, collect, data_of
from metapretrain.report.rows import paired

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BASE = "supervised-resnet18"
METHODS = (BASE, "prl-query-unfrozen-linear", "simclr")
ENCODERS = (*METHODS, "pretrain-prl-query", "pretrain-simclr")
RECIPES, COUNTS, SEEDS = ("paper", "strong"), (10, 25, 50, 100, 250, 450), (0, 1, 2)
AGAINST_SIMCLR = (METHODS[1:], ENCODERS[3:])  # prototypes and SimCLR: fine-tuned, and not
SHOTS, HEADS = ("5w1s", "5w5s"), ("nearest", "centred", "logistic")
TEST, MISSING = "test_accuracy", "not run yet"
ENCODER = re.compile(rf"encoder-(?:({'|'.join(ENCODER_HEADS)})-)?(.+)-s(\d+)")
Cells = dict[Any, dict[str, dict[int, Result]]]  # by place (labels, or shots and head), method and seed
Tables = dict[tuple[str, str], Cells]  # by data set and recipe
LEGEND = (
    "Test accuracy in %, mean ± half-width of the 95% interval over {} (Student t); {}. Differences are paired (of the "
    "same seeds), in points. Above and below: the interval of the difference leaves out 0; no interval is corrected "
    "for the number of comparisons."
)


@dataclass(frozen=True)
class Panel:
    """Means with the ends of their intervals, (x, mean, low, high) in %, of one series or several."""

    title: str
    axis: str
    series: Mapping[str, Sequence[tuple[float, float, float, float]]]
    ticks: Sequence[str] = ()  # names of the places 0, 1, ... on the axis; without them it is logarithmic


# Results.


def labels_of(result: Result) -> int | None:
    """The labels per class that a run of `run_stl10.py` was restricted to."""
    found = re.fullmatch(r".+-(\d+)-labels", str(result.get("dataset")))
    return int(found[1]) if found and result.get("benchmark") == "stl10" else None


def encoder_of(result: Result) -> re.Match[str] | None:
    """Head, encoder and the encoder's seed of a run of `run_fewshot.py --encoder`."""
    return ENCODER.fullmatch(result["method"]) if result.get("benchmark") == "fewshot" else None


def by_labels(results: Iterable[Result]) -> Tables:
    """Runs by data set and recipe, labels per class, method and seed.

    Raises InputError: a run has no test accuracy, is there twice, or was tested on other data than the others.
    """
    tables: Tables = {}
    for result in results:
        if (labels := labels_of(result)) and result.get("kind") != "pretraining":
            dataset = result["dataset"].removesuffix(f"-{labels}-labels")
            put(tables, (dataset, result["recipe"]), labels, result["method"], result["seed"], result)
    return tables


def by_encoder(results: Iterable[Result]) -> Tables:
    """Runs by data set and recipe, (shots, head), encoder and the encoder's seed; raises as `by_labels`."""
    tables: Tables = {}
    for result in results:
        if found := encoder_of(result):
            recipe = re.sub(r"^[^-]+-(stl10-)?", "", result["recipe"])  # it begins with the backbone and the tag
            dataset, _, shots = result["dataset"].rpartition("-")
            put(tables, (dataset, recipe), (shots, found[1] or "nearest"), found[2], int(found[3]), result)
    return tables


def put(tables: Tables, key: tuple[str, str], place: Any, method: str, seed: int, result: Result) -> None:
    """Add a run to its table."""
    told = f"{result['dataset']}, {result['recipe']}: {result['method']}, seed {seed}"
    if result["metrics"].get(TEST) is None:
        raise InputError(f"{told} has no {TEST}; leave the run out, or run it without --validate")
    cells = tables.setdefault(key, {})
    other = next(runs_in(cells), result)
    if tested(other) != tested(result):
        both = f"{tested(result)[1]}, others on {tested(other)[1]}"
        raise InputError(f"{told} was tested on {both}: give runs on the same data")
    seeds = cells.setdefault(place, {}).setdefault(method, {})
    if seed in seeds:
        raise InputError(f"{told} is there twice; give each run once")
    seeds[seed] = result


def trained_on(cells: Cells) -> set[int]:
    """The labels per class that the encoders of a table were trained on, as their commands say.

    Raises InputError: they are several.
    """
    found = {int(n) for run in runs_in(cells) for n in re.findall(r"-(\d+)-labels", str(run.get("command")))}
    if len(found) > 1:
        told = f"encoders of {listed(sorted(found))} labels per class are in one table"
        raise InputError(f"{told}; give those of one number, or runs with another --tag")
    return found


def runs_in(cells: Cells) -> Iterator[Result]:
    """All runs of a table."""
    return (run for by_method in cells.values() for seeds in by_method.values() for run in seeds.values())


def tested(result: Result) -> tuple[Any, str]:
    """The files that a run read, and how much it was tested on."""
    counts, what = result.get("counts", {}), "episodes" if encoder_of(result) else "images"
    number = counts.get("test_episodes" if what == "episodes" else "test")
    return data_of(result), f"{number:,} {what}" if number else f"{what} whose number is not told"


def ordered(names: Iterable[Any], first: Sequence[Any]) -> list[Any]:
    """The known names in their order, then the others."""
    found = set(names)
    return [*(name for name in first if name in found), *sorted(found - set(first))]


def passes_of(results: Iterable[Result], recipe: str) -> dict[str, dict[int, set[int]]]:
    """Encoder passes of a recipe's runs by method and labels per class."""
    found: dict[str, dict[int, set[int]]] = {}
    for result in results:
        spent = result.get("budget", {}).get("encoder_passes")
        if (labels := labels_of(result)) and result["recipe"] == recipe and spent is not None:
            found.setdefault(result["method"], {}).setdefault(labels, set()).add(int(spent))
    return found


def methods_of(cells: Cells, first: Sequence[str]) -> list[str]:
    """The methods of a recipe, those of record first."""
    return ordered((method for by_method in cells.values() for method in by_method), first)


def mean_of(seeds: Seeds) -> Interval | None:
    """Mean and interval over the seeds, None of none."""
    return mean_interval([run["metrics"][TEST] for _, run in sorted(seeds.items())]) if seeds else None


def gaps_of(cells: Cells, first: str, second: str) -> dict[Any, Interval]:
    """The paired difference of two methods at each place where both have a common seed."""
    found = {place: paired(by.get(first, {}), by.get(second, {}), TEST) for place, by in cells.items()}
    return {place: gap for place, gap in found.items() if gap is not None}


# What the intervals say.


def verdict(gap: Interval) -> str:
    """Where a difference lies: `above` or `below` 0 beyond its interval, `none` shown, or `one` seed only.

    Example:
        >>> [verdict(mean_interval(gaps)) for gaps in ([1.0, 1.1], [-1.0, -1.1], [-1.0, 1.1], [1.0])]
        ['above', 'below', 'none', 'one']
    """
    if not gap.known:
        return "one"
    return "above" if gap.low > 0 else "below" if gap.high < 0 else "none"


def listed(names: Iterable[Any]) -> str:
    """Names in a sentence.

    Example:
        >>> listed([10, 25, 50])
        '10, 25 and 50'
    """
    *most, last = map(str, names)
    return f"{', '.join(most)} and {last}" if most else last


WORDS = {"above": "above", "below": "below", "none": "no difference shown", "one": "one seed only"}


def compared(gaps: Mapping[Any, Interval], unit: str = "") -> str:
    """At which places a difference is above 0, below it, or neither, beyond its interval.

    Example:
        >>> gaps = {10: mean_interval([-1.0, -1.1]), 25: mean_interval([-1.0, 1.1])}
        >>> compared(gaps, " labels"), compared({50: gaps[10], 100: gaps[10]})
        ('below at 10 labels, no difference shown at 25 labels', 'below everywhere')
    """
    found: dict[str, list[Any]] = {}
    for place, gap in gaps.items():
        found.setdefault(verdict(gap), []).append(place)
    if len(found) == 1 and len(gaps) > 1:
        return "no difference shown anywhere" if "none" in found else f"{WORDS[next(iter(found))]} everywhere"
    return ", ".join(f"{told} at {listed(found[kind])}{unit}" for kind, told in WORDS.items() if kind in found)


def crossing(gaps: Mapping[int, Interval]) -> str:
    """Whether two lines cross, as far as the intervals show it; "" of fewer than two counts of labels.

    A crossing is shown by a difference below 0 and one above 0, each beyond its interval; it lies between both.

    Example:
        >>> crossing({10: mean_interval([-2.0, -2.1]), 25: mean_interval([-1.0, 1.2]), 50: mean_interval([2.0, 2.1])})
        'The lines cross between 10 and 50 labels.'
    """
    if len(gaps) < 2:
        return ""
    beyond = [(labels, kind) for labels in sorted(gaps) if (kind := verdict(gaps[labels])) in ("above", "below")]
    if shown_at := [(one[0], two[0]) for one, two in pairwise(beyond) if one[1] != two[1]]:
        return f"The lines cross {listed(f'between {low} and {high}' for low, high in shown_at)} labels."
    signs = [(labels, gaps[labels].mean > 0) for labels in sorted(gaps) if gaps[labels].mean]
    turns = [f"between {one[0]} and {two[0]}" for one, two in pairwise(signs) if one[1] != two[1]]
    if turns:
        return f"The means change order {listed(turns)} labels; the intervals show no crossing."
    return "The means keep their order." if signs else "The means are equal."


def missing(tables: Tables, places: Sequence[Any], methods: Sequence[str]) -> list[str]:
    """What of the runs of record is not there: recipes, places, methods and seeds; a line, or none."""
    found = {seed for cells in tables.values() for by in cells.values() for runs in by.values() for seed in runs}
    seeds, lines = sorted(found | set(SEEDS)), []
    here = {recipe for _, recipe in tables}
    lines += [f"recipe {recipe}: all" for recipe in RECIPES if recipe not in here]
    for (dataset, recipe), cells in tables.items():
        lacking: dict[str, list[str]] = {}  # what is not there, and where
        for place in places:
            runs = cells.get(place, {})
            gone = {name: [seed for seed in seeds if seed not in runs.get(name, {})] for name in methods}
            parts = {name: f" seed{'s' * (len(n) > 1)} {listed(n)}" * (n != seeds) for name, n in gone.items() if n}
            what = ", ".join(name + part for name, part in parts.items())
            what = "all methods" if all(n == seeds for n in gone.values()) else what
            lacking.setdefault(what, []).append(place_name(place))
        lines += [f"{dataset}, recipe {recipe}: {what} at {listed(at)}" for what, at in lacking.items() if what]
    return ["", f"Not run yet: {'; '.join(lines)}."] if lines else []


def place_name(place: Any) -> str:
    """The labels per class, or shots and head, in words."""
    return str(place) if isinstance(place, int) else " ".join(map(shots_of, place))


# Tables.


def label_lines(results: Sequence[Result]) -> list[str]:
    """Accuracy by labels per class, the differences to supervised training, and what they show: Markdown."""
    tables, lines = by_labels(results), []
    for dataset, recipe in (keys := table_order(tables)):
        cells = dict(sorted(tables[dataset, recipe].items()))
        names = methods_of(cells, METHODS)
        others = [name for name in names if name != BASE]
        gaps = {(one, two): gaps_of(cells, one, two) for one, two in [(n, BASE) for n in others] + [*pairwise(others)]}
        rows, seeds = [], most_seeds(cells)
        for n in sorted({*cells, *COUNTS}):
            means = [cell(mean_of(cells.get(n, {}).get(name, {})), seeds) for name in names]
            rows.append([str(n), *means, *(cell(found.get(n), seeds, "+") for found in gaps.values())])
        header = ["labels per class", *names, *map(minus, gaps)]
        lines += [f"**{dataset}, recipe {recipe}**", "", *markdown_table(header, rows)]
        for (one, two), found in gaps.items():
            if found:
                lines.append(f"- `{one}` against `{two}`: {compared(found, ' labels')}. {crossing(found)}".rstrip())
        lines += [f"- {budgets(passes_of(results, recipe), names)}", ""]
    return [*told(lines, tables, "seeds"), *missing(tables, COUNTS, METHODS)] if keys else ["Not run yet."]


def encoder_lines(results: Sequence[Result]) -> list[str]:
    """Accuracy of the encoders as few-shot learners by shots and head, and what it shows: Markdown."""
    tables, lines = by_encoder(results), []
    keys = table_order(tables)
    for dataset in dict.fromkeys(dataset for dataset, _ in keys):
        recipes = {recipe: tables[dataset, recipe] for one, recipe in keys if one == dataset}
        places = places_of({place: {} for cells in recipes.values() for place in cells})
        rows: list[list[str]] = []
        differences: list[list[str]] = []
        verdicts: dict[tuple[str, str], list[str]] = {}
        for recipe, cells in recipes.items():
            passes, seeds = passes_of(results, recipe), most_seeds(cells)
            most = {labels for counts in passes.values() for labels in counts if labels == max(counts)}
            trained = trained_on(cells) or most  # where no command tells it, encoders of all labels
            names = methods_of(cells, ENCODERS)
            for name in names:
                spent = {n for labels, found in passes.get(name, {}).items() if labels in trained for n in found}
                about = [f"{recipe}: {name}", " or ".join(f"{n:,}" for n in sorted(spent)) or "not told"]
                rows.append(about + [cell(mean_of(cells.get(at, {}).get(name, {})), seeds) for at in places])
            for pair in [(name, BASE) for name in names if name != BASE] + list(AGAINST_SIMCLR):
                if gaps := gaps_of({place: cells.get(place, {}) for place in places}, *pair):
                    told_of = compared({place_name(place): gap for place, gap in gaps.items()})
                    verdicts.setdefault(pair, []).append(f"recipe {recipe}, {told_of}")
                    found = [cell(gaps.get(at), seeds, "+") for at in places]
                    differences.append([f"{recipe}: {minus(pair)}", *found])
        lines += [f"**{dataset}**", ""]
        lines += markdown_table(["recipe: encoder", "encoder passes", *map(place_name, places)], rows)
        if differences:
            lines += markdown_table(["recipe: difference", *map(place_name, places)], differences)
        lines += [f"- `{one}` against `{two}`: {'; '.join(found)}." for (one, two), found in verdicts.items()] + [""]
    every = [(shots, head) for shots in SHOTS for head in HEADS]
    return [*told(lines, tables, "encoders"), *missing(tables, every, ENCODERS)] if keys else ["Not run yet."]


def table_order(tables: Tables) -> list[tuple[str, str]]:
    """The keys of the tables, recipes of record first."""
    recipes = ordered({recipe for _, recipe in tables}, RECIPES)
    return sorted(tables, key=lambda key: (key[0], recipes.index(key[1])))


def most_seeds(cells: Cells) -> int:
    """The largest number of seeds of a method."""
    return max(len(seeds) for by_method in cells.values() for seeds in by_method.values())


def cell(value: Interval | None, seeds: int, sign: str = "") -> str:
    """A mean with its interval, and the number of its seeds where others have more.

    Example:
        >>> cell(mean_interval([0.5, 0.5]), 2), cell(mean_interval([0.5]), 2), cell(None, 2)
        ('50.00 ± 0.00', '50.00 (1 seed)', 'not run yet')
    """
    if value is None:
        return MISSING
    return shown(value, sign=sign) + f" ({value.n} seed{'s' * (value.n > 1)})" * (value.n < seeds)


def budgets(passes: Mapping[str, Mapping[int, set[int]]], names: Sequence[str]) -> str:
    """How many encoder passes the runs had, and whether those of one number of labels had the same."""
    spent: dict[int, set[int]] = {}
    for name in names:
        for labels, found in passes.get(name, {}).items():
            spent.setdefault(labels, set()).update(found)
    places: dict[str, list[int]] = {}
    for labels, found in sorted(spent.items()):
        places.setdefault(" or ".join(f"{n:,}" for n in sorted(found)), []).append(labels)
    told = [f"{number} at {listed(at)} labels" if len(places) > 1 else number for number, at in places.items()]
    unequal = "Budgets are not equal. " * any(len(found) > 1 for found in spent.values())
    return f"{unequal}Encoder passes of a run, pretraining included: {', '.join(told) or 'not told'}."


def told(lines: Sequence[str], tables: Tables, what: str) -> list[str]:
    """The lines of tables and what their numbers are."""
    size = {tested(run)[1] for cells in tables.values() for run in runs_in(cells)}
    return [*lines, LEGEND.format(what, f"{listed(sorted(size))} per run")]


def minus(pair: tuple[str, str]) -> str:
    """A difference of two methods in words.

    Example:
        >>> minus(("simclr", BASE)), minus(("prl-query-unfrozen-linear", "simclr"))
        ('simclr minus supervised', 'prl-query-unfrozen-linear minus simclr')
    """
    return f"{pair[0]} minus {'supervised' if pair[1] == BASE else pair[1]}"


def places_of(cells: Cells) -> list[tuple[str, str]]:
    """Shots and heads of a recipe, in their order."""
    shots, heads = (ordered({place[at] for place in cells}, first) for at, first in enumerate((SHOTS, HEADS)))
    return [(one, head) for one in shots for head in heads if (one, head) in cells]


def shots_of(setting: str) -> str:
    """A setting's shots in words.

    Example:
        >>> shots_of("5w1s")
        '1-shot'
    """
    return re.sub(r"^\d+w(\d+)s$", r"\1-shot", setting)


# Plots.


def point(x: float, mean: Interval) -> tuple[float, float, float, float]:
    """A point of a panel, in %; a mean of one seed has no interval."""
    ends = (mean.low, mean.high) if mean.known else (mean.mean, mean.mean)
    return x, 100 * mean.mean, 100 * ends[0], 100 * ends[1]


def label_panels(results: Sequence[Result]) -> list[Panel]:
    """Accuracy against labels per class, a panel per recipe."""
    tables, found = by_labels(results), []
    for dataset, recipe in table_order(tables):
        cells = tables[dataset, recipe]
        series = {
            name: [point(n, mean) for n, by in sorted(cells.items()) if (mean := mean_of(by.get(name, {})))]
            for name in methods_of(cells, METHODS)
        }
        found.append(Panel(f"{dataset}, recipe {recipe}", "labels per class", series))
    return found


def encoder_panels(results: Sequence[Result]) -> list[Panel]:
    """Accuracy by encoder and head, a panel per recipe and number of shots."""
    tables, found = by_encoder(results), []
    for dataset, recipe in table_order(tables):
        cells = tables[dataset, recipe]
        names, places = methods_of(cells, ENCODERS), places_of(cells)
        for shots in dict.fromkeys(shots for shots, _ in places):
            series = {}
            for number, head in enumerate(head for one, head in places if one == shots):
                by = cells[shots, head]
                means = [(x, mean_of(by.get(name, {}))) for x, name in enumerate(names)]
                series[head] = [point(x + 0.15 * (number - 1), mean) for x, mean in means if mean]
            title = f"{dataset}, {shots_of(shots)}, encoders of recipe {recipe}"
            found.append(Panel(title, "", series, names))
    return found


def figure_of(shown_panels: Sequence[Panel]) -> Figure:
    """The panels, at most two beside each other."""
    figure, all_axes = panels(len(shown_panels), 2, 5.2, 3.9)
    for axes, panel in zip(all_axes, shown_panels, strict=True):
        for number, (name, points) in enumerate(panel.series.items()):
            x, mean, low, high = ([one[at] for one in points] for at in range(4))
            ends = [
                [m - one for m, one in zip(mean, low, strict=True)],
                [one - m for m, one in zip(mean, high, strict=True)],
            ]
            style: dict[str, Any] = {
                "color": COLOURS[(0, 3, 2, 4, 5)[number % 5]],
                "marker": MARKERS[number % len(MARKERS)],
            }
            axes.errorbar(
                x, mean, yerr=ends, label=name, linestyle="" if panel.ticks else "-", **style, capsize=3, markersize=5
            )
        if panel.ticks:
            axes.set_xticks(range(len(panel.ticks)), panel.ticks, rotation=20, ha="right", fontsize=8)
            axes.set_xlim(-0.5, len(panel.ticks) - 0.5)
        else:
            axes.set_xscale("log")
            ticks = sorted({x for points in panel.series.values() for x, *_ in points})
            axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
            axes.set_xticks([], minor=True)
        axes.set_title(panel.title, fontsize=10, color=INK)
        axes.set_xlabel(panel.axis, color=INK)
        axes.set_ylabel("test accuracy %; bars: 95% over seeds", fontsize=8, color=INK)
        axes.grid(axis="y", color="0.9", linewidth=0.6)
        axes.legend(frameon=False, fontsize=8)
        plain(axes)
    return literal(figure)


# The command.


def gathered(paths: Sequence[Path]) -> Collection:
    """The runs of all folders and files together.

    Raises InputError: one is not there or is no result, or none of their runs is of the kind that this script shows.
    """
    parts = [collect(path) for path in paths]
    results = [result for part in parts for result in part.results]
    told = [result for result in results if result.get("recipe") and result.get("dataset")]
    kept = [result for result in told if labels_of(result) or encoder_of(result)]
    problems = [problem for part in parts for problem in part.problems]
    if not kept:
        raise InputError(
            f"no complete run of run_stl10.py --labels-per-class N or run_fewshot.py --encoder in "
            f"{', '.join(map(str, paths))}; {len(results)} other runs" + "".join(f"; {one}" for one in problems[:1])
        )
    return Collection(kept, [name for part in parts for name in part.incomplete], problems)


def page(found: Collection) -> str:
    """Both tables, and which runs are not in them."""
    lines = ["## By labels per class", "", *label_lines(found.results), ""]
    lines += ["## The encoders on other classes", "", *encoder_lines(found.results)]
    for title, names in (("Incomplete runs, not in the tables", found.incomplete), ("Problems", found.problems)):
        lines += ["", f"{title}: {len(names)}", "", *(f"- {name}" for name in names)] if names else []
    return "\n".join(map(printable, lines)).rstrip() + "\n"


def options_of(argv: Sequence[str] | None) -> Namespace:
    """Read the command line."""
    parser = Parser(prog="table_transfer.py", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULTS", help="folders of runs, files of results")
    parser.add_argument(
        "--out", type=Path, default=Path("transfer"), metavar="DIR", help="for transfer.md and its plots"
    )
    parser.add_argument(
        "--bundle", type=Path, metavar="DIR", help="also write transfer-labels.json, transfer-encoders.json"
    )
    options: Namespace = parser.parse_args(argv)
    return options


@main_guard
def main(argv: Sequence[str] | None = None) -> int:
    """Write the tables and plots, print the tables."""
    options = options_of(argv)
    found = gathered(options.results)
    text = page(found)
    print(text)
    print(write_file(options.out / "transfer.md", text))
    for name, shown_panels in (("labels", label_panels(found.results)), ("encoders", encoder_panels(found.results))):
        if shown_panels:
            print(save_figure(figure_of(shown_panels), options.out / f"{name}.png"))
    for name, benchmark in (("labels", "stl10"), ("encoders", "fewshot")) if options.bundle else ():
        kept = [result for result in found.results if result["benchmark"] == benchmark]
        if kept:  # what is right image by image is left out: it is the largest part, and no table here shows it
            lean = [{key: value for key, value in result.items() if key != "correct"} for result in kept]
            print(bundle(lean, options.bundle / f"transfer-{name}.json"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
