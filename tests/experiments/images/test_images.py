"""The steps of an image experiment: equal budgets, held-back images, seeds."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from metapretrain.data.images import ImageSet
from metapretrain.errors import InputError
from metapretrain.experiments.base import Context, Machine
from metapretrain.experiments.images.data import ImageData
from metapretrain.experiments.images.recipe import ImagePhase, ImageRecipe
from metapretrain.experiments.images.training import ImageMethod, finetuning, new_encoder, updates
from metapretrain.models import Encoder
from metapretrain.training import loop
from tests.experiments.conftest import RECIPE, finetune, make_images, pretrain

METHODS = [
    ImageMethod("supervised"),
    ImageMethod("prl-standard"),
    ImageMethod("prl-query", "mlp", True),
    ImageMethod("simclr"),
]


class Sized(ImageSet):
    """A training part that is only counted."""

    def __init__(self, n: int) -> None:
        object.__setattr__(self, "n", n)

    def __len__(self) -> int:
        return self.n  # type: ignore[attr-defined, no-any-return]


@given(epochs=st.integers(1, 400), share=st.floats(0.01, 0.99), batch=st.integers(2, 600), n=st.integers(2, 9000))
def test_every_row_passes_the_same_number_of_images(epochs: int, share: float, batch: int, n: int) -> None:
    recipe = dataclasses.replace(RECIPE, epochs=epochs, pretrain_share=share, batch_size=batch)
    data = ImageData(Sized(n), Sized(0), Sized(0), (0.5,), (0.5,))
    counts = {}
    for method in METHODS:
        try:
            before, after = updates(recipe, data, method)
        except InputError:
            assert batch > n or epochs * n // batch < 400  # only a small budget may be refused
            continue
        views = 2 if method.objective == "simclr" else 1
        assert after >= 1 and (before >= 1) == (method.objective != "supervised")
        counts[method.objective] = (before * views + after) * batch
    assume(counts)
    assert set(counts.values()) == {epochs * n // batch * batch}


def test_a_share_of_the_budget_is_pretraining(recipe: ImageRecipe, data: ImageData) -> None:
    small = dataclasses.replace(recipe, epochs=10, pretrain_share=0.8)  # 50 batches of 12
    assert [updates(small, data, method) for method in METHODS] == [(0, 50), (40, 10), (40, 10), (20, 10)]


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"batch_size": 61}, "batch_size 61 is more than the 60 training images"),
        ({"batch_size": 60, "epochs": 1}, "too few"),
        ({"batch_size": 12, "epochs": 1, "pretrain_share": 0.05}, "too few"),
        ({"batch_size": 12, "epochs": 1, "pretrain_share": 0.95}, "too few"),
    ],
)
def test_a_budget_without_an_update_is_refused(
    recipe: ImageRecipe, data: ImageData, changes: dict[str, float], part: str
) -> None:
    with pytest.raises(InputError, match=part):
        updates(dataclasses.replace(recipe, **changes), data, ImageMethod("prl-query"))


def test_validation_images_are_the_same_for_every_seed_and_never_trained_on() -> None:
    marked = make_images(72)
    marked.images[:, 0, 0, 0] = torch.arange(72)
    once, again = (ImageData.of(marked, make_images(30), 12) for _ in range(2))
    trained, held = (set(part.images[:, 0, 0, 0].tolist()) for part in (once.train, once.validation))
    assert trained | held == set(range(72)) and not trained & held
    assert torch.equal(once.validation.images, again.validation.images)
    assert once.counts == {"train": 60, "validation": 12, "test": 30}
    assert once.validation.labels.bincount().tolist() == [4, 4, 4]
    assert (once.mean, once.std) == once.train.statistics() != marked.statistics()


@pytest.mark.parametrize("objective", ["prl-query", "simclr"])
def test_what_reads_no_labels_is_trained_on_unlabelled_images(
    recipe: ImageRecipe, data: ImageData, objective: str
) -> None:
    """SimCLR sees them and nothing of the training part; what reads labels does not see them."""
    more = dataclasses.replace(make_images(200, seed=5), labels=torch.full((200,), -1), split="unlabeled")
    dark = dataclasses.replace(data.train, images=data.train.images // 3)

    def end(**parts: ImageSet) -> dict[str, torch.Tensor]:
        encoder, _ = pretrain(objective, dataclasses.replace(data, **parts), recipe, 0, Machine())
        return encoder.state_dict()

    alone, both, other = end(), end(unlabelled=more), end(unlabelled=more, train=dark)
    same = all(torch.equal(alone[name], both[name]) for name in alone)
    assert same == (objective == "prl-query")
    same = all(torch.equal(both[name], other[name]) for name in both)
    assert same == (objective == "simclr")
    assert dataclasses.replace(data, unlabelled=more).counts == {**data.counts, "unlabelled": 200}


def test_unlabelled_images_of_another_shape_are_refused() -> None:
    with pytest.raises(InputError, match="unlabelled ones"):
        ImageData.of(make_images(72), make_images(30), 12, make_images(20, size=8))


@pytest.mark.parametrize("objective", ["prl-query", "simclr", "supervised"])
def test_training_reads_the_training_part_alone(recipe: ImageRecipe, data: ImageData, objective: str) -> None:
    def end(held: ImageSet, test: ImageSet) -> dict[str, torch.Tensor]:
        part = dataclasses.replace(data, validation=held, test=test)
        if objective == "supervised":
            encoder = new_encoder(part, recipe, 0)
            finetune(encoder, ImageMethod("supervised"), part, recipe, 0, Machine())
        else:
            encoder, _ = pretrain(objective, part, recipe, 0, Machine())
        return encoder.state_dict()

    other = end(make_images(9, seed=5), make_images(6, seed=6))
    assert all(torch.equal(value, other[name]) for name, value in end(data.validation, data.test).items())


@pytest.mark.parametrize(
    ("train", "test", "validation", "part"),
    [
        (make_images(12), make_images(6, size=5), 3, "must agree"),
        (make_images(12), make_images(6, classes=2), 3, "must agree"),
        (make_images(12), make_images(6), 12, "leave none to train on"),
        (make_images(12), make_images(6), 500, "500 validation images of 12 training images"),
        (make_images(0), make_images(6), 0, "0 training images"),
        (dataclasses.replace(make_images(12), labels=torch.full((12,), -1)), make_images(6), 3, "have no label"),
    ],
)
def test_parts_that_cannot_be_used_are_refused(train: ImageSet, test: ImageSet, validation: int, part: str) -> None:
    with pytest.raises(InputError, match=part):
        ImageData.of(train, test, validation)


def weights(encoder: Encoder) -> torch.Tensor:
    return torch.cat([value.flatten() for value in encoder.parameters()])


def test_new_weights_are_a_function_of_the_seed(recipe: ImageRecipe, data: ImageData) -> None:
    torch.manual_seed(7)
    state = torch.get_rng_state()
    first, other = (weights(new_encoder(data, recipe, seed)) for seed in (0, 1))
    assert torch.equal(state, torch.get_rng_state())
    torch.rand(3)
    assert torch.equal(first, weights(new_encoder(data, recipe, 0)))
    assert not torch.equal(first, other)


def test_frozen_fine_tuning_leaves_the_encoder_and_unfrozen_changes_it(recipe: ImageRecipe, data: ImageData) -> None:
    for frozen in (True, False):
        encoder = new_encoder(data, recipe, 0)
        before = {name: value.clone() for name, value in encoder.state_dict().items()}
        head, report = finetune(encoder, ImageMethod("prl-query", "linear", frozen), data, recipe, 0, Machine())
        same = [torch.equal(value, before[name]) for name, value in encoder.state_dict().items()]
        assert all(same) if frozen else not any(same)
        assert report.steps == 10 and report.batches == {"supervised": 10}
        assert head.weight.shape == (3, encoder.features)


def test_a_head_in_training_is_validated_and_bad_outputs_are_refused(recipe: ImageRecipe, data: ImageData) -> None:
    about = Context("row", ImageMethod("supervised"), 0, recipe, data, Machine())
    head, job = finetuning(about, new_encoder(data, recipe, 0))
    assert job.evaluate is not None
    with torch.no_grad():
        head.weight.zero_()
        head.bias.copy_(torch.tensor([0.0, 1.0, 0.0]))
    assert job.evaluate(1) == {"accuracy": float((data.validation.labels == 1).double().mean())}
    torch.nn.init.constant_(head.bias, float("nan"))
    with pytest.raises(InputError, match="outputs of 12 of 12 inputs are NaN or infinite"):
        job.evaluate(1)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What reaches the training loop: (step, stream, settings) of each call; nothing is trained."""
    calls: list[Any] = []

    def train(step: Any, stream: Any, settings: Any, **options: Any) -> None:
        calls.append((step, stream, settings))

    monkeypatch.setattr(loop, "train", train)
    return calls


