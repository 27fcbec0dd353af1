"""Importing the package is quick, quiet and light; every public name is there."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import metapretrain
from metapretrain import _HOMES

HEAVY = {
    "accelerate",
    "gym",
    "higher",
    "learn2learn",
    "matplotlib",
    "sklearn",
    "tensorboard",
    "torchvision",
    "transformers",
}
ROOT = Path(__file__).parent.parent


def run(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


def test_import_is_silent() -> None:
    done = run("import metapretrain")
    assert (done.stdout, done.stderr) == ("", "")


def test_import_needs_no_framework() -> None:
    modules = run("import sys, metapretrain; print(*sys.modules)").stdout.split()
    assert not HEAVY & set(modules)


@pytest.mark.parametrize("package", ["episodes", "maml", "protonet"])
def test_core_packages_import_no_framework(package: str, modules_after: Callable[..., set[str]]) -> None:
    modules = modules_after(f"import metapretrain.{package}")
    assert not HEAVY & modules
    assert not {name for name in modules if name.startswith(("metapretrain.data", "metapretrain.training"))}


def test_text_prompts_and_schedules_import_no_framework(modules_after: Callable[..., set[str]]) -> None:
    experiments = ("text.experiment", "prompts.tuning", "schedule.training", "schedule.tasks")
    kinds = ("models.text_encoders", *(f"experiments.{name}" for name in experiments))
    named = ", ".join(("prompts_pretraining", *(f"metapretrain.{kind}" for kind in kinds)))
    modules = modules_after(f"import sys; sys.path.insert(0, {str(ROOT / 'benchmarks')!r}); import {named}")
    assert "prompts_pretraining" in modules and not {*HEAVY, "torch._dynamo"} & modules


def test_a_dry_run_over_texts_imports_no_framework(modules_after: Callable[..., set[str]]) -> None:
    code = "import run_text; run_text.main(['--smoke', '--dry-run'])"
    modules = modules_after(f"import sys; sys.path.insert(0, {str(ROOT / 'benchmarks')!r}); {code}")
    assert "run_text" in modules and not {*HEAVY, "torch._dynamo"} & modules


def test_what_is_imported_is_seen(modules_after: Callable[..., set[str]]) -> None:
    assert "gym" not in modules_after("import json")
    assert "sklearn" in modules_after("import sklearn")
    for code in ("print(1)", "raise SystemExit(0)"):
        with pytest.raises(AssertionError, match=r"^1\n|ended early"):
            modules_after(code, quiet=True)
    with pytest.raises(AssertionError, match="no_such_module"):
        modules_after("import no_such_module")


def test_every_public_name_is_there() -> None:
    assert set(metapretrain.__all__) == {*_HOMES, "__version__"}
    for name, module in _HOMES.items():
        found = getattr(importlib.import_module(module), name)
        assert getattr(metapretrain, name) is found
    assert dir(metapretrain) == sorted(metapretrain.__all__)


def test_each_public_name_is_told_of_in_a_few_words() -> None:
    source = Path(metapretrain.__file__).read_text(encoding="utf-8")
    told = re.findall(r"^    from ([\w.]+) import (\w+) as (\w+)  # \w.+$", source, re.MULTILINE)
    assert {name: module for module, name, alias in told if name == alias} == _HOMES


def test_what_is_imported_is_declared() -> None:
    declared = set(re.findall(r'"([\w-]+)>=', (ROOT / "setup.py").read_text(encoding="utf-8").replace("_", "-")))
    declared |= {"learn2learn"}  # by .ci/setup-env.sh
    packages = {"PIL": "pillow", "sklearn": "scikit-learn", "umap": "umap-learn"}
    ours = {"metapretrain", *(file.stem for file in (ROOT / "benchmarks").glob("*.py"))}
    for file in [*(ROOT / "metapretrain").rglob("*.py"), *(ROOT / "benchmarks").glob("*.py")]:
        nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
        names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
        for name in {name.partition(".")[0] for name in names} - sys.stdlib_module_names - ours:
            package = packages.get(name, name.replace("_", "-"))
            assert package in declared, f"{file.name} imports {name}, which setup.py does not declare"


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'EpisodeSampeler'"):
        getattr(metapretrain, "EpisodeSampeler")  # noqa: B009 - mypy would refuse the plain form


def test_version_is_the_one_in_the_citation() -> None:
    citation = ROOT / "CITATION.cff"
    assert f"\nversion: {metapretrain.__version__}\n" in citation.read_text(encoding="utf-8")
