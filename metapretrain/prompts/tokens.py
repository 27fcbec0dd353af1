"""Token ids of pieces of text, so that put together they are what the tokenizer makes of the whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from metapretrain.errors import InputError

Ids = list[int]
ANCHORS = ("a", "x", "0", "the")


def plain_ids(tokenizer: Any, texts: Sequence[str]) -> list[Ids]:
    """Ids of each text at the start of a sequence; what looks like a special token in it is plain text.

    Raises:
        InputError: no tokenizer, or a text that is no string of whole characters.
    """
    if not texts:
        return []
    if not callable(tokenizer):
        raise InputError(f"give a tokenizer of transformers, not a {type(tokenizer).__name__}")
    for text in texts:
        if not isinstance(text, str) or not _is_unicode(text):
            raise InputError(f"{text!r} is no text that can be tokenised; give a string of whole characters")
    found = tokenizer(
        list(texts),
        add_special_tokens=False,
        split_special_tokens=True,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )
    return [list(row) for row in found["input_ids"]]


def _is_unicode(text: str) -> bool:
    """Whether it can be written as UTF-8, which half of a surrogate pair cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def continued_ids(tokenizer: Any, texts: Sequence[str]) -> list[Ids]:
    """Ids of each text where it follows other text: `" good"` is one token of GPT-2, and `"▁good"` one of T5.

    Each is read behind an anchor whose own ids are then cut off; a text that merges with all anchors is read
    as the start of a sequence.
    """
    found: dict[int, Ids] = {row: [] for row, text in enumerate(texts) if not text}
    for anchor in ANCHORS:
        rows = [row for row in range(len(texts)) if row not in found]
        head = plain_ids(tokenizer, [anchor])[0]
        for row, ids in zip(rows, plain_ids(tokenizer, [anchor + texts[row] for row in rows]), strict=True):
            if head and ids[: len(head)] == head:
                found[row] = ids[len(head) :]
    rows = [row for row in range(len(texts)) if row not in found]
    found.update(zip(rows, plain_ids(tokenizer, [texts[row].strip() for row in rows]), strict=True))
    return [found[row] for row in range(len(texts))]


def special_ids(tokenizer: Any) -> tuple[Ids, Ids]:
    """The special tokens that the tokenizer puts before and after a text.

    Raises:
        InputError: the tokenizer changes the text itself when it adds them.
    """
    plain, whole = plain_ids(tokenizer, ["a"])[0], list(tokenizer("a")["input_ids"])
    for start in range(len(whole) - len(plain) + 1):
        if plain and whole[start : start + len(plain)] == plain:
            return whole[:start], whole[start + len(plain) :]
    name = type(tokenizer).__name__
    raise InputError(f"{name} makes other ids of a text when it adds special tokens; use another tokenizer")


def token_id(tokenizer: Any, token: str | None) -> int | None:
    """Id of a token of the vocabulary, or None."""
    found = None if token is None else tokenizer.convert_tokens_to_ids(token)
    return None if found is None or found == tokenizer.unk_token_id else int(found)