def test_each_phase_of_the_recipe_reaches_the_loop(recipe: ImageRecipe, data: ImageData, trained: list[Any]) -> None:
    names = ("supervised", "prl", "simclr", "frozen", "unfrozen")
    phases = {
        name: ImagePhase(0.01 * i, "plain", "adamw", 0.1 * i, "linear", 0.2, 0.03 * i, 0.9 + 0.01 * i)
        for i, name in enumerate(names, start=1)
    }
    recipe = dataclasses.replace(recipe, **phases, simclr_temperature=0.3)
    encoder = new_encoder(data, recipe, 4)
    finetune(encoder, ImageMethod("supervised"), data, recipe, 4, Machine())
    pretrain("prl-query", data, recipe, 4, Machine(precision="bf16"))
    pretrain("simclr", data, recipe, 4, Machine())
    for frozen in (True, False):
        finetune(encoder, ImageMethod("prl-query", "linear", frozen), data, recipe, 4, Machine())
    assert [chosen.steps for *_, chosen in trained] == [20, 10, 5, 10, 10]
    for phase, (step, stream, chosen) in zip(phases.values(), trained, strict=True):
        assert (chosen.lr, chosen.optimizer, chosen.weight_decay, chosen.schedule, chosen.warmup) == (
            phase.lr,
            "adamw",
            phase.weight_decay,
            "linear",
            0.2,
        )
        assert (chosen.ema, chosen.seed, chosen.device) == (phase.ema, 4, "cpu")
        (task,) = step.objectives.values()
        assert task.images.augment.crops and not task.images.augment.flips  # grey images are not mirrored
        loss = getattr(task, "proto", task)
        assert getattr(loss, "label_smoothing", phase.label_smoothing) == phase.label_smoothing
        assert sum(len(batch) for batches in stream for batch in batches.values()) == 12 * chosen.steps
    assert [chosen.precision for *_, chosen in trained] == ["fp32", "bf16", "fp32", "fp32", "fp32"]
    prl, simclr = (next(iter(trained[i][0].objectives.values())) for i in (1, 2))
    assert (prl.proto.mode, prl.proto.query_fraction, simclr.contrast.temperature) == ("query", 0.5, 0.3)


