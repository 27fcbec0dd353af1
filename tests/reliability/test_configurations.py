"""Any command line of five benchmarks ends as a finished run or as one clear line with status 2, never a traceback."""

from __future__ import annotations

import contextlib
import io
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from benchmarks import run_fewshot, run_prompts, run_schedule, run_stl10, run_text
from metapretrain.experiments.prompts.recipe import PromptRecipe
from metapretrain.experiments.schedule.recipe import ScheduleRecipe
from tests.reliability.draws import command_lines, leaves, parser_of
from tests.reliability.lengths import lengths, only_long

# A script, its recipe, what every call is given, and what a whole run is given besides so that it ends in seconds.
SCRIPTS: dict[str, tuple[Any, Any, list[str], list[str]]] = {
    "stl10": (run_stl10, run_stl10.PAPER, ["--dataset", "digits"], ["--methods", "supervised-mlp,simclr-frozen"]),
    "fewshot": (run_fewshot, run_fewshot.PROTONET, ["--settings", "2w1s"], ["--methods", "protonet,anil"]),
    "text": (run_text, run_text.PAPER, [], ["--methods", "cosine,proto"]),
    "prompts": (run_prompts, PromptRecipe(), [], ["--methods", "metapt-kmeans", "--sets", "sst2"]),
    "schedule": (run_schedule, ScheduleRecipe(), [], ["--methods", "uniform", "--settings", "agnostic"]),
}

USUAL = settings(deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """No network, no launcher, no log."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    caplog.set_level(logging.ERROR)


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    """A folder that is missing, an empty one and a file."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_bytes(b"\x00\xff")
    return [str(tmp_path / name) for name in ("missing", "empty", "file")]


def check(script: Any, words: list[str], out: Path) -> int:
    """Run a script and check that it ends well; an exception passes through."""
    shown, told = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(told):
        try:
            status = script.main([*words, "--out", str(out)])
        except SystemExit as stop:
            status = stop.code
    lines = told.getvalue().splitlines()
    assert status in (0, 2), (status, words)
    if status == 2:
        assert [line for line in lines if line.startswith("error: ")] == lines[-1:], (lines, words)
        assert len(lines[-1]) > 20, (lines, words)
    return int(status)


def test_every_option_and_every_field_is_drawn() -> None:
    for script, recipe, _, _ in SCRIPTS.values():
        assert len(parser_of(script.options_of)._actions) > 15
        assert len(list(leaves(recipe))) > 10


@pytest.mark.parametrize("draws", lengths(5, 300))
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_plan(name: str, draws: int, tmp_path: Path, paths: list[str]) -> None:
    script, recipe, always, _ = SCRIPTS[name]
    lines = command_lines(script.options_of, recipe, paths, small=False)

    @settings(USUAL, max_examples=draws)
    @given(lines, st.sampled_from([["--smoke"], ["--smoke"], ["--smoke"], []]))
    def run(words: list[str], smoke: list[str]) -> None:
        check(script, [*smoke, "--dry-run", "--device", "cpu", *always, *words], tmp_path / "runs")
        assert not (tmp_path / "runs").exists(), words

    run()


@pytest.mark.parametrize(("name", "draws"), [("prompts", 2), *(only_long(name, 15) for name in SCRIPTS)])
def test_a_whole_run(name: str, draws: int, tmp_path: Path, paths: list[str]) -> None:
    script, recipe, always, few = SCRIPTS[name]
    lines = command_lines(script.options_of, recipe, paths, small=True)

    @settings(USUAL, max_examples=draws)
    @given(lines)
    def run(words: list[str]) -> None:
        assume(name != "prompts" or not {"paper", "budget=paper"} & set(words))  # 20,000 steps, of --smoke too
        shutil.rmtree(tmp_path / "runs", ignore_errors=True)
        usual = ["--smoke", "--no-figures", "--device", "cpu", *always, *few]
        if check(script, [*usual, *words], tmp_path / "runs") == 0:
            assert any((tmp_path / "runs").rglob("result.json")), words

    run()
