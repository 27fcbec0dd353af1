"""Experiments on the disk: pretrainings shared, runs resumed to the same bits, refusals before training."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import metapretrain
from metapretrain.errors import InputError
from metapretrain.evaluation.predictions import read_predictions
from metapretrain.experiments.base import Machine
from metapretrain.experiments.images.data import ImageData
from metapretrain.experiments.images.experiment import ImageExperiment
from metapretrain.experiments.images.recipe import ImageRecipe
from metapretrain.experiments.images.training import ImageMethod
from metapretrain.files import SUMS
from metapretrain.training import loop
from metapretrain.training.logs import read_metrics
from tests.experiments.conftest import make_images

ROWS = {
    "supervised": ImageMethod("supervised"),
    "frozen": ImageMethod("prl-query", "linear", True),
    "unfrozen": ImageMethod("prl-query", "mlp"),
    "simclr": ImageMethod("simclr"),
}
Make = Callable[..., ImageExperiment]


@pytest.fixture
def make(tmp_path: Path, data: ImageData, recipe: ImageRecipe) -> Make:
    def build(out: str = "runs", **changes: Any) -> ImageExperiment:
        usual = {"recipe": recipe, "data": data, "machine": Machine(), "out": tmp_path / out, "figures": None}
        return ImageExperiment("bench", "small", "short", **(usual | changes))

    return build


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was pretrained and fine-tuned, in order."""
    calls: list[str] = []
    real_pretrain, real_train = ImageExperiment.pretrain, ImageExperiment.train

    def pretrain(self: Any, context: Any) -> Any:
        calls.append(f"pretrain {context.method.objective}")
        return real_pretrain(self, context)

    def train(self: Any, context: Any) -> Any:
        calls.append(f"finetune {context.method.objective}")
        return real_train(self, context)

    monkeypatch.setattr(ImageExperiment, "pretrain", pretrain)
    monkeypatch.setattr(ImageExperiment, "train", train)
    return calls


def files(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(run.glob("*.safetensors"))}


def test_rows_that_share_a_pretraining_run_it_once_a_seed(make: Make, trained: list[str]) -> None:
    experiment = make()
    results = {name: experiment.row(name, method, 0) for name, method in ROWS.items()}
    assert trained == [
        "finetune supervised",
        "pretrain prl-query",
        "finetune prl-query",
        "finetune prl-query",
        "pretrain simclr",
        "finetune simclr",
    ]
    experiment.row("frozen", ROWS["frozen"], 1)
    assert trained[6:] == ["pretrain prl-query", "finetune prl-query"]
    assert {result["budget"]["encoder_passes"] for result in results.values()} == {240}
    assert results["simclr"]["budget"] == {
        "encoder_passes": 240,
        "updates": 15,
        "pretrain_updates": 5,
        "finetune_updates": 10,
    }
    assert results["frozen"]["kind"] == "row" and results["frozen"]["counts"]["test"] == 30


def test_a_frozen_row_has_the_pretrained_encoder_bit_for_bit(make: Make) -> None:
    experiment = make()
    experiment.row("frozen", ROWS["frozen"], 0)
    mine, pretrained = (
        load_file(experiment.path(name, 0) / "encoder.safetensors") for name in ("frozen", "pretrain-prl-query")
    )
    assert all(torch.equal(value, mine[name]) for name, value in pretrained.items())


def test_a_row_does_not_depend_on_whether_its_pretraining_was_there(make: Make) -> None:
    both, alone = make("both"), make("alone")
    both.row("frozen", ROWS["frozen"], 0)
    both.row("unfrozen", ROWS["unfrozen"], 0)  # from the disk
    alone.row("unfrozen", ROWS["unfrozen"], 0)  # as it came from training
    assert files(both.path("unfrozen", 0)) == files(alone.path("unfrozen", 0))


def test_the_saved_model_predicts_what_was_scored(make: Make, data: ImageData) -> None:
    experiment = make()
    for name in ("supervised", "unfrozen"):
        result = experiment.row(name, ROWS[name], 0)
        run = experiment.path(name, 0)
        predicted = metapretrain.load(run).predict(data.test.images)
        stored = read_predictions(run / "predictions.csv")
        assert stored.predictions.tolist() == predicted.tolist()
        right = (predicted == data.test.labels).double().mean().item()
        assert result["metrics"]["test_accuracy"] == pytest.approx(right)


