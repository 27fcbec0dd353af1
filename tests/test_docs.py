"""The documentation's Python runs (block after block), its links lead somewhere; commands are tested elsewhere."""

from __future__ import annotations

import doctest
import importlib.util
import json
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import ttest_rel

from benchmarks import table_fewshot
from metapretrain.evaluation.intervals import paired_interval
from metapretrain.report.results import collect

ROOT = Path(__file__).parent.parent
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(path: Path, language: str) -> list[str]:
    text = path.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def load_script(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"documented_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_readme_names_both_commands_of_the_makefile() -> None:
    named = set(re.findall(r"^make (\w+)", "\n".join(blocks(ROOT / "README.md", "bash")), re.MULTILINE))
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert {"demo", "test"} <= named <= targets


def test_readme_is_short_and_links_the_guides_for_own_things() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.count("\n") <= 130
    assert all(f"docs/{path.name}" in text for path in (ROOT / "docs").glob("own-*.md"))


def test_outcomes_in_the_readme_are_those_of_the_results() -> None:
    text, index = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/results/index.md"))
    table = text.partition("## What the benchmarks found")[2].partition("## Modules")[0]
    for number in re.findall(r"\d+\.\d+(?: ± \d+\.\d+)?(?= \|| \()", table):
        mean, _, half = number.partition(" ± ")
        digits = len(mean.partition(".")[2])
        told = {
            (f"{float(a):.{digits}f}", f"{float(b):.{digits}f}" if half and b else "")
            for a, b in re.findall(r"(\d+\.\d+)(?: ± (\d+\.\d+))?", index)
        } | {(f"{float(a):.{digits}f}", "") for a in re.findall(r"(\d+\.\d+)", index)}
        assert (mean, half) in told, f"README has {number}, which docs/results/index.md has not"


# tests/episodes/test_guide.py runs the first and looks at its result, test_own_benchmark.py the second,
# tests/test_documented_commands.py the others.
ELSEWHERE = {"docs/custom-episodes.md", "docs/own-benchmark.md"}
ELSEWHERE |= {"docs/fewshot-texts.md", "docs/own-images.md", "docs/own-text-tasks.md"}
RUNNABLE = [str(path.relative_to(ROOT)) for path in DOCS if blocks(path, "python")]


@pytest.mark.usefixtures("registries")
@pytest.mark.parametrize("name", [name for name in RUNNABLE if name not in ELSEWHERE])
def test_documented_python_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = ROOT / name
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "documented"}
    for number, block in enumerate(blocks(path, "python"), start=1):
        exec(compile(block, f"{path.name}, block {number}", "exec"), names)


def test_the_quickstart_notebook_runs_and_keeps_no_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = json.loads((ROOT / "docs" / "quickstart.ipynb").read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 4)  # later versions want an id for each cell
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "notebook"}
    for number, cell in enumerate(notebook["cells"]):
        source = "".join(cell["source"])
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None
            exec(compile(source, f"quickstart.ipynb, cell {number}", "exec"), names)
        for target in re.findall(r"\]\(([\w-]+\.md)\)", source):
            assert (ROOT / "docs" / target).exists(), target
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", DOCS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_to_files_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (path.parent / target).exists(), f"{path.name} links to {target}, which does not exist"


