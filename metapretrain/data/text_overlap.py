"""Near-duplicates of texts: their normalised form, and how many training rows another split has too."""

from __future__ import annotations

import re
import unicodedata

from metapretrain.data.texts import TextSet


def normalise_text(text: str) -> str:
    """Return `text` as near-duplicates are compared: NFKC, lower case, letters and digits, one space between words.

    A text without letters and digits keeps its characters.

    Example:
        >>> normalise_text(" What’s   UP? ") == normalise_text("what's up")
        True
    """
    lowered = unicodedata.normalize("NFKC", text).casefold()
    return " ".join(re.findall(r"\w+", lowered)) or " ".join(lowered.split())


def pair_keys(rows: TextSet) -> list[tuple[str, ...]]:
    """Return for each row its normalised sentences, sorted, so that a pair in either order has one key."""
    second = rows.second if rows.second is not None else [None] * len(rows)
    return [
        tuple(sorted(normalise_text(text) for text in pair if text is not None))
        for pair in zip(rows.first, second, strict=True)
    ]


def overlap(train: TextSet, dev: TextSet) -> dict[str, int]:
    """Count the training rows that dev has too, by normalised text.

    Returns:
        ``pairs``: training rows whose whole pair (in either order) or sentence is in dev; ``sentences``: training
        rows that share at least one sentence with dev.

    Example:
        >>> train = TextSet(["A b.", "x", "y"], ["c", "a B", "z"])
        >>> overlap(train, TextSet(["C", "q"], ["a b", "r"]))
        {'pairs': 1, 'sentences': 2}
    """
    keys = pair_keys(dev)
    whole, single = set(keys), {text for key in keys for text in key}
    own = pair_keys(train)
    return {
        "pairs": sum(key in whole for key in own),
        "sentences": sum(any(text in single for text in key) for key in own),
    }
