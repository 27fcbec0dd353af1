"""The made tasks: the same for a seed, labels that follow from the sentences, every class in every split."""

from __future__ import annotations

import pytest
import torch

from metapretrain.data.made import SENTIMENT, SLOTS, made_tasks
from metapretrain.errors import InputError


def facts(sentence: str) -> list[tuple[int, int]]:
    """(thing, word) of each slot, read back from the sentence's words."""
    words = set(sentence.split())
    return [
        next((fact, form) for fact, pair in enumerate(slot) for form in (0, 1) if pair[form] in words) for slot in SLOTS
    ]


def test_a_seed_gives_the_same_sentences_and_another_seed_others() -> None:
    first, again, other = made_tasks(3), made_tasks(3), made_tasks(4)
    for task, same, different in zip(first, again, other, strict=True):
        for split in ("train", "validation", "dev", "test"):
            rows = getattr(task, split)
            assert rows.first == getattr(same, split).first and rows.second == getattr(same, split).second
        assert task.train.first != different.train.first


def test_labels_follow_from_the_words() -> None:
    sst, para, sts = made_tasks(rows=110)
    for text, label in zip(sst.train.first, sst.train.require_labels().tolist(), strict=True):
        assert sum(word in text.split() for word in SENTIMENT[label]) == 2
    assert para.train.second is not None and sts.train.second is not None
    for a, b, label in zip(para.train.first, para.train.second, para.train.require_labels().tolist(), strict=True):
        same = sum(x[0] == y[0] for x, y in zip(facts(a), facts(b), strict=True))
        assert same == (5 if label else 3)
    for a, b, score in zip(sts.train.first, sts.train.second, sts.train.require_labels().tolist(), strict=True):
        shared = [(x[0] == y[0]) * (1 if x == y else 0.5) for x, y in zip(facts(a), facts(b), strict=True)]
        assert sum(shared) == score


def test_every_class_is_in_every_split_and_tests_have_no_labels() -> None:
    for task in made_tasks(rows=48):
        for rows in (task.train, task.dev, task.validation):
            assert len(torch.unique(task.class_labels(rows))) == task.num_classes
        assert task.test is not None and task.test.labels is None and len(task.test) == 12


@pytest.mark.parametrize("rows", [7, True, 8.0])
def test_too_few_rows_are_one_line(rows: int) -> None:
    with pytest.raises(InputError, match="at least 8"):
        made_tasks(rows=rows)
