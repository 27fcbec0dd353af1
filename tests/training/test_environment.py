"""What a run says about its surroundings is true, and tells nothing of the machine's folders."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from metapretrain.training import environment
from metapretrain.training.environment import (
    command,
    commit,
    device_name,
    doctor,
    peak_memory_bytes,
    versions,
    without_absolute_paths,
)

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Let some packages look as if they were not installed."""
    usual = metadata.version

    def hide(*names: str) -> None:
        def version(name: str) -> str:
            if name in names:
                raise metadata.PackageNotFoundError(name)
            return usual(name)

        monkeypatch.setattr(metadata, "version", version)
        environment._version.cache_clear()

    yield hide
    environment._version.cache_clear()


def test_versions_are_those_of_the_modules(without: Any) -> None:
    found = versions()
    assert found["python"] == platform.python_version()
    assert found["torch"] == torch.__version__
    assert found["numpy"] == np.__version__
    assert found["transformers"] == metadata.version("transformers")
    without("transformers", "accelerate")
    assert "transformers" not in versions()
    assert "accelerate" not in versions()


def test_versions_and_doctor_import_nothing(modules_after: Callable[..., set[str]]) -> None:
    code = "from metapretrain.training.environment import doctor, versions; versions(); doctor()"
    found = modules_after(code, quiet=True)
    heavy = {"transformers", "torchvision", "higher", "learn2learn", "tensorboard", "matplotlib"}
    assert "metapretrain.training.environment" in found and not found & heavy


def row(report: str, name: str) -> str:
    (line,) = [line for line in report.splitlines() if line.startswith(f"{name} ")]
    return line.removeprefix(name).strip()


def test_doctor_names_what_is_there() -> None:
    report = doctor()
    assert row(report, "torch") == torch.__version__
    assert row(report, "numpy") == np.__version__
    assert row(report, "python").startswith(platform.python_version())
    assert row(report, "cpu").startswith(f"{os.cpu_count()} cores")
    assert ("cuda:0" in report) == torch.cuda.is_available()


def test_doctor_says_how_to_install_what_is_missing(without: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    without("higher", "learn2learn", "umap-learn")
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    report = doctor()
    assert row(report, "higher") == "missing: pip install higher"
    assert "learn2learn==0.2.0" in row(report, "learn2learn")
    assert "--build-option=build_ext" in row(report, "learn2learn")
    assert row(report, "umap-learn").endswith("pip install umap-learn")
    assert "needed only to build learn2learn" in row(report, "C compiler")


def test_doctor_finds_the_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "my-cc"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CC", "my-cc -O2")
    assert row(doctor(), "C compiler") == str(compiler)


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return subprocess.run(
        ["git", *who, *words], cwd=folder, env=env, capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.mark.skipif(shutil.which("git") is None, reason="needs Git")
def test_commit_is_that_of_the_package_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("GIT_")]:  # what a Git hook sets
        monkeypatch.delenv(name)
    package = tmp_path / "repo" / "metapretrain"
    (package / "training").mkdir(parents=True)
    (package / "errors.py").write_text("")
    monkeypatch.setattr(environment, "__file__", str(package / "training" / "environment.py"))
    monkeypatch.delenv("METAPRETRAIN_COMMIT", raising=False)
    fresh = commit.__wrapped__
    assert fresh() is None
    monkeypatch.setenv("METAPRETRAIN_COMMIT", "")
    assert fresh() is None
    monkeypatch.setenv("METAPRETRAIN_COMMIT", "release 3, copied")
    assert fresh() == "release 3, copied"
    git(tmp_path / "repo", "init")
    assert fresh() == "release 3, copied"  # installed inside some repository that does not track it
    git(tmp_path / "repo", "add", ".")
    git(tmp_path / "repo", "commit", "-m", "first")
    head = git(tmp_path / "repo", "rev-parse", "HEAD")
    assert fresh() == head
    (package / "new.py").write_text("")
    assert fresh() == head
    (package / "errors.py").write_text("changed")
    assert fresh() == head + "+changes"
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "nowhere"))  # as inside a Git hook
    assert fresh() == head + "+changes"
    monkeypatch.setenv("PATH", "")
    assert fresh() == "release 3, copied"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["/a/b/run.py", "--out", "/c/d e"], "run.py --out 'd e'"),
        (["run.py", "--out=/c/d", "--out=~/x/y", "~/z"], "run.py --out=d --out=y z"),
        (["run.py", "runs/a", "../b", "a/b=c", "3/4"], "run.py runs/a ../b a/b=c 3/4"),
        (["run.py", "x:/a/b", "[/a/b,/c/d]"], "run.py x:b '[b,d]'"),
        (["/v/lib/metapretrain/__main__.py", "demo"], "python -m metapretrain demo"),
        (["run.py", "--data-dir", "/"], "run.py --data-dir ''"),
        ([], ""),
    ],
)
def test_the_command_has_no_absolute_path(words: list[str], said: str) -> None:
    assert command(words) == said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("/home/me/x.bin", "x.bin"),
        ("cannot read '/home/me/x.bin': gone", "cannot read 'x.bin': gone"),
        ("a=/b/c;/d/e", "a=c;e"),
        ("(/b/c)", "(c)"),
        ("see https://example.org/a/b", "see https://example.org/a/b"),
        ("images/s, 1/2, and/or, runs/x/y, ./a/b, ../c", "images/s, 1/2, and/or, runs/x/y, ./a/b, ../c"),
        ({"/a/b": ["/c/d", 3, None, {"e": "~/f/g"}]}, {"b": ["d", 3, None, {"e": "g"}]}),
    ],
)
def test_without_absolute_paths(text: Any, said: Any) -> None:
    assert without_absolute_paths(text) == said


@pytest.mark.skipif(torch.cuda.is_available(), reason="resident memory is told where there is no GPU")
def test_peak_memory_is_in_bytes() -> None:
    assert 50_000_000 < peak_memory_bytes() < 200_000_000_000


def test_device_names() -> None:
    assert device_name("cpu") == f"cpu ({torch.get_num_threads()} threads)"
    assert device_name(torch.device("meta")) == "meta"
    if torch.cuda.is_available():
        assert device_name() == torch.cuda.get_device_name(0)
    else:
        assert device_name() == device_name("cpu")
