"""Token ids of one or more segments put into a sequence with the tokenizer's special tokens, and padded batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from metapretrain.data.documents import Corpus, Documents, tokenize_documents
from metapretrain.errors import InputError

Ids = Sequence[int] | NDArray[np.int32]
Batch = dict[str, Tensor]


class Frame:
    """How a tokenizer's sequences are put together, and how wide batches are.

    Args:
        tokenizer: of the transformers library, with padding, mask and unknown tokens.
        max_length: tokens of a sequence at most, special ones included.
        multiple: widths of batches are multiples of it; with `max_length` all batches have one width, which CUDA
            graphs and joint passes over several tasks need.

    Attributes:
        mask_id: of the mask token.
        typed: whether the tokenizer gives token types.

    Raises:
        InputError: a token is missing, or the length is too small or no multiple of `multiple`.

    Example:
        >>> from metapretrain.models.tiny_text import tiny_tokenizer
        >>> frame = Frame(tiny_tokenizer(), max_length=16)
        >>> ids, types, starts = frame.sequence([7, 8], [9])
        >>> ids.tolist(), types.tolist(), starts
        ([2, 7, 8, 3, 9, 3], [0, 0, 0, 0, 1, 1], [1, 4])
        >>> frame.pad([(ids, types)])["attention_mask"].shape
        torch.Size([1, 16])
    """

    def __init__(self, tokenizer: Any, max_length: int = 128, multiple: int = 16) -> None:
        missing = [name for name in ("pad", "mask") if getattr(tokenizer, f"{name}_token_id") is None]
        if missing:
            raise InputError(f"the tokenizer has no {missing[0]} token; set tokenizer.{missing[0]}_token")
        if max_length < 16 or multiple < 1 or max_length % multiple:
            raise InputError(f"max_length must be a multiple of {multiple} of at least 16, got {max_length}")
        self.tokenizer, self.max_length, self.multiple = tokenizer, max_length, multiple
        self.pad_id, self.mask_id = int(tokenizer.pad_token_id), int(tokenizer.mask_token_id)
        self.typed = "token_type_ids" in tokenizer.model_input_names
        bare = tokenizer("a", add_special_tokens=False)["input_ids"]
        pair = list(tokenizer("a", "a")["input_ids"])
        first = _find(pair, bare, 0)
        second = _find(pair, bare, first + len(bare))
        self.prefix = pair[:first]
        self.middle = pair[first + len(bare) : second]
        self.suffix = pair[second + len(bare) :]
        special = set(tokenizer.all_special_ids)
        self._corpora: dict[tuple[int, bool], tuple[Documents, Corpus]] = {}
        self.pieces = np.array([i for i in range(len(tokenizer)) if i not in special], np.int64)

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return len(self.tokenizer)

    def room(self, segments: int = 1) -> int:
        """Tokens that `segments` segments can have together."""
        return self.max_length - len(self.prefix) - len(self.suffix) - (segments - 1) * len(self.middle)

    def corpus(self, texts: Documents, *, lower: bool = False) -> Corpus:
        """The tokens of documents, made the first time that a task asks for them."""
        key = id(texts), lower  # the texts are kept beside, so that no others can have their id
        if key not in self._corpora:
            self._corpora[key] = texts, tokenize_documents(texts, self.tokenizer, lower=lower)
        return self._corpora[key][1]

    def ids(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens."""
        return list(self.tokenizer(text, add_special_tokens=False, truncation=False, verbose=False)["input_ids"])

    def all_ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of texts, without special tokens."""
        if not texts:
            return []
        options = {"add_special_tokens": False, "truncation": False, "padding": False, "verbose": False}
        return list(self.tokenizer(list(texts), return_attention_mask=False, **options)["input_ids"])

    def cut(self, *segments: Ids) -> list[Ids]:
        """Segments cut at their ends so that they fit, each time the longest."""
        sizes, room = [len(segment) for segment in segments], self.room(len(segments))
        while sum(sizes) > room:
            longest = sizes.index(max(sizes))
            others = sorted(sizes)[-2] if len(sizes) > 1 else 0
            sizes[longest] -= max(1, min(sum(sizes) - room, sizes[longest] - others))
        return [segment[:size] for segment, size in zip(segments, sizes, strict=True)]

    def sequence(self, *segments: Ids) -> tuple[NDArray[np.int64], NDArray[np.int64], list[int]]:
        """Put segments together.

        Returns:
            ids int64 (L,), token types int64 (L,): 0 for the first segment and 1 for the others, and where each
            segment begins.
        """
        parts: list[Ids] = [self.prefix]
        starts, size, first = [], len(self.prefix), 0
        for number, segment in enumerate(segments):
            if number:
                parts.append(self.middle)
                size += len(self.middle)
            if number == 1:
                first = size
            starts.append(size)
            parts.append(segment)
            size += len(segment)
        parts.append(self.suffix)
        ids = np.concatenate([np.asarray(part, np.int64) for part in parts])
        types = np.zeros(len(ids), np.int64)
        if first:
            types[first:] = 1
        return ids, types, starts

    def width(self, lengths: Sequence[int]) -> int:
        """Width of a batch of sequences of these lengths.

        Raises:
            InputError: one is longer than `max_length`.
        """
        longest = max(lengths)
        if longest > self.max_length:
            raise InputError(f"a sequence of {longest} tokens does not fit max_length {self.max_length}")
        return -(-longest // self.multiple) * self.multiple

    def pad(self, rows: Sequence[tuple[NDArray[np.int64], NDArray[np.int64]]]) -> Batch:
        """A padded batch of (ids, types): `input_ids`, `attention_mask` and, where used, `token_type_ids` (B, L)."""
        lengths = np.array([len(ids) for ids, _ in rows])
        shape = len(rows), self.width(lengths.tolist())
        real = np.arange(shape[1]) < lengths[:, None]
        ids, types = np.full(shape, self.pad_id), np.zeros(shape, np.int64)
        ids[real] = np.concatenate([row[0] for row in rows])
        types[real] = np.concatenate([row[1] for row in rows])
        batch = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(real.astype(np.int64))}
        return batch | ({"token_type_ids": torch.from_numpy(types)} if self.typed else {})


def _find(ids: list[int], part: list[int], begin: int) -> int:
    for place in range(begin, len(ids)):
        if ids[place : place + len(part)] == part:
            return place
    raise InputError("the tokenizer does not put the two texts of a pair one after the other")
