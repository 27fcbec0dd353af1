"""Episodes hold what their spec says, depend on their key alone, and are uniform."""

from __future__ import annotations

import logging
import pickle
from collections import Counter
from itertools import combinations, islice
from operator import itemgetter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from metapretrain.episodes import EpisodePlan, EpisodeSampler, EpisodeSpec
from metapretrain.errors import InputError

LABELS = np.repeat([30, 10, 20, 50, 40], [6, 7, 8, 9, 20])


def facts(plan: EpisodePlan) -> tuple[object, ...]:
    return list(plan), plan.index, plan.support_y.tolist(), plan.query_y.tolist(), plan.classes, plan.group


def check(plan: EpisodePlan, labels: np.ndarray, ways: int, shots: int, queries: int) -> None:
    assert len(set(plan)) == len(plan) == ways * (shots + queries)
    assert len(set(plan.classes)) == len(plan.classes) == ways
    y = torch.cat([plan.support_y, plan.query_y]).tolist()
    assert [plan.classes[i] for i in y] == labels[list(plan)].tolist()
    assert Counter(plan.support_y.tolist()) == dict.fromkeys(range(ways), shots)
    assert Counter(plan.query_y.tolist()) == dict.fromkeys(range(ways), queries)
    assert plan.support + plan.query == list(plan)
    assert len(plan.support) == ways * shots


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(2, 30), min_size=3, max_size=12),
    ways=st.integers(1, 3),
    seed=st.integers(0, 2**64 - 1),
    data=st.data(),
)
def test_episodes_hold_what_the_spec_says(sizes: list[int], ways: int, seed: int, data: st.DataObject) -> None:
    per_class = data.draw(st.integers(2, sorted(sizes)[-ways]))
    shots = data.draw(st.integers(1, per_class - 1))
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(len(sizes)) * 3, sizes))
    spec = EpisodeSpec(ways, shots, per_class - shots)
    for plan in EpisodeSampler(labels, spec, 8, seed=seed, block_size=3):
        check(plan, labels, ways, shots, per_class - shots)


def test_ranged_episodes_stay_in_their_ranges_and_reach_all_of_them() -> None:
    sampler = EpisodeSampler(LABELS, EpisodeSpec((2, 4), (1, 3), (2, 3)), 400, seed=0)
    seen = set()
    for plan in sampler:
        ways = len(plan.classes)
        shape = ways, len(plan.support) // ways, len(plan.query) // ways
        check(plan, LABELS, *shape)
        seen.add(shape)
    assert len(seen) == 3 * 3 * 2


def test_an_episode_is_a_function_of_seed_epoch_and_index() -> None:
    def make(**changes: object) -> list[object]:
        options = {"seed": 1, "epoch": 2, "block_size": 16} | changes
        return [facts(p) for p in EpisodeSampler(LABELS, EpisodeSpec(3, 1, 2), 50, **options)]  # type: ignore[arg-type]

    base = make()
    assert make() == base
    for change in ({"seed": 2}, {"epoch": 3}, {"block_size": 32}):
        assert make(**change)[:16] != base[:16]
    assert make(start=37) == base[37:]


def test_reading_one_episode_gives_the_iterated_one() -> None:
    sampler = EpisodeSampler(LABELS, EpisodeSpec((2, 3), 1, 2), 40, seed=0, block_size=16)
    assert [facts(sampler.plan(i)) for i in range(40)] == [facts(plan) for plan in sampler]
    before = facts(sampler.plan(3))
    sampler.set_epoch(1)
    assert facts(sampler.plan(3)) != before


def test_global_random_state_has_no_part() -> None:
    sampler = EpisodeSampler(LABELS, EpisodeSpec(3, 1, 2), 5, seed=0)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first = list(sampler)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(1)
    assert list(sampler) == first


@pytest.mark.parametrize("world_size", [2, 3, 8])
@pytest.mark.parametrize("start", [0, 5])
def test_union_over_ranks_is_the_list_of_one_process(world_size: int, start: int) -> None:
    def make(**options: int) -> EpisodeSampler:
        spec = EpisodeSpec(2, 1, 2)
        return EpisodeSampler(LABELS, spec, 50, seed=0, start=start, block_size=16, uneven=True, **options)

    alone = [facts(plan) for plan in make()]
    shares = []
    for rank in range(world_size):
        sampler = make(rank=rank, world_size=world_size)
        shares.append([facts(plan) for plan in sampler])
        assert len(sampler) == len(shares[-1])
        assert all(index % world_size == rank for _, index, *_ in shares[-1])
    assert sorted((fact for share in shares for fact in share), key=itemgetter(1)) == alone


