"""Objectives against other libraries and slow loops; images that are no part of a module's state."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from pytorch_metric_learning.losses import NTXentLoss, SelfSupervisedLoss
from torch import Tensor, nn

from metapretrain.data.augment import make_augmentation
from metapretrain.data.images import ImageSet
from metapretrain.errors import InputError
from metapretrain.experiments.images.data import Images
from metapretrain.experiments.images.objectives import PRL, ImageStep, Objective, SimCLR, Supervised
from metapretrain.models import build_encoder, build_head, projection
from metapretrain.protonet import MODES, ProtoLoss


def make_source(labels: Tensor | None = None, augment: str = "none") -> Images:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (24, 1, 6, 6), generator=generator, dtype=torch.uint8)
    labels = torch.arange(24) % 4 if labels is None else labels
    data = ImageSet(images, labels, list("abcd"))
    return Images(data, make_augmentation(augment, 6, 1, (0.5,), (0.25,)))


@pytest.fixture
def encoder() -> nn.Module:
    torch.manual_seed(0)
    return build_encoder("mlp", channels=1, image_size=6)


ROWS = torch.tensor([0, 5, 10, 15, 3, 8, 2, 21])


def slow_nt_xent(first: Tensor, second: Tensor, temperature: float) -> float:
    """Equation 1 of Chen et al. (2020), term by term."""
    z = [row / row.norm() for row in torch.cat([first, second]).double()]
    n, total = len(first), 0.0
    for i in range(2 * n):
        j = (i + n) % (2 * n)
        others = sum(math.exp(float(z[i] @ z[k]) / temperature) for k in range(2 * n) if k != i)
        total -= math.log(math.exp(float(z[i] @ z[j]) / temperature) / others)
    return total / (2 * n)


@pytest.mark.parametrize("temperature", [0.1, 0.5])
def test_simclr_is_nt_xent_of_the_two_views(encoder: nn.Module, temperature: float) -> None:
    torch.manual_seed(1)
    head = projection(512, 16)
    task = SimCLR(make_source(augment="strong"), head, temperature)
    seen: list[Tensor] = []
    task.images.augment.register_forward_hook(lambda module, given, x: seen.append(x))
    loss = task.loss(encoder, ROWS)
    (x,) = seen
    assert len(x) == 2 * len(ROWS) and not torch.equal(x[: len(ROWS)], x[len(ROWS) :])
    first, second = head(encoder(x)).chunk(2)
    theirs = SelfSupervisedLoss(NTXentLoss(temperature=temperature))(first, second)
    torch.testing.assert_close(loss, theirs)
    assert loss.item() == pytest.approx(slow_nt_xent(first.detach(), second.detach(), temperature), rel=1e-5)


def test_simclr_pairs_follow_the_batch_size(encoder: nn.Module) -> None:
    task = SimCLR(make_source(), nn.Identity(), 0.5)
    for rows in (ROWS, ROWS[:3], ROWS):
        z = encoder(task.images.view(rows)).detach()
        assert task.loss(encoder, rows).item() == pytest.approx(slow_nt_xent(z, z, 0.5), rel=1e-5)


def test_simclr_reads_no_labels(encoder: nn.Module) -> None:
    torch.manual_seed(1)
    head, losses = projection(512, 8), []
    for labels in (torch.arange(24) % 4, torch.full((24,), -1)):
        torch.manual_seed(2)
        losses.append(SimCLR(make_source(labels, "plain"), head).loss(encoder, ROWS))
    assert torch.equal(*losses)
    task = SimCLR(make_source(), head)
    task.images.labels = None  # type: ignore[assignment]
    assert task.loss(encoder, ROWS).isfinite()


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan])
def test_simclr_refuses_a_temperature_that_is_not_positive(temperature: float) -> None:
    with pytest.raises(InputError, match="temperature"):
        SimCLR(make_source(), nn.Identity(), temperature)


@pytest.mark.parametrize("mode", MODES)
def test_prl_is_the_prototypical_loss_of_the_features(encoder: nn.Module, mode: str) -> None:
    source = make_source()
    ours, reference = (ProtoLoss(mode, num_classes=4, seed=3, query_fraction=0.5) for _ in range(2))
    loss = PRL(source, ours).loss(encoder, ROWS)
    z = encoder((source.images[ROWS].float() / 255 - 0.5) / 0.25)  # pooled features, no projection
    torch.testing.assert_close(loss, reference(z, source.labels[ROWS]))
    assert loss.item() > 0


def test_supervised_is_cross_entropy(encoder: nn.Module) -> None:
    source, head = make_source(), build_head("linear", 512, 4)
    logits = head(encoder((source.images[ROWS].float() / 255 - 0.5) / 0.25))
    for smoothing in (0.0, 0.2):
        expected = F.cross_entropy(logits, ROWS % 4, label_smoothing=smoothing)
        torch.testing.assert_close(Supervised(source, head, smoothing).loss(encoder, ROWS), expected)


def test_cross_entropy_and_prototypes_share_the_features(encoder: nn.Module) -> None:
    source, head, proto = make_source(), build_head("linear", 512, 4), ProtoLoss("leave-one-out", num_classes=4)
    parts = [Supervised(source, head, 0.1).loss(encoder, ROWS), PRL(source, proto).loss(encoder, ROWS)]
    loss = Supervised(source, head, 0.1, proto, weight=0.3).loss(encoder, ROWS)
    torch.testing.assert_close(loss, 0.7 * parts[0] + 0.3 * parts[1])


OBJECTIVES: dict[str, Callable[[], Objective]] = {
    "supervised": lambda: Supervised(make_source(), nn.Linear(512, 4)),
    "prl": lambda: PRL(make_source(), ProtoLoss(num_classes=4)),
    "simclr": lambda: SimCLR(make_source(), nn.Linear(512, 8)),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_images_are_no_part_of_the_state(encoder: nn.Module, name: str) -> None:
    step = ImageStep(encoder, {name: OBJECTIVES[name]()})
    held = [*step.state_dict().values(), *step.buffers(), *step.parameters()]  # buffers: what DDP sends
    assert all(value.dtype != torch.uint8 for value in held)
    assert all(len(value) != 24 for value in held if value.ndim)
    total = sum(value.numel() for value in held[: len(step.state_dict())])
    outside = sum(p.numel() for p in encoder.parameters())
    assert total - outside < 6000


def test_images_follow_the_module_to_its_device_unless_they_do_not_fit() -> None:
    meta = torch.device("meta")
    source = make_source().to(meta)
    assert source.images.device == source.labels.device == meta
    away = make_source()
    away.resident = False
    away.to(meta)
    assert away.images.device.type == "cpu" and away.labels.device == meta
    half = make_source().half()
    assert half.images.dtype == torch.uint8 and half.labels.dtype == torch.int64


def test_step_weighs_each_loss_and_gives_only_the_named_ones(encoder: nn.Module) -> None:
    tasks = {name: OBJECTIVES[name]() for name in ("supervised", "prl")}
    step = ImageStep(encoder, tasks, {"prl": 0.25})
    losses = step({"supervised": ROWS, "prl": ROWS})
    plain = ImageStep(encoder, tasks)({"supervised": ROWS, "prl": ROWS})
    torch.testing.assert_close(losses["prl"], 0.25 * plain["prl"])
    assert torch.equal(losses["supervised"], plain["supervised"])
    assert list(step({"prl": ROWS})) == ["prl"]
    with pytest.raises(InputError, match="'simclr', but the objectives are supervised, prl"):
        ImageStep(encoder, tasks, {"simclr": 1.0})


class FeatureNorm(Objective):
    def loss(self, encoder: nn.Module, rows: Tensor) -> Tensor:
        return encoder(self.images.view(rows)).square().mean()


def test_a_step_takes_any_objective_of_its_base(encoder: nn.Module) -> None:
    own = FeatureNorm(make_source())
    step = ImageStep(encoder, {"norm": own, "prl": OBJECTIVES["prl"]()}, {"norm": 0.5})
    assert step.objective("norm") is own and (own.views, SimCLR.views) == (1, 2)
    torch.testing.assert_close(step({"norm": ROWS})["norm"], 0.5 * own.loss(encoder, ROWS))
    with pytest.raises(TypeError, match="abstract"):
        Objective(own.images)  # type: ignore[abstract]


def test_step_forgets_the_prototypes_of_an_epoch(encoder: nn.Module) -> None:
    def after(reset: bool) -> Tensor:
        step = ImageStep(encoder, {"prl": PRL(make_source(), ProtoLoss(num_classes=4, memory="epoch"))})
        step({"prl": ROWS})
        if reset:
            step.start_epoch("prl")
        return step({"prl": ROWS[:5]})["prl"]

    fresh = ImageStep(encoder, {"prl": PRL(make_source(), ProtoLoss(num_classes=4, memory="epoch"))})
    assert torch.equal(after(True), fresh({"prl": ROWS[:5]})["prl"])
    assert not torch.equal(after(True), after(False))
