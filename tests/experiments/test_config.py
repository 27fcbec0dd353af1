"""`--config FILE`: a run again from its own configuration, where given options win."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import run_fewshot, run_prompts, run_schedule, run_stl10, run_text
from metapretrain.errors import InputError
from metapretrain.experiments.command import Table, _jobs, with_config
from metapretrain.files import load_tensors

SMOKE = {
    "run_stl10": ["--dataset", "digits", "--methods", "supervised-mlp,prl-query-frozen-linear"],
    "run_fewshot": [
        *("--methods", "supervised-centroid,protonet", "--head", "nearest", "--settings", "5w1s,5w5s"),
        *("--image-size", "16", "--queries", "1"),
    ],
    "run_text": ["--encoder", "tiny", "--methods", "cross,proto"],
}
MAINS: dict[str, Callable[..., int]] = {
    "run_stl10": run_stl10.main,
    "run_fewshot": run_fewshot.main,
    "run_text": run_text.main,
}


def result(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "result.json").read_text())
    return found


def config(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "config.json").read_text())
    return found


@pytest.mark.parametrize("script", SMOKE)
def test_a_run_from_its_folder_gives_the_same_result(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    main = MAINS[script]
    usual = ["--smoke", "--device", "cpu", "--no-figures"]
    assert main([*SMOKE[script], *usual, "--seeds", "0", "1", "--out", str(tmp_path / "first")]) == 0
    firsts = sorted(path.parent for path in (tmp_path / "first").rglob("result.json"))
    rows = [run for run in firsts if result(run)["kind"] == "row" and result(run)["seed"] == 1]
    assert len(rows) >= 2
    for place, run in enumerate(rows):
        assert main(["--config", str(run / "config.json"), "--out", str(tmp_path / f"again{place}")]) == 0
        made = [path.parent for path in (tmp_path / f"again{place}").rglob("result.json")]
        (again,) = [one for one in made if result(one)["kind"] == "row"]
        assert again.relative_to(tmp_path / f"again{place}") == run.relative_to(tmp_path / "first")
        for key in ("metrics", "budget", "counts"):
            assert result(again)[key] == result(run)[key]
        assert config(again)["config"] == config(run)["config"]
        for file in run.rglob("*.safetensors"):
            kept, there = load_tensors(file), load_tensors(again / file.relative_to(run))
            assert kept.keys() == there.keys() and all(bool((kept[name] == there[name]).all()) for name in kept)
    # values that were changed in the file are not those of its command
    about = config(again)
    key = next(key for key, value in about["config"]["choices"].items() if type(value) is int)
    about["config"]["choices"][key] += 1
    (tmp_path / "edited.json").write_text(json.dumps(about))
    assert main(["--config", str(tmp_path / "edited.json"), "--dry-run", "--tag", "again", "--seeds", "5"]) == 2
    value = about["config"]["choices"][key]
    assert f"has {key} {value}, and {value - 1} by its command, which is what runs again" in capsys.readouterr().err
    # its own configuration leads to the same row once more, though the first folder is gone
    words = with_config(f"{script}.py", ["--config", str(again)])
    monkeypatch.setattr(sys, "argv", ["elsewhere"])
    assert "--config" not in config(again)["command"] and words[words.index("--seeds") + 1] == "1"


def written(folder: Path, command: str, kind: str = "row", **more: Any) -> Path:
    folder.mkdir(exist_ok=True)
    about = {"command": command, "config": {"method": "simclr", "seed": 3, "dataset": "digits", **more}}
    (folder / "config.json").write_text(json.dumps(about))
    (folder / "result.json").write_text(json.dumps({"kind": kind}))
    return folder / "config.json"


def test_given_options_win(tmp_path: Path) -> None:
    command = "benchmarks/run_stl10.py --dataset digits --seeds 0 1 2 3 --out runs --resume --set prl.lr=0.1 epochs=3"
    file = written(tmp_path / "run", f"{command} --jobs-per-device 2 --job --log-to wandb --precision=bf16")
    known = with_config("run_stl10.py", ["--config", str(file)])
    assert known == [
        *["--dataset", "digits", "--set", "prl.lr=0.1", "epochs=3", "--precision", "bf16"],
        *["--methods", "simclr", "--seeds", "3"],
    ]
    given = ["--seeds", "5", "--precision", "fp32", "--set", "epochs=4", "--out", "new"]
    words = with_config("run_stl10.py", [*given, "--config", str(file)])
    options = run_stl10.options_of(words)
    assert options.seeds == [5] and options.precision == "fp32" and options.methods == ["simclr"]
    assert options.out == Path("new") and options.changes == ["prl.lr=0.1", "epochs=3", "epochs=4"]
    assert run_stl10.recipe_of(options).epochs == 4
    assert with_config("run_stl10.py", ["--smoke"]) == ["--smoke"]


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("protonet", ["--seeds", "3", "--settings", "5w1s", "--methods", "protonet"]),
        ("encoder", [*["--encoder", "enc", "--seeds", "3", "--settings", "5w1s"], "--methods", "encoder", "--head"]),
        ("encoder-logistic-vit", ["--encoder", "enc", "--seeds", "3", "--settings", "5w1s", "--methods", "encoder"]),
        ("encoder-vit", ["--encoder", "enc", "--seeds", "3", "--settings", "5w1s", "--methods", "encoder"]),
        ("encoder-logistic", ["--encoder", "enc", "--seeds", "3", "--settings", "5w1s", "--methods", "encoder"]),
        ("supervised-nearest", ["--seeds", "3", "--settings", "5w1s", "--methods", "supervised-centroid"]),
    ],
)
def test_a_row_of_a_few_shot_command_is_chosen_alone(method: str, words: list[str], tmp_path: Path) -> None:
    command = "run_fewshot.py --encoder enc --methods protonet,encoder --head nearest logistic --settings 5w1s,5w5s"
    file = written(tmp_path / "run", command, method=method, dataset="made-5w1s")
    found = with_config("run_fewshot.py", ["--config", str(file)], run_fewshot.row_options)
    assert found[: len(words)] == words
    options = run_fewshot.options_of(found)
    assert list(options.methods) == [method.removesuffix("-vit")] and options.settings == ["5w1s"]


@pytest.mark.parametrize(
    ("methods", "updates"),
    [("protonet,supervised-nearest", 4), ("supervised-nearest", 9), ("all", 4), ("supervised-nearest,encoder", 9)],
)
def test_a_supervised_row_is_run_again_as_the_one_of_several_that_it_was(
    methods: str, updates: int, tmp_path: Path
) -> None:
    command = f"run_fewshot.py --smoke --methods {methods} --settings 5w1s --set updates=9"
    file = written(tmp_path / "run", command, method="supervised-nearest", dataset="made-5w1s")
    found = with_config("run_fewshot.py", ["--config", str(file), "--image-size", "16"], run_fewshot.row_options)
    ((table, rows),) = read(run_fewshot, found)
    assert rows["supervised-nearest"].updates == table.experiment.recipe.supervised.updates == updates


def test_what_cannot_be_run_again_is_one_line(tmp_path: Path) -> None:
    command = "run_stl10.py --dataset image-folder --data-dir photos"
    cases = {
        "no such file": tmp_path / "nowhere.json",
        "is not of run_stl10.py: its command is 'run_text.py'": written(tmp_path / "a", "run_text.py"),
        "is not of run_stl10.py: its command is ''": written(tmp_path / "b", ""),
        "is not of run_stl10.py: its command is 'run_stl10.py \"open'": written(tmp_path / "f", 'run_stl10.py "open'),
        "is of a pretraining": written(tmp_path / "c", command, kind="pretraining"),
        "run with --data-dir photos, which is not here": written(tmp_path / "d", command),
        "give it again by --plugin FILE": written(tmp_path / "e", "run_stl10.py --plugin mine.py"),
    }
    nameless = tmp_path / "nameless.json"
    nameless.write_text(json.dumps({"command": "run_stl10.py", "config": {}}))
    cases["is not of run_stl10.py: its command is 'run_stl10.py'"] = nameless
    for told, file in cases.items():
        with pytest.raises(InputError, match=told):
            with_config("run_stl10.py", ["--config", str(file)])
    data = ["--data-dir", str(tmp_path)]
    assert with_config("run_stl10.py", ["--config", str(cases["run with --data-dir photos, which is not here"]), *data])


MADE = "made-5w1s-conv4-smoke"


@pytest.mark.parametrize(
    ("script", "words", "jobs"),
    [
        (run_fewshot, ["--methods", "all", "--encoder", "{run}"], 11),
        (run_fewshot, ["--encoder", "{run}", "--head", "nearest", "logistic", "centred"], 1),
        (run_fewshot, ["--encoder", "{run}", "--methods", "encoder-centred,protonet", "--settings", "5w1s,5w5s"], 2),
        (run_fewshot, ["--methods", "supervised-logistic,maml", "--head", "nearest", "normalised"], 2),
        (run_fewshot, ["--methods", "supervised-logistic,maml", "--set", "updates=9", "supervised.lr=0.3"], 2),
        (run_stl10, ["--dataset", "digits", "--methods", "all"], None),
        (run_text, ["--encoder", "tiny", "--methods", "all"], None),
        (run_prompts, ["--methods", "all"], None),
        (run_schedule, ["--methods", "uniform,fixed"], None),
    ],
)
def test_every_script_takes_the_words_of_its_jobs(
    script: Any, words: list[str], jobs: int | None, tmp_path: Path
) -> None:
    usual = ["--smoke", "--device", "cpu", "--no-figures", "--out", str(tmp_path)]
    if "{run}" in words:
        tiny = [*usual, "--image-size", "16", "--settings", "5w1s", "--methods", "protonet", "--seeds", "0"]
        assert run_fewshot.main(tiny) == 0
        words = [str(tmp_path / "fewshot" / MADE / "protonet-s0") if word == "{run}" else word for word in words]
    given = [*words, *usual, "--jobs-per-device", "2"]
    for table, chosen in read(script, given):
        found = _jobs(chosen, script.options_of(given), ["script.py", *given, *table.more])
        again = [pair for command in found.values() for pair in read(script, command[2:])]
        assert sorted(name for _, rows in again for name in rows) == sorted(chosen)
        assert all(chosen[name] == row for _, rows in again for name, row in rows.items())
        assert all(job.experiment.recipe == table.experiment.recipe for job, _ in again)
        assert jobs is None or len(found) == jobs


def read(script: Any, words: list[str]) -> list[tuple[Table, dict[str, Any]]]:
    """The tables of a command line, each with the rows that it names."""
    options = script.options_of(words)
    if script is run_prompts:
        tables = [Table(run_prompts.experiment_of(options), run_prompts.ROWS)]
    else:
        tables = script.tables_of(options)
    return [(table, {name: table.methods[name] for name in options.methods}) for table in tables]
