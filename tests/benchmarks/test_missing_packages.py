"""What a run imports or reads later is looked for before the first one: no job starts, and nothing is written."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from metapretrain.checks import lacking, require
from metapretrain.errors import InputError
from metapretrain.experiments import command
from metapretrain.experiments.base import ALWAYS, DRAWN, Experiment
from metapretrain.experiments.images import objectives

ROOT = Path(__file__).parents[2]
SCRIPTS = {  # rows for which another package is needed by some, and that package
    "run_stl10": ("--dataset digits --methods supervised-mlp,simclr,simclr-frozen", "pytorch_metric_learning"),
    "run_text": ("--methods baseline,cross,pretrain-ce", "transformers"),
    "run_prompts": ("--methods pt,metapt-kmeans", "sklearn"),
    "run_schedule": ("--methods uniform,utility-exact --settings aware", "tensorboard"),
    "run_fewshot": ("--methods protonet,maml --settings 5w1s,5w5s", "accelerate"),
}
TOLD = {
    "run_stl10": "simclr, simclr-frozen need pytorch_metric_learning, which is not installed: "
    "pip install pytorch-metric-learning; or run the other rows alone: --methods supervised-mlp\n",
    "run_text": "all rows need transformers, which is not installed: pip install transformers\n",
    "run_prompts": "metapt-kmeans needs sklearn, which is not installed: "
    "pip install scikit-learn; or run the other rows alone: --methods pt\n",
    "run_schedule": "all rows need tensorboard, which is not installed: pip install tensorboard\n",
    "run_fewshot": "all rows need accelerate, which is not installed: pip install accelerate\n",
}


@pytest.fixture
def hide(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Hides a package, and those of its modules that are imported already; no other is left half imported by it."""
    for module in (*ALWAYS, *DRAWN, "pytorch_metric_learning.losses", "sklearn.cluster", "sklearn.neighbors"):
        importlib.import_module(module)

    def hidden(package: str) -> None:
        for name in [name for name in sys.modules if name.startswith(f"{package}.")]:
            monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.setitem(sys.modules, package, None)

    return hidden


def start(script: str, out: Path, *more: str, options: str = "") -> int:
    words = (options or SCRIPTS[script][0]).split()
    given = [*words, "--smoke", "--no-figures", "--device", "cpu", "--out", str(out), *more]
    status: int = importlib.import_module(script).main(given)
    return status


