"""The table, from hand-made runs whose figures are known."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from report_stl10 import LAYOUT, POSTER, QUERY

from metapretrain.errors import InputError
from metapretrain.evaluation.intervals import mean_interval, paired_images_interval, proportion_interval
from metapretrain.evaluation.predictions import read_predictions
from metapretrain.experiments.images.experiment import IMAGES
from metapretrain.report.layout import Published
from metapretrain.report.results import bundle, collect, pack
from metapretrain.report.rows import Group, Row, measure_claim
from metapretrain.report.table import build_table, write

MakeRun = Callable[..., Path]


def group_of(root: Path) -> Group:
    (group,) = build_table(collect(root)).groups
    return group


def row_of(group: Group, method: str) -> Row:
    return next(row for row in group.rows if row.method == method)


def test_published_rows_are_the_posters() -> None:
    assert len(POSTER) == 11
    prl = {name: float(pair.scores["test"] or 0) for name, pair in POSTER.items() if "prl" in name}
    query = np.mean([value for name, value in prl.items() if "query" in name])
    standard = np.mean([value for name, value in prl.items() if "standard" in name])
    assert (round(100 * query, 1), round(100 * standard, 1)) == (63.7, 61.3)


def test_means_intervals_and_pairs(tmp_path: Path, make_run: MakeRun) -> None:
    folders: dict[str, list[Path]] = {}
    for method, rights in (("supervised-resnet18", (300, 304, 302)), ("prl-query-frozen-linear", (308, 310, 306))):
        folders[method] = [make_run(method, seed, right) for seed, right in enumerate(rights)]
    group = group_of(tmp_path / "runs")
    assert group.baselines == ["supervised-resnet18"]
    row = row_of(group, "prl-query-frozen-linear")
    assert row.scores["test"] == mean_interval([0.77, 0.775, 0.765])
    assert row.scores["train"].half_width == pytest.approx(0, abs=1e-12)
    assert row.test_sets["test"] == proportion_interval(308, 400)
    (difference,) = row.differences
    assert difference is not None
    assert difference.seeds == [0, 1, 2]
    assert difference.over_seeds.mean == pytest.approx(6 / 400)
    assert difference.over_seeds.half_width == pytest.approx(mean_interval([8, 6, 4]).half_width / 400)
    correct = [
        [read_predictions(folder / "predictions.csv").correct for folder in folders[method]]
        for method in ("prl-query-frozen-linear", "supervised-resnet18")
    ]
    assert difference.over_images == paired_images_interval(*correct)
    assert row.published == Published({"test": 0.642, "train": 0.999})
    assert row.wall_s == pytest.approx(61)
    assert group.notes == []


def test_tokens_a_second_and_padding_stand_beside_the_cost(tmp_path: Path, make_run: MakeRun) -> None:
    for seed in range(2):
        make_run("a", seed, tokens_per_s=200_000 + 2000 * seed, padding_share=0.2 + 0.1 * seed)
    make_run("b", 0)
    table = build_table(collect(tmp_path / "runs"))
    lines = [line for line in table.markdown().splitlines() if "tokens per second" in line or "60.5 s" in line]
    shown = [[cell.strip() for cell in line.split("|")[-3:-1]] for line in lines]
    assert shown == [["tokens per second", "padding, %"], ["201,000", "25.0"]]
    told = {row["method"]: row for row in json.loads(table.json())["groups"][0]["rows"]}
    assert told["a"]["tokens_per_s"] == 201_000 and "tokens_per_s" not in told["b"]


def test_the_posters_claim_is_tested_on_all_pairs(tmp_path: Path, make_run: MakeRun) -> None:
    rights = {"query-frozen-linear": (310, 312), "standard-frozen-linear": (300, 304)}
    rights |= {"query-frozen-mlp": (301, 300), "standard-frozen-mlp": (302, 301), "query-alone": (400, 400)}
    for name, values in rights.items():
        for seed, right in enumerate(values):
            make_run(f"prl-{name}", seed, right)
    make_run("prl-query-frozen-mlp", 9, 400)  # a seed that its partner does not have
    (claim,) = group_of(tmp_path / "runs").claims
    assert (claim.pairs, claim.better, claim.seeds) == (2, 1, [0, 1])
    by_hand = mean_interval([(10 - 1) / 800, (8 - 1) / 800])
    assert claim.over_seeds.mean == pytest.approx(by_hand.mean)
    assert claim.over_seeds.half_width == pytest.approx(by_hand.half_width)
    assert claim.published == pytest.approx((0.642 - 0.607 + 0.631 - 0.606) / 2)
    line = "prl-query minus prl-standard, mean over pairs of methods: +1.00 ± 1.59 points"
    told = write(tmp_path / "runs")
    assert f"{line} (1 of 2 pairs above 0, 2 common seeds); published +3.00 (2 of 2)." in told


def test_the_posters_own_claim() -> None:
    published = {name: {0: {"metrics": {"test_accuracy": pair.scores["test"]}}} for name, pair in POSTER.items()}
    claim = measure_claim(LAYOUT, QUERY, published, POSTER)
    assert claim is not None
    assert (claim.pairs, claim.better, claim.published_better) == (4, 3, 3)
    assert claim.over_seeds.mean == pytest.approx(claim.published) == pytest.approx(0.02350)


def test_posters_order_then_by_name(tmp_path: Path, make_run: MakeRun) -> None:
    for method in ("z-own", "a-own", "simclr", "prl-query-frozen-mlp", "prl-query-unfrozen-linear", "supervised-mlp"):
        make_run(method, 0)
    methods = [row.method for row in group_of(tmp_path / "runs").rows]
    expected = ["supervised-mlp", "simclr", "prl-query-unfrozen-linear", "prl-query-frozen-mlp", "a-own", "z-own"]
    assert methods == expected


def test_one_seed_has_no_interval_but_the_test_sets(tmp_path: Path, make_run: MakeRun) -> None:
    make_run("simclr", 0, 300)
    text = write(tmp_path / "runs")
    line = next(line for line in text.splitlines() if line.startswith("| simclr | 1 | 75"))
    assert line.startswith("| simclr | 1 | 75.00 | 400 | 70.53 to 78.99 | 99.00 | 70.00 | 65.00 | - | 64.6 / 96.5 |")
    assert "One seed, so no interval over seeds: simclr." in text
    assert "nan" not in text.lower()


def test_unequal_seeds_are_paired_on_the_common_ones(tmp_path: Path, make_run: MakeRun) -> None:
    for seed in (0, 1, 2):
        make_run("supervised-resnet18", seed, 300 + 10 * seed)
    for seed in (1, 2, 3):
        make_run("simclr", seed, 305 + 10 * seed)
    make_run("other", 7, 300)
    group = group_of(tmp_path / "runs")
    difference = row_of(group, "simclr").differences[0]
    assert difference is not None
    assert difference.seeds == [1, 2]
    assert difference.over_seeds.mean == pytest.approx(5 / 400)
    assert "simclr minus supervised-resnet18: on the common seeds only (1 2)." in group.notes
    assert row_of(group, "other").differences == [None, None]
    assert "other minus simclr: no common seed, so no paired difference." in group.notes


def test_other_images_are_not_paired(tmp_path: Path, make_run: MakeRun) -> None:
    make_run("supervised-resnet18", 0)
    make_run("simclr", 0, predictions=False)
    group = group_of(tmp_path / "runs")
    difference = row_of(group, "simclr").differences[0]
    assert difference is not None
    assert difference.over_images is None
    told = "Predictions are not of the same images as supervised-resnet18's, so no difference over images: simclr."
    assert told in group.notes


def test_what_makes_rows_incomparable_is_said(tmp_path: Path, make_run: MakeRun) -> None:
    make_run("supervised-resnet18", 0)
    make_run("simclr", 0, budget={"encoder_passes": 300000}, device="NVIDIA H200")
    make_run("own", 0, predictions=False, counts={"test": 200})
    notes = " ".join(group_of(tmp_path / "runs").notes)
    assert "Unequal budgets" in notes
    assert "supervised-resnet18 150,000; simclr 300,000" in notes
    assert "Several devices, so wall times are not comparable" in notes
    assert "simclr: NVIDIA H200" in notes
    assert "The numbers of test images differ: supervised-resnet18 400; simclr 400; own 200." in notes


def test_budgets_that_differ_between_seeds_are_shown(tmp_path: Path, make_run: MakeRun) -> None:
    make_run("simclr", 0)
    make_run("simclr", 1, budget={"encoder_passes": 200000})
    text = write(tmp_path / "runs")
    assert "150,000 or 200,000" in text
    assert "Unequal budgets" in text


def test_pretraining_runs_stand_apart(tmp_path: Path, make_run: MakeRun) -> None:
    make_run("simclr", 0)
    make_run("prl-query", 0, None, kind="pretraining", budget={"encoder_passes": 90000})
    group = group_of(tmp_path / "runs")
    assert [row.method for row in group.rows] == ["simclr"]
    assert [row.method for row in group.pretraining] == ["prl-query"]
    assert not any("Unequal" in note for note in group.notes)
    _, after = write(tmp_path / "runs").split("Pretraining only, shared by the methods above:")
    assert "| prl-query | 1 | 90,000 |" in after


def test_accuracy_under_corruption_is_a_column_where_it_was_measured(tmp_path: Path, make_run: MakeRun) -> None:
    make_run("simclr", 0)
    plain = build_table(collect(tmp_path / "runs"))
    assert "corrupted" not in plain.markdown().lower()
    for seed, share in ((0, 0.5), (1, 0.25)):
        make_run("prl-query", seed, metrics={"corrupt_accuracy": share})
    table = build_table(collect(tmp_path / "runs"))
    header, _, *rows = (line for line in table.markdown().splitlines() if line.startswith("|"))
    column = [cell.strip() for cell in header.split("|")].index("corrupted %")
    cells = {row.split("|")[1].strip(): row.split("|")[column].strip() for row in rows[:2]}
    assert cells["simclr"] == "-"
    assert cells["prl-query"].startswith("37.50 ±")
    assert "0.375" in table.csv()


def test_digits_that_depend_on_the_machine_are_not_in_a_csv(tmp_path: Path, make_run: MakeRun) -> None:
    make_run("simclr", 0, metrics={"corrupt_accuracy": 1 / 3})
    found = build_table(collect(tmp_path / "runs")).csv()
    assert ",0.333333333333," in found and "0.3333333333333" not in found


def test_groups_do_not_mix(tmp_path: Path, make_run: MakeRun) -> None:
    make_run("simclr", 0, 300)
    make_run("simclr", 0, 200, group="digits-strong")
    groups = build_table(collect(tmp_path / "runs")).groups
    told = [(group.dataset, group.recipe, group.rows[0].scores["test"].mean) for group in groups]
    assert told == [("digits", "strong", 0.5), ("stl10", "paper", 0.75)]
    assert [group.rows[0].published is None for group in groups] == [True, False]


def test_the_demos_supervised_is_the_baseline(tmp_path: Path, make_run: MakeRun) -> None:
    for method in ("supervised", "prl-query", "simclr-frozen"):
        make_run(method, 0, group="digits-demo")
    (group,) = build_table(collect(tmp_path / "runs"), IMAGES).groups
    assert group.baselines == ["supervised", "simclr-frozen"]


def test_the_same_table_from_a_bundle(tmp_path: Path, make_run: MakeRun) -> None:
    for method in ("supervised-resnet18", "simclr"):
        for seed in range(3):
            make_run(method, seed, 300 + seed + len(method))
    text = write(tmp_path / "runs")
    path = bundle(collect(tmp_path / "runs").results, tmp_path / "docs" / "results" / "stl10.json")
    assert write(path, tmp_path / "again") == text
    for name in ("table.md", "table.csv", "table.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "runs" / "report" / name).read_bytes()
    assert write(tmp_path / "runs") == text  # a report beside the runs does not feed on itself


def test_three_formats_tell_the_same(tmp_path: Path, make_run: MakeRun) -> None:
    for seed in range(2):
        make_run("supervised-resnet18", seed, 300 + seed)
        make_run("simclr", seed, 310)
    make_run("prl-query", 0, None, kind="pretraining")
    write(tmp_path / "runs")
    folder = tmp_path / "runs" / "report"
    stored = json.loads((folder / "table.json").read_text())
    records = list(csv.DictReader((folder / "table.csv").open()))
    assert [record["method"] for record in records] == ["supervised-resnet18", "simclr", "prl-query"]
    assert [record["kind"] for record in records] == ["", "", "pretraining"]
    row = stored["groups"][0]["rows"][1]
    assert float(records[1]["test"]) == row["accuracy"]["test"]["mean"] == 0.775
    difference = row["differences"][0]["over_seeds"]
    assert difference["mean"] == pytest.approx(9.5 / 400)
    for name, value in (("", difference["mean"]), ("_half_width", difference["half_width"])):
        assert float(records[1]["difference_1_seeds" + name]) == pytest.approx(value, rel=1e-11)
    assert records[0]["difference_1_seeds"] == ""
    assert records[2]["test"] == ""
    assert "| simclr | +2.38 ± 1.59 |" in (folder / "table.md").read_text(encoding="utf-8")


def test_only_incomplete_runs(tmp_path: Path, make_run: MakeRun) -> None:
    (make_run("simclr", 0) / "result.json").unlink()
    text = write(tmp_path / "runs")
    assert "No complete run yet." in text
    assert "Incomplete runs, not in the table: 1" in text
    assert "- stl10-paper/simclr-s0 (no result.json)" in text


def test_where_the_report_cannot_go(tmp_path: Path, make_run: MakeRun) -> None:
    make_run("simclr", 0)
    (tmp_path / "runs" / "report").write_text("")
    with pytest.raises(InputError, match="it is a file; name a folder"):
        write(tmp_path / "runs")


def test_runs_of_other_data_files_are_not_compared_image_by_image() -> None:
    """Two folders of one name, with labels in one order: only the checksums tell their images apart."""
    results = []
    for method, md5 in (("supervised-mlp", "1"), ("supervised-resnet18", "1"), ("simclr", "2")):
        results.append(
            {
                "schema": 1,
                "status": "complete",
                "method": method,
                "seed": 0,
                "metrics": {"test_accuracy": 0.5},
                "counts": {"test": 4},
                "correct": pack(np.array([True, True, False, False]), "f"),
                "data": {"test images": {"bytes": 3, "md5": md5, "official": None}},
            }
        )
    (group,) = build_table(results, LAYOUT).groups
    over_images = {row.method: [gap.over_images is not None for gap in row.differences if gap] for row in group.rows}
    assert over_images["supervised-mlp"] == [True, False]
    assert [note for note in group.notes if "checksums" in note] == [
        "Not a comparison on the same data: the checksums of the data files differ between "
        "supervised-mlp, supervised-resnet18; simclr."
    ]
    assert not [note for note in build_table(results[:2], LAYOUT).groups[0].notes if "checksums" in note]


@pytest.mark.parametrize(("recipe", "told"), [("paper-smoke", True), ("paper", False)])
def test_smoke_runs_are_told_as_such(tmp_path: Path, make_run: MakeRun, recipe: str, told: bool) -> None:
    make_run("simclr", 0, 300, recipe=recipe)
    assert ("Their numbers mean nothing." in build_table(collect(tmp_path / "runs")).markdown()) is told


def test_a_time_without_the_shared_pretraining_is_told_as_such(tmp_path: Path, make_run: MakeRun) -> None:
    make_run("simclr", 0, 300)
    make_run("pretrain-simclr", 0, None, kind="pretraining")
    rows, pretraining = build_table(collect(tmp_path / "runs")).markdown().split("Pretraining only")
    assert "| wall time without pretraining |" in rows and "| wall time |" in pretraining
    assert "| encoder passes |" in rows and "fine-tuning" not in rows  # no run has any of the latter


def test_published_figures_beside_runs_on_other_rows_are_marked_and_not_compared(
    tmp_path: Path, make_run: MakeRun
) -> None:
    make_run("simclr", 0)
    make_run("supervised-resnet18", 0, counts={"test": 200}, predictions=False)
    file = make_run("prl-query-frozen-mlp", 0, predictions=False) / "result.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "counts": {}}))
    table = build_table(collect(tmp_path / "runs"))
    (group,) = table.groups
    assert {row.method: row.other_data for row in group.rows} == {
        "supervised-resnet18": "test 400, here 200",
        "simclr": "",
        "prl-query-frozen-mlp": "test 400, here not told",
    }
    text = table.markdown()
    assert "| 62.5 / 98.4 \u2021 |" in text and "| 64.6 / 96.5 |" in text
    told = (
        "\u2021 The published numbers are of other data (test 400, here 200), so not of the same examples: supervised-"
    )
    assert told in text and [*group.figures()[1]] == ["simclr"]
    rows = {row["method"]: row["published"] for row in json.loads(table.json())["groups"][0]["rows"]}
    assert "other_data" in rows["supervised-resnet18"] and "other_data" not in rows["simclr"]
