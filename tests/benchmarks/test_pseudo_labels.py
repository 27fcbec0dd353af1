"""Pseudo labels: right where classes can be told apart, balanced, the surest first."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.pseudo_labels import pseudo_labelled
from metapretrain.errors import InputError


def clouds(counts: tuple[int, ...], seed: int) -> tuple[Tensor, Tensor]:
    """Points around (8 label, 0), and their labels."""
    labels = torch.cat([torch.full((count,), label) for label, count in enumerate(counts)])
    noise = torch.randn(len(labels), 2, generator=torch.Generator().manual_seed(seed))
    return noise + torch.stack([8.0 * labels, 0.0 * labels], 1), labels


def test_sentences_get_the_label_of_their_cloud_as_many_of_each() -> None:
    z, labels = clouds((60, 60, 60), 0)
    z_plain, truth = clouds((5, 30, 9), 1)
    plain = [f"{label} {row}" for row, label in enumerate(truth.tolist())]
    texts, about = pseudo_labelled(plain, z_plain, labels, z, rows=None, confidence=0.5)
    assert texts.require_labels().bincount().tolist() == [5, 5, 5]
    assert [int(text.split()[0]) for text in texts.first] == texts.require_labels().tolist()
    assert {about[f"recall_class_{label}"] for label in range(3)} == {1.0}
    assert (about["plain_sentences"], about["kept_sentences"]) == (44, 15)
    few, _ = pseudo_labelled(plain, z_plain, labels, z, rows=6, confidence=0.5)
    assert few.require_labels().tolist() == [0, 0, 1, 1, 2, 2]
    assert set(few.first) <= set(texts.first)  # the surest of the sure ones


def test_a_label_that_no_sentence_gets_is_an_error() -> None:
    z, labels = clouds((60, 60, 60), 0)
    z_plain, _ = clouds((5, 5), 1)
    with pytest.raises(InputError, match=r"given label 2 with a probability of 0\.5 or more"):
        pseudo_labelled(["text"] * 10, z_plain, labels, z, rows=None, confidence=0.5)