@pytest.mark.parametrize("more", [(), ("--jobs-per-device", "2")], ids=["in turn", "side by side"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_nothing_starts_where_a_row_lacks_a_package(
    script: str,
    more: tuple[str, ...],
    hide: Callable[[str], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def started(*_: Any, **__: Any) -> None:
        raise AssertionError("a job has started")

    for what, name in ((command, "run_jobs"), (Experiment, "run")):
        monkeypatch.setattr(what, name, started)
    importlib.import_module(script)
    hide(SCRIPTS[script][1])
    assert start(script, tmp_path / "runs", *more) == 2
    assert capsys.readouterr().err.endswith(f"error: {TOLD[script]}")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_dry_run_warns_and_shows_the_plan(
    script: str,
    hide: Callable[[str], None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    importlib.import_module(script)
    hide(SCRIPTS[script][1])
    assert start(script, tmp_path / "runs", "--dry-run") == 0
    assert caplog.messages.count(TOLD[script].strip()) == 1  # once, however many tables there are
    assert "seeds 0" in capsys.readouterr().out
    assert not (tmp_path / "runs").exists()


def test_rows_that_need_no_more_are_let_run(
    hide: Callable[[str], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start("run_stl10", tmp_path) == 0
    hide("pytorch_metric_learning")
    assert start("run_stl10", tmp_path, "--resume") == 0  # all are done
    root = tmp_path / "stl10" / "digits-paper-smoke"
    (root / "simclr-s0" / "result.json").unlink()
    assert start("run_stl10", tmp_path, "--resume") == 0  # its pretraining is done
    (root / "pretrain-simclr-s0" / "result.json").unlink()
    assert start("run_stl10", tmp_path, "--resume") == 0  # no row is left that would start from it
    (root / "simclr-s0" / "result.json").unlink()
    capsys.readouterr()
    assert start("run_stl10", tmp_path, "--resume") == 2
    assert capsys.readouterr().err.startswith("error: simclr needs pytorch_metric_learning, which is not installed: ")
    assert start("run_stl10", tmp_path / "other", options="--dataset digits --methods supervised-mlp") == 0


def test_figures_and_corruption_say_which_option_does_without(
    hide: Callable[[str], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hide("PIL")
    words = ["--dataset", "digits", "--smoke", "--methods", "supervised-mlp", "--out", str(tmp_path / "runs")]
    main = importlib.import_module("run_stl10").main
    installed = "PIL, which is not installed: pip install pillow"
    assert main(words) == 2
    assert capsys.readouterr().err.endswith(f"error: supervised-mlp needs {installed}; or give --no-figures\n")
    assert main([*words, "--no-figures", "--corrupt"]) == 2
    assert capsys.readouterr().err.endswith(f"error: --corrupt needs {installed}; or leave it out\n")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "options",
    [
        "run_text --methods baseline,cross --encoder {}",
        "run_prompts --methods pt,metapt-kmeans --set embedder={}",
        "run_fewshot --methods protonet --encoder {}",
        "run_stl10 --dataset digits --methods supervised-mlp,simclr --unlabelled {}",
    ],
)
@pytest.mark.parametrize("more", [(), ("--jobs-per-device", "2")], ids=["in turn", "side by side"])
def test_nothing_starts_where_files_of_a_row_cannot_be_read(
    options: str, more: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "config.json").write_text('{"model_type": "bert"}')
    script, *words = options.format(damaged).split()
    assert start(script, tmp_path / "runs", *more, options=" ".join(words)) == 2
    assert str(damaged) in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "runs").exists()


def test_an_objective_of_ones_own_names_its_packages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Own(objectives.PRL):
        imports = ("no_such_package.losses",)

    monkeypatch.setitem(objectives.OBJECTIVES, "own", objectives.Entry(Own, "prl", Own.build))
    assert start("run_stl10", tmp_path / "runs", options="--dataset digits --methods own,supervised-mlp") == 2
    told = "own needs no_such_package, which is not installed: pip install no-such-package; "
    assert capsys.readouterr().err.endswith(f"{told}or run the other rows alone: --methods supervised-mlp\n")


def test_a_package_that_the_data_need_is_one_line(
    hide: Callable[[str], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    importlib.import_module("run_schedule")
    hide("transformers")
    assert start("run_schedule", tmp_path / "runs") == 2
    assert capsys.readouterr().err.endswith("error: transformers is not installed: pip install transformers\n")


def test_a_package_that_is_damaged_is_told_with_its_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "hurt_one.py").write_text("raise AttributeError('np.float_ was removed')\n")
    (tmp_path / "hurt_two.py").write_text("import no_such_dependency.part\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert lacking("hurt_one", load=False) is None and lacking("json.decoder") is None
    with pytest.raises(InputError, match=r"^it needs hurt_one, which cannot be imported \(AttributeError: np\.float_"):
        require("hurt_one", "it")
    assert lacking("hurt_two") == "no_such_dependency, which is not installed: pip install no-such-dependency"


# Read or asked for before the first run; of other commands; or with a way without them.
ELSEWHERE = {"huggingface_hub", "learn2learn", "onnx", "onnxscript", "pandas", "pyarrow", "shtab", "timm", "umap"}
WITH_PYTHON = {"torch", "numpy", "safetensors", "tqdm"}  # imported when the package is


def test_every_package_that_is_imported_late_is_looked_for() -> None:
    """A late import of a package that no `imports` names would be found missing in the middle."""
    files = [*(ROOT / "metapretrain").rglob("*.py"), *(ROOT / "benchmarks").glob("*.py")]
    ours = {"metapretrain", *(file.stem for file in files)}
    late: dict[str, str] = {}
    named = {module.partition(".")[0] for module in (*ALWAYS, *DRAWN)}
    for file in files:
        if file.stem.startswith("speed_"):  # contenders that are missing are left out
            continue
        for function in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(function, ast.FunctionDef):
                continue
            for node in ast.walk(function):
                if isinstance(node, ast.Import | ast.ImportFrom):
                    names = [alias.name for alias in node.names]
                    roots = [node.module or ""] if isinstance(node, ast.ImportFrom) else names
                    late |= {name.partition(".")[0]: f"{file.name}:{node.lineno}" for name in roots}
                if function.name == "imports" and isinstance(node, ast.Constant) and isinstance(node.value, str):
                    named.add(node.value.partition(".")[0])
    named |= {name.partition(".")[0] for entry in objectives.OBJECTIVES.values() for name in entry.kind.imports}
    left = late.keys() - named - ours - ELSEWHERE - WITH_PYTHON - sys.stdlib_module_names
    assert not left, {name: late[name] for name in left}
