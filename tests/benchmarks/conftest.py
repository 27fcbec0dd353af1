"""Running a benchmark script in this process: a test module names its `main` and the options TINY of every call."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    caplog.set_level(logging.ERROR)


@pytest.fixture
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., int]:
    """Run the module's script with its runs in a folder of the test."""
    module = request.module
    return lambda *words: module.main([*module.TINY, "--out", str(tmp_path / "runs"), *map(str, words)])


@pytest.fixture
def refuse(run: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run the script, check that it fails in one line with status 2, and return that line."""

    def refused(*words: object) -> str:
        capsys.readouterr()
        try:
            status = run(*words)
        except SystemExit as stop:
            status = int(stop.code or 0)
        shown = capsys.readouterr()
        assert status == 2 and shown.out == ""
        assert shown.err.startswith("error: ") and shown.err.count("\n") == 1
        return shown.err

    return refused
