"""The speed benchmark runs, counts right, names what is missing, and takes no unknown row."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "run_speed.py"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("run_speed", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "run_speed", module)
    spec.loader.exec_module(module)
    return module


def test_a_missing_peer_is_named_and_skipped(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "learn2learn", None)
    out = tmp_path / "speed.json"
    assert script.main(["--smoke", "--rows", "planning-omniglot", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "learn2learn FusedNWaysKShots | skipped: needs learn2learn" in printed
    results = json.loads(out.read_text())
    assert [result["median"] > 0 for result in results] == [True, True, False, False]


def test_rates_and_ratios_are_of_the_work_done(script: ModuleType) -> None:
    """A clock that the work itself moves: 2 and 5 ms a unit."""
    now = [0.0]

    def contender(name: str, cost: float, ours: bool) -> object:
        def work(n: int) -> None:
            now[0] += n * cost

        return script.Contender(name, lambda: work, ours=ours, clock=lambda: now[0])

    pair = [contender("ours", 0.002, True), contender("peer", 0.005, False)]
    ours, peer = script.measure("row", pair, script.Settings(3, 0.5))
    assert ours.median == pytest.approx(500)
    assert (peer.low, peer.high) == (pytest.approx(200), pytest.approx(200))
    assert (ours.ratio, peer.ratio) == (pytest.approx(2.5), pytest.approx(1))


def test_an_unknown_row_is_one_line(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_status:
        script.main(["--rows", "planning-omniglott"])
    assert exit_status.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "did you mean 'planning-omniglot'" in error
