"""`--log-to`: a run's values in wandb and mlflow beside TensorBoard, by fake modules that write down each call."""

from __future__ import annotations

import importlib
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import run_stl10
from metapretrain.errors import InputError
from metapretrain.training.run_folder import RunFolder
from tests.training.run_files import CONFIG, scalars

WANDB = """
import json, math
class Run:
    def __init__(self, name): self.name = name
    def log(self, values, step=None):
        if any(value == 13 for value in values.values()): raise OSError("the service is away")
        tell("log", self.name, values, step)
    def finish(self): tell("finish", self.name)
def tell(*what):
    with open(__file__ + ".calls", "a") as file: file.write(json.dumps(what) + chr(10))
def init(project, name, config, dir, reinit):
    if name.startswith("refused/"): raise RuntimeError("no API key\\nconfigured")
    assert reinit == "create_new"
    tell("init", project, name, config)
    return Run(name)
"""
MLFLOW = """
import json
from types import SimpleNamespace as Object
utils = Object(validation=Object(MAX_PARAM_VAL_LENGTH=500, MAX_PARAMS_TAGS_PER_BATCH=100))
def tell(*what):
    with open(__file__ + ".calls", "a") as file: file.write(json.dumps(what) + chr(10))
def search_experiments(filter_string): return []
def create_experiment(name, artifact_location, tags): tell("experiment", name); return "1"
def start_run(run_id, experiment_id, run_name, nested, tags, description):
    tell("init", run_name, nested)
    return Object(info=Object(run_id=f"id of {run_name}"))
def log_params(values): tell("params", values)
def log_metrics(values, step, run_id): tell("log", run_id, values, step)
def end_run(): tell("finish")
"""


@pytest.fixture
def services(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[Any]]:
    """Fake services; the calls that one has had."""
    folder = tmp_path / "installed"
    folder.mkdir()
    for name, code in (("wandb", WANDB), ("mlflow", MLFLOW)):
        (folder / f"{name}.py").write_text(code)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(folder))
    importlib.invalidate_caches()

    def calls(name: str) -> list[Any]:
        file = folder / f"{name}.py.calls"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    yield calls
    for name in ("wandb", "mlflow"):
        sys.modules.pop(name, None)


def test_values_go_to_each_service_and_to_tensorboard(services: Any, tmp_path: Path) -> None:
    folder = tmp_path / "table" / "prl-s0"
    with RunFolder.open(folder, CONFIG, log_to=["wandb", "mlflow"]) as run:
        assert services("wandb") == []  # a folder that is only looked at starts nothing
        run.log(1, "train", {"loss": 0.5})
        run.log(4, "validation", {"accuracy": 0.75})
        run.hparams({"method": "prl"}, {"test_accuracy": 0.7, "silhouette": None})
    values = [{"train/loss": 0.5}, {"validation/accuracy": 0.75}, {"when_done/test_accuracy": 0.7}]
    steps = [1, 4, 4]
    (begun, *logged, ended) = services("wandb")
    assert begun[:3] == ["init", "metapretrain", "table/prl-s0"] and begun[3]["method"] == CONFIG["method"]
    assert logged == [["log", "table/prl-s0", one, step] for one, step in zip(values, steps, strict=True)]
    assert ended == ["finish", "table/prl-s0"]
    experiment, begun, params, *logged, ended = services("mlflow")
    assert (experiment, begun) == (["experiment", "metapretrain"], ["init", "table/prl-s0", True])
    assert params[1]["method"] == CONFIG["method"] and ended == ["finish"]
    assert logged == [["log", "id of table/prl-s0", one, step] for one, step in zip(values, steps, strict=True)]
    assert scalars(folder, "train/loss") == [(1, 0.5)]


def test_rows_that_are_trained_together_stay_apart(services: Any, tmp_path: Path) -> None:
    names = ["wandb", "mlflow"]
    with (
        RunFolder.open(tmp_path / "a", CONFIG, log_to=names) as first,
        RunFolder.open(tmp_path / "b", CONFIG, log_to=names) as second,
    ):
        for step in (1, 2):
            first.log(step, "train", {"loss": 1.0})
            second.log(step, "train", {"loss": 2.0})
    for service in names:
        values = {(call[1][-1], call[2]["train/loss"]) for call in services(service) if call[0] == "log"}
        assert values == {("a", 1.0), ("b", 2.0)}


def test_other_processes_and_runs_without_the_option_start_nothing(services: Any, tmp_path: Path) -> None:
    with RunFolder.open(tmp_path / "a", CONFIG, log_to=["wandb"], main=False) as run:
        run.log(1, "train", {"loss": 1.0})
    with RunFolder.open(tmp_path / "b", CONFIG) as run:
        run.log(1, "train", {"loss": 1.0})
    assert services("wandb") == []


def test_a_service_that_refuses_is_one_line_and_one_that_fails_later_is_left_out(
    services: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        RunFolder.open(tmp_path / "refused" / "a", CONFIG, log_to=["wandb"]) as run,
        pytest.raises(InputError, match=r"^--log-to wandb: no API key configured; log in"),
    ):
        run.log(1, "train", {"loss": 0.5})
    with (
        caplog.at_level(logging.WARNING),
        RunFolder.open(tmp_path / "table" / "a", CONFIG, log_to=["wandb", "mlflow"]) as run,
    ):
        for step, value in enumerate((1.0, 13.0, 2.0)):
            run.log(step, "train", {"loss": value})
    assert [record.message for record in caplog.records] == ["wandb is left out from now on: the service is away"]
    assert [call[2]["train/loss"] for call in services("wandb") if call[0] == "log"] == [1.0]
    assert [call[2]["train/loss"] for call in services("mlflow") if call[0] == "log"] == [1.0, 13.0, 2.0]


def test_a_script_logs_to_what_it_is_told(services: Any, tmp_path: Path) -> None:
    words = ["--dataset", "digits", "--smoke", "--no-figures", "--device", "cpu", "--methods", "supervised-mlp"]
    assert run_stl10.main([*words, "--log-to", "wandb", "--out", str(tmp_path)]) == 0
    begun, *logged, ended = services("wandb")
    assert begun[2] == "digits-paper-smoke/supervised-mlp-s0" and ended[0] == "finish"
    assert any("train/loss_supervised" in call[2] for call in logged) and "when_done/test_accuracy" in logged[-1][2]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("wandb", "--log-to: wandb is not installed: pip install wandb, or leave --log-to out"),
        ("mlflow,wandb", "--log-to: mlflow is not installed: pip install mlflow, or leave --log-to out"),
        ("wandbb", "--log-to: unknown tracker 'wandbb'; did you mean 'wandb'?"),
    ],
)
def test_a_service_that_is_not_there_is_one_line(
    given: str, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None)
    with pytest.raises(SystemExit) as stop:
        run_stl10.main(["--dataset", "digits", "--smoke", "--log-to", given])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.startswith(f"error: {told}") and error.count("\n") == 1
