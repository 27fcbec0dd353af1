"""Draws are exactly uniform, distinct and functions of their key."""

from __future__ import annotations

from itertools import permutations as all_orders

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from metapretrain import draws
from metapretrain.draws import Bits, Use, distinct, integers, permutations


def bits(seed: int = 0, block: int = 0) -> Bits:
    return Bits(seed, Use.EPISODES, 0, block)


@settings(max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 400), min_size=1, max_size=20),
    count=st.integers(1, 40),
    seed=st.integers(0, 2**64 - 1),
)
def test_distinct_draws_are_distinct_and_in_range(sizes: list[int], count: int, seed: int) -> None:
    lanes = np.maximum(np.array(sizes), count)
    drawn = distinct(bits(seed), lanes, count)
    assert drawn.shape == (len(lanes), count)
    for lane, size in zip(drawn.tolist(), lanes.tolist(), strict=True):
        assert len(set(lane)) == count
        assert min(lane) >= 0
        assert max(lane) < size


@settings(max_examples=40)
@given(sizes=st.lists(st.integers(1, 300), min_size=1, max_size=8), seed=st.integers(0, 2**64 - 1))
def test_permutations_hold_each_number_once(sizes: list[int], seed: int) -> None:
    orders = permutations(bits(seed), np.array(sizes))
    for order, size in zip(orders.tolist(), sizes, strict=True):
        assert sorted(order[:size]) == list(range(size))


@pytest.mark.parametrize("size", [pytest.param(4, id="by sorting"), pytest.param(6, id="by rejection")])
def test_every_ordered_selection_is_equally_likely(size: int) -> None:
    drawn = distinct(bits(3), np.full(60_000, size), 3)
    outcomes = dict.fromkeys(all_orders(range(size), 3), 0)
    for order in map(tuple, drawn.tolist()):
        outcomes[order] += 1
    assert chisquare(list(outcomes.values())).pvalue > 1e-3


def test_selection_is_uniform_in_lanes_smaller_than_the_widest() -> None:
    sizes = np.tile([3, 5], 30_000)
    drawn = distinct(bits(4), sizes, 3)[::2]
    _, counts = np.unique(drawn, axis=0, return_counts=True)
    assert len(counts) == 6
    assert chisquare(counts).pvalue > 1e-3


def test_every_order_is_equally_likely() -> None:
    _, counts = np.unique(permutations(bits(1), np.full(48_000, 4)), axis=0, return_counts=True)
    assert len(counts) == 24
    assert chisquare(counts).pvalue > 1e-3


def test_tied_keys_are_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two random bits a key, ties abound; without rejection low positions would win them."""
    words = Bits.words

    def coarse(self: Bits, count: int, *, wide: bool = False) -> np.ndarray:
        return words(self, count, wide=wide) & np.uint32(0xC0000003)

    monkeypatch.setattr(Bits, "words", coarse)
    drawn = distinct(bits(2), np.full(20_000, 4), 3)
    assert chisquare(np.bincount(drawn[:, 0], minlength=4)).pvalue > 1e-3


def test_biased_words_are_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """2**32 is no multiple of 3: the word that would make 0 more likely than 1 and 2 must not count."""
    given_words = iter([np.array([0], dtype=np.uint32), np.array([2**31], dtype=np.uint32)])
    monkeypatch.setattr(Bits, "words", lambda self, count, wide=False: next(given_words))
    assert integers(bits(), np.array([3])).tolist() == [1]


def test_chunks_of_lanes_are_drawn_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws, "CHUNK", 40)
    orders = permutations(bits(), np.array([3, 2, 2, 2, 20, 7]))
    for order, size in zip(orders.tolist(), [3, 2, 2, 2, 20, 7], strict=True):
        assert sorted(order[:size]) == list(range(size))


def test_bits_depend_on_each_part_of_the_key() -> None:
    keys = [
        (0, Use.EPISODES, 0, 0),
        (1, Use.EPISODES, 0, 0),
        (0, Use.BATCHES, 0, 0),
        (0, Use.EPISODES, 1, 0),
        (0, Use.EPISODES, 0, 1),
    ]
    assert len({tuple(Bits(*key).words(4).tolist()) for key in keys}) == len(keys)


def test_bits_are_those_of_philox_on_every_numpy() -> None:
    assert Bits(1, Use.EPISODES, 2, 3).words(3, wide=True).tolist() == [
        6649467637274347345,
        1664830243804975061,
        3838947846721426917,
    ]
