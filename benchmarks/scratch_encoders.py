"""Encoders of `run_schedule.py`: BERT from scratch with word pieces of the texts, or any that has a name."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from metapretrain.errors import one_of
from metapretrain.models.language_models import SPECIAL, random_bert, wordpiece_tokenizer
from metapretrain.models.text_encoders import TextEncoder, build_text_encoder, check_length, longest

# Layers, features and attention heads of a BERT encoder; the feed-forward part has 4 times the features.
SIZES = {"mini": (4, 128, 2), "small": (4, 256, 4), "medium": (8, 384, 6)}
VOCABULARY = 8000
MOST_LETTERS = 6  # of a piece that is no word


def word_pieces(texts: Iterable[str], vocabulary: int = VOCABULARY) -> list[str]:
    """The characters, frequent words, and frequent begins and ends of the other words, of some texts.

    A function of the texts, in any order: the trainers of the tokenizers library settle ties by chance.

    Example:
        >>> word_pieces(["the cat sat", "the cat"], 24)[-2:]
        ['cat', 'the']
    """
    words = Counter(word for text in texts for word in re.findall(r"\w+|[^\w\s]", text))
    letters = sorted({letter for word, count in words.items() if count > 1 for letter in word})
    single = [*letters, *(f"##{letter}" for letter in letters)]
    room = max(0, vocabulary - len(SPECIAL) - len(single))
    often = [word for word in _most_frequent(words) if len(word) > 1 and words[word] > 1][: room * 3 // 4]
    parts: Counter[str] = Counter()
    whole = set(often)
    for word in words.keys() - whole:
        for size in range(2, min(MOST_LETTERS, len(word) - 1) + 1):
            parts[word[:size]] += words[word]
            parts[f"##{word[-size:]}"] += words[word]
    kept = [part for part in _most_frequent(parts) if parts[part] > 1 and part not in whole]
    return [*SPECIAL, *single, *kept[: room - len(often)], *sorted(often)]


def _most_frequent(counts: Mapping[str, int]) -> list[str]:
    return sorted(counts, key=lambda name: (-counts[name], name))


def make_tokenizer(texts: Iterable[str], vocabulary: int = VOCABULARY, *, max_length: int = 128) -> Any:
    """A cased BERT tokenizer whose pieces are :func:`word_pieces` of the texts.

    Args:
        vocabulary: pieces at most, unless there are more characters.

    Example:
        >>> make_tokenizer(["the cat sat on the mat"] * 2, 60).tokenize("the mats")
        ['the', 'mat', '##s']
    """
    pieces = dict.fromkeys(word_pieces(texts, vocabulary))
    return wordpiece_tokenizer(pieces, max_length=max_length, lowercase=False)


def new_encoder(size: str, tokenizer: Any, *, seed: int, dropout: float = 0.1) -> TextEncoder:
    """A BERT encoder of one of :data:`SIZES` with random weights; the global random state is left alone.

    Example:
        >>> from metapretrain.models.language_models import tiny_tokenizer
        >>> encoder = new_encoder("mini", tiny_tokenizer(), seed=0)
        >>> encoder.features, encoder.encode(["a text"]).shape
        (128, torch.Size([1, 128]))
    """
    layers, features, heads = SIZES[one_of("encoder from scratch", size, SIZES)]
    model = random_bert(
        len(tokenizer),
        layers=layers,
        features=features,
        heads=heads,
        hidden=4 * features,
        positions=tokenizer.model_max_length,
        seed=seed,
        dropout=dropout,
    )
    return TextEncoder(model, tokenizer, "mean")


class Encoders:
    """Makes the encoder of each run: of a size from scratch, or any that `build_text_encoder` knows.

    Args:
        name: one of :data:`SIZES`, or a name for `build_text_encoder`.
        texts: training texts that the word pieces of an encoder from scratch come from.
        max_length: tokens of a sequence; at most the positions of the encoder.
    """

    def __init__(self, name: str, texts: Sequence[str] = (), *, max_length: int = 128) -> None:
        self.name = name
        if name in SIZES:
            self.tokenizer = make_tokenizer(texts, max_length=max_length)
        else:
            encoder = self(0)
            check_length(max_length, longest(encoder.model, encoder.tokenizer))
            self.tokenizer = encoder.tokenizer

    def __call__(self, seed: int) -> TextEncoder:
        """An encoder; only one from scratch depends on the seed."""
        if self.name in SIZES:
            return new_encoder(self.name, self.tokenizer, seed=seed)
        return build_text_encoder(self.name, seed=seed, modules=False)
