"""The set-up of `make`, with a stand-in for Python that only writes down what it is asked to do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SETUP = ROOT / ".ci" / "setup-env.sh"

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")

STAND_IN = """#!/bin/sh
case "$*" in
    *version_info*|*ensurepip*|*"pip --version"*) exit 0 ;;
    *python_version*) echo 3.11.0 ;;
    *) echo "$*" >> "{log}" ;;
esac
case "$*" in *learn2learn==*) exit {build} ;; esac
"""


def stand_in(folder: Path, build: int = 0) -> Path:
    """An environment in `folder`/env whose Python logs its arguments to `folder`/log."""
    python = folder / "env" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(STAND_IN.format(log=folder / "log", build=build))
    python.chmod(0o755)
    return folder / "env"


def tools_without_compiler(folder: Path) -> dict[str, str]:
    tools = folder / "bin"
    tools.mkdir()
    for name in ("sh", "ls", "mkdir", "rm", "touch"):
        (tools / name).symlink_to(shutil.which(name) or name)
    return {"PATH": str(tools)}


def run(*command: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    words = [str(word) for word in command]
    return subprocess.run(words, cwd=ROOT, env=env or clean, capture_output=True, text=True, timeout=60)


def assert_one_line(done: subprocess.CompletedProcess[str], *parts: str) -> None:
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    for part in parts:
        assert part in done.stderr


def test_second_make_skips_the_set_up(tmp_path: Path) -> None:
    venv = stand_in(tmp_path)
    first = run("make", "lint", f"VENV={venv}")
    assert first.returncode == 0, first.stderr
    assert "installing" in first.stdout
    asked = (tmp_path / "log").read_text().splitlines()
    assert [line.split()[2] for line in asked] == ["install", "install", "install", "check", "format"]
    assert "-e .[dev,learn2learn]" in asked[1]
    assert "--no-deps --config-settings=--build-option=build_ext learn2learn==0.2.0" in asked[2]
    second = run("make", "lint", f"VENV={venv}")
    assert second.stdout == ""
    assert (tmp_path / "log").read_text().splitlines() == [*asked, *asked[-2:]]


def test_extra_arguments_reach_pip(tmp_path: Path) -> None:
    venv = stand_in(tmp_path)
    run("make", "setup", f"VENV={venv}", "PIP_ARGS=--pre", "LEARN2LEARN_PIP_ARGS=--no-cache-dir")
    upgrade, install, build = (tmp_path / "log").read_text().splitlines()
    assert "--pre" in upgrade
    assert "--pre" in install
    assert "--no-cache-dir" not in install
    assert "--pre --no-cache-dir" in build


def test_a_long_set_up_says_that_it_goes_on(tmp_path: Path) -> None:
    venv = stand_in(tmp_path)
    python = venv / "bin" / "python"
    python.write_text(python.read_text().replace("#!/bin/sh\n", '#!/bin/sh\ncase "$*" in *-e*) sleep 3.5 ;; esac\n'))
    done = run("sh", SETUP, venv, venv / "stamp", env={**os.environ, "SETUP_SECONDS": "1"})
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stdout.splitlines() if line.startswith("still installing")]
    assert told[:2] == ["still installing, after 1 s", "still installing, after 2 s"] and len(told) <= 4
    python.write_text(python.read_text().replace("sleep 3.5", "exit 3"))
    failed = run("sh", SETUP, venv, venv / "other", env={**os.environ, "SETUP_SECONDS": "1"})
    assert failed.returncode == 3 and not (venv / "other").exists()


def test_stamp_of_another_checkout_does_not_count(tmp_path: Path) -> None:
    venv = stand_in(tmp_path)
    (venv / ".metapretrain-1234").touch()
    assert "installing" in run("make", "setup", f"VENV={venv}").stdout
    assert not (venv / ".metapretrain-1234").exists()


def test_without_a_compiler_learn2learn_is_left_out_in_one_line(tmp_path: Path) -> None:
    venv = stand_in(tmp_path)
    done = run("sh", SETUP, venv, venv / "stamp", env=tools_without_compiler(tmp_path))
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if "learn2learn" in line] == [
        "note: no C compiler found: learn2learn, an optional extra, is left out"
    ]
    assert "learn2learn==" not in (tmp_path / "log").read_text()
    assert (venv / "stamp").exists()


def test_failed_build_of_learn2learn_is_left_out_in_one_line(tmp_path: Path) -> None:
    venv = stand_in(tmp_path, build=1)
    done = run("sh", SETUP, venv, venv / "stamp", env={**os.environ, "CC": "sh"})
    assert done.returncode == 0, done.stderr
    assert "could not be built and is left out" in done.stdout
    assert (venv / "stamp").exists()


def test_python_that_does_not_fit_is_one_line(tmp_path: Path) -> None:
    old = tmp_path / "python"
    old.write_text('#!/bin/sh\ncase "$*" in *python_version*) echo 3.9.1 ;; *) exit 1 ;; esac\n')
    old.chmod(0o755)
    done = run("sh", SETUP, tmp_path / "env", tmp_path / "stamp", old)
    assert_one_line(done, f"PYTHON={old} is 3.9.1", "3.11, 3.12 or 3.13")
    assert_one_line(run("sh", SETUP, tmp_path / "env", tmp_path / "stamp", tmp_path / "none"), "not a Python")
    assert not (tmp_path / "env").exists()


def test_no_fitting_python_at_all_is_one_line(tmp_path: Path) -> None:
    done = run("sh", SETUP, tmp_path / "env", tmp_path / "stamp", env=tools_without_compiler(tmp_path))
    assert_one_line(done, "no Python 3.11, 3.12 or 3.13 found")


def test_folder_that_is_no_environment_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    done = run("sh", SETUP, tmp_path, tmp_path / "stamp", sys.executable)
    assert_one_line(done, "not a Python environment")
    run("sh", ROOT / ".ci" / "clean.sh", tmp_path)
    assert (tmp_path / "thesis.tex").exists()
