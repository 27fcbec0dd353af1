"""Encoders and heads: shapes, stems, where the seed goes, and what frozen means."""

from __future__ import annotations

import pytest
import torch
import torchvision
from torch import nn

from metapretrain.errors import InputError
from metapretrain.models import ENCODERS, HEADS, STEMS, Frozen, build_encoder, build_head, projection


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", ENCODERS)
def test_every_encoder_gives_its_number_of_features_and_learns_everywhere(name: str, channels: int) -> None:
    encoder = build_encoder(name, channels=channels, image_size=32)
    z = encoder(torch.randn(3, channels, 32, 32))
    assert z.shape == (3, encoder.features)
    z.square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in encoder.parameters())


def test_resnet18_is_torchvisions_without_its_classifier() -> None:
    ours = build_encoder("resnet18").eval()
    theirs = torchvision.models.resnet18(weights=None).eval()
    theirs.fc = nn.Identity()
    theirs.load_state_dict(ours.backbone.state_dict())
    x = torch.randn(2, 3, 64, 64)
    assert torch.equal(ours(x), theirs(x))
    assert ours.features == 512


def test_the_3x3_stem_keeps_twice_the_resolution() -> None:
    sizes = {}
    for stem in STEMS:
        backbone = build_encoder("resnet18", stem=stem).backbone
        seen: list[torch.Size] = []
        backbone.layer1.register_forward_hook(lambda module, given, z, seen=seen: seen.append(z.shape))
        backbone(torch.randn(1, 3, 96, 96))
        sizes[stem] = seen[0][-2:]
    assert sizes == {"standard": (24, 24), "3x3": (48, 48)}


def test_small_conv_takes_odd_sizes_and_ignores_where_things_are_only_by_pooling() -> None:
    encoder = build_encoder("small-conv", channels=1, image_size=7).eval()
    assert encoder(torch.randn(2, 1, 7, 9)).shape == (2, 128)


def test_mlp_is_for_one_image_size() -> None:
    encoder = build_encoder("mlp", channels=3, image_size=5)
    assert [p.shape for p in encoder.parameters() if p.ndim == 2] == [(512, 75), (512, 512)]
    with pytest.raises(RuntimeError):
        encoder(torch.zeros(1, 3, 6, 6))


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ({"name": "resnet"}, "did you mean 'resnet18'"),
        ({"name": "resnet18", "stem": "3x4"}, "did you mean '3x3'"),
        ({"name": "mlp", "channels": 0}, "at least 1"),
        ({"name": "mlp", "image_size": -1}, "at least 1"),
    ],
)
def test_bad_choices_are_refused(given: dict[str, object], part: str) -> None:
    with pytest.raises(InputError, match=part):
        build_encoder(**given)  # type: ignore[arg-type]


def test_frozen_takes_no_gradient_and_its_batchnorm_does_not_move() -> None:
    encoder = build_encoder("small-conv", channels=1, image_size=8)
    encoder(torch.randn(16, 1, 8, 8))  # statistics that are not the initial ones
    before = {name: value.clone() for name, value in encoder.state_dict().items()}
    head = build_head("linear", encoder.features, 3)
    model = nn.Sequential(Frozen(encoder), head)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, weight_decay=0.1)
    start = head.weight.detach().clone()
    for _ in range(3):
        model.train()
        optimizer.zero_grad()
        logits = model(torch.randn(8, 1, 8, 8))
        nn.functional.cross_entropy(logits, torch.arange(8) % 3).backward()
        optimizer.step()
    after = encoder.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert all(p.grad is None and not p.requires_grad for p in encoder.parameters())
    assert not torch.equal(head.weight, start)


def test_heads_have_the_posters_sizes() -> None:
    assert sum(p.numel() for p in build_head("linear", 512, 10).parameters()) == 512 * 10 + 10
    assert sum(p.numel() for p in build_head("mlp", 512, 10).parameters()) == 512 * 512 + 512 + 512 * 10 + 10
    assert all(build_head(name, 6, 4)(torch.zeros(2, 6)).shape == (2, 4) for name in HEADS)
    assert projection(6, 5)(torch.zeros(2, 6)).shape == (2, 5)
    assert any(isinstance(part, nn.ReLU) for part in projection(6).modules())
    with pytest.raises(InputError, match="did you mean 'linear'"):
        build_head("linaer", 6, 4)
