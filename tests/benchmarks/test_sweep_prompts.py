"""Figures 2 and 3 by one command: a table a value, and one figure."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from benchmarks import map_prompts, sweep_prompts

SMALL = ["reads=40", "meta.clusters=3", "validations=1", "tune.epochs=1"]


def test_a_sweep_is_a_table_for_each_value_and_a_figure(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn = []

    def keep(values: object, *labels: str) -> object:
        drawn.append(values)
        return plain(values, *labels)  # type: ignore[arg-type]

    plain = sweep_prompts.sweep_figure
    monkeypatch.setattr(sweep_prompts, "sweep_figure", keep)
    given = ["examples", "--values", "5", "10", "--smoke", "--sets", "sst2", "--methods=pt,metapt-random"]
    given += ["--no-figures", "--out", str(tmp_path), "--set", *SMALL]
    assert sweep_prompts.main([*given, "--dry-run"]) == 0 and not drawn
    assert sweep_prompts.main(given) == 0
    (values,) = drawn
    assert {row: sorted(points) for row, points in values.items()} == {"pt": [5, 10], "metapt-random": [5, 10]}
    assert all(0 <= value <= 1 for points in values.values() for seeds in points.values() for value in seeds)
    assert (tmp_path / "prompts/sweep-examples.png").stat().st_size > 5000
    assert (tmp_path / "prompts/made-equal-tiny-examples-5-smoke/pt-s0/result.json").is_file()
    assert "sweep-examples.png" in capsys.readouterr().out
    ended = [line.split(":")[0] for line in caplog.messages if "seed 0: done" in line]
    assert Counter(ended) == {"pretrain-metapt-random seed 0": 1, "pt seed 0": 2, "metapt-random seed 0": 2}


def test_a_value_that_cannot_be_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["clusters", "--values", "3", "0", "--smoke", "--out", str(tmp_path)]
    assert sweep_prompts.main(given) == 2
    assert "clusters is 0; give a whole number from 1 to 10000" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())  # refused before the first value is run


def test_a_tag_and_a_value_given_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["clusters", "--values", "3", "3", "--tag", "mine", "--smoke", "--out", str(tmp_path), "--dry-run"]
    assert sweep_prompts.main(given) == 0
    assert capsys.readouterr().out.count("made-equal-tiny-mine-clusters-3-smoke") == 1


def test_two_values_that_mean_one_number_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["clusters", "--values", "3", "03", "--smoke", "--out", str(tmp_path)]
    assert sweep_prompts.main(given) == 2
    assert "--values 3 and 03 are the same number" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_values_that_take_all_rows_are_one_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    plain = sweep_prompts.sweep_figure
    monkeypatch.setattr(sweep_prompts, "sweep_figure", lambda values, *to: drawn.append(values) or plain(values, *to))
    given = ["rows", "--values", "100000", "none", "--smoke", "--sets", "sst2", "--methods=metapt-random"]
    assert sweep_prompts.main([*given, "--no-figures", "--out", str(tmp_path), "--set", *SMALL]) == 0
    (at,) = drawn[0]["metapt-random"].values()
    assert len(at) == 1  # of one seed


def test_maps_of_meta_tasks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--smoke", "--out", str(tmp_path), "--values", "2", "5", "--grouping", "label", "--points", "50"]
    assert map_prompts.main([*given, "--dry-run"]) == 0
    assert "100 sentences in 2, 5 tasks by label" in capsys.readouterr().out and not list(tmp_path.iterdir())
    assert map_prompts.main(["--smoke", "--out", str(tmp_path), "--values", "2", "--grouping", "label"]) == 2
    assert "do not make 2 groups" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        map_prompts.main([*given, "--tag", "../x"])
    assert "--tag: part of a folder's name" in capsys.readouterr().err
    given[given.index("2")] = "10"
    assert map_prompts.main(given) == 0
    shown = capsys.readouterr().out
    assert "| 5 | 1.000 | 20, 20, 20, 20, 20 |" in shown
    assert (tmp_path / "prompts/map-label-10-5-smoke.md").read_text() in shown
    assert (tmp_path / "prompts/map-label-10-5-smoke.png").stat().st_size > 5000


def test_a_value_that_no_row_can_take_is_refused_before_all_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["clusters", "--values", "5", "3", "--smoke", "--methods", "metapt-label", "--out", str(tmp_path)]
    assert sweep_prompts.main([*given, "--set", *SMALL[:1]]) == 2
    line = capsys.readouterr().err
    assert "--values 3: metapt-label needs meta.clusters of at least 5, a label each; got 3" in line
    assert not list(tmp_path.rglob("result.json"))
