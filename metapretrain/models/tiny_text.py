"""A text model of 60 thousand parameters without any file: for tests, smoke runs and a first look."""

from __future__ import annotations

import string
from typing import Any

from metapretrain.models.bert import SPECIAL, random_bert, wordpiece_tokenizer

_POSITIONS = 256


def tiny_tokenizer() -> Any:
    """A BERT tokenizer whose pieces are pairs of letters and single ASCII characters; nothing is downloaded.

    Example:
        >>> tiny_tokenizer().tokenize("A tiny test.")
        ['a', 'ti', '##ny', 'te', '##st', '.']
    """
    letters = string.ascii_lowercase
    inside = [*letters, *string.digits, *(a + b for a in letters for b in letters)]
    pieces = [*SPECIAL, *string.punctuation, *inside, *(f"##{piece}" for piece in inside)]
    return wordpiece_tokenizer(pieces, max_length=_POSITIONS)


def tiny_model(vocabulary: int, *, seed: int = 0, dropout: float | None = None) -> Any:
    """BERT of 2 layers and 32 features with random weights; the global random state is left alone.

    Example:
        >>> tiny_model(100).config.hidden_size
        32
    """
    rate = 0.1 if dropout is None else dropout
    return random_bert(
        vocabulary, layers=2, features=32, heads=2, hidden=64, positions=_POSITIONS, seed=seed, dropout=rate
    )
