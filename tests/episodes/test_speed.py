"""The speed benchmark runs, counts right, names what is missing, and takes no unknown row."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

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
    content = json.loads(out.read_text())
    assert "core" in content["hardware"]
    assert "numpy" in content["versions"]
    results = content["rows"]
    assert [result["median"] > 0 for result in results] == [True, True, False, False]


def test_rates_and_ratios_are_of_the_work_done(script: ModuleType) -> None:
    """A clock that the work itself moves: 2 and 5 ms a unit."""
    contenders = importlib.import_module("speed_contenders")
    now = [0.0]

    def contender(name: str, cost: float, ours: bool) -> object:
        def work(n: int) -> None:
            now[0] += n * cost

        return contenders.Contender(name, lambda: work, ours=ours, clock=lambda: now[0])

    pair = [contender("ours", 0.002, True), contender("peer", 0.005, False)]
    ours, peer = script.measure("row", pair, script.Settings(3, 0.5))
    assert ours.median == pytest.approx(500)
    assert (peer.low, peer.high) == (pytest.approx(200), pytest.approx(200))
    assert (ours.ratio, peer.ratio) == (pytest.approx(2.5), pytest.approx(1))


def test_what_is_measured_is_kept_when_the_rest_is_cut_short(script: ModuleType) -> None:
    contenders = importlib.import_module("speed_contenders")
    now = [0.0]
    kept: list[Any] = []

    def work(n: int) -> None:
        now[0] += n

    def never() -> float:
        raise KeyboardInterrupt

    one = contenders.Contender("one", lambda: work, clock=lambda: now[0], difference=lambda: 0.5)
    other = contenders.Contender("other", lambda: work, clock=lambda: now[0], difference=never)
    with pytest.raises(KeyboardInterrupt):
        script.measure("row", [one, other], script.Settings(2, 1.0), kept.append)
    repeats = [[result.repeats for result in results] for results in kept]
    assert repeats == [[1], [1, 1], [2, 1], [2, 2], [2, 2]]
    assert [result.difference for result in kept[-1]] == [0.5, None]
    assert [result.median for result in kept[-1]] == [pytest.approx(1), pytest.approx(1)]


def test_an_unknown_row_is_one_line(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_status:
        script.main(["--rows", "planning-omniglott"])
    assert exit_status.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "did you mean 'planning-omniglot'" in error


def test_a_folder_that_is_not_there_is_refused_before_anything_is_measured(
    script: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert script.main(["--rows", "planning-omniglot", "--out", str(tmp_path / "no" / "speed.json")]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("error: no folder")


def test_image_rows_say_what_needs_a_gpu_and_count_operations(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    images = importlib.import_module("speed_images")
    for name, small in (("BATCH", 4), ("CPU_TRAIN_BATCH", 4), ("SIZE", 32)):
        monkeypatch.setattr(images, name, small)
    monkeypatch.setattr(images.torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(sys.modules, "kornia", None)
    out = tmp_path / "speed.json"
    assert script.main(["--smoke", "--rows", "augment-plain,train", "--out", str(out)]) == 0
    rows = {(row["row"], row["name"]): row for row in json.loads(out.read_text())["rows"]}
    assert "skipped: needs kornia" in capsys.readouterr().out
    for name in ("CUDA graph", "compiled", "compiled, CUDA graph"):
        assert rows["train", name]["missing"] == "a CUDA GPU"
        assert rows["augment-plain", f"BatchAugment, {name}"]["missing"] == "a CUDA GPU"
    assert rows["train", "kernel by kernel"]["median"] > 0
    ours, theirs = (rows["augment-plain", name] for name in ("BatchAugment", "torchvision v2, image by image"))
    assert ours["ratio"] == pytest.approx(ours["median"] / theirs["median"])
    assert 0 < ours["kernels"] < theirs["kernels"]
    assert ours["waits"] is None


def test_kernels_of_one_call_are_counted(script: ModuleType) -> None:
    contenders, torch = importlib.import_module("speed_contenders"), importlib.import_module("torch")
    if torch.cuda.is_available():
        pytest.skip("operations are counted on the CPU")
    x = torch.ones(3)
    assert contenders.count_kernels(lambda: x + x)[0] == 1
    assert importlib.import_module("speed_measure").counted(lambda n: [x + x for _ in range(n + 4)]) == (1, None)


def test_a_call_may_be_many_units_and_a_prefix_names_a_group(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]

    def work(n: int) -> None:
        now[0] += n * 0.5

    ran = []

    class Made(ModuleType):
        @staticmethod
        def contenders(name: str) -> list[object]:
            ran.append(name)
            kind = importlib.import_module("speed_contenders").Contender
            return [kind("ours", lambda: work, ours=True, clock=lambda: now[0], each=8)]

    monkeypatch.setitem(sys.modules, "made_rows", Made("made_rows"))
    names = ("planning-a", "loss", "planning-b")
    rows = {name: script.Row("images", "made_rows.contenders", {"name": name}) for name in names}
    monkeypatch.setattr(script, "ROWS", rows)
    assert script.main(["--rows", "planning"]) == 0
    assert ran == ["planning-a", "planning-b"]
    assert "| planning-b | ours | 16.000 images | 16.000 to 16.000 |" in capsys.readouterr().out
