"""What may import what: the core folders know nothing of each other, and nothing imports what is above it."""

from __future__ import annotations

import ast
from pathlib import Path

import metapretrain

PACKAGE = Path(metapretrain.__file__).parent
LEAVES = {"errors", "devices", "extras", "gather", "paths", "tensors"}
MAY_IMPORT = {
    "errors": set(),
    "devices": {"errors"},
    "extras": {"errors"},
    "gather": set(),
    "paths": set(),
    "tensors": {"errors"},
    "episodes": {"errors", "extras"},
    "protonet": {"errors", "gather"},
    "maml": {"errors", "extras"},
    "prompts": {"errors", "extras", "maml", "tensors"},
    "scheduling": {"errors"},
    "data": {"errors", "paths"},
    "training": LEAVES | {"episodes"},
    "models": LEAVES | {"data", "maml", "training"},
    "evaluation": LEAVES | {"data", "episodes", "models", "protonet", "training"},
    "tasks": LEAVES
    | {"data", "episodes", "evaluation", "maml", "models", "prompts", "protonet", "scheduling", "training"},
}


def imported(source: str) -> set[str]:
    """The parts of the package that a module imports, inside functions too."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            modules |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.split(".")[1] for name in modules if name.startswith("metapretrain.")}


def test_imports_are_seen_wherever_they_stand() -> None:
    source = """
import torch, metapretrain.data.stl10
from metapretrain import options
def f():
    from metapretrain.maml import adapt
"""
    assert imported(source) == {"data", "options", "maml"}


def test_no_relative_imports() -> None:
    for file in PACKAGE.rglob("*.py"):
        nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        assert not [node for node in nodes if isinstance(node, ast.ImportFrom) and node.level], file


def test_each_folder_imports_only_what_is_below_it() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}
    assert folders <= MAY_IMPORT.keys(), "a new folder: say here what it may import"
    for part, allowed in MAY_IMPORT.items():
        files = [PACKAGE / f"{part}.py"] if part in LEAVES else sorted((PACKAGE / part).rglob("*.py"))
        for file in files:
            found = imported(file.read_text(encoding="utf-8")) - {part} - allowed
            assert not found, f"{file.relative_to(PACKAGE)} imports {', '.join(sorted(found))}"
