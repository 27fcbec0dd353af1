"""Convolutions as matrix products: the same values and gradients, to second order and under vmap."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from metapretrain.maml import MAML
from metapretrain.maml.engines import MatmulConvolutions, matmul_conv2d


@pytest.mark.parametrize(("kernel", "stride", "padding"), [(3, 1, 1), (3, 2, 1), ((3, 5), (2, 1), (0, 2)), (1, 1, 0)])
@pytest.mark.parametrize("bias", [True, False])
def test_equals_conv2d(kernel: Any, stride: Any, padding: Any, bias: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(3, 4, kernel, stride, padding, bias=bias).double()
    x = torch.randn(2, 3, 9, 8, dtype=torch.float64)
    expected = layer(x)
    with MatmulConvolutions():
        assert torch.allclose(layer(x), expected, rtol=1e-12, atol=1e-12)


def test_second_derivatives() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 2, 5, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 2, 3, 3, dtype=torch.float64, requires_grad=True)

    def convolved(x: Tensor, weight: Tensor) -> Tensor:
        return matmul_conv2d(x, weight, None, (2, 2), (1, 1))

    assert torch.autograd.gradcheck(convolved, (x, weight))
    assert torch.autograd.gradgradcheck(convolved, (x, weight))


def test_meta_gradient_of_the_stack_is_that_of_the_loop() -> None:
    def gradient(engine: str) -> Tensor:
        torch.manual_seed(0)
        layers = nn.Conv2d(1, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, 2, 1), nn.Flatten()
        net = nn.Sequential(*layers, nn.Linear(16, 3)).double()
        x, y = torch.randn(2, 6, 1, 8, 8, dtype=torch.float64), torch.arange(6).remainder(3).repeat(2, 1)
        maml = MAML(net, lr=0.1, steps=2, engine=engine)
        if engine == "vmap":
            with MatmulConvolutions():
                maml.backward((x, y), (x, y))
        else:
            maml.backward((x, y), (x, y))
        return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])

    stacked, looped = gradient("vmap"), gradient("loop")
    assert (stacked - looped).norm() < 1e-10 * looped.norm()


@pytest.mark.parametrize("options", [{"groups": 3}, {"padding": "same"}, {"dilation": 2}])
def test_what_it_does_not_do_runs_as_it_is(options: dict[str, object]) -> None:
    layer = nn.Conv2d(3, 3, 3, **options)  # type: ignore[arg-type]
    x = torch.randn(1, 3, 9, 9)
    expected = layer(x)
    with MatmulConvolutions():
        assert torch.equal(layer(x), expected)


def test_large_images_run_as_they_are() -> None:
    x, weight = torch.randn(1, 1, 40, 40), torch.randn(1, 1, 3, 3)
    with MatmulConvolutions():
        assert torch.equal(F.conv2d(x, weight), torch.conv2d(x, weight))
        assert F.conv2d(x, weight).is_contiguous()
