"""The API pages list every public name once, with a line and a description, and nothing internal."""

from __future__ import annotations

import importlib
import re
from types import ModuleType

import pytest

from tests.test_docs import ROOT, load_script

INTERNAL = ("checks", "cli", "draws", "graphs", "nests", "options")  # modules of which no name is public
FOLDERS = [
    ".".join(path.parent.relative_to(ROOT).parts) for path in sorted((ROOT / "metapretrain").rglob("__init__.py"))
]


@pytest.fixture(scope="module")
def api() -> ModuleType:
    return load_script(ROOT / "docs" / "api_pages.py")


def paths_of(text: str) -> list[str]:
    return re.findall(r"\]\[([\w.]+)\]", text)


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_public_name_is_listed_once(api: ModuleType, folder: str) -> None:
    module = importlib.import_module(folder)
    paths = paths_of(api.overview())
    objects = [getattr(importlib.import_module(path.rpartition(".")[0]), path.rpartition(".")[2]) for path in paths]
    for name in set(getattr(module, "__all__", ())) - {"__version__"}:
        found = [
            path
            for path, listed in zip(paths, objects, strict=True)
            if listed is getattr(module, name) and path.endswith(f".{name}")
        ]
        assert len(found) == 1, f"{folder}.{name}: {found}"


def test_the_list_holds_no_internals_and_says_what_each_name_is(api: ModuleType) -> None:
    text = api.overview()
    paths = paths_of(text)
    assert len(paths) == len(set(paths))
    assert not [path for path in paths if re.search(r"\._", path) or path.split(".")[1] in INTERNAL]
    assert len(re.findall(r"^- \[`\w+`\]\[[\w.]+\]: \S.*$", text, re.MULTILINE)) == len(paths)


def test_every_listed_name_is_described_on_one_page(api: ModuleType) -> None:
    described = [
        path for folder in api.pages() for path in re.findall(r"^::: ([\w.]+)$", api.page(folder), re.MULTILINE)
    ]
    assert sorted(described) == sorted(paths_of(api.overview()))


def test_what_guides_import_is_public_and_other_names_are_not(api: ModuleType) -> None:
    assert api.documented("metapretrain.data.registry.DatasetInfo")  # own-images.md imports it
    assert api.documented("metapretrain.maml.learner.MAML.backward")
    assert not api.documented("metapretrain.maml.engines.descend_by_higher")
    assert not api.documented("metapretrain.maml.learner")
