"""The few-shot script end to end on made glyphs: results, report, resume, encoders, and one line for bad input."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fewshot_experiment
import fewshot_learning as learning
import pytest
import torch
from report_fewshot import LAYOUT, layout_of

from benchmarks import run_fewshot
from benchmarks.run_fewshot import METHODS, main, methods_of, options_of
from metapretrain import EpisodeSampler, EpisodeSpec, load
from metapretrain.cli import main as metapretrain
from metapretrain.data.registry import load_few_shot
from metapretrain.report.table import build_table
from metapretrain.training import loop

TINY = ["--device", "cpu", "--smoke", "--no-figures", "--image-size", "16", "--settings", "5w1s", "--queries", "1"]
ROOT = Path("fewshot") / "made-5w1s-conv4-smoke"


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., int]:
    return lambda *words: main([*TINY, "--out", str(tmp_path), *map(str, words)])


def result(folder: Path) -> Any:
    return json.loads((folder / "result.json").read_text())


def check_loaded(folder: Path, accuracy: float) -> None:
    """What `load` gives has the accuracy of the run on its test episodes."""
    model, images = load(folder), load_few_shot("made", None, 16).first(25, images=40).test
    sampler = EpisodeSampler(images.labels, EpisodeSpec(5, 1, 1), 20, seed=learning.FROZEN_SEED["test"])
    right = []
    for plan in sampler:
        support, query = images.images[plan].split([len(plan.support_y), len(plan.query_y)])
        found = model.adapt(support, plan.support_y).predict(query)
        right.append((found == plan.query_y).double().mean())
    assert float(torch.stack(right).mean()) == pytest.approx(accuracy, abs=1e-6)
    assert model.encode(query).shape == (5, 64)


def test_every_method_is_trained_tested_once_and_reported(
    run: Callable[..., int], refuse: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--methods", "all") == 0
    table = capsys.readouterr().out
    for name in METHODS:
        found = result(tmp_path / ROOT / f"{name}-s0")
        metrics = found["metrics"]
        assert 0.2 < metrics["test_accuracy"] <= 1 and 0 < metrics["test_ci95"] < 0.2
        assert found["counts"]["test_episodes"] == 20 and found["counts"]["train_classes"] == 25
        shared = name.startswith("supervised")
        assert found["transductive"] == (not shared and name not in ("protonet", "r2d2"))
        passes = {"maml++": 4 * 66, "reptile": 4 * 2 * 5 * (10 + 1)}.get(name, 4 * 2 * 5 * (1 + 5))
        assert found["budget"].items() >= {"encoder_passes": 4 * 20 if shared else passes, "updates": 4}.items()
        assert shared or found["budget"]["best_step"] in (2, 4)
        assert f"| {name} | 1 | {100 * metrics['test_accuracy']:.2f}" in table
        assert f"- {name}: 20 test episodes per run" in table
        assert (tmp_path / ROOT / f"{name}-s0" / "learner.safetensors").is_file()
        if name in ("protonet", "metasgd", "r2d2", "maml++", "supervised-centroid", "supervised-logistic"):
            check_loaded(tmp_path / ROOT / f"{name}-s0", metrics["test_accuracy"])

    training = tmp_path / "fewshot" / "made-supervised-conv4-smoke" / "supervised-s0"
    learned = (training / "learner.safetensors").read_bytes()
    assert run("--settings", "5w5s", "--methods", "supervised-logistic") == 0  # the same training
    assert (training / "learner.safetensors").read_bytes() == learned

    assert run("--encoder", tmp_path / ROOT / "protonet-s0") == 0
    scored = result(tmp_path / ROOT / "encoder-protonet-s0-s0")
    assert "its encoder works inside an episode only" in refuse("--encoder", tmp_path / ROOT / "anil-s0")
    assert not (tmp_path / ROOT / "encoder-anil-s0-s0").exists()
    assert scored["metrics"]["test_accuracy"] == result(tmp_path / ROOT / "protonet-s0")["metrics"]["test_accuracy"]


def test_a_run_that_was_cut_short_ends_with_the_same_bits(
    run: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "CHECKPOINT_SECONDS", 0.0)
    assert run("--methods", "maml", "--out", tmp_path / "whole") == 0
    plain, calls = fewshot_experiment.score_episodes, []

    def stops(*args: Any, **options: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return plain(*args, **options)

    monkeypatch.setattr(fewshot_experiment, "score_episodes", stops)
    assert run("--methods", "maml", "--out", tmp_path / "cut") == 130
    kept = sorted(path.name for path in (tmp_path / "cut" / ROOT / "maml-s0" / "checkpoint").iterdir())
    assert kept[-1] == "step-00000003"
    assert run("--methods", "maml", "--out", tmp_path / "cut", "--resume") == 0
    whole, cut = (tmp_path / name / ROOT / "maml-s0" for name in ("whole", "cut"))
    assert len(calls) == 4  # a validation that failed, the same again, and the test
    assert result(whole)["metrics"] == result(cut)["metrics"]
    assert (whole / "learner.safetensors").read_bytes() == (cut / "learner.safetensors").read_bytes()
    assert run("--methods", "maml", "--out", tmp_path / "cut", "--resume") == 0
    assert len(calls) == 4


def test_an_encoder_that_knows_a_test_class_is_refused(
    run: Callable[..., int], refuse: Callable[..., str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert run("--methods", "protonet") == 0
    folder = tmp_path / ROOT / "protonet-s0"
    config = json.loads((folder / "config.json").read_text())
    config["config"]["model"]["classes"][3] = "test glyph 7"
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "weights.sha256").unlink()
    assert "the encoder's training and test share 1 class(es), such as 'test glyph 7'" in refuse("--encoder", folder)
    words = ["few-shot", str(folder), "--dataset", "made", "--shots", "1", "--queries", "2", "--episodes", "2"]
    with caplog.at_level(logging.WARNING):
        assert metapretrain(words) == 0
    assert "1 classes are of the encoder's training, such as 'test glyph 7'" in caplog.text


def test_a_dry_run_says_what_it_would_do(run: Callable[..., int], tmp_path: Path, capsys: Any) -> None:
    assert run("--dry-run", "--settings", "5w1s,20w1s", "--methods", "protonet,maml") == 0
    said = capsys.readouterr().out
    assert "protonet: 4 updates of 2 episodes (5-way 1-shot, 5 queries per class), 240 encoder passes" in said
    assert "maml: 4 updates of 2 episodes (20-way 1-shot, 5 queries per class), 1,600 encoder passes" in said
    assert run("--dry-run", "--methods", "r2d2", "--set", "pretrained=true") == 0
    said = capsys.readouterr().out
    assert "r2d2: after a supervised training of 4 updates of 20 images, 4 updates of 2 episodes" in said
    assert f"{4 * 20 + 240} encoder passes in all" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "words",
    [
        ("--settings", "26w1s"),
        ("--settings", "5w5s", "--queries", "16"),
        ("--methods", "protonet", "--set", "drop=0.1"),
    ],
)
def test_a_dry_run_refuses_episodes_that_a_run_refuses(
    refuse: Callable[..., str], tmp_path: Path, words: tuple[str, ...]
) -> None:
    said = refuse("--dry-run", *words)
    assert said == refuse(*words)
    assert not list(tmp_path.iterdir())


def test_queries_of_training_and_of_the_test_are_told_apart(refuse: Callable[..., str]) -> None:
    told = refuse("--methods", "maml", "--set", "queries=40")
    assert "training episodes of maml: shots + queries = 41 is above" in told
    assert "--set shots=N queries=N are of training" in told
    assert "--set shots" not in refuse("--methods", "maml", "--queries", "40")


def test_more_batches_than_steps_or_images_are_refused_before_a_run(refuse: Callable[..., str]) -> None:
    for steps, most in ((60, 50), (3, 3)):
        told = refuse("--methods", "reptile", "--set", "batches=51", f"inner_steps={steps}")
        assert f"batches of reptile, one for an inner step, is 51; give a whole number from 1 to {most}" in told


def test_all_settings_are_checked_before_the_first_is_trained(refuse: Callable[..., str], tmp_path: Path) -> None:
    words = ("--settings", "5w1s,40w1s", "--methods", "protonet")
    assert refuse(*words) == refuse(*words, "--dry-run") == refuse(*words[2:], "--settings", "40w1s")
    assert not list(tmp_path.iterdir())


def test_bad_input_is_one_line(refuse: Callable[..., str], run: Callable[..., int], tmp_path: Path) -> None:
    assert "expected ways and shots such as 5w1s,20w5s, all or lake; given '5x1'" in refuse("--settings", "5x1")
    assert "1w5s: the only class is always right; give 2 ways or more" in refuse("--settings", "5w1s,1w5s")
    assert "--head logistic is of --encoder and supervised rows; leave it out" in refuse("--head", "logistic")
    assert "did you mean 'maml'" in refuse("--methods", "mamml")
    assert "method encoder needs one to score" in refuse("--methods", "encoder")
    for other in (("--dataset", "cub"), ("--data-dir", tmp_path)):
        assert "stands for --dataset image-folder --data-dir DIR" in refuse("--image-folder", "mine", *other)
    assert "is not a run folder" in refuse("--encoder", tmp_path / "none")
    assert "did you mean 'inner_lr'" in refuse("--set", "iner_lr=1")
    assert "inner_lr is -1.0; give a number above 0" in refuse("--methods", "maml", "--set", "inner_lr=-1")
    assert "clip is -1.0; give a number above 0" in refuse("--methods", "maml", "--dry-run", "--set", "clip=-1")
    assert "lr is 0.0; give a number above 0" in refuse("--set", "lr=0")
    assert "did you mean 'support'" in refuse("--set", "batchnorm=suport")
    assert "chunk=1 cannot be compiled" in refuse("--methods", "protonet,maml", "--compile", "--set", "chunk=1")
    assert "ways" in refuse("--settings", "40w1s")
    assert "conv4 needs images of 16 pixels or more" in refuse("--image-size", "8")
    assert not list(tmp_path.iterdir())  # all of it before a run's folder is made
    assert run("--methods", "protonet") == 0
    assert "already holds a run" in refuse("--methods", "protonet")
    assert "choices.lr was 0.001, is 0.5" in refuse("--methods", "protonet", "--resume", "--set", "lr=0.5")


def test_omniglot_needs_its_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cpu"]) == 2
    assert "omniglot needs a data folder (--data-dir)" in capsys.readouterr().err


def test_the_papers_choices_and_figures_stand_beside() -> None:
    assert layout_of("cifar-fs", "conv4-bf16").published["cifar-fs-5w1s"]["r2d2"].scores == {"test": 0.6}
    assert options_of([]).settings == ["5w1s", "5w5s", "20w1s", "20w5s"]
    five, twenty = methods_of(5), methods_of(20)
    assert (five["maml"].inner_lr, five["maml"].inner_steps, five["maml"].tasks) == (0.4, 1, 32)
    assert (twenty["anil"].inner_lr, twenty["anil"].inner_steps, twenty["anil"].tasks) == (0.1, 5, 16)
    assert five["protonet"].ways == 60
    plus = twenty["maml++"]
    assert (plus.learn_rates, plus.batchnorm, plus.queries, plus.lr * plus.lr_end) == (True, "batch", 1, 1e-5)
    for name in ("maml", "maml++"):
        assert methods_of(5, photos=True)[name].batchnorm == "support"  # inductive unless named transductive
    assert methods_of(5, photos=True)["maml-transductive"].batchnorm == "batch"
    rates = [(reptile.inner_lr, reptile.lr) for reptile in (five["reptile"], methods_of(5, photos=True)["reptile"])]
    assert rates == [(0.3, 0.01), (0.1, 0.003)]  # docs/results/maml.md
    runs = [
        {
            "schema": 1,
            "status": "complete",
            "benchmark": "fewshot",
            "dataset": "omniglot-20w1s",
            "recipe": "conv4",
            "method": name,
            "seed": 0,
            "metrics": {"test_accuracy": 0.9},
        }
        for name in ("protonet", "maml")
    ]
    text = build_table(runs, LAYOUT).markdown()
    rows = {line.split(" | ")[0]: line for line in reversed(text.splitlines()) if line.startswith("| ")}
    assert rows["| protonet"].endswith("| 96.0 ‡ |") and rows["| maml"].endswith("| 95.8 ‡ |")
    assert build_table(runs, LAYOUT).csv() and build_table(runs, LAYOUT).json()


@pytest.mark.parametrize(("words", "told"), [(["--tag", "../../x"], "--tag"), (["--seeds", str(2**32)], "a seed is")])
def test_nothing_is_written_for_a_bad_tag_or_seed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    try:
        status: object = main([*TINY, "--out", str(tmp_path / "runs"), *words])
    except SystemExit as end:  # the parser's own
        status = end.code
    shown = capsys.readouterr().err
    assert status == 2 and told in shown and not (tmp_path / "runs").exists()


def test_photographs_have_the_prints_of_their_backbone_beside_them() -> None:
    for backbone, printed in (("conv4", "60.0"), ("resnet12-flat", "72.6")):
        layout = layout_of("cifar-fs", backbone)
        assert layout.published["cifar-fs-5w1s"]["r2d2"].scores == {"test": float(printed) / 100}
        assert set(layout.published["cifar-fs-5w5s"]) <= set(METHODS)
        assert layout.published_counts == {"test_classes": 20, "test_images": 12_000}
    assert layout_of("omniglot", "conv4") is LAYOUT


def colours(folder: Path) -> Path:
    """Nine classes for training, six each for validation and test, of nine images of noise about a colour."""
    from PIL import Image

    generator = torch.Generator().manual_seed(0)
    for part, classes in (("train", 9), ("validation", 6), ("test", 6)):
        for number in range(classes):
            base = torch.randint(0, 200, (3,), generator=generator)
            (folder / part / f"{part[:2]}-{number}").mkdir(parents=True)
            for image in range(9):
                pixels = (base + torch.randint(0, 55, (16, 16, 3), generator=generator)).to(torch.uint8)
                Image.fromarray(pixels.numpy()).save(folder / part / f"{part[:2]}-{number}" / f"{image}.png")
    return folder


def test_a_resnet12_starts_from_the_supervised_training(tmp_path: Path) -> None:
    words = [*TINY, "--out", str(tmp_path), "--image-folder", str(colours(tmp_path / "colours"))]
    assert (
        main([*words, "--methods", "protonet,r2d2,supervised-logistic", "--backbone", "resnet12", "--set", "queries=1"])
        == 0
    )
    root = tmp_path / "fewshot" / "image-folder-5w1s-resnet12-smoke"
    training = tmp_path / "fewshot" / "image-folder-supervised-resnet12-smoke" / "supervised-s0"
    passes = {name: result(root / f"{name}-s0")["budget"]["encoder_passes"] for name in ("protonet", "r2d2")}
    assert passes == dict.fromkeys(passes, 4 * 20 + 4 * 2 * 5 * (1 + 1))  # those of the training, and its own
    assert result(training)["kind"] == "pretraining"
    assert load(root / "r2d2-s0").adapt(torch.zeros(2, 3, 16, 16), [3, 8]).classes.tolist() == [3, 8]


def test_training_with_the_validation_classes_chooses_nothing_by_them(run: Callable[..., int], tmp_path: Path) -> None:
    assert run("--methods", "protonet", "--trainval") == 0
    found = result(tmp_path / "fewshot" / "made-trainval-5w1s-conv4-smoke" / "protonet-s0")
    assert found["counts"]["train_classes"] == 25 + 20 and found["counts"]["validation_classes"] == 20
    assert "validation_accuracy" not in found["metrics"] and found["budget"]["best_step"] == 4


def test_a_prefix_changes_the_supervised_training_beside_other_methods(
    run: Callable[..., int], refuse: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = ("--methods", "protonet,supervised-logistic")
    assert run("--dry-run", *both, "--set", "updates=7", "supervised.updates=9") == 0
    said = capsys.readouterr().out
    assert "protonet: 7 updates" in said and "supervised-logistic: 9 updates" in said
    assert run("--dry-run", "--methods", "supervised-logistic", "--set", "updates=7", "turns=true") == 0
    assert "supervised-logistic: 7 updates" in capsys.readouterr().out
    assert "did you mean 'turns'" in refuse(*both, "--set", "supervised.truns=true")
    assert "unknown prefix 'shared'; give supervised.turns=VALUE" in refuse(*both, "--set", "shared.turns=true")
    assert "give supervised.turns=true for the shared training" in refuse(*both, "--set", "turns=true")
    assert "supervised.turns=true changes none of protonet; leave it out, or give NAME=VALUE" in refuse(
        *("--methods", "protonet", "--set", "supervised.turns=true")
    )
    assert "finetune.steps=3 changes none of" in refuse(*both, "--set", "finetune.steps=3")
    assert "learner=maml would make another method" in refuse(*both, "--set", "learner=maml")
    assert "supervised.head=nearest would make another" in refuse(*both, "--set", "supervised.head=nearest")
    assert not list(tmp_path.iterdir())

    assert run(*both, "--set", "supervised.turns=true") == 0
    again = ("--config", tmp_path / ROOT / "protonet-s0", "--tag", "again")
    assert run(*again) == 0  # what is said of other rows of that command is no fault here
    training = tmp_path / "fewshot" / "made-supervised-conv4-smoke" / "supervised-s0"
    choices = {
        folder.name: json.loads((folder / "config.json").read_text())["config"]["choices"].get("turns")
        for folder in (training, *(tmp_path / ROOT / f"{name}-s0" for name in both[1].split(",")))
    }
    assert choices == {"supervised-s0": True, "protonet-s0": None, "supervised-logistic-s0": True}
    assert load(tmp_path / ROOT / "supervised-logistic-s0").learner.classifier.out_features == 4 * 25


def test_heads_are_chosen_for_encoders_and_supervised_rows_alike(
    run: Callable[..., int], refuse: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    heads = ("nearest", "normalised", "centred", "logistic")
    assert run("--methods", "supervised-logistic", "--head", *heads) == 0
    rows = {"centred": "supervised-centroid"}
    source = tmp_path / ROOT / "supervised-nearest-s0"
    assert run("--encoder", source, "--head", *heads) == 0
    for head in heads:  # an encoder that is frozen from the start is that of the row
        one = result(tmp_path / ROOT / f"{rows.get(head, f'supervised-{head}')}-s0")["metrics"]
        name = "encoder" + f"-{head}" * (head != "nearest")
        other = result(tmp_path / ROOT / f"{name}-{source.name}-s0")["metrics"]
        assert other["test_accuracy"] == pytest.approx(one["test_accuracy"], abs=1e-6)
    assert "unknown head 'svm'" in refuse("--encoder", source, "--head", "svm")


def test_an_encoder_is_fine_tuned_in_each_episode(
    run: Callable[..., int], refuse: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--methods", "protonet,maml++,supervised-logistic") == 0
    words = ("--encoder", tmp_path / ROOT / "protonet-s0", "--head", "finetune", "normalised")
    capsys.readouterr()
    assert run(*words, "--dry-run", "--set", "finetune.steps=3") == 0
    assert "encoder-finetune-protonet-s0: 3 steps in each episode, 20 test episodes" in capsys.readouterr().out
    before = (tmp_path / ROOT / "protonet-s0" / "learner.safetensors").read_bytes()
    assert run(*words, "--set", "finetune.steps=2", "finetune.lr=1e-9", "finetune.head_lr=1e-9") == 0
    still, normalised = (
        result(tmp_path / ROOT / f"encoder-{head}-protonet-s0-s0") for head in ("finetune", "normalised")
    )
    assert still["metrics"]["test_accuracy"] == pytest.approx(normalised["metrics"]["test_accuracy"], abs=1e-6)
    config = json.loads((tmp_path / ROOT / "encoder-finetune-protonet-s0-s0" / "config.json").read_text())["config"]
    assert (
        config["tuning"]["steps"] == 2
        and (tmp_path / ROOT / "protonet-s0" / "learner.safetensors").read_bytes() == before
    )
    assert run("--encoder", tmp_path / ROOT / "supervised-logistic-s0", "--head", "finetune") == 0
    assert "tuning.lr was 1e-09, is 0.5" in refuse(*words, "--resume", "--set", "finetune.lr=0.5")
    assert "did you mean 'steps'" in refuse(*words, "--set", "finetune.step=2")
    assert "--set steps=2 changes none of encoder-finetune, encoder-normalised" in refuse(*words, "--set", "steps=2")
    assert "--head finetune is of --encoder alone" in refuse("--methods", "supervised-logistic", "--head", "finetune")
    assert "its encoder works inside an episode only, by batch statistics" in refuse(
        *("--encoder", tmp_path / ROOT / "maml++-s0", "--head", "finetune", "--tag", "other")
    )


def test_a_pretrained_encoder_is_a_row(
    run: Callable[..., int], refuse: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import ViTConfig, ViTImageProcessor, ViTModel

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, image_size=16)
    ViTModel(config).save_pretrained(tmp_path / "vit")
    ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(tmp_path / "vit")
    assert run("--encoder", tmp_path / "vit", "--head", "logistic") == 0
    found = result(tmp_path / ROOT / "encoder-logistic-vit-s0")
    assert 0.1 < found["metrics"]["test_accuracy"] <= 1 and not found["transductive"]
    monkeypatch.setattr(run_fewshot, "load_few_shot", lambda *_: pytest.fail("the data are read"))
    assert "torchvision:none is no image encoder" in refuse("--encoder", "torchvision:none")
