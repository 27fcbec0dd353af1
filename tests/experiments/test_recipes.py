"""`name=value` changes one choice of a recipe; every kind of bad change is one line before anything runs."""

from __future__ import annotations

import dataclasses

import pytest

from metapretrain.errors import InputError
from metapretrain.experiments.images.experiment import DEMO_RECIPE
from metapretrain.experiments.images.recipe import ImagePhase, ImageRecipe
from metapretrain.experiments.recipe import Proto, override
from metapretrain.experiments.text.recipe import TextPhase
from metapretrain.training import TrainSettings


def test_changes_are_made_in_order_and_the_recipe_is_left_as_it_was(recipe: ImageRecipe) -> None:
    before = dataclasses.asdict(recipe)
    changed = override(
        recipe,
        [
            "epochs=7",
            "prl.lr=0.5",
            "balanced=true",
            "proto.memory=epoch",
            "prl.ema=0.99",
            "prl.ema=none",
            "simclr.ema=0.9",
            "proto.distance=cosine",
            "proto.learn_temperature=True",
            "stem=3x3",
            "prl.lr=2e-3",
        ],
    )
    expected = before | {
        "epochs": 7,
        "balanced": True,
        "stem": "3x3",
        "prl": before["prl"] | {"lr": 2e-3, "ema": None},
        "simclr": before["simclr"] | {"ema": 0.9},
        "proto": before["proto"] | {"memory": "epoch", "distance": "cosine", "learn_temperature": True},
    }
    assert dataclasses.asdict(changed) == expected
    assert type(changed.epochs) is int and changed.balanced is True
    assert dataclasses.asdict(recipe) == before
    assert override(recipe, ["balanced=false"]).balanced is False
    assert override(recipe, []) == recipe


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ("epochs", "name=value"),
        ("", "name=value"),
        ("=3", "unknown recipe setting"),
        ("epoch=3", "did you mean 'epochs'"),
        ("prl.learning=3", "allowed: augment"),
        ("pr.lr=3", "did you mean 'prl'"),
        ("prl=3", "prl.lr"),
        ("epochs.lr=3", "not a single value"),
        ("prl.lr.x=3", "not a single value"),
        ("epochs=many", "expected a whole number, got 'many'"),
        ("epochs=1.5", "expected a whole number"),
        ("epochs=none", "expected a whole number"),
        ("epochs=", "expected a whole number"),
        ("prl.lr=fast", "expected a number"),
        ("prl.ema=fast", "expected a number"),
        ("balanced=yes", "expected true or false"),
        ("epochs=0", "at least 1"),
        ("epochs=-1", "at least 1"),
        ("batch_size=1", "at least 2"),
        ("validation=-1", "at least 0"),
        ("pretrain_share=nan", "above 0 and below 1"),
        ("pretrain_share=0", "above 0 and below 1"),
        ("pretrain_share=1", "above 0 and below 1"),
        ("encoder=resnet", "did you mean 'resnet18'"),
        ("stem=5x5", "allowed: 3x3, standard"),
        ("simclr_temperature=0", "above 0"),
        ("simclr_temperature=inf", "above 0"),
        ("unfrozen.lr=-1", "give a number above 0 and below"),
        ("frozen.lr=nan", "give a number above 0 and below"),
        ("prl.optimizer=adam", "did you mean 'adamw'"),
        ("prl.schedule=cosin", "did you mean 'cosine'"),
        ("prl.augment=stong", "did you mean 'strong'"),
        ("prl.weight_decay=-1", "weight_decay"),
        ("prl.warmup=1", "warmup"),
        ("prl.ema=1", "ema"),
        ("prl.label_smoothing=1", "label_smoothing"),
        ("prl.label_smoothing=nan", "label_smoothing"),
        ("proto.distance=euclid", "did you mean 'euclidean'"),
        ("proto.temperature=0", "temperature"),
        ("proto.query_fraction=0", "query_fraction"),
        ("proto.query_fraction=1", "query_fraction"),
        ("proto.query_fraction=nan", "query_fraction"),
        ("proto.memory=epochs", "did you mean 'epoch'"),
    ],
)
def test_bad_changes_are_refused_in_one_line_that_repeats_them(recipe: ImageRecipe, change: str, part: str) -> None:
    with pytest.raises(InputError) as error:
        override(recipe, ["epochs=2", change])
    assert part in str(error.value) and change in str(error.value) and "\n" not in str(error.value)


def test_a_recipe_made_in_python_is_checked_too(recipe: ImageRecipe) -> None:
    for make in (
        lambda: ImagePhase(lr=0),
        lambda: Proto(distance="cosin"),
        lambda: dataclasses.replace(recipe, batch_size=0),
    ):
        with pytest.raises(InputError):
            make()
    assert DEMO_RECIPE.validation == 147


@pytest.mark.parametrize("make", [ImagePhase, TextPhase])
def test_a_phase_is_checked_and_trained_with_the_same_settings(make: type[ImagePhase | TextPhase]) -> None:
    phase = make(0.3, optimizer="sgd", weight_decay=0.1, schedule="linear", warmup=0.2, label_smoothing=0.4)
    expected = TrainSettings(7, 0.3, "sgd", weight_decay=0.1, schedule="linear", warmup=0.2, device="cpu", seed=5)
    assert phase.settings(7, device="cpu", seed=5) == expected
    for change in ({"warmup": 1.0}, {"label_smoothing": 1.0}, {"schedule": "cosin"}):
        with pytest.raises(InputError, match=next(iter(change))):
            dataclasses.replace(phase, **change)


def test_a_new_term_of_a_phase_is_one_field() -> None:
    @dataclasses.dataclass(frozen=True)
    class Heavy(ImagePhase):
        momentum: float = 0.5

    assert Heavy(0.1, ema=0.9).settings(3) == TrainSettings(3, 0.1, momentum=0.5, ema=0.9)
    with pytest.raises(InputError, match="momentum"):
        Heavy(0.1, momentum=1.0)
