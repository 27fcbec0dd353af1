"""Shuffled batches visit every row, resume exactly and share out over ranks."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from metapretrain.episodes import ShuffledBatches
from metapretrain.errors import InputError


def joined(parts: Any) -> list[int]:
    return list(itertools.chain.from_iterable(parts))


def lists(batches: Any) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


@settings(max_examples=60)
@given(n=st.integers(1, 400), size=st.integers(1, 50), seed=st.integers(0, 2**64 - 1), drop=st.booleans())
def test_an_epoch_visits_every_row_once(n: int, size: int, seed: int, drop: bool) -> None:
    if drop and size > n:
        size = n
    batches = ShuffledBatches(n, size, seed=seed, drop_last=drop)
    rows = joined(lists(batches))
    assert len(set(rows)) == len(rows) == (n // size * size if drop else n)
    assert set(rows) <= set(range(n))
    assert len(list(batches)) == len(batches)


def test_batches_are_int64_on_the_cpu_and_the_callers_own() -> None:
    batches = ShuffledBatches(8, 4, seed=0)
    before = lists(batches)
    batch = next(iter(batches))
    assert (batch.dtype, batch.device.type) == (torch.int64, "cpu")
    batch.fill_(-1)
    assert lists(batches) == before


@pytest.mark.parametrize("labels", [None, np.repeat(np.arange(4), [2, 30, 30, 38])])
def test_batches_depend_on_seed_and_epoch_alone(labels: Any) -> None:
    def make(seed: int = 0, **options: int) -> list[list[int]]:
        return lists(ShuffledBatches(100, 8, seed=seed, labels=labels, **options))

    base = make()
    assert make() == base
    assert make(start=5) == base[5:]
    assert make(seed=1)[0] != base[0]
    assert make(epoch=1)[0] != base[0]
    batches = ShuffledBatches(100, 8, seed=0, labels=labels, epoch=1, start=3)
    batches.set_epoch(0)
    assert lists(batches) == base
    assert lists(batches.iter_from(7)) == base[7:]


@pytest.mark.parametrize("labels", [None, np.arange(96) % 5])
def test_ranks_together_hold_the_batches_of_one_process(labels: Any) -> None:
    alone = lists(ShuffledBatches(96, 12, seed=0, labels=labels))
    ranks = [lists(ShuffledBatches(96, 4, seed=0, rank=rank, world_size=3, labels=labels)) for rank in range(3)]
    assert [joined(parts) for parts in zip(*ranks, strict=True)] == alone


@settings(max_examples=40)
@given(counts=st.lists(st.integers(1, 40), min_size=1, max_size=8), size=st.integers(1, 30), seed=st.integers(0, 1_000))
def test_balanced_batches_hold_every_class_equally(counts: list[int], size: int, seed: int) -> None:
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)) * 3, counts))
    for batch in ShuffledBatches(len(labels), size, seed=seed, labels=labels, drop_last=False):
        _, inverse = np.unique(labels, return_inverse=True)
        seen = np.bincount(inverse[batch.numpy()], minlength=len(counts))
        assert seen.max() - seen.min() <= (0 if len(batch) % len(counts) == 0 == size % len(counts) else 2)


def test_balanced_batches_of_equal_classes_visit_every_row_once() -> None:
    rows = joined(lists(ShuffledBatches(60, 7, seed=0, labels=np.arange(60) % 4, drop_last=False)))
    assert sorted(rows) == list(range(60))


def test_a_small_class_repeats_only_after_all_its_rows_came() -> None:
    labels = np.repeat([0, 1], [3, 27])
    rows = [row for row in joined(lists(ShuffledBatches(30, 2, seed=0, labels=labels))) if row < 3]
    assert len(rows) == 15
    for i in range(0, 15, 3):
        assert sorted(rows[i : i + 3]) == [0, 1, 2]


@pytest.mark.parametrize(
    ("n", "size", "options", "message"),
    [
        (0, 4, {}, "do not fill one batch"),
        (3, 4, {}, "3 rows do not fill one batch of 4.*drop_last=False"),
        (3, 0, {}, "batch_size is .*; give a whole number of at least 1"),
        (3, 1.5, {}, "batch_size is .*; give a whole number"),
        (True, 1, {}, "n is .*; give a whole number"),
        (8, 4, {"labels": [0, 1]}, "2 labels and 8 rows"),
        (8, 4, {"widths": torch.ones(2)}, "2 widths and 8 rows"),
        (8, 4, {"widths": torch.ones(8), "pool": 0}, "pool is .*; give a whole number of at least 1"),
        (8, 4, {"labels": [0.0] * 8}, "not float64"),
        (8, 4, {"seed": -1}, "seed is .*; give a whole number of at least 0"),
        (8, 4, {"start": -1}, "start is .*; give a whole number of at least 0"),
        (9, 2, {"world_size": 2, "drop_last": False}, "last batch of 1 rows cannot be shared"),
        (8, 2, {"rank": 2, "world_size": 2}, "rank must be below"),
    ],
)
def test_bad_options_are_one_line(n: Any, size: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        ShuffledBatches(n, size, **({"seed": 0} | options))
    assert "\n" not in str(error.value)


def test_the_order_of_classes_differs_between_rounds() -> None:
    labels = np.arange(600) % 3
    orders = {tuple(labels[batch.numpy()].tolist()) for batch in ShuffledBatches(600, 3, seed=0, labels=labels)}
    assert len(orders) == 6


WIDTHS = torch.from_numpy(np.random.default_rng(0).integers(3, 31, 90))


def alike(widths: torch.Tensor, size: int, **options: Any) -> ShuffledBatches:
    return ShuffledBatches(len(widths), size, widths=widths, **options)


def test_batches_of_similar_length_bring_every_row_equally_often() -> None:
    batches = alike(WIDTHS, 8, seed=1, pool=4)
    epochs = []
    for epoch in range(44):  # of 11 batches: 121 whole pools of 4
        batches.set_epoch(epoch)
        epochs += list(batches)
    counts = torch.bincount(torch.cat(epochs), minlength=90)
    assert len(batches) == 11 and counts.sum() == 44 * 88 and counts.max() - counts.min() <= 1


def test_a_pool_is_cut_by_length_and_one_batch_is_random() -> None:
    widths = torch.from_numpy(np.random.default_rng(1).integers(3, 61, 200))
    pooled = alike(widths, 8, seed=1, pool=8)
    first = [widths[pooled.batch(number)] for number in range(8)]
    first.sort(key=lambda part: int(part.min()))
    assert all(int(a.max()) <= int(b.min()) for a, b in itertools.pairwise(first))
    plain = alike(widths, 8, seed=1, pool=1)
    assert sum(float(widths[rows].float().std()) for rows in plain) > 2 * sum(
        float(widths[pooled.batch(number)].float().std()) for number in range(len(pooled))
    )


def test_balanced_batches_of_similar_length_have_all_classes_equally_often() -> None:
    labels = (torch.arange(50) % 10 == 0).long()  # one row in ten is of class 1
    batches = alike(torch.arange(50) + 1, 10, seed=0, pool=5, labels=labels)
    assert float(labels[torch.cat(list(batches))].float().mean()) == 0.5


@settings(max_examples=40)
@given(n=st.integers(1, 80), size=st.integers(1, 20), pool=st.integers(1, 9), world=st.integers(1, 3))
def test_batches_of_similar_length_are_a_sorted_pool_of_the_epochs_end_to_end(
    n: int, size: int, pool: int, world: int
) -> None:
    size, world = min(size, n), world if world * size <= n else 1
    widths = torch.arange(n) * 7 % 11
    whole = alike(widths, size * world, seed=5, pool=pool, task=2)
    plain = ShuffledBatches(n, n, seed=5, task=2)
    laid = torch.cat([plain.batch(epoch) for epoch in range(2 * pool * size * world // n + 1)])
    for block in range(2):
        numbers = range(block * pool, (block + 1) * pool)
        rows = laid[block * pool * size * world :][: pool * size * world]
        assert sorted(joined(lists(map(whole.batch, numbers)))) == sorted(rows.tolist())
    parts = [alike(widths, size, seed=5, pool=pool, task=2, rank=rank, world_size=world) for rank in range(world)]
    for number in range(2 * pool):
        assert joined(part.batch(number).tolist() for part in parts) == whole.batch(number).tolist()


@pytest.mark.parametrize("drop", [True, False])
def test_an_order_of_ones_own_is_cut_into_batches(drop: bool) -> None:
    batches = ShuffledBatches(7, 3, seed=0, drop_last=drop, order=lambda epoch: 100 * epoch + torch.arange(7))
    batches.set_epoch(2)
    assert lists(batches) == [[200, 201, 202], [203, 204, 205], *([] if drop else [[206]])]
    assert batches.batch(len(batches) + 1).tolist() == [103, 104, 105]
