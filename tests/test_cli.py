"""The command: help, the overview, the glue of each subcommand, and bad input in one line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import types
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import metapretrain
from metapretrain import cli
from metapretrain.cli import build_parser, main
from metapretrain.evaluation.predictions import write_predictions
from metapretrain.models import saved
from metapretrain.models.pretrained import ENCODER_HEADS
from metapretrain.report import figures

COMMANDS = (
    "demo",
    "data",
    "report",
    "plot",
    "corrupt",
    "predict",
    "export",
    "push",
    "few-shot",
    "doctor",
    "completion",
)


def refuse(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run the command, check that it fails in one line, and return that line."""
    try:
        status = main(argv)
    except SystemExit as stop:
        status = int(stop.code or 0)
    shown = capsys.readouterr()
    assert (status, shown.out) == (2, "")
    assert shown.err.startswith("error: ")
    assert shown.err.count("\n") == 1
    return shown.err


def show(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(argv) == 0
    return capsys.readouterr().out


def run_python(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def write_run(folder: Path, method: str, seed: int, right: int, n: int = 20) -> Path:
    run = folder / f"{method}-s{seed}"
    run.mkdir(parents=True)
    labels = np.zeros(n, np.int64)
    write_predictions(run / "predictions.csv", labels, (np.arange(n) >= right).astype(np.int64))
    result = {
        "schema": 1,
        "status": "complete",
        "benchmark": "stl10",
        "dataset": "stl10",
        "recipe": "paper",
        "method": method,
        "seed": seed,
        "metrics": {"test_accuracy": right / n},
        "counts": {"test": n},
        "budget": {"encoder_passes": 100},
    }
    (run / "result.json").write_text(json.dumps(result))
    lines = [
        {"step": step, "split": split, "name": "loss", "value": seed + 1 / step}
        for step in (1, 2, 3)
        for split in ("train", "validation")
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


class Model:
    """A run's model that classifies by brightness."""

    image_size, channels, classes = 8, 3, ("dark", "bright")

    def encode(self, images: torch.Tensor) -> torch.Tensor:
        return images.float().mean(dim=(2, 3))

    def predict(self, images: torch.Tensor) -> torch.Tensor:
        return (self.encode(images).mean(dim=1) > 127).long()


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    asked: list[Any] = []

    def load(run: Path, device: str = "cpu") -> Model:
        asked.append((run, device))
        return Model()

    monkeypatch.setattr(saved, "load", load)
    return asked


def write_image(path: Path, grey: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((12, 12, 3), grey, np.uint8)).save(path)
    return path


def test_without_arguments_it_says_what_there_is_and_what_to_do_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = show([], capsys)
    assert all(f"metapretrain {command}" in shown for command in COMMANDS)
    assert shown.rstrip().endswith("Next: metapretrain demo")
    scripts = {path.name for path in (Path(__file__).parent.parent / "benchmarks").glob("run_*.py")}
    assert scripts == set(re.findall(r"benchmarks/(\w+\.py)", shown))
    write_run(tmp_path / "runs" / "demo" / "digits-demo", "supervised", 0, 12)
    last = show([], capsys).rstrip().splitlines()[-1]
    assert last == "Next: metapretrain report runs/demo"
    assert "| supervised | 1 |" in show(last.split()[2:], capsys)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_each_command_has_examples_that_parse(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    examples = re.findall("^  metapretrain (.*)", capsys.readouterr().out.partition("examples:\n")[2], re.MULTILINE)
    assert examples
    for example in examples:
        assert example.split()[0] == command
        build_parser().parse_args(example.split())


def test_help_and_version_are_quick_and_import_no_torch() -> None:
    code = (
        "import sys\nfrom metapretrain.cli import main\ntry: main(['--version'])\n"
        "except SystemExit: print('torch' in sys.modules)"
    )
    done = run_python("-c", code)
    assert done.stdout == f"metapretrain {metapretrain.__version__}\nFalse\n"


def test_module_can_be_run() -> None:
    done = run_python("-m", "metapretrain", "reprot")
    assert done.returncode == 2
    assert done.stderr.startswith("error: unknown command 'reprot'; did you mean 'report'?")


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["doctr"], "did you mean 'doctor'"),
        (["demo", "--methods", "simclear"], "did you mean 'simclr'"),
        (["demo", "--sedes", "1"], "did you mean '--seeds'"),
        (["demo", "--seeds", "0", "x"], "'x'"),
        (["demo", "--precision", "fp23"], "did you mean 'fp32'"),
        (["report"], "required: RUNS"),
        (["report", "nowhere"], "no such folder: nowhere"),
        (["report", ".", "--format", "cvs"], "did you mean 'csv'"),
        (["plot", "nowhere"], "no such folder: nowhere"),
        (["data", "slt10"], "did you mean 'stl10'"),
        (["data", "stl10", "--data-dir", "nowhere"], "nowhere"),
        (["data", "cs224n", "--data-dir", "nowhere"], "no folder nowhere: it must hold"),
        (["data", "--data-dir", "nowhere"], "no such folder: nowhere"),
        (["data", "--download", "--data-dir", "nowhere"], "name the data set first"),
        (["data", "digits", "--download"], "nothing to download"),
        (["data", "stl10", "--download"], "--data-dir"),
        (["few-shot", "run"], "--image-folder"),
        (["few-shot", "run", "--image-folder", "d", "--ways", "0"], "at least 1"),
        (["few-shot", "run", "--image-folder", "d", "--episodes", "many"], "'many'"),
        (["predict", "run"], "give image files, or texts such as --sst FILE"),
        (["predict", "run", "--texts", "topic"], "NAME=FILE"),
        (["predict", "run", "--sst", "x.csv", "--texts", "sst=y.csv"], "one file per task"),
        (["predict", "run", "--sst", "x.csv"], "not a run folder"),
        (["predict", "run", "a.png", "--device", "gpu"], "did you mean 'cuda'"),
    ],
)
def test_bad_input_is_one_line(argv: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert part in refuse(argv, capsys)


def test_device_that_is_not_there_is_one_line(
    loaded: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "'cuda:9' is not available" in refuse(["predict", "run", "a.png", "--device", "cuda:9"], capsys)
    assert loaded == []


def test_demo_gets_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Namespace] = []
    stand_in = types.ModuleType("metapretrain.experiments.images.experiment")
    monkeypatch.setattr(stand_in, "run_demo", lambda options: given.append(options) or 0, raising=False)
    monkeypatch.setitem(sys.modules, "metapretrain.experiments.images.experiment", stand_in)
    assert main(["demo", "--methods", "supervised,simclr", "--seeds", "4", "--smoke"]) == 0
    (options,) = given
    assert (options.methods, options.seeds, options.smoke) == (["supervised", "simclr"], [4], True)


def test_doctor_names_torch(capsys: pytest.CaptureFixture[str]) -> None:
    assert torch.__version__ in show(["doctor"], capsys)


def test_predict_names_the_class_of_each_file(
    tmp_path: Path, loaded: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    files = [str(write_image(tmp_path / f"{grey}.png", grey)) for grey in (250, 3)]
    shown = show(["predict", "run", *files, "--device", "cpu"], capsys)
    assert shown == f"{files[0]}\tbright\n{files[1]}\tdark\n"
    assert loaded == [(Path("run"), "cpu")]


def test_predict_names_a_file_that_is_no_image(
    tmp_path: Path, loaded: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.png").write_text("text")
    assert "text.png" in refuse(["predict", "run", str(tmp_path / "text.png")], capsys)


def test_the_reducers_offered_are_those_there_are() -> None:
    assert set(cli.REDUCERS) == set(figures.REDUCERS)  # written twice, so that help needs no torch
    assert cli.HEADS == ENCODER_HEADS


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_knows_each_command_and_option(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab", reason="the optional dependency shtab writes the script")
    script = show(["completion", shell], capsys)
    for word in (*COMMANDS, "--image-folder", "--calibrate", "torchvision"):
        assert word in script
    if shell == "bash":
        asked = (
            'COMP_WORDS=(metapretrain exp); COMP_CWORD=1; _shtab_metapretrain metapretrain exp; echo "${COMPREPLY[@]}"'
        )
        done = subprocess.run(["bash", "-c", f"{script}\n{asked}"], capture_output=True, text=True, check=True)
        assert done.stdout.split() == ["export"]


def test_completion_without_its_package_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert "pip install shtab" in refuse(["completion", "bash"], capsys)


def test_episodes_of_one_class_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["few-shot", "tiny", "--texts", "any.tsv", "--ways", "1"]) == 2
    assert capsys.readouterr().err == "error: --ways 1: the only class is always right; give 2 or more\n"


@pytest.mark.parametrize(
    ("words", "whose"),
    [
        (["--image-folder", "d", "--label", "topic"], "--label and --table are of --texts: leave them out"),
        (["--dataset", "digits", "--table", "text=x"], "--label and --table are of --texts: leave them out"),
        (["--image-folder", "d", "--data-dir", "d"], "--data-dir is of --dataset: leave it out"),
    ],
)
def test_options_of_other_data_are_refused(words: list[str], whose: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert whose in refuse(["few-shot", "run", *words], capsys)


def test_fine_tuning_is_a_head_with_settings_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [f"{word} number {row},{word}" for row in range(8) for word in ("sport", "money", "music")]
    table = tmp_path / "news.csv"
    table.write_text("\n".join(["sentence,label", *lines]) + "\n")
    words = ["few-shot", "tiny", "--texts", str(table), "--ways", "3", "--shots", "2", "--queries", "3"]
    found = show([*words, "--head", "finetune", "--set", "steps=2", "lr=0.001"], capsys)
    assert re.fullmatch(r"3-way 2-shot  [\d.]+% \+- [\d.]+% \(100 episodes\)\n", found)
    both = show([*words, "--head", "finetune", "normalised", "--episodes", "4", "--set", "lr=1e-9"], capsys)
    first, second = (line.split("  ") for line in both.splitlines())
    assert (first[1], second[1]) == ("finetune", "normalised") and first[2] == second[2]
    assert first[3:] == [] and second[3:] == ["minus finetune: +0.00% +- 0.00%"]
    assert show([*words, "--head", "normalised", "normalised", "--episodes", "4"], capsys).count("\n") == 1
    trained = ["--head", "normalised", "finetune", "--set", "steps=20", "lr=0.01", "head_lr=1", "scale=0.1"]
    lines = show([*words, *trained, "--episodes", "6"], capsys).splitlines()
    told = [[float(number) / 100 for number in re.findall(r"([-\d.]+)%", line)] for line in lines]
    assert told[1][2] == pytest.approx(told[1][0] - told[0][0], abs=2e-4) and told[1][2] != 0 < told[1][3]
    alone = show([*words, *trained, "--episodes", "1"], capsys)
    assert re.search(r"\(1 episode\)  minus normalised: [-+][\d.]+%\n$", alone)
    assert "did you mean 'steps'" in refuse([*words, "--head", "finetune", "--set", "step=2"], capsys)
    assert "--set lr=1 is of fine-tuning: give --head finetune" in refuse([*words, "--set", "lr=1"], capsys)
