"""What is not imported before it is used."""

from __future__ import annotations

from collections.abc import Callable

import pytest

HEAVY = ("scipy", "sklearn", "matplotlib", "umap", "tensorboard")


def test_the_package_does_not_import_evaluation(modules_after: Callable[..., set[str]]) -> None:
    assert "metapretrain.evaluation" not in modules_after("import metapretrain")


@pytest.mark.parametrize("module", ["evaluation.episodes", "evaluation.metrics", "report.table", "report.figures"])
def test_evaluation_imports_its_tools_when_used(module: str, modules_after: Callable[..., set[str]]) -> None:
    loaded = modules_after(f"import metapretrain.{module}")
    assert f"metapretrain.{module}" in loaded
    assert not loaded & set(HEAVY)
