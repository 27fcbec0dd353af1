"""The documentation's Python runs (block after block), its links lead somewhere; commands are tested elsewhere."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from metapretrain.protonet.learner import HEADS
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


def test_readme_is_short() -> None:
    assert (ROOT / "README.md").read_text(encoding="utf-8").count("\n") <= 130


# tests/episodes/test_guide.py runs the first and looks at its result, test_own_benchmark.py the second,
# tests/test_documented_commands.py the others.
ELSEWHERE = {"docs/custom-episodes.md", "docs/own-benchmark.md"}
ELSEWHERE |= {"docs/fewshot-texts.md", "docs/own-images.md", "docs/own-prompts.md", "docs/own-text-tasks.md"}
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


def test_result_tables_are_those_of_the_result_files() -> None:
    builder = load_script(ROOT / "docs" / "build_results.py")
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert builder.rebuilt(page) == page
    assert builder.rebuilt(page.replace("449,920", "449,921")) == page


def test_the_table_of_pretrained_encoders_is_that_of_its_result_file() -> None:
    found = json.loads((ROOT / "docs" / "results" / "pretrained.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs" / "fewshot.md").read_text(encoding="utf-8")
    assert len(found["rows"]) == 4
    for row in found["rows"]:
        cells = [
            " | ".join(
                f"{row['accuracy'][shots][head][0]:.2f} ± {row['accuracy'][shots][head][1]:.2f}" for head in HEADS
            )
            for shots in ("1", "5")
        ]
        assert (
            f"| {row['encoder']}, {row['set']} | {row['classes']} | 1 | {cells[0]} |\n|  |  | 5 | {cells[1]} |" in page
        )


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
    ],
)
def test_damaged_marks_and_result_files_leave_the_page_as_it_is(
    page: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    builder = load_script(ROOT / "docs" / "build_results.py")
    monkeypatch.setattr(builder, "DOCS", tmp_path)
    (tmp_path / "results").mkdir()
    for name in ("speed-damaged", "damaged-tuning"):
        (tmp_path / "results" / f"{name}.json").write_text("{}")
    (tmp_path / "results" / "speed-cpu.json").write_bytes((ROOT / "docs/results/speed-cpu.json").read_bytes())
    (tmp_path / "results.md").write_text(page)
    assert builder.main([]) == 2
    shown = capsys.readouterr().err
    assert told in shown and shown.count("\n") == 1
    assert (tmp_path / "results.md").read_text() == page
