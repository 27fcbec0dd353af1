"""Write the pages, tables and plots of docs/results/ from its result files, docs/results/*.json.

    python docs/build_results.py          # write all of them
    python docs/build_results.py --check  # exit 1 if one would change

To add results, put a file NAME.json into docs/results/ (`metapretrain report RUNS --bundle NAME.json`, or what
run_speed.py and run_scale.py write) and run this. No line is needed: its tables become docs/results/tables/NAME.md and
NAME.csv, and its main table stands on the page of its benchmark, below "Other result files". To place it in a page's
text instead, write `<!-- NAME -->` and `<!-- /NAME -->` there; the table comes between both.

All else on the pages docs/results/*.md is written by hand. The questions of index.md are in result_summary.py, the
plots in result_plots.py.
"""

from __future__ import annotations

import csv
import io
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import ctrl_c  # noqa: F401
import report_fewshot
import result_files
import result_plots
import result_summary
import speed_shapes
import table_transfer
from result_files import (
    TRANSFER,
    Pair,
    benchmark_of,
    content,
    is_bundle,
    is_speed,
    keep_layouts,
    names,
    pairs_of,
    runs_of,
    shots,
    source,
    speed_ratios,
    table_of,
)
from run_scale import scaling_table

from metapretrain.errors import InputError
from metapretrain.files import write_file
from metapretrain.options import Parser, main_guard
from metapretrain.report.markdown import (
    OTHER,
    figure_text,
    markdown,
    markdown_table,
    printable,
    published_text,
    scores_section,
)
from metapretrain.report.results import collect
from metapretrain.report.rows import Group

UNTUNED = {("stl10", "strong"): ("prl-standard-", "the loss was chosen for query mode; standard mode was not tuned")}
MANY = 15  # contenders of a speed file that a page still shows one by one


# Tables in Markdown.


def main_table(name: str) -> str:
    """The table that a page shows of a result file, with a line on where the others are.

    Raises:
        InputError: the file is not there, damaged or of an unknown kind.
    """
    return f"{checked(main_lines, name)}\n\nAll tables of these results: [{name}](tables/{name}.md)."


def full_page(name: str) -> str:
    """The page with all tables of a result file."""
    about = f"Result file: [{name}.json](../{name}.json). The same as [CSV]({name}.csv)."
    return f"# {name}\n\n{about}\n\n{checked(full_lines, name)}\n"


def checked(make: Callable[[str], str], name: str) -> str:
    """What `make` returns of a result file; a file of another kind is an error of one line."""
    try:
        return re.sub(r"\n{3,}", "\n\n", make(name)).strip()
    except InputError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise InputError(f"docs/results/{name}.json is damaged or of an unknown kind: {error!r}") from error


def main_lines(name: str) -> str:
    """The main table of a result file."""
    if is_special(name):
        found = content(source(name))
        if is_speed(found) and len(found["rows"]) > MANY:
            return lean(speed_summary(found))
        return lean(other_table(name))
    groups = [group for group in table_of(source(name)).groups if group.rows]
    if benchmark_of(name) == "fewshot":
        return lean(fewshot_tables(groups))
    lines = []
    for group in groups:
        lines += [f"**{group.recipe}**", ""] if len(groups) > 1 else []
        lines += marked_untuned(group, list(map(printable, scores_section(group))))
        lines += [f"- {printable(note)}" for note in group.notes if note.startswith(OTHER)]
        lines += ["", pairs_sentence(pairs_of(name, group)), ""]
    return lean("\n".join(lines))


def full_lines(name: str) -> str:
    """Every table of a result file."""
    if is_special(name):
        return lean(other_table(name))
    text = ""
    for group in table_of(source(name)).groups:
        text += "\n".join(marked_untuned(group, markdown([group]).splitlines()))
        if pairs := pairs_of(name, group):
            title = ", ".join(filter(None, (group.dataset, group.recipe, group.encoder)))
            text += f"\n\n## Pairs of methods: {title}\n\n{pairs_sentence(pairs)}\n\n{pairs_table(group, pairs)}"
        text += "\n\n"
    return lean(text)


def is_special(name: str) -> bool:
    """Whether a result file's tables are not those of `metapretrain report`."""
    return name in TRANSFER or name.endswith("-sweeps") or not is_bundle(name)


