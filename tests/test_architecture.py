"""docs/architecture.md names files and folders that exist, and every folder of the package."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def tree_paths() -> list[str]:
    """The paths of the tree, from their indentation."""
    paths, folder = [], ""
    for line in TEXT.split("```")[1].strip().splitlines():
        name = line.split()[0]
        folder = name if not line.startswith(" ") else folder
        paths.append(name if name == folder else folder + name)
    return paths


def test_every_path_of_the_page_exists() -> None:
    named = re.findall(r"`((?:metapretrain|benchmarks|tests|docs)/[\w/.]*)`", TEXT)
    assert len(named) > 15
    links = [f"docs/{target}" for target in re.findall(r"\]\((\w[\w-]*\.md)\)", TEXT)]
    missing = [path for path in (*tree_paths(), *named, *links) if not (ROOT / path).exists()]
    assert not missing


def test_the_tree_has_every_folder_and_module_at_the_top_of_the_package() -> None:
    package = ROOT / "metapretrain"
    there = {f"metapretrain/{path.name}" for path in package.glob("[!_]*.py")}
    there |= {f"metapretrain/{path.parent.name}/" for path in package.glob("*/__init__.py")}
    assert there <= set(tree_paths())
