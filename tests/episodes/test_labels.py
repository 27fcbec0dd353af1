"""Labels are read from every form they come in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from metapretrain.episodes.sampler import read_groups, read_labels
from metapretrain.errors import InputError


class WithTargets:
    def __init__(self, rows: int, **columns: Any) -> None:
        self.rows = rows
        self.__dict__.update(columns)

    def __len__(self) -> int:
        return self.rows


@pytest.mark.parametrize(
    "source",
    [
        [7, 3, 7],
        (7, 3, 7),
        np.array([7, 3, 7], dtype=np.uint8),
        torch.tensor([7, 3, 7]),
        WithTargets(3, targets=[7, 3, 7]),
        WithTargets(3, labels=torch.tensor([7, 3, 7])),
        WithTargets(3, indices_to_labels={0: 7, 1: 3, 2: 7}, labels=[7, 3]),
    ],
)
def test_every_source_gives_the_same_codes(source: Any) -> None:
    read = read_labels(source)
    assert read.codes.tolist() == [1, 0, 1]
    assert read.names == (3, 7)


def test_strings_are_labels() -> None:
    assert read_labels(["dog", "cat"]).names == ("cat", "dog")


def test_booleans_are_labels() -> None:
    assert read_labels(np.array([True, False])).names == (0, 1)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ([], "empty"),
        (torch.zeros(0, dtype=torch.int64), "empty"),
        ([0.0, 1.0], "integers or strings, not float64"),
        (torch.tensor([0.5]), "integers or strings, not float32"),
        ([[0, 1], [1, 0]], r"one-dimensional.*\(2, 2\)"),
        ([[0, 1], [1]], "one-dimensional"),
        ([0, "cat"], "mixture"),
        ([0, None], "integers or strings"),
        (SimpleNamespace(), "SimpleNamespace"),
        (WithTargets(3, targets=[0, 1]), "3 rows and 2 targets"),
        ("cat", "not str"),
    ],
)
def test_bad_labels_are_one_line(source: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        read_labels(source)
    assert "\n" not in str(error.value)


def test_groups_of_another_length_are_refused() -> None:
    with pytest.raises(InputError, match="2 groups and 3 labels"):
        read_groups([0, 1], 3)