def test_weights_of_another_run_are_not_taken_for_its_own(make: Make) -> None:
    experiment = make()
    for seed in (0, 1):
        experiment.row("unfrozen", ROWS["unfrozen"], seed)
    names = "unfrozen", "pretrain-prl-query"
    runs, pretrainings = ([experiment.path(name, seed) for seed in (0, 1)] for name in names)
    for run, other in (runs, pretrainings):
        for file in sorted(run.glob("*.safetensors")):
            whole = file.read_bytes()
            file.write_bytes((other / file.name).read_bytes())  # of the same shape
            with pytest.raises(InputError, match=f"{file.name} is damaged, or of another run"):
                metapretrain.load(run)
            file.write_bytes(whole)
    metapretrain.load(runs[0])
    (pretrainings[0] / "encoder.safetensors").write_bytes((pretrainings[1] / "encoder.safetensors").read_bytes())
    again = make(resume=True)
    again.row("unfrozen", ROWS["unfrozen"], 0)  # it is done
    with pytest.raises(InputError, match=r"encoder\.safetensors is damaged, or of another run"):
        again.row("frozen", ROWS["frozen"], 0)
    (pretrainings[0] / SUMS).unlink()  # as of a version that wrote none
    again.row("frozen", ROWS["frozen"], 0)


class Killed(RuntimeError):
    pass


@pytest.mark.parametrize(("row", "cut"), [("unfrozen", 6), ("unfrozen", 15), ("supervised", 7)])
def test_a_cut_experiment_resumes_to_the_same_bits(
    make: Make, monkeypatch: pytest.MonkeyPatch, row: str, cut: int
) -> None:
    whole, method = make("whole"), ROWS[row]
    whole.row(row, method, 0)
    monkeypatch.setattr(loop, "CHECKPOINT_SECONDS", 0.0)
    real, done = loop.engine.Engine.prepared, []

    def prepared(self: Any, batches: Any) -> Any:
        if len(done) == cut:
            raise Killed
        done.append(1)
        return real(self, batches)

    with monkeypatch.context() as patch:
        patch.setattr(loop.engine.Engine, "prepared", prepared)
        with pytest.raises(Killed):
            make("cut").row(row, method, 0)
    with pytest.raises(InputError, match="--resume"):
        make("cut").row(row, method, 0)
    counted: list[int] = []

    def count(self: Any, batches: Any) -> Any:
        counted.append(1)
        return real(self, batches)

    monkeypatch.setattr(loop.engine.Engine, "prepared", count)
    rest = make("cut", resume=True)
    result = rest.row(row, method, 0)
    assert len(counted) < 20 - cut + 3  # from a checkpoint, not from the start
    names = [row] if row == "supervised" else [row, "pretrain-prl-query"]
    for name in names:
        assert files(whole.path(name, 0)) == files(rest.path(name, 0)) != {}
        assert read_metrics(whole.path(name, 0)) == read_metrics(rest.path(name, 0))
        assert not (rest.path(name, 0) / "checkpoint").exists()  # the weights stand beside the result
    assert result["metrics"] == json.loads((whole.path(row, 0) / "result.json").read_text())["metrics"]


def test_a_result_that_is_damaged_is_named(make: Make) -> None:
    make().row("frozen", ROWS["frozen"], 0)
    for name, done in (("frozen", "frozen"), ("unfrozen", "pretrain-prl-query")):
        file = make().path(done, 0) / "result.json"
        whole = file.read_text()
        for bad in (whole[:-9], whole.replace('"budget"', '"bulget"')):
            file.write_text(bad)
            with pytest.raises(InputError, match=rf"{done}-s0/result\.json is damaged"):
                make(resume=True).row(name, ROWS[name], 0)
        file.write_text(whole)


def test_resume_keeps_finished_rows(make: Make, trained: list[str]) -> None:
    first = make().row("frozen", ROWS["frozen"], 0)
    before = (make().path("frozen", 0) / "result.json").read_bytes()
    trained.clear()
    again = make(resume=True)
    again.check(ROWS, [0, 1])
    assert again.row("frozen", ROWS["frozen"], 0) == first
    assert trained == [] and (again.path("frozen", 0) / "result.json").read_bytes() == before


def test_existing_rows_are_refused_before_anything_is_trained(make: Make, trained: list[str]) -> None:
    make().row("unfrozen", ROWS["unfrozen"], 1)
    kept = (make().path("unfrozen", 1) / "result.json").read_bytes()
    with pytest.raises(InputError, match=r"unfrozen-s1 already holds a run; continue it with --resume"):
        make().check(ROWS, [0, 1])
    make().check({"frozen": ROWS["frozen"]}, [0, 1])  # its pretraining is there and done: used again
    assert (make().path("unfrozen", 1) / "result.json").read_bytes() == kept