def other_table(name: str) -> str:
    """The table of a result file that is no bundle, or of runs that have tables of their own."""
    if name in TRANSFER:
        runs = [result for one in TRANSFER if source(one).is_file() for result in runs_of(source(one)).results]
        make = table_transfer.label_lines if name == "transfer-labels" else table_transfer.encoder_lines
        return "\n".join(make(runs))
    if name.endswith("-sweeps"):
        return sweeps(collect(source(name)).results)
    found = content(source(name))
    if "ways" in found:
        return encoders(found)
    if "shapes" in found:
        shapes = [speed_shapes.Shape(**one) for one in found["shapes"]]
        return f"{speed_shapes.table(shapes)}\n\n{told_of(found)}"
    if "rows" in found and "processes" in found["rows"][0]:
        return scaling_table(found)
    if is_speed(found):
        return speed(found)
    if name.endswith("-tuning"):
        return trials(name, found)
    raise InputError(f"docs/results/{name}.json is damaged or of an unknown kind")


def lean(text: str) -> str:
    """The Markdown without the constant columns of its tables, which a line below each tells.

    Example:
        >>> print(lean("| a | n | x |\\n| --- | ---: | ---: |\\n| p | 3 | 1 |\\n| q | 3 | 2 |\\n").strip())
        | a | x |
        | --- | ---: |
        | p | 1 |
        | q | 2 |
        <BLANKLINE>
        The same in all lines: n 3.
    """
    return re.sub(r"(?:^\|.*\n)+", lambda found: _lean_table(found[0]), f"{text}\n", flags=re.MULTILINE)


def cells_of(line: str) -> list[str]:
    """The cells of a line of a Markdown table."""
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip()[1:-1])]


def _lean_table(text: str) -> str:
    header, _, *body = rows = [cells_of(line) for line in text.splitlines()]
    compared = [row for row in body if row[0] != "majority class"]
    values = {place: {row[place] for row in compared} for place in range(1, len(header))}
    constant = [place for place, found in values.items() if len(found) == 1 and len(compared) > 1]
    if not constant or len(constant) == len(header) - 1:
        return text
    lines = [f"| {' | '.join(c for place, c in enumerate(row) if place not in constant)} |" for row in rows]
    told = [f"{header[place]} {one}" for place in constant if (one := compared[0][place]) not in ("", "-")]
    return "\n".join([*lines, *(["", f"The same in all lines: {'; '.join(told)}."] * bool(told))]) + "\n"


def marked_untuned(group: Group, lines: list[str]) -> list[str]:
    """The lines of a table with a mark on the methods that the recipe was not tuned for."""
    for (benchmark, recipe), (begin, why) in UNTUNED.items():
        if (group.benchmark, group.recipe) == (benchmark, recipe):
            lines = [re.sub(rf"^\| ({begin}\S+)", r"| \1 (untuned)", line) for line in lines]
            lines += ["", f"Untuned: {why}.", ""]
    return lines


def fewshot_tables(groups: Sequence[Group]) -> str:
    """A table for each set and backbone: methods by settings, the published numbers beside ours."""
    settings = {setting: place for place, setting in enumerate(report_fewshot.SHOTS)}
    found: dict[tuple[str, str], dict[str, Group]] = {}
    for group in groups:
        dataset, _, setting = group.dataset.rpartition("-")
        found.setdefault((dataset, group.recipe), {})[setting] = group
    lines = []
    for (dataset, backbone), by_setting in found.items():
        order = sorted(by_setting, key=lambda setting: settings.get(setting, len(settings)))
        rows = {setting: {row.method: row for row in by_setting[setting].rows} for setting in order}
        body = []
        for method in dict.fromkeys(name for setting in order for name in rows[setting]):
            cells = [method]
            for setting in order:
                row, column = rows[setting].get(method), by_setting[setting].layout.column("test")
                scores = row.published.scores if row and row.published else {}
                source_of = f" ({row.published.source})" if row and row.published and row.published.source else ""
                mark = f" {OTHER}" * bool(row and row.other_data)
                cells.append(figure_text(column, row.scores.get("test")) if row else "-")
                cells.append(published_text(column, scores.get("test")) + source_of + mark)
            body.append(cells)
        header = ["method", *(title for setting in order for title in (f"{shots(setting)} %", f"published, {setting}"))]
        lines += [f"**{dataset}, {backbone}**", "", *markdown_table(header, body)]
        kept = [note for setting in order for note in by_setting[setting].notes if " test episodes" in note]
        kept += [note for setting in order for note in by_setting[setting].notes if note.startswith(OTHER)]
        named: dict[str, list[str]] = {}  # what is said, and of which methods
        for note in dict.fromkeys(re.sub(r", \S+ \S+ points over episodes", "", note) for note in kept):
            method, _, told = note.rpartition(": ")
            named.setdefault(told, []).append(method)
        notes = [f"{', '.join(filter(None, methods))}: {told}".removeprefix(": ") for told, methods in named.items()]
        lines += [*(f"- {printable(note)}" for note in notes), ""]
    return "\n".join([*lines, "Mean ± half-width of the 95% interval over seeds (Student t)."])


