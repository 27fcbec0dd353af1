"""Labels are read from every form they come in."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Subset, TensorDataset

from metapretrain.episodes import EpisodeSampler, EpisodeSpec, ShuffledBatches, group_tasks
from metapretrain.episodes.sampler import read_groups, read_labels
from metapretrain.errors import InputError
from tests.episodes.columns import Column


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


def tables() -> list[Callable[[list[Any]], Any]]:
    """Columns of pandas where it is installed."""
    try:
        import pandas as pd
    except ImportError:
        return []
    return [
        lambda values: pd.Series(values, index=range(len(values))[::-1]),
        lambda values: pd.Series(values, dtype="category", index=["same"] * len(values)),
        lambda values: pd.Series(values, dtype=object),
        lambda values: pd.Series(values).convert_dtypes(),
        lambda values: pd.Series(values).array,
        pd.Categorical,
        pd.Index,
    ]


ANY: list[Callable[[list[Any]], Any]] = [list, tuple, np.array, lambda values: np.array(values, dtype=object), Column]
NUMBERS: list[Callable[[list[Any]], Any]] = [
    torch.tensor,
    lambda values: TensorDataset(torch.zeros(len(values), 2), torch.tensor(values)),
    lambda values: Subset(
        TensorDataset(torch.zeros(len(values)), torch.tensor(values[::-1])), range(len(values))[::-1]
    ),
    lambda values: [torch.tensor(value) for value in values],
    *[lambda values, dtype=dtype: np.array(values, dtype=dtype) for dtype in "bBhHiIlLqQ"],
    *[
        lambda values, dtype=dtype: torch.tensor(values, dtype=dtype)
        for dtype in (torch.uint8, torch.int16, torch.int32)
    ],
]
TEXTS: list[Callable[[list[Any]], Any]] = [lambda values: [np.str_(value) for value in values]]
if hasattr(np.dtypes, "StringDType"):
    TEXTS.append(lambda values: np.array(values, dtype=np.dtypes.StringDType()))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 100), min_size=1, max_size=20)
    | st.lists(st.text("ab1é", max_size=3), min_size=1, max_size=20)
)
def test_a_container_changes_no_label(values: list[Any]) -> None:
    codes, names = [sorted(set(values)).index(value) for value in values], tuple(sorted(set(values)))
    for make in [*ANY, *tables(), *(TEXTS if isinstance(values[0], str) else NUMBERS)]:
        read = read_labels(make(values))
        assert (read.codes.tolist(), read.names) == (codes, names), make


@pytest.mark.parametrize("mark", [-1, -100])
def test_a_mark_of_no_label_is_no_class(mark: int) -> None:
    labels, spec = [0, 0, 1, 1, mark, mark], EpisodeSpec(2, 1, 1)
    for use in (
        lambda: EpisodeSampler(labels, spec, 1, seed=0),
        lambda: EpisodeSampler(labels, EpisodeSpec(None, 1, 1), 1, seed=0),
        lambda: EpisodeSampler([0, 1] * 3, spec, 1, seed=0, groups=labels),
        lambda: ShuffledBatches(6, 2, seed=0, labels=labels),
        lambda: group_tasks(torch.eye(6), 3, "label", labels=labels),
    ):
        with pytest.raises(InputError, match=f"must not be negative, but the least is {mark}"):
            use()


def test_masked_values_are_no_labels() -> None:
    labels = np.ma.masked_array([0, 0, 1, 1], mask=[0, 0, 0, 1])
    for use in (read_labels, lambda y: EpisodeSampler(y, EpisodeSpec(2, 1, 1), 1, seed=0)):
        with pytest.raises(InputError, match="labels have 1 masked values; leave these rows out"):
            use(labels)
    assert read_labels(labels[:2]).names == (0,)


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
        ([0, None], "row 1 has None"),
        (np.array(["a", float("nan")], dtype=object), "row 1 has nan"),
        (np.array([0, "cat"], dtype=object), "mixture"),
        (Column([1, 2.5]), "row 1 has 2.5"),
        (torch.tensor([1.0], dtype=torch.bfloat16), "not bfloat16"),
        (np.array([b"cat"]), r"not \|S3"),
        (TensorDataset(torch.zeros(3)), "not TensorDataset"),
        (TensorDataset(torch.zeros(3), torch.zeros(3, 2)), "not float32"),
        ({"a": 1}, "not dict"),
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
