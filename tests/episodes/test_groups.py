"""Meta tasks from clusters, topics, chance and labels."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from metapretrain.episodes import EpisodeSampler, EpisodeSpec, group_agreement, group_tasks
from metapretrain.episodes import groups as module
from metapretrain.episodes.groups import tidy_groups
from metapretrain.errors import InputError

LABELS = torch.arange(60) % 3
NOISE = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
FAR = NOISE * 0.1 + torch.eye(4)[LABELS] * 10
TOPICS = ("pizza pasta waiter menu", "goalkeeper penalty referee match", "laptop keyboard battery screen")
TEXTS = [" ".join(np.random.default_rng(row).choice(TOPICS[row % 3].split(), 12)) for row in range(60)]


def test_kmeans_finds_clusters() -> None:
    groups = group_tasks(FAR, 3, seed=1)
    assert groups.dtype == torch.int64 and groups.shape == (60,)
    assert group_agreement(groups, LABELS) == pytest.approx(1)
    assert group_agreement(group_tasks(NOISE, 3), LABELS) < 0.2
    assert torch.equal(group_tasks(FAR.numpy().tolist(), 3, seed=1), groups)


def test_many_rows_take_mini_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MANY", 50)
    assert group_tasks(TEXTS, 3, "lda").shape == (60,)
    assert group_agreement(group_tasks(FAR, 3), LABELS) == pytest.approx(1)


def test_lda_finds_topics_of_texts_and_of_counts() -> None:
    assert group_agreement(group_tasks(TEXTS, 3, "lda", 0), LABELS) > 0.9
    counts = torch.rand(60, 12, generator=torch.Generator().manual_seed(0)) < 0.9
    counts = counts * torch.eye(3).repeat_interleave(4, 1)[LABELS] * 5
    assert group_agreement(group_tasks(counts, 3, "lda", 0), LABELS) > 0.9


def test_texts_without_words_are_spread_over_the_topics() -> None:
    texts = [*TEXTS, *[""] * 300, "退屈"]
    empty = group_tasks(texts, 3, "lda", 0)[60:360]
    assert torch.bincount(empty, minlength=3).min() > 60


def test_random_groups_have_equal_sizes_and_follow_the_seed() -> None:
    groups = group_tasks(TEXTS[:59], 4, "random", 3)
    assert sorted(torch.bincount(groups).tolist()) == [14, 15, 15, 15]
    assert torch.equal(groups, group_tasks(TEXTS[:59], 4, "random", 3))
    assert not torch.equal(groups, group_tasks(TEXTS[:59], 4, "random", 4))


@pytest.mark.parametrize("k", [3, 4, 7, 10])
def test_label_groups_hold_one_label_each(k: int) -> None:
    labels = ["bad"] * 40 + ["fair"] * 15 + ["good"] * 5
    groups = group_tasks(TEXTS, k, "label", 0, labels=labels)
    assert sorted(set(groups.tolist())) == list(range(k))
    assert all(len({labels[i] for i in torch.nonzero(groups == g)[:, 0].tolist()}) == 1 for g in range(k))
    if k == 10:  # 40 rows in 6 pieces, 15 in 3, 5 in 1
        assert sorted(torch.bincount(groups).tolist()) == [5, 5, 5, 5, 6, 6, 7, 7, 7, 7]


def test_small_groups_are_merged_into_the_nearest_or_dropped(caplog: pytest.LogCaptureFixture) -> None:
    features = torch.cat([FAR, FAR[:1] + 3])  # a row by itself, nearest to the cluster of label 0
    with caplog.at_level(logging.WARNING):
        merged = group_tasks(features, 4, seed=0, smallest=5)
    assert "1 rows of 1 groups with less than 5 rows were merged into others" in caplog.text
    assert sorted(set(merged.tolist())) == [0, 1, 2] and merged[60] == merged[0]
    dropped = group_tasks(features, 4, seed=0, smallest=5, small="drop")
    assert dropped[60] == -1 and sorted(torch.bincount(dropped[:60]).tolist()) == [20, 20, 20]
    assert group_agreement(dropped, [*LABELS.tolist(), 0]) == pytest.approx(1)


@pytest.mark.filterwarnings("error::sklearn.exceptions.ConvergenceWarning", "ignore:overflow")
@pytest.mark.parametrize(("features", "method"), [(FAR * 1e25, "kmeans"), (FAR * 0, "kmeans"), (FAR * 0 + 1, "lda")])
def test_fewer_groups_than_asked_for_are_told(features: Any, method: str, caplog: pytest.LogCaptureFixture) -> None:
    groups = group_tasks(features, 3, method)
    assert caplog.messages[-1:] == [f"{method} found 1 groups of the 3 asked for: the rows do not differ enough"]
    assert not groups.any()


def test_without_features_small_groups_go_to_the_largest() -> None:
    groups, count = tidy_groups([5, 5, 5, 2, 2, 0], smallest=2)
    assert (groups.tolist(), count) == ([1, 1, 1, 0, 0, 1], 1)
    assert tidy_groups([1, 0, 1], smallest=1)[0].tolist() == [1, 0, 1]


def test_episodes_stay_inside_a_group_with_one_class_too() -> None:
    groups = group_tasks(TEXTS, 3, "label", labels=LABELS)
    spec = EpisodeSpec(ways=None, shots=4, queries=4)
    for plan in EpisodeSampler(LABELS, spec, 20, seed=0, groups=groups):
        assert len(set(groups[list(plan)].tolist())) == 1 and len(set(plan)) == 8


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: group_tasks(FAR, 61), "only 60 rows"),
        (lambda: group_tasks(FAR, 0), "k is .*; give a whole number of at least 1"),
        (lambda: group_tasks(FAR, 3, "kmean"), "did you mean 'kmeans'"),
        (lambda: group_tasks(FAR, 3, small="keep"), "unknown small"),
        (lambda: group_tasks(TEXTS, 3), "encode them"),
        (lambda: group_tasks("one text", 1), "list of strings"),
        (lambda: group_tasks([1, 2], 1), r"shape \(N, D\)"),
        (lambda: group_tasks(FAR * float("nan"), 3), "finite"),
        (lambda: group_tasks(NOISE, 3, "lda"), "negative"),
        (lambda: group_tasks(["", "the"], 2, "lda"), "no words"),
        (lambda: group_tasks(TEXTS, 3, "label"), "needs labels"),
        (lambda: group_tasks(TEXTS, 2, "label", labels=LABELS), "60 labels of 3 kinds do not make 2 groups"),
        (lambda: group_tasks(TEXTS, 3, "label", labels=LABELS[:9]), "9 labels"),
        (lambda: group_tasks(TEXTS, 10, "random", smallest=7), "the largest has 6"),
        (lambda: group_tasks(None, 1), r"shape \(N, D\)"),
        (lambda: group_tasks(FAR[:, :0], 3), r"shape \(N, D\)"),
        (lambda: group_tasks(torch.zeros(9, 2, dtype=torch.complex64), 3), "imaginary"),
        (lambda: tidy_groups([-1, -1], smallest=1), "no rows in groups"),
        (lambda: tidy_groups([0, float("nan")], smallest=1), "whole numbers"),
        (lambda: tidy_groups(torch.tensor([0.0, 1.0]), smallest=1), "not float32"),
        (lambda: tidy_groups([0, 10**12], smallest=1), "run from 0 to 1000000000000; give -1 for rows in none, else 0"),
        (lambda: tidy_groups([0, 10**30], smallest=1), "whole numbers"),
        (lambda: tidy_groups([0, -5], smallest=1), "run from -5 to 0"),
        (lambda: tidy_groups([[0, 1]], smallest=1), r"shape \(1, 2\)"),
        (lambda: tidy_groups([0, [1]], smallest=1), "unequal length"),
        (lambda: tidy_groups(None, smallest=1), "whole numbers"),
        (lambda: tidy_groups([0, 1], smallest=0), "smallest is .*; give a whole number of at least 1"),
        (lambda: tidy_groups([0, 1], smallest=1, small="keep"), "unknown small"),
        (lambda: tidy_groups([0, 0, 1], smallest=2, features=FAR), "got 60 for 3 rows"),
        (lambda: group_agreement([0, 1], [0, 1, 1]), "one a row each"),
        (lambda: group_agreement([-1, -1], [0, 1]), "no row is in a group"),
    ],
)
def test_errors_are_clear(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()