def trials(name: str, found: dict[str, dict[str, float]]) -> str:
    """The table of a file of trials, whose metrics are of validation rows and named as those of the report."""
    if not found:
        raise InputError(f"docs/results/{name}.json holds no trial")
    columns = {column.metric: column for column in result_files.LAYOUTS[name.split("-")[0]].all_columns}
    measured = sorted(next(iter(found.values())), key=lambda metric: metric not in columns)  # validation's own first
    known = {metric: columns.get(metric) or columns.get(metric.removeprefix("validation_")) for metric in measured}
    shown_ = {metric: column for metric, column in known.items() if column is not None}
    rows = []
    for trial, scores in found.items():
        cells = [
            f"{100 * scores[metric]:.1f}" if column.percent else f"{scores[metric]:.3f}"
            for metric, column in shown_.items()
        ]
        rows.append([trial.removesuffix(" seed 0"), *cells])
    lines = markdown_table(["trial", *(column.title for column in shown_.values())], rows)
    return "\n".join([*lines, "A line per trial, scored on validation data only; seed 0 where no seed is named."])


def sweeps(results: Sequence[Mapping[str, Any]]) -> str:
    """The table of runs of `sweep_prompts.py`, whose recipes end with what was changed and its value."""
    found: dict[tuple[str, str, float], list[float]] = {}
    for result in results:
        _, sweep, value = result["recipe"].rsplit("-", 2)
        at = float(result["counts"]["pretraining"]) if sweep == "rows" else float(value)
        found.setdefault((sweep, result["method"], at), []).append(100 * result["metrics"]["mean_accuracy"])
    order = sorted(found, key=lambda key: (key[0], key[2]))
    methods = list(dict.fromkeys(method for _, method, _ in found))
    rows = []
    for sweep, at in dict.fromkeys((sweep, at) for sweep, _, at in order):
        values = [found.get((sweep, method, at), []) for method in methods]
        seeds = max(map(len, values))
        rows.append([f"{sweep}: {at:,.0f}", str(seeds), *(f"{sum(v) / len(v):.1f}" if v else "-" for v in values)])
    legend = "Mean accuracy %; means over seeds, without intervals."
    return "\n".join([*markdown_table(["what was changed", "seeds", *methods], rows), legend])


def encoders(found: Mapping[str, Any]) -> str:
    """The table of pretrained encoders as few-shot learners, and heads' paired differences to fine-tuning."""
    heads = list(dict.fromkeys(head for row in found["rows"] for by in row["accuracy"].values() for head in by))
    rows, gaps = [], []
    for row in found["rows"]:
        name = ", ".join([row["encoder"], row["set"], *([f"{row['episodes']} episodes"] if "episodes" in row else [])])
        for shot, by in row["accuracy"].items():
            cells = ["{:.2f} ± {:.2f}".format(*by[head]) if head in by else "-" for head in heads]
            rows.append([name, str(row["classes"]), shot, *cells])
        for shot, by in row.get("minus finetune", {}).items():
            told = ", ".join("{} {:+.2f} ± {:.2f}".format(head, *gap) for head, gap in by.items())
            gaps.append(f"{name}, {shot}-shot: {told}")
    about = f"Accuracy % over {found['episodes']:,} episodes of {found['ways']} classes"
    if any("episodes" in row for row in found["rows"]):
        about += " where a line names no other number"
    about += ", ± half-width of the 95% interval over episodes"
    lines = markdown_table(["encoder, set", "classes", "shots", *heads], rows)
    told = f"{about}. {found['hardware']}; {found['versions']}."
    if gaps:
        told += f"\n\nMinus `finetune` over the same episodes, mean of the paired differences ± 95%: {'; '.join(gaps)}."
    return "\n".join([*lines, told])


# Speed.


def told_of(measured: Mapping[str, Any]) -> str:
    """Where and with what a file of speeds was measured."""
    about = f"{measured['hardware']}; load of the machine {measured['load']}; {measured['versions']}"
    commit = re.sub("([0-9a-f]{7})[0-9a-f]{33}", r"\1", measured["commit"])  # short names
    return f"{about}; commit {commit}."


