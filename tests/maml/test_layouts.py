"""Channels last: the same losses and gradients, for modules that use `view` too, and only where it helps."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from metapretrain.maml import MAML
from metapretrain.maml.engines import ReshapingViews, channels_last


class Viewing(nn.Module):
    """A block of a CNN with its maps flattened by `view`, which channels last cannot do."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(4))
        self.head = nn.Linear(4 * 81, 2)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.block(x).view(len(x), -1))


def part(rows: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(2, rows, 3, 36, 36, generator=torch.Generator().manual_seed(rows))
    return x, (torch.arange(rows) % 2).repeat(2, 1)


@pytest.mark.parametrize("engine", ["loop", "mixed"])
@pytest.mark.parametrize("first_order", [False, True])
def test_the_layout_changes_no_loss_and_no_gradient(engine: str, first_order: bool) -> None:
    torch.manual_seed(0)
    maml = MAML(Viewing(), 0.1, first_order, engine=engine)
    found = []
    for small in (0, 10**9):
        with patch("metapretrain.maml.engines.SMALL", small):
            maml.zero_grad()
            losses = maml.backward(part(4), part(6))
        gradients = [p.grad for p in maml.parameters() if p.grad is not None]
        assert all(g.is_contiguous() for g in gradients)
        found.append([losses, *gradients])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("filters", "images", "helps"),
    [
        (torch.ones(4, 3, 3, 3), torch.ones(2, 3, 36, 36), True),
        (torch.ones(4, 3, 3, 3), torch.ones(2, 3, 28, 28), False),
        (torch.ones(4, 3, 3, 3), torch.ones(2, 3, 36, 36, dtype=torch.float64), False),
        (torch.ones(4, 3), torch.ones(2, 3, 36, 36), False),
    ],
)
def test_large_float32_images_with_filters_are_laid_out(filters: Tensor, images: Tensor, helps: bool) -> None:
    params, (x, y), _ = channels_last({"w": filters}, (images, torch.arange(2)))
    assert torch.equal(params["w"], filters) and torch.equal(x, images) and y.tolist() == [0, 1]
    for tensor in (params["w"], x):
        if tensor.ndim == 4:
            assert tensor.is_contiguous(memory_format=torch.channels_last) == helps


def test_a_view_as_another_type_stays_a_view() -> None:
    x = torch.tensor([1.0])
    with ReshapingViews():
        assert x.view(torch.int32).item() == 0x3F800000
        assert x.view(dtype=torch.int32).dtype == torch.int32
        assert x.view(1, -1).data_ptr() == x.data_ptr()
