"""The script that shares runs between processes: its launches, and what it reads from their results."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import run_scale
from run_scale import Launch, main, options_of, read

from metapretrain.errors import InputError
from metapretrain.experiments import command
from tests import forks

SMOKE = ["--smoke", "--device", "cpu", "--seeds", "0"]


def written(folder: Path, method: str, processes: int, speed: float) -> None:
    result = {
        "method": method,
        "seed": 0,
        "metrics": {"test_accuracy": 0.5},
        "wall_s": 2.0,
        "pretrain_wall_s": 3.0,
        "images_per_s": speed,
        "updates_per_s": speed,
        **({"processes": processes} if processes > 1 else {}),
    }
    (folder / "a" / "b" / f"{method}-s0").mkdir(parents=True)
    (folder / "a" / "b" / f"{method}-s0" / "result.json").write_text(json.dumps(result))


def test_speed_is_that_of_the_pretraining_and_the_whole_batch(tmp_path: Path) -> None:
    for speed, method in enumerate(["prl-query-frozen-linear", "simclr", "pretrain-prl-query", "pretrain-simclr"]):
        written(tmp_path, method, 2, speed)
    prl, simclr = read(Launch("images", 2, False, (0,)), 512, tmp_path)
    assert (prl["rates"], simclr["rates"], prl["wall_s"]) == ([2], [3], [5.0])
    written(tmp_path / "maml", "maml", 1, 10.0)
    (maml,) = read(Launch("tasks", 1, True, (0,)), 64, tmp_path / "maml")
    assert maml["rates"] == [640.0] and maml["batch"] == 64


def test_a_launch_that_became_single_processes_is_refused(tmp_path: Path) -> None:
    written(tmp_path, "maml", 1, 10.0)
    with pytest.raises(InputError, match="number of processes"):
        read(Launch("tasks", 2, False, (0,)), 64, tmp_path)


def test_several_processes_are_started_by_torchrun() -> None:
    options = options_of([*SMOKE, "--precision", "bf16", "--encoder", "tiny"])
    two = run_scale.command_of(Launch("tokens", 2, False, (0, 1)), options)
    assert two[1:3] == ["-m", "torch.distributed.run"] and "--no-cuda-graph" in two
    assert two[two.index("--encoder") + 1] == "tiny" and two[two.index("--precision") + 1] == "bf16"
    one = run_scale.command_of(Launch("tasks", 1, True, (0,)), options)
    assert one[1].endswith("run_fewshot.py") and not {"--no-cuda-graph", "--precision", "--encoder"} & set(one)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "--stl10"),
        ([*SMOKE, "--processes", "0", "1"], "--processes"),
        ([*SMOKE, "--device", "cuda:1"], "cuda:1"),
        ([*SMOKE, "--results", "no/such/file"], "--results"),
        ([*SMOKE, "--results", "."], "is a folder"),
        ([*SMOKE, "--recorded-only"], "--recorded-only needs a GPU"),
    ],
)
def test_what_cannot_be_run_is_one_line(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    shown = capsys.readouterr().err
    assert told in shown and shown.count("\n") == 1


def test_a_failed_launch_is_named_and_the_others_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = run_scale.WORK["tasks"]
    monkeypatch.setattr(
        run_scale,
        "WORK",
        {
            "tasks": replace(tasks, smoke=f"{tasks.smoke} --image-size 16 --queries 1"),
            "images": run_scale.Work(
                "run_stl10.py",
                {"simclr": "pretrain-simclr"},
                "--set batch_size=512",
                "",
                "stl10",
                "images",
                "images_per_s",
            ),
        },
    )
    monkeypatch.setattr(command, "subprocess", forks)
    file = tmp_path / "scale.json"
    words = [*SMOKE, "--work", "images,tasks", "--processes", "1", "--out", str(tmp_path), "--results", str(file)]
    assert main(words) == 2  # STL-10 is not there; made tasks are
    assert "images-1" in capsys.readouterr().err.splitlines()[-1]
    (row,) = json.loads(file.read_text())["rows"]
    assert row["row"] == "maml" and row["precision"] == "fp32" and row["rates"][0] > 0
    assert row["processes"] == 1 and row["batch"] == 4


def test_nothing_that_fits_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMOKE, "--processes", "1000000"]) == 2
    assert "nothing was run" in capsys.readouterr().err.splitlines()[-1]


def test_results_that_cannot_be_written_let_the_other_launches_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(launch: Launch, *_: object) -> tuple[list[dict[str, object]], None]:
        return [{**ROW, "values": [0.5], "rates": [5.0], "wall_s": [3.0], "processes": launch.processes}], None

    monkeypatch.setattr(run_scale, "start", start)
    options = options_of([*SMOKE, "--results", str(tmp_path)])
    launches = [Launch("tasks", count, False, (0,)) for count in (1, 2)]
    with pytest.raises(InputError, match="2 of 2 launches failed: tasks-1: cannot write"):
        run_scale.run_all(launches, [{}, {}], options)
    assert capsys.readouterr().out.count("| maml (4) |") == 2


@pytest.mark.slow
def test_two_processes_reach_what_one_does(tmp_path: Path) -> None:
    file = tmp_path / "scale.json"
    words = [*SMOKE, "--work", "tasks", "--processes", "1", "2", "--out", str(tmp_path), "--results", str(file)]
    assert main(words) == 0
    one, two = sorted(json.loads(file.read_text())["rows"], key=lambda row: row["processes"])
    assert two["processes"] == 2 and two["values"] == pytest.approx(one["values"], abs=0.02)


ROW = {"row": "maml", "unit": "tasks", "batch": 4, "cuda_graph": False, "metric": "test_accuracy", "seeds": [0]}
ROWS = [{**ROW, "values": [0.5], "rates": [5.0], "wall_s": [3.0], "processes": count} for count in (1, 2)]


def test_rows_of_another_machine_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    here = {"hardware": "here", "versions": "torch 2"}
    file = tmp_path / "scale.json"
    file.write_text(json.dumps({**here, "rows": ROWS}))
    assert run_scale.stored_rows(file, here) == ROWS
    for other in ({"hardware": "there"}, {"versions": "torch 3"}):
        with pytest.raises(InputError, match="has rows of"):
            run_scale.stored_rows(file, here | other)
    damaged: list[dict[str, object]] = [{"values": []}, {"values": ["x"]}, {"rates": None}, {"wall_s": []}, {"row": {}}]
    damaged += [{"rates": [10**400]}, {"values": [math.nan]}]
    for text in ("{}", "", "[" * 10**5, *(json.dumps({**here, "rows": [ROWS[0] | change]}) for change in damaged)):
        file.write_text(text)
        with pytest.raises(InputError, match="not a result file"):
            run_scale.stored_rows(file, here)


def test_a_row_stays_until_it_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = {"hardware": "here", "versions": "torch 2"}
    file = tmp_path / "scale.json"
    file.write_text(json.dumps({**here, "rows": ROWS}))
    seen: list[list[float]] = []

    def start(launch: Launch, *_: object) -> tuple[list[dict[str, object]] | None, str | None]:
        seen.append(sorted(row["rates"][0] for row in json.loads(file.read_text())["rows"]))
        return ([{**ROWS[0], "rates": [9.0]}], None) if launch.processes == 1 else (None, "error: killed")

    monkeypatch.setattr(run_scale, "surroundings", lambda: dict(here))
    monkeypatch.setattr(run_scale, "start", start)
    words = [*SMOKE, "--work", "tasks", "--processes", "1", "2", "--seeds", "0", "--resume", "--results", str(file)]
    assert main([*words, "--out", str(tmp_path)]) == 2  # the second launch fails
    assert seen[0] == [5.0, 5.0]
    rows = json.loads(file.read_text())["rows"]
    assert [(row["processes"], row["rates"]) for row in rows] == [(2, [5.0]), (1, [9.0])]


def test_on_gpus_every_seed_is_recorded_and_the_rest_can_be_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    chosen: list[list[Launch]] = []
    monkeypatch.setattr(run_scale, "check_device", lambda _: "cuda")
    monkeypatch.setattr(run_scale, "slots", lambda *_: [{"CUDA_VISIBLE_DEVICES": name} for name in "01"])
    monkeypatch.setattr(run_scale, "run_all", lambda launches, *_: chosen.append(list(launches)))
    words = ["--smoke", "--work", "tasks,tokens", "--processes", "1", "2", "--seeds", "0", "1", "2"]
    assert main(words) == main([*words, "--recorded-only"]) == 0
    recorded = [Launch(work, count, True, (0, 1, 2)) for count in (1, 2) for work in ("tasks", "tokens")]
    eager = [Launch(work, count, False, (0,)) for count in (1, 2) for work in ("tasks", "tokens")]
    assert chosen == [[*recorded[:2], *eager[:2], *recorded[2:], *eager[2:]], recorded]
    two = run_scale.command_of(recorded[2], options_of(words))
    assert two[two.index("--seeds") :][:4] == ["--seeds", "0", "1", "2"] and "--no-cuda-graph" not in two


def test_a_launch_whose_updates_were_not_recorded_is_not_kept_as_recorded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    options = options_of([*SMOKE, "--out", str(tmp_path)])
    monkeypatch.setattr(run_scale, "read", lambda *_: [dict(ROW)])

    def run(_: object, places: object, folder: Path) -> None:
        (folder / "launch.log").write_text("WARNING: steps are not recorded as CUDA graphs: no memory\n")

    monkeypatch.setattr(run_scale, "run_jobs", run)
    rows, reason = run_scale.start(Launch("tasks", 2, True, (0,)), [{}, {}], options)
    assert rows is None and reason is not None and "no memory" in reason and f"remove {tmp_path}" in reason
    monkeypatch.setattr(run_scale, "run_jobs", lambda *_: pytest.fail("its runs are done: nothing would be said again"))
    resumed = options_of([*SMOKE, "--out", str(tmp_path), "--resume"])
    assert run_scale.start(Launch("tasks", 2, True, (0,)), [{}, {}], resumed) == (None, reason)
    monkeypatch.setattr(run_scale, "run_jobs", run)
    rows, reason = run_scale.start(Launch("tasks", 2, False, (0,)), [{}, {}], options)
    assert rows is not None and reason is None
