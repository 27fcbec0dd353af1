"""The prototypical loss against slow loops, its symmetries, its numerics."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from metapretrain.errors import InputError
from metapretrain.protonet import DISTANCES, MODES, ProtoLoss
from tests.protonet import slow

LABELS = [-7, 300, 300, 5, -7, 300, 5, 5, -7, 12, 300, 5]


def rows(n: int, d: int = 4, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def value_and_gradient(loss: ProtoLoss, z: Tensor, y: Any) -> tuple[Tensor, Tensor]:
    z = z.clone().requires_grad_()
    value = loss(z, torch.as_tensor(y))
    (gradient,) = torch.autograd.grad(value, z)
    return value.detach(), gradient


def slow_value_and_gradient(z: Tensor, y: list[int], **options: Any) -> tuple[Tensor, Tensor]:
    z = z.clone().requires_grad_()
    value = slow.loss(z, y, **options)
    if value is None:
        return torch.zeros((), dtype=z.dtype), torch.zeros_like(z)
    return value.detach(), torch.autograd.grad(value, z)[0]


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_standard_mode_equals_the_papers_pseudocode(distance: str, smoothing: float) -> None:
    y = [label for label in LABELS if label != 12]  # the loop has no gradient where a query is its prototype
    z, everything = rows(len(y)), list(range(len(y)))
    loss = ProtoLoss(distance=distance, temperature=2.0, label_smoothing=smoothing)
    expected = slow_value_and_gradient(
        z, y, support=everything, query=everything, name=distance, temperature=2.0, smoothing=smoothing
    )
    torch.testing.assert_close(value_and_gradient(loss, z, y), expected, rtol=1e-10, atol=1e-12)


@settings(max_examples=50)
@given(
    y=st.lists(st.sampled_from([-3, -2, 0, 1, 2, 3, 4]), min_size=2, max_size=16),
    seed=st.integers(0, 99),
    call=st.integers(0, 5),
    stratified=st.booleans(),
    fraction=st.sampled_from([0.25, 0.5]),
    smoothing=st.sampled_from([0.0, 0.2]),
)
def test_query_mode_equals_the_slow_loop(
    y: list[int], seed: int, call: int, stratified: bool, fraction: float, smoothing: float
) -> None:
    loss = ProtoLoss("query", query_fraction=fraction, stratified=stratified, seed=seed, label_smoothing=smoothing)
    loss.calls.fill_(call)
    z = rows(len(y), seed=seed)
    support, query = slow.split(seed, call, y, fraction, stratified)
    expected = slow_value_and_gradient(z, y, support=support, query=query, smoothing=smoothing)
    torch.testing.assert_close(value_and_gradient(loss, z, y), expected, rtol=1e-9, atol=1e-11)


@settings(max_examples=100)
@given(
    y=st.lists(st.sampled_from([-3, -2, 0, 1, 2, 3, 4]), min_size=2, max_size=16),
    seed=st.integers(0, 99),
    distance=st.sampled_from(DISTANCES),
    smoothing=st.sampled_from([0.0, 0.2]),
    classes=st.booleans(),
)
def test_leave_one_out_equals_the_slow_loop(
    y: list[int], seed: int, distance: str, smoothing: float, classes: bool
) -> None:
    y = [label + 3 for label in y] if classes else y
    options: dict[str, Any] = {"num_classes": 9} if classes else {}
    loss = ProtoLoss("leave-one-out", distance=distance, temperature=0.7, label_smoothing=smoothing, **options)
    z = rows(len(y), seed=seed).requires_grad_()
    value = slow.leave_one_out(z, y, name=distance, temperature=0.7, smoothing=smoothing)
    expected = (torch.zeros(()).double(), torch.zeros_like(z))
    if value is not None:
        expected = (value.detach(), torch.autograd.grad(value, z)[0])
    torch.testing.assert_close(value_and_gradient(loss, z.detach(), y), expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("distance", DISTANCES)
def test_leave_one_out_over_an_epoch_takes_its_earlier_rows_too(distance: str) -> None:
    loss = ProtoLoss("leave-one-out", distance=distance, num_classes=4, memory="epoch")
    first, second, y, later = rows(7), rows(5, seed=1), [0, 0, 1, 1, 1, 2, 2], [0, 1, 3, 2, 2]  # 3 is alone
    loss(first, torch.tensor(y))
    z = second.clone().requires_grad_()
    value = slow.leave_one_out(z, later, earlier=(first, y), name=distance)
    assert value is not None
    expected = value.detach(), torch.autograd.grad(value, z)[0]
    torch.testing.assert_close(value_and_gradient(loss, second, later), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("mode", ["query", "leave-one-out"])
def test_with_random_labels_a_larger_scale_lowers_the_standard_loss_alone(mode: str) -> None:
    z, y = rows(40, 256), torch.randint(10, (40,), generator=torch.Generator().manual_seed(0))
    assert ProtoLoss(distance="sqeuclidean")(100 * z, y) < 1e-6
    assert ProtoLoss(mode, distance="sqeuclidean")(100 * z, y) > 1000


@pytest.mark.parametrize("mode", MODES)
def test_num_classes_with_missing_classes_gives_the_same(mode: str) -> None:
    z, y = rows(12), torch.tensor([0, 3, 3, 8, 0, 3, 8, 8, 0, 3, 3, 8])
    dense = value_and_gradient(ProtoLoss(mode), z, y)
    torch.testing.assert_close(value_and_gradient(ProtoLoss(mode, num_classes=10), z, y), dense)


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("mode", MODES)
def test_gradcheck_with_one_example_classes_and_equal_points(distance: str, mode: str) -> None:
    """Class 12 has one example, which is its prototype; the rows of class 5 are one point."""
    z, y = rows(len(LABELS)), torch.tensor(LABELS)
    z[y == 5] = z[3].clone()
    loss = ProtoLoss(mode, distance=distance, temperature=0.5, seed=3).eval()
    assert torch.autograd.gradcheck(lambda z: loss(z, y), z.requires_grad_())


def test_all_points_equal_gives_log_classes_and_finite_gradients() -> None:
    z = torch.ones(6, 4)
    for distance in DISTANCES:
        value, gradient = value_and_gradient(ProtoLoss(distance=distance), z, [0, 0, 1, 1, 2, 2])
        assert value.item() == pytest.approx(math.log(3))
        assert gradient.isfinite().all()


@settings(max_examples=30)
@given(y=st.lists(st.integers(0, 4), min_size=2, max_size=12), order=st.randoms(use_true_random=False))
def test_row_order_and_label_names_do_not_matter(y: list[int], order: Any) -> None:
    z, shuffled = rows(len(y)), list(range(len(y)))
    order.shuffle(shuffled)
    value, gradient = value_and_gradient(ProtoLoss(), z, y)
    other = value_and_gradient(ProtoLoss(), z[shuffled], torch.tensor(y)[shuffled])
    torch.testing.assert_close(other, (value, gradient[shuffled]))
    names = order.sample([name for name in range(-1000, 1000) if name not in (-1, -100)], 5)
    renamed = value_and_gradient(ProtoLoss(), z, [names[label] for label in y])
    torch.testing.assert_close(renamed, (value, gradient))


@pytest.mark.parametrize("stratified", [False, True])
def test_label_names_do_not_change_a_query_loss(stratified: bool) -> None:
    z, y = rows(16), torch.tensor([0, 1, 2, 3] * 4)
    loss, other = (ProtoLoss("query", stratified=stratified, seed=1) for _ in range(2))
    renamed = torch.tensor([40, -3, 17, 9])[y]
    torch.testing.assert_close(value_and_gradient(loss, z, y), value_and_gradient(other, z, renamed))


def test_scaling_by_the_temperature_leaves_the_loss() -> None:
    z, y = rows(12), torch.tensor(LABELS)
    plain = ProtoLoss()(z, y)
    torch.testing.assert_close(ProtoLoss(temperature=7.0)(7 * z, y), plain)
    torch.testing.assert_close(ProtoLoss()(z + 3, y), plain)
    torch.testing.assert_close(
        ProtoLoss(distance="sqeuclidean", temperature=49.0)(7 * z, y).item(),
        ProtoLoss(distance="sqeuclidean")(z, y).item(),
    )
    cosine = ProtoLoss(distance="cosine")
    torch.testing.assert_close(cosine(7 * z, y), cosine(z, y))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_half_precision_input_is_computed_in_float32(mode: str, dtype: torch.dtype) -> None:
    z, y = (rows(64, 32) * 300).to(dtype), torch.arange(64) % 5
    value, gradient = value_and_gradient(ProtoLoss(mode, temperature=100.0), z, y)
    expected, wide = value_and_gradient(ProtoLoss(mode, temperature=100.0), z.double(), y)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, expected.float(), rtol=1e-5, atol=1e-6)
    assert gradient.dtype == dtype
    torch.testing.assert_close(gradient, wide.to(dtype), rtol=1e-2, atol=1e-6)


def test_autocast_changes_nothing() -> None:
    z, y = rows(12, dtype=torch.bfloat16), torch.tensor(LABELS)
    for distance in DISTANCES:
        loss = ProtoLoss(distance=distance)
        plain = value_and_gradient(loss, z, y)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert all(torch.equal(a, b) for a, b in zip(value_and_gradient(loss, z, y), plain, strict=True))


def test_a_learned_temperature_starts_where_it_is_told_and_stays_positive() -> None:
    loss = ProtoLoss(temperature=16.0, learn_temperature=True)
    assert [name for name, _ in loss.named_parameters()] == ["log_temperature"]
    assert loss.log_temperature is not None
    assert loss.log_temperature.exp().item() == pytest.approx(16.0)
    z, y = rows(12, dtype=torch.float32), torch.tensor(LABELS)
    value = loss(z, y)
    torch.testing.assert_close(value, ProtoLoss(temperature=16.0)(z, y))
    optimizer = torch.optim.SGD(loss.parameters(), lr=1.0)
    for _ in range(50):
        optimizer.zero_grad()
        loss(z, y).backward()
        optimizer.step()
    assert 0 < loss.log_temperature.exp().item() < 16.0
    assert loss(z, y) < value


def test_a_learned_temperature_has_the_gradient_of_finite_differences() -> None:
    z, y = rows(12), torch.tensor(LABELS)
    loss = ProtoLoss(temperature=2.0, learn_temperature=True).double()
    assert loss.log_temperature is not None
    loss(z, y).backward()
    step = 1e-5
    values = [ProtoLoss(temperature=2.0 * math.exp(sign * step))(z, y).item() for sign in (1, -1)]
    assert loss.log_temperature.grad is not None
    assert loss.log_temperature.grad.item() == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-6)


def test_training_on_the_loss_separates_classes() -> None:
    z = rows(40, 8, dtype=torch.float32).requires_grad_()
    y = torch.arange(40) % 4
    loss = ProtoLoss("query")
    optimizer = torch.optim.Adam([z], lr=0.1)
    start = loss(z, y).item()
    for _ in range(100):
        optimizer.zero_grad()
        loss(z, y).backward()
        optimizer.step()
    assert start > 1.0
    assert ProtoLoss()(z, y).item() < 0.05


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "querry"}, r"unknown mode 'querry'; did you mean 'query'\?"),
        ({"distance": "cosin"}, r"unknown distance 'cosin'; did you mean 'cosine'\?"),
        ({"memory": "epok", "num_classes": 2}, r"unknown memory 'epok'; did you mean 'epoch'\?"),
        ({"memory": "epoch"}, r'memory="epoch" keeps a prototype for each class: give num_classes'),
        ({"query_fraction": 0}, "query_fraction is 0; give a number above 0 and below 1"),
        ({"query_fraction": 1}, "query_fraction is 1; "),
        ({"query_fraction": math.nan}, "query_fraction is nan; "),
        ({"query_fraction": "a"}, "query_fraction is 'a'; "),
        ({"temperature": 0.0}, "temperature is 0.0; give a number above 0"),
        ({"temperature": -1.0, "learn_temperature": True}, "temperature is -1.0; "),
        ({"temperature": math.nan}, "temperature is nan; "),
        ({"temperature": 1e-40}, "temperature is 1e-40, so that logits overflow"),
        ({"temperature": 1e40}, "temperature is 1e.40; give a number above 0 and at most 1e.30"),
        ({"temperature": torch.ones(2)}, r"temperature is \(2,\) numbers; give one"),
        ({"label_smoothing": 1.0}, "label_smoothing is 1.0; give a number of at least 0 and below 1"),
        ({"label_smoothing": -0.1}, "label_smoothing is -0.1; "),
        ({"num_classes": 0}, "num_classes is 0; give a whole number of at least 1"),
        ({"seed": 0.5}, "seed is 0.5; give a whole number"),
    ],
)
def test_bad_options_are_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        ProtoLoss(**options)
    assert "\n" not in str(error.value)


def test_bad_batches_are_one_line() -> None:
    z, y = torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64)
    for loss in map(ProtoLoss, MODES):
        with pytest.raises(InputError, match=r"embeddings \(4, 2\) and labels \(3,\) do not match"):
            loss(z, y[:3])
        with pytest.raises(InputError, match=r"labels are torch.float32; give whole numbers"):
            loss(z, y.float())
    epoch = ProtoLoss(memory="epoch", num_classes=2)
    epoch(z, y)
    with pytest.raises(InputError, match="embeddings have 1 features, earlier ones 2"):
        epoch(z[:, :1], y)
    for mode in ("query", "leave-one-out"):
        with pytest.raises(InputError, match=f"{mode} mode needs other rows for the prototypes, got 1 row; give at"):
            ProtoLoss(mode)(z[:1], y[:1])
