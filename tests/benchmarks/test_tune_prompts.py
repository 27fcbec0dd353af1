"""Trials of the prompts benchmark: as many for each way to pretrain, and a choice from whole sets of values."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tune_prompts
from run_prompts import options_of, recipe_of


def test_every_row_has_three_trials_without_the_test_parts(capsys: pytest.CaptureFixture[str]) -> None:
    assert tune_prompts.main(["--dry-run", "--seeds", "0", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 12 and all("--recipe fair --validate --job --reads 4000" in line for line in lines)
    for words in tune_prompts.trials().values():
        recipe_of(options_of(["--recipe", "fair", *words]))
    assert tune_prompts.main([]) == 2 and "--data-dir" in capsys.readouterr().err


def test_the_best_value_of_each_choice_is_written_for_set(tmp_path: Path) -> None:
    scores = {}
    for choice, (rows, values) in tune_prompts.CHOICES.items():
        for row in rows:
            for place, value in enumerate(values):
                score = place if choice == "fair.rate" else -place + 3 * (row == "ppt")
                scores[f"fair-tiny-tune-{row}-{value} {row} 0"] = {tune_prompts.METRIC: score}
    scores["fair-tiny-tune-ppt-1e-2 ppt 1"] = {tune_prompts.METRIC: 99}  # the seed has no other value
    (tmp_path / "tuning.json").write_text(json.dumps(scores))
    told = tune_prompts.chosen(tmp_path).splitlines()
    assert told[1] == "mixed.lr=1e-3: 1.5000" and len(told) == 10
    chosen = (tmp_path / "chosen.txt").read_text().split()
    assert chosen == ["mixed.lr=1e-3", "meta.inner_lr=0.03", "fair.rate=1"]
    assert recipe_of(options_of(["--recipe", "fair", "--set", *chosen])).meta.inner_lr == 0.03


def test_a_trial_is_read_into_the_table(tmp_path: Path) -> None:
    from run_prompts import main

    words = tune_prompts.trials(["tune.epochs=1", "validations=1", "reads=160"])["reptile-kmeans-0.6"]
    given = ["--smoke", "--recipe", "fair", "--validate", "--sets", "sst2", "--no-figures", "--out", str(tmp_path)]
    assert main([*given, *words]) == 0
    assert "tune-reptile-kmeans-0.6-smoke reptile-kmeans 0" in tune_prompts.table(tmp_path / "prompts")
    assert tune_prompts.chosen(tmp_path / "prompts").count("\n") == 0  # one value of three: nothing is chosen
