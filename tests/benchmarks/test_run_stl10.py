"""The STL-10 script end to end on tiny data, and one line for all bad input."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from report_stl10 import POSTER

from benchmarks import probe_heads, run_stl10, tune_stl10
from benchmarks.run_stl10 import METHODS, RECIPES, main
from metapretrain.data.registry import load_images
from metapretrain.errors import InputError
from metapretrain.experiments.images.data import ImageData
from metapretrain.report.results import collect

TINY = ["--device", "cpu", "--image-size", "12", "--no-figures"]
SMALL = ["--set", "validation=10", "batch_size=16"]


def write_stl10(folder: Path, train: int = 60, test: int = 20) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    for split, n in (("train", train), ("test", test)):
        random.integers(0, 256, n * 27648, dtype=np.uint8).tofile(folder / f"{split}_X.bin")
        (np.arange(n, dtype=np.uint8) % 10 + 1).tofile(folder / f"{split}_y.bin")
    return folder


@pytest.fixture
def stl10(tmp_path: Path) -> Path:
    return write_stl10(tmp_path / "stl10_binary")


def test_the_posters_eleven_rows_are_there() -> None:
    assert set(METHODS) > set(POSTER) and len(METHODS) == 17
    for name, method in METHODS.items():
        if name.startswith("prl"):
            mode, state, head = name.split("-")[1:]
            assert (method.objective, method.head) == (f"prl-{mode}", head)
            assert method.frozen == (state == "frozen")
    paper = RECIPES["paper"]
    assert (paper.stem, paper.proto.distance, paper.proto.query_fraction) == ("standard", "euclidean", 0.25)
    assert paper.proto.temperature == 1 and paper.prl.augment == paper.supervised.augment == "none"


def test_simclr_on_unlabelled_images(
    stl10: Path, refuse: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = np.random.default_rng(1).integers(0, 256, 40 * 27648, dtype=np.uint8)
    images.tofile(stl10 / "unlabeled_X.bin")
    flat = tmp_path / "flat"
    flat.mkdir()
    for number in range(30):
        Image.fromarray(images[number * 27648 :][:27648].reshape(96, 96, 3)).save(flat / f"{number}.png")
    for dataset, given, count in (("stl10", [], 40), ("stl10", [flat], 30), ("digits", [flat], 30)):
        out, words = tmp_path / f"{dataset}{count}", ["--smoke", "--methods", "simclr", "--unlabelled", *given]
        words += ["--set", "batch_size=16", "validation=10", "--data-dir", tmp_path, "--dataset", dataset]
        assert main([*TINY, "--out", str(out), *map(str, words)]) == 0
        row = json.loads((out / f"stl10/{dataset}-unlabelled-paper-smoke/simclr-s0/result.json").read_text())
        assert row["counts"]["unlabelled"] == count
    capsys.readouterr()
    assert "digits has no unlabelled part; name a folder" in refuse("--dataset", "digits", "--unlabelled")


def test_all_rows_on_digits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--dataset", "digits", "--smoke", "--no-figures", "--device", "cpu", "--out", str(tmp_path)]) == 0
    shown, root = capsys.readouterr().out, tmp_path / "stl10" / "digits-paper-smoke"
    results = {result["method"]: result for result in collect(root).results}
    assert set(results) == {
        *METHODS,
        *(f"pretrain-{name}" for name in ("prl-standard", "prl-query", "prl-loo", "simclr")),
    }
    rows = {name: result for name, result in results.items() if name in METHODS}
    assert {row["budget"]["encoder_passes"] for row in rows.values()} == {704}  # 360 * 2 // 64 * 64
    assert {tuple(row["counts"].items()) for row in rows.values()} == {
        (("train", 360), ("validation", 40), ("test", 400))
    }
    for name, row in rows.items():
        m = row["metrics"]
        assert {"test_accuracy", "train_accuracy", "nearest_prototype_accuracy", "knn_accuracy"} <= m.keys()
        assert m["nearest_prototype_accuracy"] > 0.5, name  # digits are easy
        assert re.search(rf"^\| {name} \| 1 \| ", shown, re.MULTILINE)
    assert "published" not in shown
    assert not list(root.glob("**/figures/*"))
    assert f"tensorboard --logdir {root}" in shown


def test_stl10_binaries_with_figures_and_the_posters_pairs(
    tmp_path: Path, stl10: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--data-dir", str(stl10.parent), "--device", "cpu", "--image-size", "12", "--out", str(tmp_path)]
    few = ["--methods", "supervised-mlp,prl-query-frozen-linear"]
    tiny = ["epochs=2", "pretrain_share=0.5", "encoder=small-conv"]
    assert main([*words, *few, *SMALL, *tiny]) == 0
    shown, root = capsys.readouterr().out, tmp_path / "stl10" / "stl10-paper"
    assert "| 41.4 / 59.1 ‡ |" in shown and "| 64.2 / 99.9 ‡ |" in shown  # of other test images
    drawn = {path.relative_to(root).as_posix() for path in root.glob("**/figures/*.png")}
    assert drawn == {
        "figures/curves.png",
        "figures/comparison.png",
        "supervised-mlp-s0/figures/confusion.png",
        "prl-query-frozen-linear-s0/figures/confusion.png",
        "pretrain-prl-query-s0/figures/tsne.png",
    }
    assert all(f"figure   {root / name}" in shown for name in drawn)
    stored = json.loads((root / "supervised-mlp-s0" / "result.json").read_text())
    assert set(stored["data"]) == {"train_X.bin", "train_y.bin", "test_X.bin", "test_y.bin"}
    assert stored["data"]["train_X.bin"]["official"] is False
    assert str(tmp_path) not in json.dumps(stored)
    # a smoke run sees a part of the images only: no published figures beside it
    assert main([*words, "--no-figures", "--smoke", *SMALL, "--methods", "supervised-mlp"]) == 0
    assert "41.4" not in capsys.readouterr().out


def test_dry_run_shows_the_plan_and_writes_nothing(
    run: Callable[..., int], tmp_path: Path, stl10: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--data-dir", stl10, *SMALL, "--dry-run", "--seeds", "3", "4") == 0
    shown = capsys.readouterr().out
    assert "seeds 3 4" in shown and "; train 50, validation 10, test 20\n" in shown
    assert all(f"{method}: 4,992 encoder passes" in shown for method in METHODS)  # 100 * 50 // 16 * 16
    assert "of encoder and head" in next(line for line in shown.splitlines() if line.startswith("supervised-resnet18"))
    assert shown.splitlines()[-1].endswith("of encoder and head") and "frozen-mlp" in shown
    assert not (tmp_path / "runs").exists()


def test_validate_leaves_the_test_images_alone(
    run: Callable[..., int], tmp_path: Path, stl10: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in ("test_X.bin", "test_y.bin"):
        (stl10 / file).unlink()
    words = ["--data-dir", stl10, "--smoke", *SMALL, "--tag", "trial", "--validate", "--seeds", "5"]
    assert run(*words, "--methods", "prl-query-frozen-linear") == 0
    shown, root = capsys.readouterr().out, tmp_path / "runs" / "stl10" / "stl10-paper-trial-smoke"
    assert "validation only" in shown and "validation_accuracy" in shown
    for file in root.glob("*/result.json"):
        stored = json.loads(file.read_text())
        assert stored["counts"]["test"] == 0
        assert not {"test_accuracy", "nearest_prototype_accuracy", "knn_accuracy"} & stored["metrics"].keys()
    assert len(list(root.glob("*/result.json"))) == 2
    assert not [*root.glob("*/predictions.csv"), *root.glob("report/*")]


def test_two_processes_make_one_run_folder_a_row(
    tmp_path: Path, ranks: Callable[[int], list[dict[str, str]]], forked: Callable[..., None]
) -> None:
    words = ["--dataset", "digits", "--smoke", "--validate", "--device", "cpu", "--out", str(tmp_path / "runs")]
    words += ["--methods", "prl-query-frozen-linear,prl-query-frozen-mlp"]
    folder = str(Path(run_stl10.__file__).parent)
    code = f"import sys; sys.path.insert(0, {folder!r}); import run_stl10; sys.exit(run_stl10.main(sys.argv[1:]))"
    forked(code, [words, words], ranks(2), tmp_path)
    first, second = ((tmp_path / f"errors-2-{rank}").read_text() for rank in (0, 1))
    assert first.count("validation only") == 2 and "validation only" not in second and "|" not in second
    results = list(tmp_path.glob("runs/*/*/*/result.json"))
    assert len(results) == 3, "two rows and the pretraining that they share"


def test_train_on_all_holds_nothing_back(run: Callable[..., int], tmp_path: Path, stl10: Path) -> None:
    words = ["--data-dir", stl10, "--smoke", *SMALL, "--train-on-all", "--methods"]
    assert run(*words, "supervised-resnet18,prl-standard-unfrozen-mlp") == 0
    for result in collect(tmp_path / "runs").results:
        assert result["counts"] == {"train": 60, "validation": 0, "test": 20}
        assert "validation_accuracy" not in result["metrics"]


def test_an_image_folder(run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, colour in (("red", (220, 30, 30)), ("blue", (30, 30, 220))):
        (tmp_path / "own" / name).mkdir(parents=True)
        for row in range(30):
            Image.new("RGB", (10 + row, 14), colour).save(tmp_path / "own" / name / f"{row}.png")
    words = ["--image-folder", tmp_path / "own", "--smoke", "--set", "batch_size=8", "--set", "validation=8"]
    assert run(*words, "epochs=8", "--methods", "supervised-mlp,simclr-frozen") == 0
    shown = capsys.readouterr().out
    assert "published" not in shown and "## images, image-folder, paper-smoke" in shown
    root = tmp_path / "runs" / "stl10" / "image-folder-paper-smoke"
    results = {result["method"]: result for result in collect(root).results}
    assert results["supervised-mlp"]["metrics"]["test_accuracy"] == 1.0  # red and blue
    assert results["supervised-mlp"]["counts"] == {"train": 40, "validation": 8, "test": 12}
    lines = (root / "supervised-mlp-s0" / "predictions.csv").read_text().splitlines()
    assert lines[0] == "index,label,prediction,file" and all(
        line.split(",")[3].split("/")[0] in ("red", "blue") for line in lines[1:]
    )


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--data-dir", "nowhere"], "no folder nowhere"),
        ([], "stl10 needs a data folder (--data-dir, with --download to fetch it)"),
        ([], "--dataset digits needs none"),
        (["--image-folder", "nowhere"], "no folder nowhere"),
        (["--image-folder", "nowhere", "--dataset", "digits"], "stands for --dataset image-folder"),
        (["--methods", "prl-qery-frozen-linear"], "did you mean 'prl-query-frozen-linear'"),
        (["--methods", ","], "expected names"),
        (["--recipe", "papr"], "did you mean 'paper'"),
        (["--dataset", "slt10"], "did you mean 'stl10'"),
        (["--dataset", "omniglot", "--validate"], "omniglot's test classes are not among its training classes"),
        (["--device", "cuad"], "did you mean 'cuda'"),
        (["--device", "gpu"], "did you mean 'cuda'"),
        (["--precision", "fp23"], "did you mean 'fp32'"),
        (["--precision", "fp16"], "fp16"),
        (["--reducer", "tsen"], "did you mean 'tsne'"),
        (["--seeds", "x"], "'x'"),
        (["--seeds", "-1"], "at least 0"),
        (["--seeds", "1.5"], "'1.5'"),
        (["--seeds", "0", "0"], "2 times"),
        (["--image-size", "0"], "at least 8"),
        (["--jobs-per-device", "0"], "at least 1"),
        (["--seed", "1"], "did you mean '--seeds'"),
        (["--set", "prl.lr"], "name=value"),
        (["--set", "pl.lr=1"], "did you mean 'prl'"),
        (["--set", "prl.lr=fast"], "prl.lr=fast: expected a number"),
        (["--set", "unfrozen.lr=-1"], "unfrozen.lr=-1: lr is -1"),
        (["--set", "batch_size=0"], "batch_size=0: batch_size is 0"),
        (["--set", "epochs=1.5"], "whole number"),
        (["--set", "proto.query_fraction=nan"], "query_fraction"),
        (["--download"], "--download needs"),
        (["--download", "--dataset", "digits"], "--download needs"),
        (["--dataset", "digits", "--validate", "--train-on-all"], "give one of them"),
        (["--dataset", "digits", "--validate", "--corrupt"], "--corrupt is of the test images"),
        (["--dataset", "digits", "--set", "batch_size=5000"], "batch_size 5000 is more than the 847 training"),
        (["--dataset", "digits", "--set", "batch_size=5000", "--dry-run"], "batch_size 5000"),
        (["--dataset", "digits", "--set", "validation=1347"], "leave none to train on"),
        (["--dataset", "digits", "--seeds", "99999999999999999999"], "a seed is"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_options_are_one_line(refuse: Callable[..., str], words: list[str], part: str) -> None:
    assert part in refuse(*words)


def test_a_device_that_is_not_there(refuse: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "'cuda:9' is not available" in refuse("--dataset", "digits", "--device", "cuda:9")


@pytest.mark.parametrize("file", ["train_X.bin", "train_y.bin", "test_X.bin", "test_y.bin"])
def test_a_missing_or_truncated_file_is_named(refuse: Callable[..., str], stl10: Path, file: str) -> None:
    whole = (stl10 / file).read_bytes()
    (stl10 / file).write_bytes(whole[:-7])
    line = refuse("--data-dir", stl10)
    assert file in line and "truncated" in line
    (stl10 / file).unlink()
    assert f"lacks {file}" in refuse("--data-dir", stl10)


def test_an_empty_folder(refuse: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "is empty" in refuse("--data-dir", tmp_path / "empty")
    assert "no class folders" in refuse("--image-folder", tmp_path / "empty")


def test_an_out_that_cannot_be_used(refuse: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    line = refuse("--dataset", "digits", "--smoke", "--methods", "supervised-mlp", "--out", tmp_path / "file")
    assert "as a run folder" in line and "--out" in line


def test_existing_runs_resume_or_are_refused(
    run: Callable[..., int], refuse: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--dataset", "digits", "--smoke", "--methods", "supervised-mlp"]
    assert run(*words) == 0
    more = [*words[:-1], "prl-standard-frozen-linear,supervised-mlp"]
    line = refuse(*more)
    assert "supervised-mlp-s0 already holds a run; continue it with --resume" in line
    root = tmp_path / "runs" / "stl10" / "digits-paper-smoke"
    assert not list(root.glob("*prl*")), "an hour of pretraining before the refusal"
    line = refuse(*more, "--resume", "--set", "supervised.lr=0.5")
    assert "choices.supervised.lr was 0.001, is 0.5" in line
    assert "precision was" in refuse(*words, "--resume", "--precision", "bf16")
    before = (root / "supervised-mlp-s0" / "result.json").read_bytes()
    assert run(*words, "--resume") == 0
    assert (root / "supervised-mlp-s0" / "result.json").read_bytes() == before
    config = root / "supervised-mlp-s0" / "config.json"
    stored = json.loads(config.read_text())
    stored["config"]["method"] = "simclr"
    config.write_text(json.dumps(stored))
    assert "from another method: 'simclr', given 'supervised-mlp'" in refuse(*words, "--resume")


def test_tuning_gives_supervised_and_prl_as_many_trials(capsys: pytest.CaptureFixture[str]) -> None:
    trials = tune_stl10.trials(list(tune_stl10.TRIALS))
    kinds = [name.split("-")[1] for name in trials]
    assert kinds.count("supervised") == kinds.count("prl") > 0
    assert tune_stl10.main(["--dry-run", "--data-dir", "d", "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(trials) and all("--validate" in line for line in lines)
    assert tune_stl10.main(["--device", "cpu"]) == 2
    assert "--data-dir" in capsys.readouterr().err


def test_the_weight_of_prototypes_has_as_many_trials_as_its_control(capsys: pytest.CaptureFixture[str]) -> None:
    assert tune_stl10.main(["--dry-run", "--data-dir", "d", "--device", "cpu", "--rounds", "joint"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum("--methods ce-prl " in line for line in lines) == 4 == len(lines) / 2
    assert sum("supervised-resnet18" in line and "--validate" in line for line in lines) == 4


def test_the_best_trials_of_the_joint_round_are_written_for_set(tmp_path: Path) -> None:
    scores = {
        f"joint-{phase}-{tag} seed {seed}": {"validation_accuracy": place + seed}
        for phase, tried in tune_stl10.JOINT["joint"].items()
        for place, tag in enumerate(tried)
        for seed in (0, 1)
    }
    del scores["joint-joint-weight-0.7 seed 0"]  # the seed lacks a trial: seed 1 alone counts
    scores["joint-joint-weight-0.3 seed 1"] = {"validation_accuracy": 9}
    (tmp_path / "tuning.json").write_text(json.dumps(scores))
    assert tune_stl10.chosen(tmp_path) == "joint_weight=0.3 supervised.label_smoothing=0.2"
    assert (tmp_path / "joint.txt").read_text().split() == ["joint_weight=0.3", "supervised.label_smoothing=0.2"]


@pytest.mark.parametrize("name", tune_stl10.trials(list(tune_stl10.ROUNDS)))
def test_every_trial_is_a_valid_recipe(run: Callable[..., int], stl10: Path, name: str) -> None:
    words = tune_stl10.trials(list(tune_stl10.ROUNDS))[name]
    words = [word if word != "batch_size=256" else "batch_size=32" for word in words]
    words = [word if word != "batch_size=130" else "batch_size=30" for word in words]
    small = [] if any(word.startswith("batch_size") for word in words) else ["--set", "batch_size=30"]
    assert run("--recipe", "strong", "--data-dir", stl10, *words, *small, "--set", "validation=10", "--dry-run") == 0


@pytest.mark.parametrize("tag", ["../../evil", "a/b", "a b"])
def test_a_tag_is_no_path(refuse: Callable[..., str], tag: str) -> None:
    assert "--tag: part of a folder's name" in refuse("--dataset", "digits", "--tag", tag)


def test_more_jobs_than_any_device_takes_are_refused(refuse: Callable[..., str]) -> None:
    assert "1 to 1000" in refuse("--dataset", "digits", "--jobs-per-device", 10**11)


@pytest.mark.parametrize("text", ["{", "[]", '{"method": "a", "recipe": "b", "seed": 0, "metrics": {}}'])
def test_a_damaged_trial_is_one_line(tmp_path: Path, text: str) -> None:
    run = tmp_path / "stl10-strong-tune-x" / "a-s0"
    run.mkdir(parents=True)
    (run / "result.json").write_text(text)
    with pytest.raises(InputError, match=r"result\.json is no result of a trial"):
        tune_stl10.table(tmp_path)


def test_few_labels_a_class_are_seen_for_as_many_updates(
    refuse: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--dataset", "digits", "--device", "cpu", "--no-figures", "--smoke", "--set", "batch_size=32", "--out"]
    words += [str(tmp_path), "--methods", "supervised-resnet18,prl-query-frozen-linear,simclr"]
    assert main(words) == main([*words, "--labels-per-class", "12"]) == 0
    whole, few = tmp_path / "stl10/digits-paper-smoke", tmp_path / "stl10/digits-12-labels-paper-smoke"
    for row in ("supervised-resnet18", "prl-query-frozen-linear", "simclr"):
        one, other = (json.loads((place / f"{row}-s0/result.json").read_text()) for place in (whole, few))
        assert other["counts"]["train"] == 120 and one["counts"]["test"] == other["counts"]["test"]
        assert one["budget"]["updates"] == pytest.approx(other["budget"]["updates"], abs=2)
    told = refuse("--dataset", "digits", "--smoke", "--labels-per-class", "500", "--out", tmp_path)
    assert re.search(r"--labels-per-class 500: a class has \d+ training images; give", told)


def test_the_images_of_few_labels_are_the_first_of_each_class() -> None:
    train = load_images("digits", None, "train")
    data = ImageData.of(train, load_images("digits", None, "test"), 100)
    few, recipe = run_stl10.with_few_labels(data, RECIPES["strong"], 30)
    assert few.train.labels.bincount().tolist() == [30] * 10 and recipe.epochs == round(200 * 1247 / 300)
    for c in range(10):
        first = data.train.images[data.train.labels == c][:30]
        assert torch.equal(few.train.images[few.train.labels == c], first)
    assert few.validation is data.validation and few.mean == data.mean


def test_heads_of_a_finished_pretraining_are_probed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--dataset", "digits", "--device", "cpu", "--no-figures", "--smoke", "--out", str(tmp_path)]
    assert main([*words, "--methods", "prl-standard-frozen-linear"]) == 0
    capsys.readouterr()
    run = next((tmp_path / "stl10").glob("*/pretrain-prl-standard-s0"))
    assert probe_heads.main([str(run), "--updates", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("mean norm ") and len(lines) == 3 + 11
    assert probe_heads.main([str(tmp_path)]) == 2


def test_shifted_features_kill_the_hidden_units_and_not_a_linear_head() -> None:
    y = torch.arange(400) % 4
    z = torch.eye(4, 64)[y] * 6 + torch.rand(400, 64)
    rows = [line.strip("| ").split(" | ") for line in probe_heads.table(z, y, z, y, 200).splitlines()[2:]]
    found = {name: [float(value) for value in values] for name, *values in rows}
    assert found["as they are"][1] > 95 and found["standardised"][1] > 95
    shifted = found["shifted by 10 spreads"]
    assert shifted[1] < 60 and shifted[2] > 90 and shifted[3] > 70


def test_scattered_features_are_told_apart_by_prototypes_and_not_by_neighbours() -> None:
    z, y, z_test, y_test = probe_heads.scattered()
    rows = [line.strip("| ").split(" | ") for line in probe_heads.table(z, y, z_test, y_test, 1).splitlines()[2:]]
    found = {name: [float(value) for value in values] for name, *values in rows}
    for name in ("as they are", "times 40", "shifted by 5 spreads"):
        assert 12 < found[name][-2] < 22 and 37 < found[name][-1] < 47