def test_training_asks_that_episodes_divide_by_ranks() -> None:
    with pytest.raises(InputError, match="50 over 4; for evaluation pass uneven=True"):
        EpisodeSampler(LABELS, EpisodeSpec(2, 1, 2), 50, seed=0, world_size=4)
    EpisodeSampler(LABELS, EpisodeSpec(2, 1, 2), 52, seed=0, world_size=4)
    EpisodeSampler(LABELS, EpisodeSpec(2, 1, 2), None, seed=0, world_size=4)


def test_an_endless_sampler_goes_on_and_has_no_length() -> None:
    sampler = EpisodeSampler(LABELS, EpisodeSpec(2, 1, 2), None, seed=0, start=10, block_size=4)
    assert [plan.index for plan in islice(sampler, 20)] == list(range(10, 30))
    with pytest.raises(TypeError, match="endless"):
        len(sampler)


def test_a_start_past_the_end_gives_nothing() -> None:
    sampler = EpisodeSampler(LABELS, EpisodeSpec(2, 1, 2), 16, seed=0, start=40, block_size=8)
    assert len(sampler) == 0
    assert list(sampler) == []


def test_every_combination_and_order_of_classes_is_equally_likely() -> None:
    labels = np.repeat(np.arange(4), [2, 3, 4, 9])
    sampler = EpisodeSampler(labels, EpisodeSpec(2, 1, 1), 24_000, seed=5)
    counts = Counter(plan.classes for plan in sampler)
    assert len(counts) == 12
    assert chisquare(list(counts.values())).pvalue > 1e-3


def test_every_row_of_a_class_is_equally_likely_as_support_and_as_query() -> None:
    sampler = EpisodeSampler(np.zeros(6, dtype=int), EpisodeSpec(1, 2, 1), 12_000, seed=6)
    counts = Counter((frozenset(plan.support), plan.query[0]) for plan in sampler)
    assert len(counts) == len(list(combinations(range(6), 2))) * 4
    assert chisquare(list(counts.values())).pvalue > 1e-3


def test_query_labels_come_in_every_order_equally_often() -> None:
    sampler = EpisodeSampler(LABELS, EpisodeSpec(2, 1, 2), 12_000, seed=7)
    counts = Counter(tuple(plan.query_y.tolist()) for plan in sampler)
    assert len(counts) == 6
    assert chisquare(list(counts.values())).pvalue > 1e-3


def test_groups_hold_their_episodes_and_are_equally_likely() -> None:
    labels = np.repeat(np.arange(12), 5)
    groups = np.repeat(["greek", "latin", "runes"], [15, 20, 25])
    sampler = EpisodeSampler(labels, EpisodeSpec(3, 1, 2), 6_000, seed=0, groups=groups)
    counts: Counter[str] = Counter()
    for plan in sampler:
        assert {groups[row] for row in plan} == {plan.group}
        counts[plan.group] += 1
    assert chisquare([counts[name] for name in ("greek", "latin", "runes")]).pvalue > 1e-3
    check(sampler.plan(0), labels, 3, 1, 2)


def test_a_label_in_two_groups_is_a_class_of_each() -> None:
    labels, groups = np.tile([0, 1], 20), np.repeat([0, 1], 20)
    for plan in EpisodeSampler(labels, EpisodeSpec(2, 2, 3), 20, seed=0, groups=groups):
        assert len({int(groups[row]) for row in plan}) == 1
        check(plan, labels, 2, 2, 3)


def test_without_ways_rows_of_a_group_come_whatever_their_labels() -> None:
    labels, groups = np.tile([5, 9, 7], 20), np.repeat(["a", "b"], 30)
    counts: Counter[tuple[int, ...]] = Counter()
    for plan in EpisodeSampler(labels, EpisodeSpec(None, 2, (1, 4)), 500, seed=0, groups=groups):
        assert len(plan.support) == 2
        assert 1 <= len(plan.query) <= 4
        assert len(set(plan)) == len(plan)
        assert {groups[row] for row in plan} == {plan.group}
        assert plan.classes == (5, 7, 9)
        y = torch.cat([plan.support_y, plan.query_y]).tolist()
        assert [plan.classes[i] for i in y] == labels[list(plan)].tolist()
        counts[tuple(plan.support_y.tolist())] += 1
    assert len(counts) == 9


def test_small_classes_and_groups_are_left_out_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        sampler = EpisodeSampler(LABELS, EpisodeSpec(2, 1, 7), 200, seed=0)
    assert [record.getMessage() for record in caplog.records] == [
        "left out 2 of 5 classes with fewer than 8 examples (shots + queries)"
    ]
    assert {name for plan in sampler for name in plan.classes} == {20, 40, 50}