def speed(measured: dict[str, Any]) -> str:
    """The tables of a file that `benchmarks/run_speed.py --out` wrote; what was skipped is told below."""
    rows = []
    for row in measured["rows"]:
        if row["missing"]:
            continue
        note = f" ({row['note']})" if row.get("note") else ""
        differs = "" if row["difference"] is None else f"{row['difference']:.0e}"
        rate, limits = f"{plain(row['median'])} {row['unit']}", f"{plain(row['low'])} to {plain(row['high'])}"
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
        rows.append([row["row"], f"{row['name']}{note}", rate, limits, ratio, differs])
    header = ["benchmark", "contender", "median per second", "range", "times the best peer", "gradients differ by"]
    lines = markdown_table(header, rows)
    if measured.get("memory"):
        header = ["benchmark", "contender", "peak of a meta-step, MiB", "left after 50 episodes, MiB"]
        memory = [
            [row["row"], row["name"], f"{row['peak']:,.1f}", f"{row['left']:.2f}", f"{row['ratio']:.2f}"]
            for row in measured["memory"]
            if not row["missing"]
        ]
        lines += ["Memory:", "", *markdown_table([*header, "times less than the best peer"], memory)]
    if gone := [f"{row['row']}, {row['name']} ({row['missing']})" for row in measured["rows"] if row["missing"]]:
        lines += [f"Not measured, and what it needs: {'; '.join(gone)}.", ""]
    return "\n".join([*lines, told_of(measured)])


def speed_summary(measured: Mapping[str, Any]) -> str:
    """A line for each benchmark of a file of speeds: the best peer, and how many times its speed ours has."""
    rows = []
    for name, peer, rate, unit, of in speed_ratios(measured):
        ratios = [f"{of[kind][1]:.2f}" if kind in of else "-" for kind in ("default", "recorded", "compiled")]
        rows.append([name, peer, f"{plain(rate)} {unit}", *ratios, f"{of['fastest'][1]:.2f}: {of['fastest'][0]}"])
    header = ["benchmark", "best peer", "its median per second", "ours by default", "recorded", "compiled and recorded"]
    legend = (
        "Ours: times the best peer's speed; above 1 is faster. Recorded: as a CUDA graph. Half precision is compared "
        f"with half precision. {told_of(measured)}"
    )
    return "\n".join([*markdown_table([*header, "fastest of ours"], rows), legend])


def plain(value: float) -> str:
    """A rate with at least three digits: `279,993`, `1.43`.

    Example:
        >>> plain(279992.98), plain(1.427)
        ('279,993', '1.43')
    """
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def pairs_sentence(pairs: Sequence[Pair]) -> str:
    """How many pairs differ, before and after the correction; "" for fewer than three pairs."""
    if len(pairs) < 3:
        return ""
    seeds = sorted({pair[2].n for pair in pairs})
    plainly, corrected = sum(pair[3] < 0.05 for pair in pairs), sum(pair[4] < 0.05 for pair in pairs)
    return (
        f"Pairs of methods: {len(pairs)}, each compared by a paired t test over {' or '.join(map(str, seeds))} seeds. "
        f"{plainly} differ at p < 0.05 without a correction, {corrected} after Holm's correction for {len(pairs)} "
        "comparisons. Intervals are without a correction."
    )


def pairs_table(group: Group, pairs: Sequence[Pair]) -> str:
    """All pairs with their p-values."""
    main = group.layout.column(group.layout.main)
    rows = [
        [first, second, figure_text(main, gap, "+"), str(gap.n), f"{p:.2g}", f"{corrected:.2g}"]
        for first, second, gap, p, corrected in pairs
    ]
    header = ["method", "minus method", main.title, "common seeds", "p", "p after Holm"]
    return "\n".join(markdown_table(header, rows))


# Files.


def csv_of(name: str) -> str:
    """A result file's table as CSV; a bundle's is that of `metapretrain report`, with fractions of 12 digits."""
    if is_bundle(name) and not name.endswith("-sweeps"):
        return table_of(source(name)).csv()
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    tables = re.findall(r"(?:^\|.*\n)+", other_table(name), flags=re.MULTILINE)
    for number, text in enumerate(tables):
        header, _, *body = [cells_of(line) for line in text.splitlines()]
        writer.writerows([*([[]] * bool(number)), header, *body])
    return file.getvalue()


BLOCK = re.compile(r"(<!-- (\S+) -->\n).*?(<!-- /\2 -->)", re.DOTALL)


