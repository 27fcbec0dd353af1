"""The query split: SplitMix64 against plain Python, counts, strata."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from metapretrain.draws import mix, split_keys
from metapretrain.protonet.loss import query_count, random_queries, stratified_queries
from tests.protonet import slow


def keys(seed: int, call: int, rows: int) -> torch.Tensor:
    return split_keys(seed, torch.tensor(call), rows)


def test_mix_gives_the_first_published_output_of_splitmix64() -> None:
    gamma = 0x9E3779B97F4A7C15
    assert mix(torch.tensor(gamma - (1 << 64))).item() & slow.MASK == 0xE220A8397B1DCDAF
    assert slow.mix((1234567 + gamma) & slow.MASK) == 6457827717110365317


@settings(max_examples=50)
@given(seed=st.integers(-(2**63), 2**64), call=st.integers(0, 2**31), rows=st.integers(1, 40))
def test_keys_equal_plain_python(seed: int, call: int, rows: int) -> None:
    assert keys(seed, call, rows).tolist() == slow.keys(seed, call, rows)


def test_every_row_is_a_query_equally_often() -> None:
    none = torch.zeros(16).double()
    chosen = torch.stack([none.index_fill(0, random_queries(keys(0, c, 16), 0.25), 1) for c in range(2000)])
    assert torch.equal(chosen.sum(1), torch.full((2000,), 4.0).double())
    frequency = chosen.mean(0)
    assert (frequency - 0.25).abs().max() < 5 * (0.25 * 0.75 / 2000) ** 0.5
    together = (chosen.T @ chosen / 2000)[~torch.eye(16, dtype=torch.bool)]
    assert (together - 0.25 * 3 / 15).abs().max() < 5 * (0.05 * 0.95 / 2000) ** 0.5


def test_seeds_and_calls_give_other_splits() -> None:
    splits = [
        tuple(random_queries(keys(seed, call, 64), 0.25).sort().values.tolist())
        for seed in range(10)
        for call in range(10)
    ]
    assert len(set(splits)) == 100


@pytest.mark.parametrize(
    ("rows", "fraction", "expected"),
    [(128, 0.25, 32), (2, 0.25, 1), (2, 0.99, 1), (10, 0.01, 1), (10, 0.99, 9), (3, 0.5, 2)],
)
def test_neither_side_is_empty(rows: int, fraction: float, expected: int) -> None:
    assert query_count(rows, fraction) == expected
    assert len(random_queries(keys(0, 0, rows), fraction).unique()) == expected


@settings(max_examples=60)
@given(
    y=st.lists(st.integers(0, 4), min_size=2, max_size=24),
    fraction=st.sampled_from([0.125, 0.25, 0.5, 0.875]),
    call=st.integers(0, 99),
)
def test_stratified_split_equals_the_slow_one(y: list[int], fraction: float, call: int) -> None:
    chosen = stratified_queries(keys(7, call, len(y)), torch.tensor(y), fraction)
    assert chosen.nonzero().flatten().tolist() == slow.split(7, call, y, fraction, True)[1]
