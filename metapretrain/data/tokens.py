"""Token ids of a whole split in one flat array on the device, from which batches are gathered without the CPU."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from metapretrain.checks import whole
from metapretrain.data.texts import TextSet
from metapretrain.errors import InputError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tokens:
    """The token ids of N rows, one after the other, with where each begins.

    Attributes:
        ids: int32 (T,), the T tokens of all rows.
        types: token types uint8 (T,); None where the tokenizer gives none.
        starts, sizes: int64 (N,), where a row begins in `ids`, and its tokens; `lengths`: sizes on the CPU.
        pad_id, pad_type: id and token type that fill a row up to the width of its batch.
        truncated: number of rows cut to the longest length allowed.
        second: tokens of the other sentences, where pairs are encoded separately.

    Example:
        >>> tokens = Tokens.from_rows([[101, 7, 102], [101, 102]], pad_id=0)
        >>> batch = tokens.gather(torch.tensor([1, 0]), 4)
        >>> batch["input_ids"].tolist(), batch["attention_mask"].tolist()
        ([[101, 102, 0, 0], [101, 7, 102, 0]], [[1, 1, 0, 0], [1, 1, 1, 0]])
    """

    ids: Tensor
    types: Tensor | None
    starts: Tensor
    sizes: Tensor
    lengths: Tensor
    pad_id: int = 0
    pad_type: int = 0
    truncated: int = 0
    second: Tokens | None = None

    @classmethod
    def from_rows(
        cls,
        rows: Sequence[Sequence[int]],
        types: Sequence[Sequence[int]] | None = None,
        *,
        pad_id: int = 0,
        pad_type: int = 0,
        truncated: int = 0,
        second: Tokens | None = None,
    ) -> Tokens:
        """Lay the token ids of N rows, and their token types, end to end; a row without a token is an InputError."""
        lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        if len(rows) and int(lengths.min()) < 1:
            raise InputError(f"row {int(lengths.argmin())} has no token: an empty text cannot be encoded")
        starts = lengths.cumsum(0) - lengths
        flat = None if types is None else torch.from_numpy(_flat(types, np.uint8))
        ids = torch.from_numpy(_flat(rows, np.int32))
        return cls(ids, flat, starts, lengths, lengths, pad_id, pad_type, truncated, second)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def widths(self) -> Tensor:
        """Width that a row needs, int64 (N,) on the CPU: its length, or the greater one of a separate pair."""
        return self.lengths if self.second is None else torch.maximum(self.lengths, self.second.lengths)

    def to(self, device: torch.device | str) -> Tokens:
        """Return the tokens with the arrays that :meth:`gather` reads on `device`."""
        return replace(
            self,
            ids=self.ids.to(device),
            types=None if self.types is None else self.types.to(device),
            starts=self.starts.to(device),
            sizes=self.sizes.to(device),
            second=None if self.second is None else self.second.to(device),
        )

    def gather(self, rows: Tensor, width: int) -> dict[str, Tensor]:
        """Return a padded batch of `rows` int64 (B,) and the width L, made on the device without waiting for it.

        ``input_ids``, ``attention_mask`` and, where the tokenizer gives them, ``token_type_ids`` are int64 (B, L).
        Raises InputError: a row is longer than `width` (checked on the CPU only).
        """
        columns = torch.arange(width, device=self.ids.device)
        sizes = self.sizes[rows].unsqueeze(1)
        if sizes.device.type == "cpu" and len(sizes) and int(sizes.max()) > width:
            raise InputError(f"a row of {int(sizes.max())} tokens does not fit a batch of width {width}")
        real = columns < sizes
        places = (self.starts[rows].unsqueeze(1) + columns).clamp_(max=len(self.ids) - 1)
        batch = {"input_ids": torch.where(real, self.ids[places].long(), self.pad_id), "attention_mask": real.long()}
        if self.types is not None:
            batch["token_type_ids"] = torch.where(real, self.types[places].long(), self.pad_type)
        return batch


def padded_width(lengths: Tensor, multiple: int = 16) -> int:
    """Return the greatest of `lengths` (B,), on the CPU, rounded up to a multiple so that few widths occur."""
    return -(-int(lengths.max()) // multiple) * multiple


def tokenize(texts: TextSet, tokenizer: Any, *, max_length: int, joined: bool, name: str = "") -> Tokens:
    """Tokenise every row of a split once, by a tokenizer of the transformers library; rows are padded at their right.

    `max_length` counts special tokens too; of a joined pair the longer sentence is cut first. `joined`: a pair is one
    sequence with the separator between; else `second` holds the other sentences.
    `name`: of the rows in the log, which tells how many are cut; empty: that of their split.
    Raises InputError: the tokenizer has no padding token, `max_length` leaves no room, or a text gives no token.
    """
    if tokenizer.pad_token_id is None:
        raise InputError("the tokenizer has no padding token; set tokenizer.pad_token")
    name = name or texts.split
    if texts.second is None or joined:
        return _tokens(tokenizer, texts.first, texts.second, max_length, name)
    second = _tokens(tokenizer, texts.second, None, max_length, name)
    return replace(_tokens(tokenizer, texts.first, None, max_length, name), second=second)


def _tokens(tokenizer: Any, first: list[str], second: list[str] | None, max_length: int, name: str) -> Tokens:
    special = tokenizer.num_special_tokens_to_add(pair=second is not None)
    whole(f"max_length, with {special} special tokens,", max_length, special + 1)
    if not first:
        return Tokens.from_rows([], pad_id=tokenizer.pad_token_id)
    # Cutting only the rows that are too long tells how many there are with any kind of tokenizer.
    bare = {"padding": False, "return_attention_mask": False}
    coded = tokenizer(first, second, truncation=False, verbose=False, **bare)
    ids, types = list(coded["input_ids"]), coded.get("token_type_ids")
    types = None if types is None else list(types)
    long = [row for row, tokens in enumerate(ids) if len(tokens) > max_length]
    if long:
        logger.info("%s: %d of %d rows are cut to %d tokens", name, len(long), len(ids), max_length)
        pair = None if second is None else [second[row] for row in long]
        shown = [first[row] for row in long]
        cut = tokenizer(shown, pair, truncation="longest_first", max_length=max_length, **bare)
        for place, row in enumerate(long):
            ids[row] = cut["input_ids"][place]
            if types is not None:
                types[row] = cut["token_type_ids"][place]
    pads = {"pad_id": tokenizer.pad_token_id, "pad_type": tokenizer.pad_token_type_id}
    return Tokens.from_rows(ids, types, **pads, truncated=len(long))


def _flat(rows: Sequence[Sequence[int]], dtype: Any) -> np.ndarray[Any, Any]:
    return np.fromiter(chain.from_iterable(rows), dtype, sum(map(len, rows)))