def test_balanced_batches_hold_every_class_as_often(recipe: ImageRecipe, data: ImageData, trained: list[Any]) -> None:
    for balanced in (True, False):
        pretrain("prl-standard", data, dataclasses.replace(recipe, balanced=balanced), 0, Machine())
    counts = [
        {tuple(data.train.labels[rows].bincount(minlength=3).tolist()) for batch in stream for rows in batch.values()}
        for _, stream, _ in trained
    ]
    assert counts[0] == {(4, 4, 4)} and len(counts[1]) > 1


@pytest.mark.parametrize("objective", ["prl-standard", "prl-query", "simclr"])
def test_pretraining_without_validation_images(recipe: ImageRecipe, data: ImageData, objective: str) -> None:
    part = ImageData.of(make_images(72), data.test, 0)
    encoder, report = pretrain(objective, part, recipe, 0, Machine())
    assert report.steps == updates(recipe, part, ImageMethod(objective))[0]
    finetune(encoder, ImageMethod(objective), part, recipe, 0, Machine())


def test_what_cannot_be_pretrained_is_refused(recipe: ImageRecipe, data: ImageData) -> None:
    with pytest.raises(InputError, match="did you mean 'prl-query'"):
        pretrain("prl-qery", data, recipe, 0, Machine())
    with pytest.raises(InputError, match="needs a head"):
        finetune(new_encoder(data, recipe, 0), ImageMethod("simclr", None), data, recipe, 0, Machine())
    with pytest.raises(InputError, match="same number of images"):
        pretrain("simclr", data, recipe, 0, Machine(world=5))
    lone = dataclasses.replace(recipe, batch_size=2)
    single = dataclasses.replace(data.train, labels=torch.arange(60), classes=[str(c) for c in range(60)])
    with pytest.raises(InputError, match="query"):
        pretrain("prl-query", dataclasses.replace(data, train=single), lone, 0, Machine())