@pytest.mark.parametrize(
    ("changes", "key"), [({"epochs": 5}, "choices.epochs was 4, is 5"), ({"stem": "3x3"}, "choices.stem")]
)
def test_a_changed_recipe_is_refused_with_the_key(
    make: Make, recipe: ImageRecipe, changes: dict[str, Any], key: str
) -> None:
    make().row("supervised", ROWS["supervised"], 0)
    changed = make(recipe=dataclasses.replace(recipe, **changes), resume=True)
    for refuse in (lambda: changed.check(ROWS, [0]), lambda: changed.row("supervised", ROWS["supervised"], 0)):
        with pytest.raises(InputError) as error:
            refuse()
        assert key in str(error.value) and "\n" not in str(error.value)


def test_a_pretraining_of_another_recipe_is_not_reused(make: Make, recipe: ImageRecipe, trained: list[str]) -> None:
    make().row("frozen", ROWS["frozen"], 0)
    trained.clear()
    phase = dataclasses.replace(recipe.prl, lr=0.5)
    changed = make(recipe=dataclasses.replace(recipe, prl=phase))
    for refuse in (
        lambda: changed.check({"unfrozen": ROWS["unfrozen"]}, [0]),
        lambda: changed.row("unfrozen", ROWS["unfrozen"], 0),
    ):
        with pytest.raises(InputError, match=r"choices\.prl\.lr was 0\.02, is 0\.5"):
            refuse()
    assert trained == []


def test_other_images_are_another_configuration(make: Make, data: ImageData) -> None:
    make().row("supervised", ROWS["supervised"], 0)
    fewer = dataclasses.replace(data, test=data.test.subset(range(9)))
    with pytest.raises(InputError, match=r"data\.counts\.test was 30, is 9"):
        make(data=fewer, resume=True).check(ROWS, [0])


def test_without_test_images_nothing_of_the_test_part_is_read(make: Make, data: ImageData) -> None:
    class Untouchable(type(data.test)):  # type: ignore[misc]
        @property
        def images(self) -> torch.Tensor:
            raise AssertionError("test images were read")

    empty = data.test.subset([])
    hidden = object.__new__(Untouchable)
    hidden.__dict__.update({k: v for k, v in empty.__dict__.items() if k != "images"})
    hidden.__class__.__len__ = lambda self: 0
    experiment = make(data=dataclasses.replace(data, test=hidden), figures=0, map_points=20)
    result = experiment.row("frozen", ROWS["frozen"], 0)
    assert result["kind"] == "tuning" and result["metrics"]["validation_accuracy"] > 0
    assert not {"test_accuracy", "knn_accuracy", "silhouette_test"} & result["metrics"].keys()
    drawn = {path.name for path in experiment.root.glob("*/figures/*")}
    assert drawn == {"tsne.png"}
    assert not list(experiment.root.glob("*/predictions.csv"))


def test_figures_are_drawn_for_one_seed(make: Make) -> None:
    experiment = make(figures=1, map_points=20)
    for seed in (0, 1):
        experiment.row("frozen", ROWS["frozen"], seed)
    drawn = sorted(path.relative_to(experiment.root).as_posix() for path in experiment.root.glob("*/figures/*"))
    assert drawn == ["frozen-s1/figures/confusion.png", "pretrain-prl-query-s1/figures/tsne.png"]


def test_plan_shows_equal_passes(make: Make) -> None:
    lines = make().plan(ROWS)
    assert all("240 encoder passes" in line for line in lines) and len(lines) == 4
    assert "5 of simclr (shared) + 10" in lines[3]


def test_rows_of_another_recipe_or_other_data_are_not_put_into_one_table(make: Make, recipe: ImageRecipe) -> None:
    make().row("supervised", ROWS["supervised"], 0)
    other = dataclasses.replace(recipe, prl=dataclasses.replace(recipe.prl, lr=recipe.prl.lr / 2))
    with pytest.raises(InputError, match=r"supervised-s0 in the same table .* choices\.prl\.lr was"):
        make(recipe=other).check({"frozen": ROWS["frozen"]}, [0])
    data = ImageData.of(make_images(70), make_images(20), 10)
    with pytest.raises(InputError, match=r"in the same table .* data\.counts"):
        make(data=data).check({"frozen": ROWS["frozen"]}, [0])
    make().check({"frozen": ROWS["frozen"]}, [0])
    make(recipe=other, out="others").check({"frozen": ROWS["frozen"]}, [0])


def test_all_changed_keys_of_a_run_are_named_before_its_neighbours_are_looked_at(
    make: Make, recipe: ImageRecipe
) -> None:
    make().row("supervised", ROWS["supervised"], 0)
    changed = make(recipe=dataclasses.replace(recipe, epochs=recipe.epochs + 1, balanced=True), resume=True)
    with pytest.raises(InputError, match=r"--resume with .* choices\.balanced was .* choices\.epochs was"):
        changed.check({"supervised": ROWS["supervised"]}, [0])
