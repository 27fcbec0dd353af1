"""The table of image objectives: one entry is all that a new one needs, and seeds are kept."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from metapretrain.errors import InputError
from metapretrain.experiments.base import Machine
from metapretrain.experiments.images import objectives
from metapretrain.experiments.images.data import ImageData
from metapretrain.experiments.images.objectives import (
    OBJECTIVES,
    PRL,
    Entry,
    Objective,
    SimCLR,
    Supervised,
    build_objectives,
    sources,
)
from metapretrain.experiments.images.recipe import ImagePhase, ImageRecipe
from metapretrain.experiments.images.training import ImageMethod, check_scheduled, new_encoder, updates, views
from metapretrain.models import build_head, projection
from tests.experiments.conftest import pretrain


class Agreement(Objective):
    """Squared difference between three views of an image: labels are not read."""

    views = 3
    labelled = False

    def loss(self, encoder: nn.Module, rows: Tensor) -> Tensor:
        """Return the mean over `rows` (B,)."""
        z: Tensor = encoder(self.images.view(torch.cat([rows] * 3)))
        return z.view(3, len(rows), -1).var(0).mean()

    def check_batch(self, rows: Tensor) -> None:
        """Refuse three rows."""
        if len(rows) == 3:
            raise InputError("three rows")


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> str:
    entry = Entry(Agreement, "simclr", Agreement.build, scheduled="mine")
    monkeypatch.setitem(objectives.OBJECTIVES, "agreement", entry)
    return "agreement"


def test_an_entry_is_all_that_a_new_objective_needs(recipe: ImageRecipe, data: ImageData, own: str) -> None:
    count = updates(recipe, data, ImageMethod(own))[0]
    assert views(own) == 3 and count == 10 // 3  # half of 4 epochs of 5 batches
    encoder, report = pretrain(own, data, recipe, 0, Machine())
    assert report.batches == {own: count}
    assert not torch.equal(next(encoder.parameters()), next(new_encoder(data, recipe, 0).parameters()))
    with pytest.raises(InputError, match="three rows"):
        pretrain(own, data, dataclasses.replace(recipe, batch_size=3), 0, Machine())


def test_a_scheduler_chooses_a_new_objective_too(recipe: ImageRecipe, data: ImageData, own: str) -> None:
    fixed = dataclasses.replace(recipe, scheduler="fixed:mine")
    _, report = pretrain("scheduled", data, fixed, 0, Machine())
    assert report.batches["mine"] == report.steps == 10
    with pytest.raises(InputError, match="multiple of 3 and at least 6, since agreement has 1/3"):
        check_scheduled(dataclasses.replace(fixed, batch_size=4), Machine())


def test_each_name_is_built_with_its_phase_and_options(recipe: ImageRecipe, data: ImageData) -> None:
    named = {name: ImagePhase(0.01, "plain", label_smoothing=i / 10) for i, name in enumerate(("supervised", "prl"), 1)}
    changed = dataclasses.replace(
        recipe,
        supervised=named["supervised"],
        prl=named["prl"],
        simclr=ImagePhase(0.01, "strong"),
        simclr_temperature=0.3,
    )
    built = build_objectives(OBJECTIVES, new_encoder(data, recipe, 0), data, changed, 0, Machine(world=2))
    assert [type(objective) for objective in built.values()] == [Supervised, PRL, PRL, PRL, SimCLR]
    assert {name: entry.kind for name, entry in OBJECTIVES.items()} == {n: type(o) for n, o in built.items()}
    for name, mode in {"prl-standard": "standard", "prl-query": "query", "prl-loo": "leave-one-out"}.items():
        proto = built[name].proto
        assert (proto.mode, proto.query_fraction) == (mode, 0.5)
        assert proto.gather and proto.label_smoothing == 0.2
    assert built["supervised"].label_smoothing == 0.1 and built["simclr"].contrast.temperature == 0.3
    assert [objective.labelled for objective in built.values()] == [True, True, True, True, False]


def test_weights_are_drawn_in_turn_from_the_seed(recipe: ImageRecipe, data: ImageData) -> None:
    encoder = new_encoder(data, recipe, 3)
    torch.manual_seed(4)
    head, scheduled = build_head("linear", encoder.features, 3), projection(encoder.features)
    torch.manual_seed(4)
    alone = projection(encoder.features)
    state = torch.get_rng_state()
    together = build_objectives(sources().values(), encoder, data, recipe, 3, Machine())
    single = build_objectives(["simclr"], encoder, data, recipe, 3, Machine())
    assert torch.equal(state, torch.get_rng_state())
    for part, expected in (
        (together["supervised"].head, head),
        (together["simclr"].projection, scheduled),
        (single["simclr"].projection, alone),
    ):
        pairs = zip(part.parameters(), expected.parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
