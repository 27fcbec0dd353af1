"""Class means and dense ids against loops and torch.unique."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from metapretrain.errors import InputError
from metapretrain.protonet import ProtoLoss, dense_ids, prototypes
from metapretrain.protonet.prototypes import _by_product, _by_rows, _by_segments, class_sums

LABELS = st.lists(st.integers(-5, 5) | st.sampled_from([300, -(2**62), 2**62]), min_size=1, max_size=20)


@settings(max_examples=60)
@given(y=LABELS)
def test_dense_ids_are_the_inverse_of_unique(y: list[int]) -> None:
    expected = torch.unique(torch.tensor(y), return_inverse=True)[1]
    assert torch.equal(dense_ids(torch.tensor(y)), expected)


@settings(max_examples=40)
@given(y=st.lists(st.integers(-1, 5), min_size=1, max_size=20), seed=st.integers(0, 1000))
def test_prototypes_are_the_means_of_the_classes(y: list[int], seed: int) -> None:
    z = torch.randn(len(y), 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    centres, present = prototypes(z, torch.tensor(y), 5)
    assert centres.shape == (5, 3)
    for c in range(5):
        members = [z[row] for row in range(len(y)) if y[row] == c]
        assert present[c].item() == bool(members)
        expected = torch.stack(members).mean(0) if members else torch.zeros(3, dtype=torch.float64)
        torch.testing.assert_close(centres[c], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_in_full_precision(dtype: torch.dtype) -> None:
    """4,096 rows of 30 overflow float16 and stop growing in bfloat16."""
    z = torch.full((4096, 2), 30.0, dtype=dtype)
    centres, _ = prototypes(z, torch.zeros(4096, dtype=torch.int64), 1)
    assert centres.dtype == torch.float32
    assert torch.equal(centres, torch.full((1, 2), 30.0))


def test_one_example_is_its_own_prototype_bit_for_bit() -> None:
    z = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    centres, _ = prototypes(z, torch.tensor([3, 1, 0, 4, 2]), 5)
    assert torch.equal(centres[[3, 1, 0, 4, 2]], z)


def test_prototypes_pass_gradcheck() -> None:
    z = torch.randn(6, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    y = torch.tensor([0, 0, 2, 2, 2, 7])
    assert torch.autograd.gradcheck(lambda z: prototypes(z, y, 4)[0], z)


@settings(max_examples=40)
@given(y=st.lists(st.integers(0, 5), min_size=1, max_size=20), seed=st.integers(0, 1000))
def test_all_ways_to_sum_have_the_same_result(y: list[int], seed: int) -> None:
    z = torch.randn(len(y), 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64, requires_grad=True)
    ids, weights = torch.tensor(y), torch.arange(15.0, dtype=torch.float64).view(5, 3)  # 5 belongs to no class
    expected, numbers = _by_rows(z, ids, 5)
    for other in (_by_product, _by_segments):
        sums, counts = other(z, ids, 5)
        torch.testing.assert_close(sums, expected, rtol=1e-12, atol=1e-12)
        assert torch.equal(counts, numbers)
        ours, theirs = (torch.autograd.grad((s * weights).sum(), z, retain_graph=True)[0] for s in (sums, expected))
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(("classes", "taken"), [(4, "_by_product"), (8192, "_by_segments")])
def test_other_devices_sum_without_atomic_adds(classes: int, taken: str) -> None:
    z, ids = torch.empty(8192, 1, device="meta"), torch.empty(8192, dtype=torch.int64, device="meta")
    with patch(f"metapretrain.protonet.prototypes.{taken}") as called:
        class_sums(z, ids, classes)
    called.assert_called_once_with(z, ids, classes)


def test_bad_shapes_and_types_are_named() -> None:
    z, y = torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(InputError, match=r"embeddings \(4, 2\) and labels \(3,\) do not match"):
        prototypes(z, y[:3], 2)
    with pytest.raises(InputError, match=r"embeddings \(4,\) and labels \(4,\)"):
        prototypes(z[:, 0], y, 2)
    with pytest.raises(InputError, match=r"\(0, 2\) and labels \(0,\).*at least 1"):
        prototypes(z[:0], y[:0], 2)
    with pytest.raises(InputError, match=r"labels are torch.float32; give whole numbers"):
        prototypes(z, y.float(), 2)
    with pytest.raises(InputError, match=r"embeddings are torch.int64"):
        prototypes(z.long(), y, 2)
    for classes in (0, -1, 2.0, True):
        with pytest.raises(InputError, match=r"num_classes is .*; give a whole number of at least 1"):
            prototypes(z, y, classes)  # type: ignore[arg-type]
    for call in (lambda: prototypes(z, y, 10**20), lambda: ProtoLoss(num_classes=10**20)):
        with pytest.raises(InputError, match="from 1 to 2147483647"):
            call()
    for call in (lambda: prototypes(z[:, :0], y, 2), lambda: ProtoLoss()(z[:, :0], y)):
        with pytest.raises(InputError, match=r"embeddings \(4, 0\) have no features"):
            call()


@pytest.mark.parametrize(("z", "y"), [([[1.0]], torch.tensor([0])), (torch.zeros(1, 1), [0]), (None, None)])
def test_what_is_no_tensor_is_refused(z, y):
    with pytest.raises(InputError, match="must be a torch tensor"):
        prototypes(z, y, 1)
    with pytest.raises(InputError, match="must be a torch tensor"):
        ProtoLoss()(z, y)
