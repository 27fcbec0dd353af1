"""The loader's check of labels: one clear line each."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from metapretrain.errors import InputError
from metapretrain.protonet import check_labels


def test_good_labels_come_back_as_int64() -> None:
    for y in ([-7, 300, 300], np.array([-7, 300, 300], dtype=np.int16), torch.tensor([-7, 300, 300])):
        checked = check_labels(y, mode="query")
        assert checked.dtype == torch.int64
        assert checked.tolist() == [-7, 300, 300]
    assert check_labels([5, 3]).tolist() == [5, 3]


def test_one_example_in_every_class_is_refused_in_query_mode_only() -> None:
    check_labels([0, 1, 2])
    with pytest.raises(InputError, match=r"every class of the batch has one example \(3 rows, 3 classes\)"):
        check_labels([0, 1, 2], mode="query")
    with pytest.raises(InputError, match="one example"):
        check_labels([4], mode="query")


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (torch.tensor([0.0, 1.0]), r"labels are torch.float32; give whole numbers"),
        (torch.tensor([[0, 1]]), r"labels have shape \(1, 2\); give \(B,\)"),
        (torch.tensor([], dtype=torch.int64), r"labels have shape \(0,\)"),
        (torch.empty(2, dtype=torch.int64, device="meta"), "labels are on meta; check them on the CPU"),
        (None, "labels are a NoneType that makes no tensor"),
        ("ab", "labels are a str that makes no tensor"),
        ([0, 10**30], "labels are a list that makes no tensor"),
        ([0, [1]], "labels are a list that makes no tensor"),
    ],
)
def test_bad_labels_are_named(y: torch.Tensor, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_labels(y)


def test_labels_outside_num_classes_are_named() -> None:
    assert check_labels([0, 9], num_classes=10).tolist() == [0, 9]
    with pytest.raises(InputError, match="labels run from 0 to 10 but num_classes=10 allows 0 to 9"):
        check_labels([0, 10], num_classes=10)
    with pytest.raises(InputError, match=r"labels run from -1 to 3 .* leave unlabelled rows \(-1\) out"):
        check_labels([-1, 3], num_classes=10)


def test_an_unknown_mode_names_the_nearest() -> None:
    with pytest.raises(InputError, match=r"unknown mode 'querry'; did you mean 'query'\?"):
        check_labels([0, 0], mode="querry")
