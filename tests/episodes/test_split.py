"""Both sides are never empty, disjoint, complete and of the wanted size."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from metapretrain.episodes import split_support_query
from metapretrain.errors import InputError
from metapretrain.protonet.loss import stratified_queries


@settings(max_examples=80)
@given(
    labels=st.lists(st.integers(0, 8), min_size=2, max_size=40),
    fraction=st.floats(0.001, 0.999),
    seed=st.integers(0, 2**31),
)
def test_random_split_is_a_partition_of_the_nearest_size(labels: list[int], fraction: float, seed: int) -> None:
    support, query = split_support_query(labels, fraction, torch.Generator().manual_seed(seed))
    assert sorted(support.tolist() + query.tolist()) == list(range(len(labels)))
    assert len(query) == min(max(round(fraction * len(labels)), 1), len(labels) - 1)
    assert support.tolist() == sorted(support.tolist())


@settings(max_examples=80)
@given(
    counts=st.lists(st.integers(1, 12), min_size=1, max_size=6).filter(lambda counts: max(counts) > 1),
    fraction=st.floats(0.001, 0.999),
    seed=st.integers(0, 2**31),
)
def test_stratified_split_serves_every_class(counts: list[int], fraction: float, seed: int) -> None:
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)) * 7
    labels = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))]
    support, query = split_support_query(labels, fraction, torch.Generator().manual_seed(seed), stratified=True)
    assert sorted(support.tolist() + query.tolist()) == list(range(len(labels)))
    in_query = Counter(labels[query].tolist())
    for code, count in enumerate(counts):
        wanted = min(max(round(count * fraction), 1), count - 1)
        assert abs(in_query[code * 7] - wanted) <= (abs(count * fraction % 1 - 0.5) < 1e-5)


@pytest.mark.parametrize("stratified", [False, True])
def test_every_row_is_query_equally_often(stratified: bool) -> None:
    labels, generator, counts = (
        torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]),
        torch.Generator().manual_seed(0),
        torch.zeros(8),
    )
    for _ in range(4_000):
        counts[split_support_query(labels, 0.25, generator, stratified=stratified)[1]] += 1
    assert counts.sum() == 8_000
    assert chisquare(counts.numpy()).pvalue > 1e-3


def test_the_generator_decides() -> None:
    labels = torch.zeros(50, dtype=torch.int64)
    queries = [split_support_query(labels, 0.25, torch.Generator().manual_seed(seed))[1].tolist() for seed in (1, 1, 2)]
    assert queries[0] == queries[1] != queries[2]


@pytest.mark.parametrize(
    ("labels", "fraction", "stratified", "message"),
    [
        ([0, 0], 0, False, "query_fraction is .*; give a number above 0 and below 1"),
        ([0, 0], 1, False, "query_fraction is .*; give a number above 0 and below 1"),
        ([0, 0], float("nan"), False, "query_fraction is .*; give a number above 0 and below 1"),
        ([0, 0], True, False, "query_fraction is .*; give a number above 0 and below 1"),
        ([0, 0], "half", False, "query_fraction is .*; give a number"),
        ([], 0.25, False, "empty"),
        ([3], 0.25, True, "at least 2 rows"),
        ([0, 1, 2], 0.25, True, "every class of this batch of 3 has one example"),
        ([0.0, 1.0], 0.25, False, "integers or strings, not float64"),
        ([0, -1], 0.25, False, "must not be negative"),
        ([[0, 1]], 0.25, False, "one-dimensional"),
    ],
)
def test_bad_splits_are_one_line(labels: Any, fraction: Any, stratified: bool, message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        split_support_query(labels, fraction, stratified=stratified)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("fraction", [0.1, 0.25, 0.5, 0.75])
def test_stratified_parts_are_as_large_as_those_of_the_loss(fraction: float) -> None:
    labels = torch.arange(2, 20).repeat_interleave(torch.arange(2, 20))
    _, query = split_support_query(labels, fraction, torch.Generator().manual_seed(0), stratified=True)
    in_loss = stratified_queries(torch.rand(len(labels)), labels, fraction)
    assert torch.bincount(labels[query]).tolist() == torch.bincount(labels[in_loss]).tolist()