def rebuilt(text: str, page: str = "index.md", others: Sequence[str] = ()) -> str:
    """A page with every marked block written anew.

    Raises:
        InputError: a mark is damaged or has lost its other one; such a block would stay as it is or take text with it.
    """
    where, opened = f"docs/results/{page}", None
    for line in text.splitlines():
        if not line.lstrip().startswith("<!--"):
            continue
        mark = re.fullmatch(r"<!-- (/?)(\S+) -->", line)
        if mark is None or (mark[2] if mark[1] else None) != opened:
            raise InputError(f"{where}: {line} is no mark, or <!-- NAME --> and <!-- /NAME --> are no pair")
        opened = None if mark[1] else mark[2]
    if opened is not None:
        raise InputError(f"{where}: <!-- {opened} --> has no <!-- /{opened} -->")
    return BLOCK.sub(lambda found: f"{found[1]}\n{block(found[2], others)}\n\n{found[3]}", text)


def block(name: str, others: Sequence[str]) -> str:
    """What stands between the marks of this name."""
    if name == "summary":
        return result_summary.summary()
    if found := re.fullmatch(r"other-(\w+)-results", name):
        mine = [one for one in others if benchmark_of(one) == found[1]]
        return "\n\n".join(f"### {one}\n\n{main_table(one)}" for one in mine) or "None."
    if name in TRANSFER and not source(name).is_file():
        return "Not run yet."
    return main_table(name)


def pages() -> dict[Path, str]:
    """The pages of docs/results/ as they should be."""
    texts = {path: result_files.text_of(path) for path in sorted(result_files.DOCS.glob("results/*.md"))}
    by_hand = "".join(BLOCK.sub(r"\1", text) for text in texts.values())
    placed = set(re.findall(r"^<!-- (\S+) -->$|\(tables/([\w.-]+)\.md\)", by_hand, re.MULTILINE))
    others = [name for name in names() if name not in {one for pair in placed for one in pair}]
    return {path: rebuilt(text, path.name, others) for path, text in texts.items()}


def contents() -> str:
    """The page that lists the tables."""
    rows = []
    for name in names():
        runs = runs_of(source(name)).results if is_bundle(name) else []
        seeds = len({run["seed"] for run in runs}) or "-"
        methods = len({re.sub(r"-s\d+$", "", run["method"]) for run in runs if run.get("kind") != "pretraining"}) or "-"
        links = f"[tables]({name}.md), [CSV]({name}.csv), [result file](../{name}.json)"
        rows.append([name, benchmark_of(name), str(methods), str(seeds), links])
    about = (
        "Every table: costs, pretraining, trials, intervals over examples, paired differences and all pairs of methods "
        "with Holm's correction. `python docs/build_results.py` writes them from the result files. A column with the "
        "same value in every row stands in a line below its table; the CSV files hold all columns."
    )
    lines = markdown_table(["file", "benchmark", "methods", "seeds", "links"], rows)
    return "\n".join(["# Tables", "", about, "", *lines])


def built() -> dict[Path, str]:
    """Every page and table, by its path."""
    tables = result_files.DOCS / "results" / "tables"
    found = pages()
    for name in names():
        found[tables / f"{name}.md"] = full_page(name)
        found[tables / f"{name}.csv"] = checked(csv_of, name) + "\n"
    return {**found, tables / "index.md": contents()}


def differing() -> list[str]:
    """The pages, tables and plots that this script would change or that no result file makes any more."""
    expected = built()
    changed = [path for path, text in expected.items() if not path.is_file() or path.read_text("utf-8") != text]
    changed += [path for path in sorted(result_files.DOCS.glob("results/tables/*")) if path not in expected]
    changed += result_plots.outdated(result_files.DOCS / "figures")
    return [path.relative_to(result_files.DOCS.parent).as_posix() for path in changed]


@main_guard
def main(argv: Sequence[str] | None = None) -> int:
    """Write or check the pages, tables and plots of docs/results/."""
    parser = Parser(prog="build_results.py", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if something would change")
    if parser.parse_args(argv).check:
        found = differing()
        print(f"differ: {', '.join(found)}; run without --check" if found else "docs/results is up to date")
        return int(bool(found))
    expected = built()
    keep_layouts()
    for path, text in expected.items():
        write_file(path, text)
    for path in set(result_files.DOCS.glob("results/tables/*")) - set(expected):
        path.unlink()
    result_plots.draw(result_files.DOCS / "figures")
    return 0


if __name__ == "__main__":
    sys.exit(main())
