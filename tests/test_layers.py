"""The structure of the package: what may import what, how many modules; no circle, flat family or unformatted code."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import metapretrain

PACKAGE = Path(metapretrain.__file__).parent
ROOT = PACKAGE.parent
LEAVES = {"errors", "checks", "draws", "nests", "graphs", "distributed", "files"}
DATA_FREE = LEAVES | {"episodes", "protonet", "maml", "prompts", "scheduling"}
MAY_IMPORT = {
    "errors": set(),
    "checks": {"errors"},
    "draws": {"errors", "checks"},
    "nests": {"errors"},
    "graphs": {"errors", "nests"},
    "distributed": {"errors"},
    "files": {"errors", "nests"},
    "episodes": LEAVES,
    "protonet": LEAVES | {"maml"},
    "maml": LEAVES,
    "prompts": LEAVES | {"maml", "training"},
    "scheduling": LEAVES,
    "training": LEAVES | {"episodes"},
    "data": LEAVES,
    "models": LEAVES | {"data", "maml", "protonet", "training"},
    "evaluation": LEAVES | {"data", "episodes", "models", "protonet", "training"},
    "report": LEAVES | {"evaluation", "training"},
    "experiments": DATA_FREE | {"data", "evaluation", "models", "report", "training", "options"},
}
MOST_MODULES, MOST_LINES, MOST_BANS = 130, 30_250, 10


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name; a folder's is that of its `__init__`."""
    found = {}
    for file in PACKAGE.rglob("*.py"):
        parts = file.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imported(source: str, known: dict[str, Path]) -> set[str]:
    """The modules of the package that a source imports, inside functions and for types alone too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in known else node.module or "" for name in inner}
    return {name for name in found if name.startswith("metapretrain.")}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The modules that import each other: those left when modules that import nothing, or nothing imports, are gone."""
    left = dict(graph)
    while True:
        wanted = {name for names in left.values() for name in names}
        ends = [name for name in left if not left[name] & left.keys() or name not in wanted]
        if not ends:
            return [sorted(left)] if left else []
        for name in ends:
            del left[name]


def test_imports_are_seen_wherever_they_stand() -> None:
    source = """
import torch, metapretrain.data.stl10
from metapretrain import options
def f():
    from metapretrain.maml import adapt, learner
"""
    known = modules()
    assert imported(source, known) == {
        "metapretrain.data.stl10",
        "metapretrain.options",
        "metapretrain.maml.adapt",
        "metapretrain.maml.learner",
    }
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]
    assert circles({"a": {"b"}, "b": set()}) == []


def test_no_relative_imports() -> None:
    for file in modules().values():
        nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        assert not [node for node in nodes if isinstance(node, ast.ImportFrom) and node.level], file


def test_each_folder_imports_only_what_is_below_it() -> None:
    known = modules()
    folders = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}
    assert folders <= MAY_IMPORT.keys(), "a new folder: say here what it may import"
    for name, file in known.items():
        part = name.split(".")[1] if "." in name else ""
        if part in MAY_IMPORT:
            found = {other.split(".")[1] for other in imported(file.read_text(encoding="utf-8"), known)}
            assert not found - {part} - MAY_IMPORT[part], f"{name} imports {', '.join(sorted(found))}"


def test_no_modules_import_each_other() -> None:
    known = modules()
    graph = {name: imported(file.read_text(encoding="utf-8"), known) - {name} for name, file in known.items()}
    assert circles(graph) == []


def test_the_package_is_small_enough_to_take_in() -> None:
    files = modules().values()
    assert len(files) <= MOST_MODULES
    assert sum(file.read_text(encoding="utf-8").count("\n") for file in files) <= MOST_LINES


def test_no_folder_holds_a_family_told_apart_by_a_prefix() -> None:
    for folder in {file.parent for file in modules().values()}:
        first = Counter(file.stem.partition("_")[0] for file in folder.glob("*.py") if not file.stem.startswith("_"))
        families = {word: number for word, number in first.items() if number > 2}
        assert not families, f"{folder.relative_to(ROOT)}: make folders of {families}"


def test_the_formatter_may_format_nearly_everything() -> None:
    parts = ("metapretrain", "benchmarks", "tests", "docs")
    files = [file for part in parts for file in (ROOT / part).rglob("*.py")]
    bans = sum(len(re.findall(r"# fmt: (?:skip|off)$", file.read_text("utf-8"), re.MULTILINE)) for file in files)
    assert bans <= MOST_BANS
