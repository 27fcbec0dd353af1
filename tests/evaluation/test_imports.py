"""What is not imported before it is used."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("scipy", "sklearn", "matplotlib", "umap", "tensorboard")


def modules_after(statement: str) -> set[str]:
    program = f"{statement}; import sys; print(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    return set(done.stdout.split())


def test_the_package_does_not_import_evaluation() -> None:
    assert "metapretrain.evaluation" not in modules_after("import metapretrain")


@pytest.mark.parametrize("module", ["evaluation.episodes", "evaluation.metrics", "report.table", "report.figures"])
def test_evaluation_imports_its_tools_when_used(module: str) -> None:
    loaded = modules_after(f"import metapretrain.{module}")
    assert f"metapretrain.{module}" in loaded
    assert not loaded & set(HEAVY)