def anchors(page: str) -> list[str]:
    """Anchors of a page's headings of the first three levels, as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", page, flags=re.DOTALL | re.MULTILINE)
    names = re.findall(r"^#{1,3} (.+)$", text, re.MULTILINE)
    return [re.sub(r"[^\w -]", "", name.lower()).replace(" ", "-") for name in names]


@pytest.mark.parametrize("path", DOCS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_to_headings_lead_to_one_heading(path: Path) -> None:
    page = path.read_text(encoding="utf-8")
    for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page):
        found = anchors((path.parent / target).read_text(encoding="utf-8") if target else page)
        assert found.count(anchor) == 1, f"{path.name} links to {target}#{anchor}: {found.count(anchor)} headings"


def test_times_and_memory_of_tables_are_those_of_the_result_files() -> None:
    page = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w-]+)`[^|]*\|[^|]*\| (\d+) \| ([\d.]+) \|$", page, re.MULTILINE)
    assert len(rows) == 15
    for name, minutes, memory in rows:
        results = collect(ROOT / "docs" / "results" / f"{name}.json").results
        on_gpu = [result for result in results if "NVIDIA" in result["device"]]
        assert f"{sum(result['wall_s'] for result in on_gpu) / 60:.0f}" == minutes, name
        assert f"{max(result['peak_memory_bytes'] for result in on_gpu) / 2**30:.1f}" == memory, name


@pytest.fixture(scope="module")
def builder() -> ModuleType:
    return load_script(ROOT / "docs" / "build_results.py")


def copied_results(builder: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    docs = tmp_path / "docs"
    shutil.copytree(ROOT / "docs" / "results", docs / "results")
    shutil.copytree(ROOT / "docs" / "figures", docs / "figures", ignore=shutil.ignore_patterns("*.png"))
    monkeypatch.setattr(builder.result_files, "DOCS", docs)
    return docs


def test_result_pages_tables_and_plots_are_those_of_the_result_files(builder: ModuleType) -> None:
    assert builder.differing() == [], "run python docs/build_results.py"


def test_what_does_not_agree_with_the_result_files_is_named_and_mended(
    builder: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    docs = copied_results(builder, tmp_path, monkeypatch)
    page, table, plot = (
        docs / "results/stl10.md",
        docs / "results/tables/stl10-paper.csv",
        docs / "figures/results-text.svg",
    )
    page.write_text(page.read_text(encoding="utf-8").replace("| 56.83", "| 56.84"), encoding="utf-8")
    table.write_text("old")
    plot.write_text("<svg/>")
    (docs / "results/tables/gone.md").write_text("a table whose result file is gone")
    before = {path: path.read_bytes() for path in builder.result_files.DOCS.rglob("*.*")}
    with pytest.raises(SystemExit, match="2"):
        builder.main(["--chek"])  # a slip writes nothing
    assert before == {path: path.read_bytes() for path in builder.result_files.DOCS.rglob("*.*")}
    assert builder.main(["--check"]) == 1
    changed = "docs/results/stl10.md, docs/results/tables/stl10-paper.csv, docs/results/tables/gone.md, "
    assert capsys.readouterr().out == f"differ: {changed}docs/figures/results-text.svg; run without --check\n"
    assert builder.main([]) == 0
    assert builder.main(["--check"]) == 0
    assert page.read_bytes() == (ROOT / "docs/results/stl10.md").read_bytes()
    assert plot.read_bytes() == (ROOT / "docs/figures/results-text.svg").read_bytes()


def test_a_new_result_file_is_shown_without_a_line_elsewhere(
    builder: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docs = copied_results(builder, tmp_path, monkeypatch)
    results = docs / "results"
    runs = (results / "fewshot-protonet.json").read_text(encoding="utf-8")
    (results / "new.json").write_text(runs.replace("omniglot-5w", "cifar-fs-5w").replace("omniglot-20w", "other-20w"))
    (results / "speed-new.json").write_bytes((results / "speed-h200-x2.json").read_bytes())
    shape = {"name": "cnn-28, 1 step, order 2", "engine": "loop", "rounds": 9, "meta_steps_per_second": {"auto": 2.0}}
    shape |= {"speed": {"higher": 1.5}, "memory": {"auto": 9.0, "higher": 9.0}}
    where = {"hardware": "a CPU", "versions": "torch", "commit": "abc", "load": "0"}
    (results / "shapes-cpu.json").write_text(json.dumps({**where, "shapes": [shape]}))
    assert builder.main([]) == 0
    page = (results / "few-shot.md").read_text(encoding="utf-8")
    assert "### new\n" in page and "| protonet | 98.59 ± 0.14 | 55.5 (Bertinetto) ‡ |" in page  # the set's own print
    assert "cifar-fs, 5-way 1-shot: protonet (conv4)" in (results / "index.md").read_text(encoding="utf-8")
    speed = (results / "speed.md").read_text(encoding="utf-8")
    assert "### speed-new\n" in speed and "### shapes-cpu\n" in speed and "cnn-28, 1 step, order 2" in speed
    assert {path.name for path in results.glob("tables/*new*")} == {
        "new.md",
        "new.csv",
        "speed-new.md",
        "speed-new.csv",
    }


def test_one_process_with_half_the_batch_is_shown_as_a_limit_of_two(
    builder: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docs = copied_results(builder, tmp_path, monkeypatch)
    file = docs / "results/speed-h200-x2.json"
    found = json.loads(file.read_text(encoding="utf-8"))
    for row in [row for row in found["rows"] if row["name"] == "1 process"]:
        half = {"name": "1 process, half the batch", "ours": True, "note": "2 processes reach at most twice this"}
        speeds = {name: 5 * row[name] for name in ("median", "low", "high", "ratio")}
        found["rows"].append({**row, **half, **speeds})
    file.write_text(json.dumps(found))
    (panel,) = builder.result_plots.several_gpus()
    assert panel.series["1 process, half the batch, times 2"]["tokens"][0] == pytest.approx(10)
    assert all(of["fastest"][0] == "2 processes" for *_, of in builder.speed_ratios(found))
    assert builder.main([]) == 0
    page = (docs / "results/several-gpus.md").read_text(encoding="utf-8")
    assert page.count("| 1 process, half the batch (2 processes reach at most twice this) | ") == 3
    assert "| scale-tokens | 2 processes | 1,160,705 tokens | 1,159,738 to 1,161,232 | 1.14 |" in page
    assert "times 2</text>" in (docs / "figures/results-several-gpus.svg").read_text(encoding="utf-8")


def test_runs_on_transfer_fill_their_page_and_no_other(
    builder: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docs = copied_results(builder, tmp_path, monkeypatch)
    results, page, plots = docs / "results", docs / "results/transfer.md", docs / "figures"
    for name in builder.TRANSFER:
        (results / f"{name}.json").unlink(missing_ok=True)
        (plots / f"results-{name}.svg").unlink(missing_ok=True)
    assert builder.main([]) == 0 and builder.main(["--check"]) == 0
    assert page.read_text(encoding="utf-8").count("\nNot run yet.\n") == 2
    runs = {"transfer-labels": ("stl10", "stl10-50-labels", "paper", "simclr")}
    runs["transfer-encoders"] = ("fewshot", "cifar-fs-5w1s", "conv4-stl10-paper", "encoder-simclr-s0")
    for name, made in runs.items():
        run = dict(zip(("benchmark", "dataset", "recipe", "method"), made, strict=True))
        run |= {"schema": 1, "seed": 0, "status": "complete", "metrics": {"test_accuracy": 0.4375}}
        run |= {"command": "--encoder runs/stl10/stl10-50-labels-paper/simclr-s0"}
        (results / f"{name}.json").write_text(json.dumps([run | {"budget": {"encoder_passes": 4096}}]))
    before = {path: path.read_bytes() for path in [results / "few-shot.md", results / "stl10.md", *plots.glob("*.svg")]}
    assert builder.main([]) == 0 and builder.main(["--check"]) == 0
    text = page.read_text(encoding="utf-8")
    assert "| 50 | 43.75 |" in text and "| paper: simclr | 4,096 | 43.75 |" in text
    assert "43.75" in (results / "tables/transfer-labels.md").read_text() and "0.4375" in (
        results / "tables/transfer-encoders.csv"
    ).read_text(encoding="utf-8")
    index = (results / "index.md").read_text(encoding="utf-8")
    assert "query mode minus supervised" not in index  # these runs are of one method
    assert before == {path: path.read_bytes() for path in before}
    assert len(list(plots.glob("results-transfer-*.svg"))) == 2


def test_heads_are_shown_beside_their_paired_differences_to_fine_tuning(builder: ModuleType) -> None:
    row = {"encoder": "mini", "set": "news", "classes": 9, "accuracy": {"5": {"nearest": [80.0, 2.0]}}}
    found = {"rows": [row], "episodes": 120, "ways": 5, "hardware": "a CPU", "versions": "torch"}
    assert "| mini, news | 9 | 5 | 80.00 ± 2.00 |" in builder.encoders(found).splitlines()
    assert "Minus" not in builder.encoders(found)
    row["minus finetune"] = {"5": {"nearest": [-1.5, 0.25], "logistic": [0.5, 0.3]}}
    told = builder.encoders(found).splitlines()[-1]
    assert told.endswith("differences ± 95%: mini, news, 5-shot: nearest -1.50 ± 0.25, logistic +0.50 ± 0.30.")


@pytest.mark.parametrize("path", sorted(ROOT.glob("docs/results/*.md")), ids=lambda path: path.name)
def test_result_pages_are_short_and_without_constant_columns(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= 200
    for table in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
        header, _, *rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in table.splitlines()]
        for place in range(1, len(header)):
            cells = {row[place] for row in rows if row[0] != " majority class "}
            assert len(rows) == 1 or len(cells) > 1, f"{header[place]} is the same in all lines of {rows[0][0]} ..."


@given(st.lists(st.floats(0, 1), max_size=12))
def test_holm_rejects_step_by_step(p_values: list[float]) -> None:
    holm = load_script(ROOT / "docs" / "result_files.py").holm
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    for level in (0.01, 0.05, 0.2):
        rejected = set()
        for rank, place in enumerate(order):  # Holm's procedure as written: stop at the first that is not small enough
            if p_values[place] * (len(p_values) - rank) >= level:
                break
            rejected.add(place)
        assert {place for place, p in enumerate(holm(p_values)) if p < level} == rejected


@pytest.mark.parametrize("name", ["build_results", "result_files", "result_summary"])
def test_examples_of_the_builder_are_right(name: str) -> None:
    tried = doctest.testmod(load_script(ROOT / "docs" / f"{name}.py"))
    assert tried.attempted and not tried.failed


def test_p_values_are_those_of_scipy(builder: ModuleType) -> None:
    first, second = [0.71, 0.74, 0.69, 0.8], [0.70, 0.70, 0.70, 0.75]
    assert builder.result_files.p_value(paired_interval(first, second)) == pytest.approx(
        ttest_rel(first, second).pvalue
    )
    assert builder.result_files.p_value(paired_interval([0.5, 0.6], [0.5, 0.6])) == 1
    assert builder.result_files.p_value(paired_interval([2.0, 3.0], [1.0, 2.0])) == 0


def test_few_shot_lines_of_the_summary_link_the_page_that_has_their_table() -> None:
    results = ROOT / "docs" / "results"
    line = re.compile(
        r"\| \[[^]]+\]\(([a-z0-9-]+\.md)\) \| ([a-z0-9-]+), (?:\d+-way \d+-shot|lake): (\S+) \(([a-z0-9-]+)\)"
        r", test % \| ([^|]+) \|"
    )
    found = line.findall((results / "index.md").read_text(encoding="utf-8"))
    assert {"cifar-fs", "omniglot", "omniglot-lake"} <= {dataset for _, dataset, *_ in found}
    for page, dataset, method, recipe, value in found:
        text = (results / page).read_text(encoding="utf-8")
        assert f"**{dataset}, {recipe}**" in text, (page, dataset, recipe)
        assert re.search(rf"(?m)^\| {re.escape(method)} \|.* {re.escape(value)} \|", text), (page, method, value)


def test_the_table_of_few_shot_methods_is_that_of_the_result_files() -> None:
    page = (ROOT / "docs" / "fewshot.md").read_text(encoding="utf-8")
    assert page.count("\n") <= 210
    scores = table_fewshot.scores_of(sorted((ROOT / "docs" / "results").glob("fewshot-*.json")))
    between = page.partition(table_fewshot.BEGIN)[2].partition(table_fewshot.END)[0]
    assert between == table_fewshot.table(scores)


BLOCK = "<!-- speed-cpu -->\nold\n<!-- /speed-cpu -->\n"


@pytest.mark.parametrize(
    ("page", "told"),
    [
        (BLOCK.replace("/speed", "/ speed"), "no pair"),
        (BLOCK.split("\n", 1)[1], "no pair"),
        (f"<!-- speed-cpu -->\nwritten by hand\n{BLOCK}", "no pair"),
        (BLOCK.rsplit("<", 1)[0], "has no <!-- /speed-cpu -->"),
        (BLOCK.replace("-cpu", "-none"), "speed-none.json"),
        (BLOCK.replace("speed-cpu", "damaged-tuning"), "damaged-tuning.json"),
        (BLOCK.replace("speed-cpu", "speed-damaged"), "speed-damaged.json is damaged"),
        (BLOCK.replace("speed-cpu", "cut"), "cut.json is damaged"),
    ],
)
def test_damaged_marks_and_result_files_leave_the_page_as_it_is(
    page: str,
    told: str,
    builder: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(builder.result_files, "DOCS", tmp_path)
    results = tmp_path / "results"
    results.mkdir()
    for name in re.findall(r"<!-- (damaged-tuning|speed-damaged|cut) -->", page):
        (results / f"{name}.json").write_text("[{" if name == "cut" else "{}")
    (results / "speed-cpu.json").write_bytes((ROOT / "docs/results/speed-cpu.json").read_bytes())
    (results / "page.md").write_text(page)
    assert builder.main([]) == 2
    shown = capsys.readouterr().err
    assert told in shown and shown.count("\n") == 1
    assert (results / "page.md").read_text() == page


@pytest.mark.parametrize(
    "change",
    [{"metrics": {"test_accuracy": None}}, {"recipe": 5}, {"benchmark": "other"}, {"dataset": ""}, {"status": "torn"}],
)
def test_a_run_that_cannot_be_shown_is_told_and_kept(
    change: dict[str, object],
    builder: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    docs = copied_results(builder, tmp_path, monkeypatch)
    file = docs / "results" / "fewshot-protonet-again.json"
    listed = json.loads((docs / "results" / "fewshot-protonet.json").read_text(encoding="utf-8"))
    listed[-1] |= change
    file.write_text(json.dumps(listed), encoding="utf-8")
    before = {path: path.read_bytes() for path in docs.rglob("*.*")}
    for words in ([], ["--check"]):
        assert builder.main(words) == 2
        shown = capsys.readouterr().err
        assert "fewshot-protonet-again.json: runs that cannot be shown: 1, first " in shown and shown.count("\n") == 1
    file.unlink()
    (number := file.with_name("number.json")).write_text("5")
    assert builder.main([]) == 2 and "number.json is damaged or of an unknown kind" in capsys.readouterr().err
    number.unlink()
    del before[file]
    (page := docs / "results" / "stl10.md").write_bytes(b"\xff")
    assert builder.main([]) == 2 and "stl10.md is no UTF-8 text" in capsys.readouterr().err
    page.write_bytes(before[page])
    assert before == {path: path.read_bytes() for path in docs.rglob("*.*")}
