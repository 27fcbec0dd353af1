"""The documentation's commands parse, its Python runs (block after block), its links lead somewhere."""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from metapretrain.cli import build_parser

ROOT = Path(__file__).parent.parent
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(path: Path, language: str) -> list[str]:
    text = path.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def commands() -> Iterator[tuple[str, str]]:
    for path in DOCS:
        for block in blocks(path, "bash"):
            for line in block.replace("\\\n", " ").splitlines():
                if re.match(r"(metapretrain|python benchmarks/)", line.strip()):
                    yield str(path.relative_to(ROOT)), line.strip()


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


@pytest.mark.parametrize(("document", "line"), list(commands()))
def test_documented_command_parses(document: str, line: str) -> None:
    words = shlex.split(line, comments=True)
    if words[0] == "metapretrain":
        build_parser().parse_args(words[1:])
        return
    script = ROOT / words[1]
    assert script.is_file(), f"{document} names {words[1]}, which does not exist"
    load_script(script).options_of(words[2:])


GUIDE = "docs/custom-episodes.md"  # tests/episodes/test_guide.py runs it and looks at its result
RUNNABLE = [str(path.relative_to(ROOT)) for path in DOCS if blocks(path, "python")]


@pytest.mark.parametrize("name", [name for name in RUNNABLE if name != GUIDE])
def test_documented_python_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = ROOT / name
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "documented"}
    for number, block in enumerate(blocks(path, "python"), start=1):
        exec(compile(block, f"{path.name}, block {number}", "exec"), names)


@pytest.mark.parametrize("path", DOCS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_to_files_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (path.parent / target).exists(), f"{path.name} links to {target}, which does not exist"


def test_result_tables_are_those_of_the_result_files() -> None:
    builder = load_script(ROOT / "docs" / "build_results.py")
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert builder.rebuilt(page) == page
    assert builder.rebuilt(page.replace("449,920", "449,921")) == page