def test_nothing_is_logged_when_nothing_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    EpisodeSampler(LABELS, EpisodeSpec(5, 1, 5), 1, seed=0)
    assert not caplog.records


def test_plans_pickle_by_value_and_small() -> None:
    plan = EpisodeSampler(np.repeat(np.arange(50), 20), EpisodeSpec(5, 1, 15), None, seed=0).plan(700)
    packed = pickle.dumps(plan)
    assert len(packed) < 2_000
    copy = pickle.loads(packed)
    assert type(copy) is EpisodePlan
    assert facts(copy) == facts(plan)


def test_labels_of_a_plan_are_copies() -> None:
    sampler = EpisodeSampler(LABELS, EpisodeSpec(2, 1, 2), 1, seed=0)
    plan = sampler.plan(0)
    plan.support_y.fill_(7)
    assert plan.support_y.tolist() == [0, 1]


def test_a_plan_needs_one_label_a_row() -> None:
    with pytest.raises(InputError, match="3 rows, 1 support labels and 1 query labels"):
        EpisodePlan.of([1, 2, 3], index=0, support_y=[0], query_y=[0], classes=(0,))
    wrong: list[Any] = [[-100], [-1], [[0, 1]]]
    for y in wrong:
        with pytest.raises(InputError, match=r"labels of a plan are .*; give one class index 0..W-1 per row"):
            EpisodePlan.of([1, 2], index=0, support_y=y, query_y=y, classes=(0,))


@pytest.mark.parametrize(
    ("labels", "spec", "message"),
    [
        (LABELS, EpisodeSpec(6, 1, 1), "ways = 6 is above the number of classes, 5"),
        (LABELS, EpisodeSpec(2, 10, 11), r"shots \+ queries = 21 .* every class: the largest has 20 examples"),
        (LABELS, EpisodeSpec(4, 1, 7), "ways = 4, but only 3 of 5 classes have at least 8 examples"),
        (LABELS, EpisodeSpec(None, 40, 11), r"shots \+ queries = 51 .* every group: the largest has 50"),
        ([-1, 0, 1], EpisodeSpec(1, 1, 1), "must not be negative, but the least is -1"),
        ([-1, 0, 1], EpisodeSpec(None, 1, 1), "must not be negative, but the least is -1"),
        ([], EpisodeSpec(1, 1, 1), "labels are empty"),
        ([0.0, 1.0], EpisodeSpec(1, 1, 1), "not float64"),
    ],
)
def test_bad_labels_for_a_spec_are_one_line(labels: object, spec: EpisodeSpec, message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        EpisodeSampler(labels, spec, 1, seed=0)
    assert "\n" not in str(error.value)


def test_groups_without_enough_classes_are_one_line() -> None:
    with pytest.raises(InputError, match=r"ways = 3, but no group has as many classes .* the best has 2"):
        EpisodeSampler(np.repeat(np.arange(4), 5), EpisodeSpec(3, 1, 1), 1, seed=0, groups=[0] * 10 + [1] * 10)
    with pytest.raises(InputError, match="3 groups and 50 labels"):
        EpisodeSampler(LABELS, EpisodeSpec(2, 1, 1), 1, seed=0, groups=[0, 0, 1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"episodes": 0}, "episodes is .*; give a whole number of at least 1"),
        ({"episodes": 2.0}, "episodes is .*; give a whole number"),
        ({"seed": -1}, "seed is .*; give a whole number of at least 0"),
        ({"seed": 2**64}, "seed is .*; give a whole number from"),
        ({"start": -1}, "start is .*; give a whole number of at least 0"),
        ({"epoch": True}, "epoch is .*; give a whole number"),
        ({"rank": 2, "world_size": 2}, "rank must be below world_size"),
        ({"world_size": 0}, "world_size is .*; give a whole number of at least 1"),
        ({"block_size": 0}, "block_size is .*; give a whole number of at least 1"),
    ],
)
def test_bad_options_are_one_line(change: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        EpisodeSampler(LABELS, EpisodeSpec(2, 1, 1), **({"episodes": 4, "seed": 0} | change))  # type: ignore[arg-type]


@pytest.mark.parametrize("what", [{"start": 2**63}, {"epoch": 2**70}, {"block_size": 2**65}])
def test_numbers_beyond_64_bits_are_refused(what):
    with pytest.raises(InputError, match="give a whole number from"):
        EpisodeSampler([0, 0, 1, 1], EpisodeSpec(2, 1, 1), None, seed=0, **what)


@pytest.mark.parametrize("spec", [None, (2, 1, 1)])
def test_what_is_no_spec_is_refused(spec):
    with pytest.raises(InputError, match="spec must be EpisodeSpec"):
        EpisodeSampler([0, 0, 1, 1], spec, 1, seed=0)
