"""A scheduler, a source, a loss, images and texts of one's own, by `--plugin`: the guides' files in the scripts."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from metapretrain import load
from tests.test_docs import ROOT, blocks

pytestmark = pytest.mark.usefixtures("registries")
SMOKE = ["--smoke", "--device", "cpu", "--no-figures"]


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., Path]:
    """Run a script with the block of a guide that registers something; return the folder of its runs."""

    def run(name: str, guide: str, *words: str, call: str = "register(") -> Path:
        file, out = tmp_path / "mine.py", tmp_path / "runs"
        (code,) = [code for code in blocks(ROOT / "docs" / guide, "python") if f"\n{call}" in code]
        file.write_text(code)
        main = importlib.import_module(f"benchmarks.{name}").main
        assert main([*SMOKE, "--plugin", str(file), "--out", str(out), *words]) == 0
        return out

    return run


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("run_text", ["--methods", "cross"]),
        ("run_stl10", ["--dataset", "digits", "--image-size", "12", "--methods", "scheduled"]),
        ("run_prompts", ["--methods", "metapt-kmeans", "--sets", "sst2"]),
    ],
)
def test_a_scheduler_of_ones_own_in_every_script(script: Callable[..., Path], name: str, words: list[str]) -> None:
    out = script(name, "scheduling.md", "--schedule", "least-taken:lead=0.5", *words)
    told = [json.loads(file.read_text()).get("schedule") for file in out.rglob("result.json")]
    counts = [about["updates"].values() for about in told if about]
    assert counts and all(max(of) - min(of) <= 2 for of in counts)


def test_a_scheduler_of_ones_own_is_a_row(script: Callable[..., Path]) -> None:
    out = script("run_schedule", "scheduling.md", "--methods", "least-taken", "--settings", "agnostic")
    (file,) = out.rglob("choices.json")
    assert json.loads(file.read_text()) == [["masked-lm", 1], ["reordering", 1]] * 6


def test_a_source_of_ones_own(script: Callable[..., Path]) -> None:
    words = ["--sources", "masked-lm,swapped-words", "--methods", "fixed:swapped-words,uniform", "--settings", "aware"]
    out = script("run_schedule", "own-scheduler-source.md", *words)
    (fixed, uniform) = sorted(out.rglob("choices.json"))
    assert json.loads(fixed.read_text()) == [["swapped-words", 12]]
    assert "swapped-words" in {name for name, _ in json.loads(uniform.read_text())}


def test_a_loss_of_ones_own_is_a_row(script: Callable[..., Path]) -> None:
    out = script(
        "run_stl10",
        "own-images.md",
        "--dataset",
        "digits",
        "--methods",
        "supervised-resnet18,my-loss",
        call='register("my-loss"',
    )
    found = {file.parent.name: json.loads(file.read_text()) for file in out.rglob("result.json")}
    assert set(found) == {"supervised-resnet18-s0", "pretrain-my-loss-s0", "my-loss-s0"}
    assert found["my-loss-s0"]["budget"]["pretrain_updates"] > 0
    assert len({found[name]["budget"]["encoder_passes"] for name in ("my-loss-s0", "supervised-resnet18-s0")}) == 1


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("run_stl10", ["--methods", "supervised-resnet18"]),
        ("run_fewshot", ["--methods", "protonet", "--image-size", "28", "--settings", "2w1s", "--queries", "3"]),
    ],
)
def test_images_of_ones_own(script: Callable[..., Path], name: str, words: list[str]) -> None:
    out = script(name, "own-images.md", "--dataset", "my-digits", *words, call="register(DatasetInfo")
    (file,) = out.rglob("result.json")
    result = json.loads(file.read_text())
    assert result["dataset"].startswith("my-digits") and 0 < result["metrics"]["test_accuracy"] <= 1


def test_a_text_task_of_ones_own(script: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(blocks(ROOT / "docs" / "own-text-tasks.md", "python")[0], {})  # the tables of the guide
    words = ["--tasks", "cs224n,topics", "--data-dir", "data/topics", "--methods", "cross"]
    out = script("run_text", "own-text-tasks.md", *words)
    (file,) = out.rglob("cross-s0/result.json")
    metrics = json.loads(file.read_text())["metrics"]
    assert {"topic_accuracy", "sst_accuracy", "sts_pearson"} <= metrics.keys()


def test_a_method_a_set_and_a_backbone_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("\n".join(blocks(ROOT / "docs" / "fewshot.md", "python")))
    words = ["--dataset", "shades", "--backbone", "patches", "--methods", "cosine,maml", "--settings", "5w1s"]
    main = importlib.import_module("benchmarks.run_fewshot").main
    assert main([*SMOKE, "--plugin", str(file), "--out", str(tmp_path), *words]) == 0
    found = {path.parent.name: json.loads(path.read_text()) for path in tmp_path.rglob("result.json")}
    assert set(found) == {"cosine-s0", "maml-s0"}
    assert not found["cosine-s0"]["transductive"] and found["cosine-s0"]["metrics"]["test_accuracy"] > 0.2
    model = load(tmp_path / "fewshot" / "shades-5w1s-patches-smoke" / "cosine-s0")
    assert model.adapt(torch.zeros(2, 3, 16, 16), [4, 9]).classes.tolist() == [4, 9]
