"""Few-shot draws, samples and made sentiment data: what holds for every seed, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.run_prompts import DOWNSTREAM, PAIRS, PRETRAINING
from metapretrain.data.made import made_sentiment
from metapretrain.data.published import hold_back, unlike, without_entities, without_escapes
from metapretrain.data.texts import (
    SentenceData,
    TextSet,
    balanced_sample,
    few_shot_draw,
    fixed_sample,
    known_texts,
    pair_keys,
    without_known,
)
from metapretrain.errors import InputError


def rows(*counts: int) -> TextSet:
    """So many rows of class 0, 1, ... in a mixed order."""
    labels = np.repeat(np.arange(len(counts)), counts)
    order = np.random.Generator(np.random.Philox(7)).permutation(len(labels))
    return TextSet([f"text {row}" for row in order], labels=torch.from_numpy(labels[order]))


@pytest.mark.parametrize("counts", [(200, 200), (500, 10, 490), (300, 2), (60, 50, 40, 30, 20)])
def test_stratified_draws_have_each_class_by_its_share_and_no_common_row(counts: tuple[int, ...]) -> None:
    train = rows(*counts)
    labels = train.require_labels()
    drawn, held = few_shot_draw(train, 40, 30, seed=3)
    assert len(drawn) == 40 and len(held) == 30 and len(set(drawn.tolist()) | set(held.tolist())) == 70
    for part in (drawn, held):
        shares = labels[part].bincount(minlength=len(counts))
        assert shares.min() >= 1
        exact = len(part) * torch.tensor(counts) / sum(counts)
        assert ((shares - exact).abs() < 1).all()


def test_draws_depend_on_the_seed_alone_and_without_strata_on_no_label() -> None:
    train = rows(150, 150)
    for stratified in (True, False):
        first = few_shot_draw(train, seed=1, stratified=stratified)
        again = few_shot_draw(train, seed=1, stratified=stratified)
        other = few_shot_draw(train, seed=2, stratified=stratified)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        assert not torch.equal(first[0], other[0]) and not set(first[0].tolist()) & set(first[1].tolist())
    relabelled = TextSet(train.first, labels=torch.zeros(300, dtype=torch.int64))
    assert torch.equal(few_shot_draw(relabelled, seed=1, stratified=False)[0], first[0])
    shares = [train.require_labels()[few_shot_draw(train, seed=s, stratified=False)[0]].sum() for s in range(5)]
    assert len({int(share) for share in shares}) > 1  # at random, not always half and half


@pytest.mark.parametrize(
    ("counts", "training", "validation", "told"),
    [
        ((40, 39), 40, 40, "but there are 79 rows"),
        ((100, 1), 40, 40, "1 of class 1"),
        ((50, 50, 50), 2, 40, "3 rows or more of each part"),
        ((50, 50), 0, 40, "is 0; give a whole number of at least 1"),
    ],
)
def test_draws_that_cannot_be(counts: tuple[int, ...], training: int, validation: int, told: str) -> None:
    with pytest.raises(InputError, match=told):
        few_shot_draw(rows(*counts), training, validation, seed=0)


def test_fixed_sample_is_stratified_in_order_and_always_the_same() -> None:
    test = rows(60, 30, 3)
    sample = fixed_sample(test, 31)
    assert sample.require_labels().bincount().tolist() == [20, 10, 1]
    assert [int(name) for name in sample.ids] == sorted(int(name) for name in sample.ids)
    assert fixed_sample(test, 31).ids == sample.ids and fixed_sample(test, 93) is test
    with pytest.raises(InputError, match="at least 1"):
        fixed_sample(test, 0)


def test_balanced_sample_takes_all_of_a_small_class() -> None:
    sample = balanced_sample(rows(50, 5, 50), 25, seed=0)
    assert sample.require_labels().bincount().tolist() == [10, 5, 10]
    assert len(set(sample.ids)) == 25
    with pytest.raises(InputError, match="1 to 105"):
        balanced_sample(rows(50, 5, 50), 106, seed=0)


def test_known_and_repeated_texts_are_dropped_and_counted() -> None:
    train = TextSet(["A b!", "a  B", "c", "d", "e", "C"], labels=torch.tensor([0, 1, 1, 0, 1, 1]))
    kept = unlike(train, TextSet(["D."]))
    assert kept.ids == ["0", "2", "4"]
    assert kept.counts == {"duplicates": 2, "conflicting": 1, "in_test": 1}
    left = without_known(kept, known_texts(["E"]))
    assert left.ids == ["0", "2"] and left.counts["in_pretraining"] == 1
    pairs = TextSet(["x", "y"], ["z", "w"], torch.tensor([0, 1]))
    assert without_known(pairs, known_texts(["W"])).first == ["x"]


def test_rows_held_back_share_no_text_and_are_one_in_six_of_each_stratum() -> None:
    texts = [f"t{row}" for row in range(24)] + ["t0", "T0!"]
    train, test = hold_back(TextSet(texts, labels=torch.tensor([0, 1] * 13)), [0, 0, 1, 1] * 6 + [0, 0])
    assert len(train) == 20 and len(test) == 4 and train.counts["duplicates"] == 2
    assert sorted(int(name) % 4 // 2 for name in test.ids) == [0, 0, 1, 1]
    assert not set(train.first) & set(test.first) and test.split == "test"


def test_escapes_and_entities() -> None:
    assert without_escapes(r'a \""b\"" \n\nc\r Br\u00fbl\u00e9e \ud83d\ude00 x\or') == 'a "b" \n\nc Brûlée 😀 x\\or'
    assert without_entities("&quot;a&#39;s&quot; &lt;3 &amp;quot; R&D &nosuch;") == '"a\'s" <3 " R&D &nosuch;'


def test_sentence_data_refuses_what_no_method_can_use() -> None:
    two = rows(2, 2)
    with pytest.raises(InputError, match=r"in 0\.\.1"):
        SentenceData("x", ("a", "b"), rows(2, 2, 2), two)
    with pytest.raises(InputError, match="no training row has class 'b'"):
        SentenceData("x", ("a", "b"), rows(4), two)
    with pytest.raises(InputError, match="pairs"):
        SentenceData("x", ("a", "b"), TextSet(["a"], ["b"], torch.tensor([0])), two)
    with pytest.raises(InputError, match="test part has no rows"):
        SentenceData("x", ("a", "b"), two, two.subset([]))


def test_made_sets_have_the_names_classes_and_sizes_of_the_real_ones() -> None:
    made = made_sentiment(seed=1)
    assert set(made) == {PRETRAINING, *DOWNSTREAM, *PAIRS}
    assert [made[name].num_classes for name in DOWNSTREAM] == [5, 2, 5, 2, 2, 3, 3]
    known = known_texts(made[PRETRAINING].train.first)
    for name, data in made.items():
        assert data.pairs == (name in PAIRS)
        for part in (data.train, data.test):
            assert part.require_labels().bincount(minlength=data.num_classes).min() >= 6
            assert data.pairs or len(set(pair_keys(part))) == len(part)
        few_shot_draw(data.train, seed=0)
        assert data.pairs or not set(pair_keys(data.train)) & set(pair_keys(data.test))
        if name in DOWNSTREAM:
            assert without_known(data.train, known).counts["in_pretraining"] == 0
    again, other = made_sentiment(seed=1), made_sentiment(seed=2)
    assert again["sst5"].train.first == made["sst5"].train.first != other["sst5"].train.first
    with pytest.raises(InputError, match="from 50 to 1000"):
        made_sentiment(pretraining=3)
