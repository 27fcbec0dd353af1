"""Label words: one token each of this tokenizer, or several on request; never two alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from metapretrain.errors import InputError
from metapretrain.prompts import Verbalizer
from tests.prompts.tiny import KINDS, WORDS, tokenizer_of


@pytest.mark.parametrize("name", KINDS)
def test_words_are_the_tokens_that_follow_the_tail(name: str) -> None:
    tokenizer = tokenizer_of(name)
    for word, ids in zip(WORDS, Verbalizer(WORDS, tokenizer).tokens, strict=True):
        assert tokenizer(f"It was {word}", add_special_tokens=False)["input_ids"][-1:] == ids


@pytest.mark.parametrize("name", KINDS)
def test_a_word_that_splits_is_refused_or_scored(name: str) -> None:
    with pytest.raises(InputError, match=r"'film' is \d tokens|'badly' is \d tokens"):
        Verbalizer(["good", "badly"], tokenizer_of(name))
    several = Verbalizer(["good", "badly"], tokenizer_of(name), several=True)
    with torch.inference_mode():
        ids, real = several.padded()
    assert several.padded("cpu")[0] is ids and not ids.is_inference()  # copied once, and of use in training
    assert ids.shape == real.shape == (2, several.longest) and several.longest > 1
    assert [row[keep].tolist() for row, keep in zip(ids, real, strict=True)] == several.tokens


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["good", "good"], "same tokens"),
        (["good", "Good"], "same tokens"),
        (["good", " "], "label 1 is empty"),
        (["good"], "at least two"),
        ("good", "at least two"),
        ([1, 2], "at least two"),
        (["good", "退屈"], "unknown to"),
        (["good", "\ud83d"], "is no text that can be tokenised"),
    ],
)
def test_bad_words(words: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Verbalizer(words, tokenizer_of("bert"))


def test_a_word_that_another_begins_with_is_refused() -> None:
    with pytest.raises(InputError, match="'good' is the first tokens of 'good film'"):
        Verbalizer(["good film", "good"], tokenizer_of("bert"), several=True)
