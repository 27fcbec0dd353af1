"""What each row trains: its loss, heads, weights, phase and batches, as they reach the training loop."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.run_text import METHODS, STRONG
from metapretrain.data.made import made_tasks
from metapretrain.experiments.base import Context
from metapretrain.experiments.recipe import Proto
from metapretrain.experiments.text import training as module
from metapretrain.experiments.text.data import TextData
from metapretrain.experiments.text.objectives import TextClasses
from metapretrain.experiments.text.recipe import PRETRAININGS, TextPhase, TextRecipe
from metapretrain.experiments.text.streams import TextStream
from metapretrain.models.text_encoders import CosineHead
from metapretrain.protonet import ProtoLoss
from metapretrain.training import loop

PHASES = [TextPhase(lr=lr, label_smoothing=10 * lr) for lr in (1e-3, 2e-3, 3e-3, 4e-3)]
RECIPE = TextRecipe(
    2,
    PHASES[0],
    PHASES[1],
    PHASES[2],
    PHASES[3],
    batch_size=8,
    encoder="tiny",
    dropout=0.3,
    pooling="cls",
    proto=Proto("sqeuclidean", 3.0),
    query=Proto("cosine", 0.5, query_fraction=0.5),
)
DATA = TextData(tuple(made_tasks(rows=24)))


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[SimpleNamespace]:
    """The arguments of the training loop, which stands still."""
    seen: list[SimpleNamespace] = []

    def train(step: Any, stream: Any, settings: Any, **_: Any) -> Any:
        seen.append(SimpleNamespace(step=step, stream=stream, settings=settings))
        return SimpleNamespace(steps=settings.steps, updates_per_second=2.0, batches={})

    monkeypatch.setattr(loop, "train", train)
    return seen


def pretrained(trained: list[SimpleNamespace], name: str, recipe: TextRecipe = RECIPE) -> SimpleNamespace:
    _, training = module.pretraining(Context(f"pretrain-{name}", PRETRAININGS[name], 5, recipe, DATA, shared=True))
    loop.train(**vars(training))
    return trained[-1]


def finetuned(trained: list[SimpleNamespace], row: str, recipe: TextRecipe = RECIPE) -> SimpleNamespace:
    _, training = module.finetuning(Context(row, METHODS[row], 5, recipe, DATA), module.new_encoder(recipe, 5))
    loop.train(**vars(training))
    return trained[-1]


def given(phase: TextPhase, settings: Any) -> bool:
    names = {field.name for field in fields(phase)} - {"label_smoothing", "rdrop", "ema"}
    return all(getattr(settings, name) == getattr(phase, name) for name in names)


@pytest.mark.parametrize("name", sorted(name for name, plan in PRETRAININGS.items() if plan.loss == "prototypes"))
def test_prototypes_are_of_the_named_kind(trained: list[SimpleNamespace], name: str) -> None:
    call = pretrained(trained, name)
    wanted = RECIPE.query if name == "proto-query" else RECIPE.proto
    for task in DATA.tasks:
        objective = call.step.objectives[task.name]
        apart = name == "proto-cosine" and task.name == "sts"
        assert (objective.texts.tokens.second is not None) == (apart or (name == "proto-separate" and task.train.pairs))
        if apart:
            assert isinstance(objective.head, CosineHead)
            continue
        proto: ProtoLoss = objective.proto
        assert proto.mode == ("query" if name == "proto-query" else "standard")
        assert proto.memory == ("epoch" if name == "proto-epoch" else None)
        assert (proto.distance, proto.temperature) == (wanted.distance, wanted.temperature)
        assert (proto.num_classes, proto.seed) == (task.num_classes, 5)
        assert (proto.query_fraction, proto.label_smoothing) == (wanted.query_fraction, PHASES[1].label_smoothing)
    assert given(PHASES[1], call.settings) and call.settings.steps == 3
    assert call.settings.ema == (0.99 if name == "proto-ensemble" else None)
    assert (set(call.step.weights.values()) == {1.0}) == (name != "proto-ensemble")
    dropouts = {part.p for part in call.step.model.modules() if isinstance(part, nn.Dropout)}
    assert dropouts == {0.3} and call.step.model.pooling == "cls"


def test_chance_weighs_the_same_in_each_task_of_the_ensemble(trained: list[SimpleNamespace]) -> None:
    weights = pretrained(trained, "proto-ensemble").step.weights
    chance = [weights[task.name] * math.log(task.num_classes) for task in DATA.tasks]
    assert chance == pytest.approx([chance[0]] * 3) and sum(weights.values()) == pytest.approx(3)
    chosen = pretrained(trained, "proto-ensemble", replace(RECIPE, loss_weights="sst=2")).step.weights
    assert chosen == {"sst": 2.0, "para": 1.0, "sts": 1.0}


def test_the_control_is_a_linear_head_and_cross_entropy(trained: list[SimpleNamespace]) -> None:
    call = pretrained(trained, "cross-entropy")
    z, rows = [torch.randn(4, 32)], torch.tensor([3, 1, 0, 7])
    for task in DATA.tasks:
        objective = call.step.objectives[task.name]
        assert isinstance(objective, TextClasses)
        (weight, bias) = objective.head.parameters()
        logits = z[0] @ weight.T + bias  # no dropout, although it trains
        labels = task.class_labels(task.train)[rows]
        smoothing = PHASES[1].label_smoothing
        torch.testing.assert_close(objective.loss(z, rows), F.cross_entropy(logits, labels, label_smoothing=smoothing))
        assert objective.texts.tokens.second is None


def test_an_epochs_prototypes_are_forgotten_by_its_task_alone(trained: list[SimpleNamespace]) -> None:
    step = pretrained(trained, "proto-epoch").step
    for name in ("sst", "sts"):
        step.objectives[name].loss([torch.randn(8, 32)] * 1, torch.arange(8))
    step.start_epoch("sst")
    counts = {name: int(step.objectives[name].proto.memory_counts.sum()) for name in ("sst", "sts")}
    assert counts == {"sst": 0, "sts": 8}


@pytest.mark.parametrize(("row", "phase"), [("cross", 0), ("proto", 2), ("baseline", 3)])
def test_each_row_has_its_phase(trained: list[SimpleNamespace], row: str, phase: int) -> None:
    call = finetuned(trained, row)
    assert given(PHASES[phase], call.settings) and call.settings.ema is None and not call.step.surgery
    for task in DATA.tasks:
        objective = call.step.objectives[task.name]
        assert objective.label_smoothing == PHASES[phase].label_smoothing
        assert (objective.texts.features is not None) == (row == "baseline")
    assert any(parameter.requires_grad for parameter in call.step.model.parameters()) == (row != "baseline")
    assert set(call.step.weights.values()) == {1.0}


def test_rows_weight_losses_and_cut_gradients_as_they_say(trained: list[SimpleNamespace]) -> None:
    assert finetuned(trained, "pcgrad").step.surgery
    recipe = replace(RECIPE, loss_weights="sst=2,para=0.5")
    assert finetuned(trained, "cross", recipe).step.weights == {"sst": 2.0, "para": 0.5, "sts": 1.0}
    for name in ("sst", "para", "sts"):
        weights = finetuned(trained, f"weighted-{name}", recipe).step.weights
        assert weights == {**dict.fromkeys(("sst", "para", "sts"), 0.01), name: 0.98}


def test_what_learns_after_pretraining_sees_other_batches(trained: list[SimpleNamespace]) -> None:
    seeds = [pretrained(trained, "proto").stream.seed, finetuned(trained, "proto").stream.seed]
    assert seeds[0] == finetuned(trained, "cross").stream.seed == 5 != seeds[1]


@pytest.mark.parametrize(("call", "balanced"), [(pretrained, "balanced"), (finetuned, "balanced_finetune")])
def test_balanced_phases_and_the_policy(
    trained: list[SimpleNamespace], call: Callable[..., Any], balanced: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sst, *others = made_tasks(rows=80)
    classes = sst.train.require_labels()
    uneven = torch.cat([(classes == 0).nonzero()[:14], (classes == 1).nonzero()[:2]]).flatten()
    tasks = (replace(sst, train=sst.train.subset(uneven)), *others)
    monkeypatch.setattr(sys.modules[__name__], "DATA", TextData(tasks))
    for name in ("balanced", "balanced_finetune"):
        changes: Any = {name: True}
        recipe = replace(RECIPE, epochs=24, policy="shortest", multiple=4, pool=3, **changes)
        stream: TextStream = call(trained, "proto", recipe).stream
        assert (stream.policy, stream.multiple) == ("shortest", 4)
        assert all(loader.pool == 3 for loader in stream.loaders.values())  # type: ignore[attr-defined]
        rows = torch.cat([batch["sst"]["rows"] for batch in stream])
        rare = (tasks[0].train.require_labels()[rows] == 1).float().mean()
        assert rare == pytest.approx(0.5 if name == balanced else 0.125, abs=0.03)


def test_sequences_are_cut_where_the_recipe_says(trained: list[SimpleNamespace]) -> None:
    step = pretrained(trained, "proto", replace(RECIPE, max_length=6)).step
    assert all(int(objective.texts.tokens.widths.max()) == 6 for objective in step.objectives.values())


def test_speed_is_in_tokens_without_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    given = places = 0

    def train(step: Any, stream: Any, settings: Any, **_: Any) -> Any:
        nonlocal given, places
        for batches in stream:
            for name, batch in batches.items():
                given += int(step.objectives[name].texts.tokens.lengths[batch["rows"]].sum())
                places += len(batch["rows"]) * len(batch["width"])
        return SimpleNamespace(steps=settings.steps, updates_per_second=2.0, batches={})

    monkeypatch.setattr(loop, "train", train)
    _, training = module.pretraining(Context("pretrain-proto", PRETRAININGS["proto"], 5, RECIPE, DATA, shared=True))
    fitted = module.TextReport.of(loop.train(**vars(training)), training.stream, "")
    assert fitted.updates == 3 and fitted.tokens_per_s == pytest.approx(2.0 * given / 3)
    assert fitted.padding_share == pytest.approx(1 - given / places)


def test_recipe_strong_gives_each_task_its_share(trained: list[SimpleNamespace]) -> None:
    stream = pretrained(trained, "proto", replace(STRONG, encoder="tiny", batch_size=8)).stream
    assert [len(batch) for batch in stream] == [1] * len(stream)
