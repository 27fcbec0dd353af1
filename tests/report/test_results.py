"""Collecting results: what is read, what is named as left out, and the bundle."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metapretrain.errors import InputError
from metapretrain.evaluation.predictions import read_predictions, write_predictions
from metapretrain.report.layout import Column, Layout, save_layout
from metapretrain.report.results import Collection, bundle, collect, fold, pack, unfold, unpack
from metapretrain.report.table import build_table

MakeRun = Callable[..., Path]


@pytest.mark.parametrize("n", [1, 7, 8, 9, 8000])
def test_pack_round_trip_is_small(n: int) -> None:
    correct = np.random.default_rng(n).random(n) < 0.5
    packed = json.loads(json.dumps(pack(correct, "abc")))
    assert unpack(packed).tolist() == correct.tolist()
    assert len(packed["bits"]) <= n / 6 + 8


@pytest.mark.parametrize("change", [{"n": 17}, {"n": 0}, {"n": None}, {"bits": "%%"}, {"bits": 3}])
def test_damaged_bits_are_one_line(change: dict[str, object]) -> None:
    with pytest.raises(InputError, match="'correct' is damaged"):
        unpack(pack(np.ones(16, bool), "abc") | change)


def test_complete_runs_with_their_predictions(tmp_path: Path, make_run: MakeRun) -> None:
    folder = make_run("simclr", 1)
    make_run("simclr", 0)
    found = collect(tmp_path / "runs")
    assert [result["seed"] for result in found.results] == [0, 1]
    assert (found.incomplete, found.problems) == ([], [])
    stored = unpack(found.results[1]["correct"])
    assert stored.tolist() == read_predictions(folder / "predictions.csv").correct.tolist()


def test_a_run_folder_itself_can_be_collected(make_run: MakeRun) -> None:
    assert collect(make_run("simclr", 1)).results[0]["method"] == "simclr"


def test_incomplete_and_torn_runs_are_named(tmp_path: Path, make_run: MakeRun) -> None:
    make_run("simclr", 0)
    (make_run("simclr", 1) / "result.json").unlink()
    make_run("simclr", 2, status="failed")
    torn = make_run("simclr", 3) / "result.json"
    torn.write_text(torn.read_text()[:50])
    (make_run("simclr", 4) / "result.json").write_text("[1]")
    csv = make_run("simclr", 5) / "predictions.csv"
    csv.write_text(csv.read_text()[:-3])
    found = collect(tmp_path / "runs")
    assert [result["seed"] for result in found.results] == [0, 5]
    assert found.incomplete == ["stl10-paper/simclr-s1 (no result.json)", "stl10-paper/simclr-s2 (status 'failed')"]
    torn_json, not_object, torn_csv = found.problems
    assert torn_json.startswith("stl10-paper/simclr-s3/result.json: not JSON")
    assert not_object.startswith("stl10-paper/simclr-s4/result.json: not a result")
    assert torn_csv.startswith("stl10-paper/simclr-s5: no comparison image by image: predictions.csv: line 401")
    assert str(tmp_path) not in " ".join(found.problems)
    assert "correct" not in found.results[1]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"schema": 2}, "schema 2, this version reads 1"),
        ({"method": None}, "names no method"),
        ({"seed": "0"}, "names no method"),
        ({"metrics": {"test_accuracy": 75.0}}, "accuracies are fractions"),
        ({"metrics": {"train_accuracy": float("nan")}}, "not a finite number"),
        ({"metrics": {"test_accuracy": None}}, "test_accuracy is missing"),
        ({"budget": {"updates": "many"}}, "budget.updates is 'many'"),
    ],
)
def test_impossible_results_are_left_out(
    tmp_path: Path, make_run: MakeRun, changes: dict[str, object], match: str
) -> None:
    make_run("simclr", 0, predictions=False, **changes)
    found = collect(tmp_path / "runs")
    assert found.results == []
    assert len(found.problems) == 1
    assert match in found.problems[0]


def test_a_result_that_its_predictions_contradict_is_left_out(tmp_path: Path, make_run: MakeRun) -> None:
    make_run("simclr", 0, metrics={"test_accuracy": 0.5})
    make_run("simclr", 1)
    write_predictions(make_run("simclr", 2) / "predictions.csv", [1] * 4, [1, 1, 1, 0])
    found = collect(tmp_path / "runs")
    assert [(result["seed"], "correct" in result) for result in found.results] == [(1, True), (2, False)]
    assert found.problems == [
        "stl10-paper/simclr-s0: metrics.test_accuracy is 0.5, but counted again from the 400 rows of predictions.csv "
        "it is 0.75: left out; restore the file that was changed, or run it again",
        "stl10-paper/simclr-s2: no comparison image by image: 4 predictions for 400 test images",
    ]
    assert found.problems[0] in build_table(found).markdown()


@pytest.mark.parametrize("kind", ["row", "pretraining"])
def test_every_flipped_digit_of_an_accuracy_is_seen(tmp_path: Path, make_run: MakeRun, kind: str) -> None:
    metric = "test_accuracy" if kind == "row" else "nearest_prototype_accuracy"
    file = make_run("simclr", 0, 313, kind=kind, metrics={"nearest_prototype_accuracy": 313 / 400}) / "result.json"
    good = file.read_text()
    bundle(collect(tmp_path / "runs").results, tmp_path / "good.json")
    for place, digit in product((0, 2, 3, 4, 5), "0123456789"):
        changed = "0.7825"[:place] + digit + "0.7825"[place + 1 :]
        file.write_text(good.replace(f'"{metric}": 0.7825', f'"{metric}": {changed}'))
        problems = collect(tmp_path / "runs").problems
        assert [metric in problem for problem in problems] == [True] * (changed != "0.7825")
    text = (tmp_path / "good.json").read_text()
    (tmp_path / "good.json").write_text(text.replace(f'"{metric}": 0.7825', f'"{metric}": 0.7835'))
    assert "counted again" in collect(tmp_path / "good.json").problems[0]  # the bits of a bundle tell it too


def text_run(folder: Path, metrics: dict[str, float], tables: dict[str, bytes]) -> None:
    for name, content in {**tables, "config.json": b"{}"}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    about = {"schema": 1, "status": "complete", "method": "m", "seed": 0, "metrics": metrics}
    (folder / "result.json").write_text(json.dumps(about))


TABLES = {
    "predictions/sst-dev.csv": b"id,prediction,label\na,0,0\nb,1,2\nc,1,1\nd,0,0\n",
    "predictions/sst.csv": b"id,prediction,label\na,0,1\n",  # a test part, whose figures no result states
    "predictions/para-dev.csv": b"id,prediction,label\na,0,0\nb,1,1\nc,1,0\nd,1,1\n",
    "predictions/sts-dev.csv": b"id,prediction,label\na,0.5,1\nb,1.25,2\nc,4.0,5\nd,3.5,2\n",
    "predictions/amazon5.csv": b"index,label,prediction\n0,0,0\n1,1,1\n2,2,1\n",
}
METRICS = {
    "sst_accuracy": 3 / 4,
    "para_accuracy": 3 / 4,
    "para_f1": 4 / 5,
    "sts_pearson": float(np.corrcoef([1, 2, 5, 2], [0.5, 1.25, 4.0, 3.5])[0, 1]),
    "sts_spearman": float(np.corrcoef([1, 2.5, 4, 2.5], [1, 2, 4, 3])[0, 1]),
    "amazon5_accuracy": 2 / 3,
    "amazon5_f1": (1 + 2 / 3) / 5,  # two of its five classes have no row here
}


@pytest.mark.parametrize("metric", METRICS)
def test_figures_of_texts_are_counted_again(tmp_path: Path, metric: str) -> None:
    text_run(tmp_path / "runs" / "m-s0", METRICS, TABLES)
    assert len(collect(tmp_path / "runs").results) == 1
    text_run(tmp_path / "runs" / "m-s0", METRICS | {metric: METRICS[metric] + 0.01}, TABLES)
    found = collect(tmp_path / "runs")
    (problem,) = found.problems
    assert not found.results and f"m-s0: metrics.{metric} is {METRICS[metric] + 0.01:.6g}" in problem
    assert metric == "amazon5_f1" or f"it is {METRICS[metric]:.6g}" in problem


@pytest.mark.parametrize(
    "content", [b"id,label\na,1", *(b"id,prediction,label\n" + row for row in (b"a,x,1", b"a", b"a,nan,1", b"\xff"))]
)
def test_damaged_predictions_of_texts_are_told_and_the_result_is_shown(tmp_path: Path, content: bytes) -> None:
    text_run(tmp_path / "runs" / "m-s0", METRICS, {"predictions/sst-dev.csv": content})
    found = collect(tmp_path / "runs")
    (problem,) = found.problems
    assert len(found.results) == 1 and problem.startswith("m-s0: cannot read predictions predictions/sst-dev.csv: ")


def test_a_mean_that_is_not_that_of_its_parts_is_left_out(tmp_path: Path) -> None:
    columns = [Column(name, f"{name}_accuracy", name) for name in ("a", "b")]
    layout = Layout((*columns, Column("mean", "mean_accuracy", "mean", parts=("a", "b"))), "mean")
    metrics = {"a_accuracy": 0.5, "b_accuracy": 0.7, "mean_accuracy": 0.6}
    for stated, told in ((0.6, []), (0.8, ["m-s0: metrics.mean_accuracy is 0.8, but its parts mean 0.6: left out; "])):
        text_run(tmp_path / "runs" / "m-s0", metrics | {"mean_accuracy": stated}, {})
        save_layout(layout, tmp_path / "runs")
        problems = collect(tmp_path / "runs").problems
        assert [problem[: len(begin)] for problem, begin in zip(problems, told, strict=True)] == told


def test_bundle_round_trip_from_file_and_folder(tmp_path: Path, make_run: MakeRun) -> None:
    for seed in range(2):
        make_run("simclr", seed, 290 + seed)
    found = collect(tmp_path / "runs")
    path = bundle(found.results, tmp_path / "docs" / "stl10.json")
    assert collect(path) == found
    assert collect(path.parent) == found
    assert len(path.read_text().splitlines()) == 5
    assert path.stat().st_size < 2 * 900 + len(json.dumps(found.results[0]["layout"]))
    path.write_text(json.dumps(found.results))  # as bundles were before anything was told once
    assert collect(path) == found


def test_a_bundle_tells_once_what_most_results_share(tmp_path: Path, make_run: MakeRun) -> None:
    files = {"train.bin": {"bytes": 3, "md5": "0" * 32, "official": None}}
    for seed in range(5):
        make_run("simclr", seed, data=files | ({"more.bin": {"bytes": 1, "md5": "1"}} if seed == 3 else {}))
    make_run("simclr", 5, counts={"train": 4000}, data={})
    found = collect(tmp_path / "runs")
    path = bundle(found.results, tmp_path / "b.json")
    assert collect(path) == found
    assert path.read_text().count("0" * 32) == 2 and path.read_text().count('"counts"') == 2
    assert [json.dumps(result, sort_keys=True) for result in collect(path).results] == [
        json.dumps(result, sort_keys=True) for result in found.results
    ]


def test_what_is_shared_is_never_given_to_results_of_another_bundle(tmp_path: Path, make_run: MakeRun) -> None:
    """Bundles joined by hand: the second one's results would take the first one's checksums."""
    joined: list[Any] = []
    for method in ("simclr", "prl"):
        for seed in range(2):
            make_run(method, seed, data={"train.bin": {"bytes": 3, "md5": method}})
        results = [one for one in collect(tmp_path / "runs").results if one["method"] == method]
        joined += json.loads(bundle(results, tmp_path / "b.json").read_text())
    for lines, number in ((joined, 4), (joined[::-1], 3), ([{**joined[0], "note": 1}, *joined[1:3]], 1)):
        (tmp_path / "b.json").write_text(json.dumps(lines))
        with pytest.raises(InputError, match=f'b.json: not a bundle: entry {number} has "shared"'):
            collect(tmp_path / "b.json")


def test_a_lost_line_of_what_is_shared_does_not_go_unnoticed(tmp_path: Path, make_run: MakeRun) -> None:
    for seed in range(3):
        make_run("simclr", seed, commit="0" * 40, versions={"torch": "2"}, data={"train.bin": {"md5": "0"}})
    path = bundle(collect(tmp_path / "runs").results, tmp_path / "b.json")
    shared, *rest = json.loads(path.read_text())
    del shared["shared"]["versions"]
    for lines, number in ((rest, 1), ([shared, *rest], 2)):
        path.write_text(json.dumps(lines))
        with pytest.raises(InputError, match=f"b.json: not a bundle: entry {number} has a commit but no versions"):
            collect(path)
        path.replace(tmp_path / "runs" / "b.json")
        assert f"entry {number} has" in collect(tmp_path / "runs").problems[0]


def test_a_result_with_nan_is_not_bundled(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="NaN or infinity"):
        bundle([{"schema": 1, "seed": 0, "probe_seconds": math.nan}], tmp_path / "b.json")


ALIKE = st.sampled_from(
    [{}, [], {"a": 1}, {"a": 1.0}, {"a": True}, [-0.0], [0.0], "{", None, 10**40, {"\u00e9": "\ud800"}]
)


@given(st.lists(st.dictionaries(st.sampled_from(["data", "counts", "seed", "shared"]), ALIKE), max_size=6))
def test_lines_of_a_bundle_give_the_results_back(results: list[dict[str, Any]]) -> None:
    results = [{**result, "schema": 1} for result in results]
    back = unfold(json.loads(json.dumps(fold(results))))
    assert [json.dumps(one, sort_keys=True) for one in back] == [json.dumps(one, sort_keys=True) for one in results]


@pytest.mark.parametrize("lines", [[{"shared": {"schema": 1}}], [{"shared": [1]}, 3], [{"shared": {"schema": 1}}, 3]])
def test_a_damaged_bundle_is_one_line(tmp_path: Path, lines: list[object]) -> None:
    (tmp_path / "b.json").write_text(json.dumps(lines))
    with pytest.raises(InputError, match="not a bundle"):
        collect(tmp_path / "b.json")


def test_the_same_run_twice(tmp_path: Path, make_run: MakeRun) -> None:
    make_run("simclr", 0)
    bundle(collect(tmp_path / "runs").results, tmp_path / "runs" / "b.json")
    assert len(collect(tmp_path / "runs").results) == 1
    assert collect(tmp_path / "runs").problems == []
    changed = [result | {"wall_s": 1.0} for result in collect(tmp_path / "runs").results]
    bundle(changed, tmp_path / "runs" / "b.json")
    found = collect(tmp_path / "runs")
    assert [result["wall_s"] for result in found.results] == [60.0]
    assert "left out, stl10-paper/simclr-s0 is the same method and seed" in found.problems[0]


def test_bad_roots_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "object.json").write_text("{}")
    cases = [
        (tmp_path / "none", "no such folder"),
        (tmp_path / "empty", "no results in"),
        (tmp_path / "notes.txt", "not JSON"),
        (tmp_path / "object.json", "not a bundle"),
    ]
    for root, match in cases:
        with pytest.raises(InputError, match=match) as caught:
            collect(root)
        assert "\n" not in str(caught.value)
        if root.name != "notes.txt":
            assert "<method>-s<seed>/result.json" in str(caught.value)
    with pytest.raises(InputError, match="no complete result"):
        bundle([], tmp_path / "b.json")


def hostile(folder: Path, text: str) -> Collection:
    (folder / "m-s0").mkdir()
    (folder / "m-s0" / "result.json").write_text(text)
    return collect(folder)


GOOD = {
    "schema": 1,
    "status": "complete",
    "method": "m",
    "seed": 0,
    "metrics": {"test_accuracy": 0.5},
    "wall_s": 1.0,
    "counts": {"test": 4},
    "budget": {"encoder_passes": 5},
}


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        json.dumps(GOOD).replace("0.5", "9" * 400),
        json.dumps(GOOD).replace("5}", "9" * 400 + "}"),
        json.dumps(GOOD | {"wall_s": "long"}),
        json.dumps(GOOD | {"wall_s": math.nan}),
        json.dumps(GOOD | {"seed": True}),
        json.dumps(GOOD | {"counts": {"test": -4}}),
        json.dumps({key: value for key, value in GOOD.items() if key != "metrics"} | {"kind": "pretraining"}),
    ],
)
def test_a_hostile_result_is_a_problem_in_one_line(tmp_path: Path, text: str) -> None:
    found = hostile(tmp_path, text)
    assert not found.results and len(found.problems) == 1 and "\n" not in found.problems[0]
    build_table(found).json()


def test_a_fingerprint_that_is_none_is_left_out(tmp_path: Path) -> None:
    packed = {**pack(np.array([True, True, False, False]), "f"), "images": ["f"]}
    found = hostile(tmp_path, json.dumps(GOOD | {"correct": packed}))
    assert len(found.results) == 1 and "correct" not in found.results[0] and len(found.problems) == 1


def test_a_saved_encoder_inside_a_run_is_no_run(tmp_path: Path, make_run: MakeRun) -> None:
    encoder = make_run("prl", 0) / "encoder"
    encoder.mkdir()
    (encoder / "config.json").write_text("{}")
    found = collect(tmp_path / "runs")
    assert (len(found.results), found.incomplete) == (1, [])


def test_files_that_only_some_rows_read_are_compared_among_these() -> None:
    """Sentences for pseudo labels, say: a table has rows with and without them."""
    results = []
    for method, own in (("ppt", None), ("ppt-pseudo", "1"), ("metapt-pseudo", "1"), ("metapt-pseudo-lda", "2")):
        data: dict[str, Any] = {"train": {"bytes": 3, "md5": "0", "official": None}}
        if own is not None:
            data["ptb.zip"] = {"bytes": 3, "md5": own, "official": None, "only": "pseudo labels"}
        about: dict[str, Any] = {"schema": 1, "status": "complete", "seed": 0, "metrics": {"test_accuracy": 0.5}}
        results.append({**about, "method": method, "data": data})
    told = [note for note in build_table(results).groups[0].notes if "checksums" in note]
    assert len(told) == 1 and told[0].endswith("differ between ppt-pseudo, metapt-pseudo; metapt-pseudo-lda.")
    assert not [note for note in build_table(results[:3]).groups[0].notes if "checksums" in note]
