"""Logits: values, gradients at coincident points, precision, and bad input."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from metapretrain.errors import InputError
from metapretrain.protonet import DISTANCES, ProtoLoss, proto_logits
from metapretrain.protonet.prototypes import wide_logits
from tests.protonet import slow


def rows(n: int, d: int = 5, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_logits_are_minus_the_distance_over_the_temperature(distance: str, dtype: torch.dtype) -> None:
    queries, centres = rows(6, dtype=dtype), rows(4, seed=1, dtype=dtype)
    expected = [[-slow.distance(q.double(), c.double(), distance).item() / 3.0 for c in centres] for q in queries]
    logits = proto_logits(queries, centres, distance, temperature=3.0)
    assert logits.dtype == dtype
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    wanted = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(logits.double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("distance", DISTANCES)
def test_gradients_agree_with_finite_differences_also_on_a_centre(distance: str) -> None:
    queries = rows(4).requires_grad_()
    centres = rows(3, seed=1)
    centres[1] = queries[2].detach()
    assert torch.autograd.gradcheck(lambda q, c: proto_logits(q, c, distance, 0.7), (queries, centres.requires_grad_()))


@pytest.mark.parametrize("distance", DISTANCES)
def test_the_product_form_has_the_derivatives_of_the_differences(distance: str) -> None:
    q, c = rows(6).requires_grad_(), rows(4, seed=1).requires_grad_()
    found = []
    for dtype in (torch.float32, torch.float64):  # of the result: float32 takes the product form
        logits = wide_logits(q, c, distance, 0.7, dtype)
        first = torch.autograd.grad((logits * rows(6, 4, seed=2)).sum(), (q, c), create_graph=True)
        squares = torch.cat([g.flatten() for g in first]).square().sum()
        found.append([logits.double(), *first, *torch.autograd.grad(squares, (q, c))])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning")  # torch's own forward mode
@pytest.mark.parametrize("distance", DISTANCES)
def test_transforms_of_functions_give_the_same_derivatives(distance: str) -> None:
    q, c, coefficients = rows(3, 2), rows(2, 2, seed=1), rows(3, 2, seed=2)

    def value(dtype: torch.dtype, q: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return (wide_logits(q, c, distance, 0.7, dtype) * coefficients).sum()

    product, plain = partial(value, torch.float32), partial(value, torch.float64)
    for transform in (torch.func.jacfwd, torch.func.grad, torch.func.hessian):
        for found, expected in zip(transform(product, (0, 1))(q, c), transform(plain, (0, 1))(q, c), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    both = torch.vmap(partial(wide_logits, distance=distance, temperature=0.7, dtype=torch.float32))
    each = [wide_logits(q[i : i + 1], c, distance, 0.7, torch.float32) for i in range(3)]
    torch.testing.assert_close(both(q[:, None], c.expand(3, -1, -1)), torch.stack(each))


@pytest.mark.parametrize("distance", DISTANCES)
def test_second_derivatives_agree_with_finite_differences(distance: str) -> None:
    inputs = (rows(3, 2).requires_grad_(), rows(2, 2, seed=1).requires_grad_())
    assert torch.autograd.gradgradcheck(lambda q, c: proto_logits(q, c, distance), inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("offset", [0.0, 50.0])
def test_a_query_on_its_centre_has_distance_zero_and_gradient_zero(dtype: torch.dtype, offset: float) -> None:
    """The product form of cdist in float32 gives up to 0.8 here."""
    z = (3 * rows(64, 512) + offset).to(dtype).requires_grad_()
    logits = proto_logits(z, z.detach())
    assert logits.dtype == torch.float32
    assert torch.equal(logits.diagonal(), torch.zeros(64))
    (gradient,) = torch.autograd.grad(logits.diagonal().sum(), z)
    assert torch.equal(gradient, torch.zeros_like(gradient))


def test_float32_logits_and_gradients_are_as_exact_as_subtracting_in_float64() -> None:
    z, centres = (rows(32, 512) + 50).float().requires_grad_(), (rows(16, 512, seed=1) + 50).float()
    wide = z.detach().double().requires_grad_()
    logits, exact = proto_logits(z, centres), proto_logits(wide, centres.double())
    torch.testing.assert_close(logits, exact.float(), rtol=3e-7, atol=0)
    (gradient,) = torch.autograd.grad(logits.sum(), z)
    (expected,) = torch.autograd.grad(exact.sum(), wide)
    torch.testing.assert_close(gradient, expected.float(), rtol=1e-6, atol=1e-6)


def test_points_close_together_are_told_apart() -> None:
    z = rows(8, 512, dtype=torch.float32)
    near = z.clone()
    near[:, 0] += 1e-4
    distance = -proto_logits(near, z).diagonal()
    torch.testing.assert_close(distance, near[:, 0] - z[:, 0], rtol=1e-3, atol=0)


@pytest.mark.parametrize("distance", DISTANCES)
def test_zero_rows_have_finite_gradients(distance: str) -> None:
    z = torch.zeros(3, 4, requires_grad=True)
    logits = proto_logits(z, z, distance)
    assert torch.equal(logits.abs(), torch.zeros(3, 3))
    (gradient,) = torch.autograd.grad(logits.sum(), z)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("distance", DISTANCES)
def test_autocast_changes_nothing(distance: str) -> None:
    queries, centres = rows(6, dtype=torch.float32), rows(4, seed=1, dtype=torch.float32)
    plain = proto_logits(queries, centres, distance)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(proto_logits(queries, centres, distance), plain)


@settings(max_examples=30)
@given(seed=st.integers(0, 10_000), scale=st.floats(1e-3, 1e3))
def test_scaling_and_moving_all_points(seed: int, scale: float) -> None:
    queries, centres, move = rows(5, seed=seed), rows(3, seed=seed + 1), rows(1, seed=seed + 2)
    plain = proto_logits(queries, centres)
    torch.testing.assert_close(proto_logits(scale * queries, scale * centres), scale * plain)
    torch.testing.assert_close(proto_logits(queries + move, centres + move), plain)
    torch.testing.assert_close(
        proto_logits(scale * queries, scale * centres, "sqeuclidean"),
        scale**2 * proto_logits(queries, centres, "sqeuclidean"),
    )
    cosine = proto_logits(queries, centres, "cosine")
    torch.testing.assert_close(proto_logits(scale * queries, centres, "cosine"), cosine)
    assert (cosine.abs() <= 1 + 1e-12).all()


def test_absent_classes_take_no_probability() -> None:
    queries = rows(4, dtype=torch.float32).requires_grad_()
    centres = rows(3, seed=1, dtype=torch.float32)
    present = torch.tensor([True, False, True])
    logits = proto_logits(queries, centres, present=present)
    probability = logits.softmax(1)
    assert torch.equal(probability[:, 1], torch.zeros(4))
    torch.testing.assert_close(probability[:, present], proto_logits(queries, centres[present]).softmax(1))
    (gradient,) = torch.autograd.grad(probability[:, 0].sum(), queries)
    assert gradient.isfinite().all() and gradient.abs().sum() > 0


def test_a_temperature_tensor_gets_a_gradient() -> None:
    temperature = torch.tensor(2.0, requires_grad=True)
    logits = proto_logits(torch.zeros(1, 1), torch.ones(1, 1), temperature=temperature)
    logits.sum().backward()
    assert temperature.grad is not None
    assert temperature.grad.item() == pytest.approx(1 / 4)


def test_an_unknown_distance_names_the_nearest() -> None:
    with pytest.raises(InputError, match=r"unknown distance 'euclidian'; did you mean 'euclidean'\?"):
        proto_logits(rows(2), rows(2), "euclidian")


def test_shapes_that_do_not_match_are_shown() -> None:
    with pytest.raises(InputError, match=r"queries \(2, 5\) and centres \(3, 4\) do not match"):
        proto_logits(rows(2), rows(3, 4))
    with pytest.raises(InputError, match=r"\(2, 5\) and centres \(5,\)"):
        proto_logits(rows(2), rows(1)[0])
    with pytest.raises(InputError, match="D, at least 1"):
        proto_logits(rows(2, 0), rows(3, 0))


@pytest.mark.parametrize("present", [[True, False], torch.ones(2), torch.tensor([True]), torch.ones(2, 3) > 0])
def test_present_is_one_truth_for_each_centre(present: Any) -> None:
    with pytest.raises(InputError, match=r"present (says|is).*give"):
        proto_logits(rows(3), rows(2), present=present)


@pytest.mark.parametrize("temperature", [0, -1.0, math.nan, math.inf, "warm", True])
def test_a_temperature_must_be_above_zero(temperature: float) -> None:
    with pytest.raises(InputError, match=r"temperature is .*; give a number above 0"):
        proto_logits(rows(2), rows(2), temperature=temperature)


@pytest.mark.parametrize("dim", [1, 2, 8, 32])
@pytest.mark.parametrize("steps", [1, 2, 3, 8])
def test_rows_a_step_of_float32_apart_are_apart_and_equal_rows_are_not(dim: int, steps: int) -> None:
    generator = torch.Generator().manual_seed(0)
    a = torch.rand(50, dim, generator=generator) + 1  # in [1, 2): steps of 2^-23
    b = a + steps * 2.0**-23
    near = -proto_logits(a, b).diagonal()
    exact = (a.double() - b.double()).norm(dim=1)
    torch.testing.assert_close(near.double(), exact, rtol=0.1 if dim < 8 or steps > 1 else 1.0, atol=0)
    for size in (1, 64, 512, 4096):
        rows = torch.randn(20, size, generator=generator) * 100 + 7
        logits = proto_logits(rows, rows)
        assert not logits.diagonal().any()
        assert torch.equal(logits, proto_logits(rows, (3 * rows.double() / 3).float()))


@pytest.mark.parametrize("way", ["zero row", "zero mean"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_and_centres_without_direction_have_no_gradient(way: str, dtype: torch.dtype) -> None:
    z = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=dtype)
    z[0] = 0 if way == "zero row" else -z[1]
    z.requires_grad_()
    loss = ProtoLoss(distance="cosine")(z, torch.tensor([0, 0, 1, 1]))
    (gradient,) = torch.autograd.grad(loss, z, create_graph=True)
    assert loss.isfinite()
    assert gradient.norm() < 10
    (second,) = torch.autograd.grad(gradient.square().sum(), z)
    assert second.isfinite().all()
    torch.testing.assert_close(
        proto_logits(z, torch.zeros(2, 3, dtype=dtype), "cosine"), torch.zeros(4, 2, dtype=dtype)
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_row_that_is_not_finite_is_at_no_finite_distance(bad: float, distance: str, dtype: torch.dtype) -> None:
    queries, centres = rows(3, dtype=dtype), rows(2, seed=1, dtype=dtype)
    queries[0, 0] = centres[1, 2] = bad
    finite = proto_logits(queries, centres, distance).isfinite()
    assert finite.tolist() == [[False, False], [True, False], [True, False]]
