"""Labels as words of the model's vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from typing import Any

import torch
from torch import Tensor

from metapretrain.errors import InputError
from metapretrain.prompts.tokens import continued_ids


class Verbalizer:
    """One word a label, in the order of the labels, checked against a tokenizer.

    Args:
        words: for example terrible, bad, maybe, good, great for five classes (Huang et al., section 3.1).
        tokenizer: of transformers.
        several: allow words of several tokens; a word's score is then the sum of its tokens' log-probabilities.
        space: a space stands before the answer in the template.

    Raises:
        InputError: fewer than two words, a word that is empty, unknown to the tokenizer or (unless `several`)
            of several tokens, or two labels with the same tokens or one the beginning of the other.

    Example:
        >>> from metapretrain.models.tiny_text import tiny_tokenizer
        >>> Verbalizer(["no", "ok"], tiny_tokenizer())
        Verbalizer(no, ok)
        >>> Verbalizer(["no", "yes"], tiny_tokenizer())
        Traceback (most recent call last):
        ...
        metapretrain.errors.InputError: label word 'yes' is 2 tokens (ye ##s); use a word of one token, or pass ...
    """

    def __init__(self, words: Sequence[str], tokenizer: Any, *, several: bool = False, space: bool = True) -> None:
        if not isinstance(words, list | tuple) or len(words) < 2 or not all(isinstance(word, str) for word in words):
            raise InputError(f"give one word for each of at least two labels, not {words!r}")
        empty = [label for label, word in enumerate(words) if not word.strip()]
        if empty:
            raise InputError(f"the word of label {empty[0]} is empty")
        self.words = tuple(word.strip() for word in words)
        self.tokenizer, self.several, self.space = tokenizer, several, space
        self.tokens = continued_ids(tokenizer, [f" {word}" if space else word for word in self.words])
        self._check_known()
        self._check_single()
        self._check_distinct()
        self.longest = max(map(len, self.tokens))
        self._padded: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def __len__(self) -> int:
        return len(self.words)

    def __repr__(self) -> str:
        return f"Verbalizer({', '.join(self.words)})"

    def padded(self, device: torch.device | str | None = None) -> tuple[Tensor, Tensor]:
        """Ids int64 (C, T) and which of them are tokens of the word (C, T), bool; copied to a device once."""
        where = torch.device("cpu" if device is None else device)
        if where not in self._padded:
            with torch.inference_mode(False):  # a training may use them next
                self._padded[where] = self._padded_on(where)
        return self._padded[where]

    def _padded_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        lengths = torch.tensor([len(ids) for ids in self.tokens])
        real = torch.arange(self.longest) < lengths[:, None]
        ids = torch.zeros(real.shape, dtype=torch.int64)
        ids[real] = torch.tensor([token for ids in self.tokens for token in ids])
        return ids.to(device), real.to(device)

    def _check_known(self) -> None:
        unknown = self.tokenizer.unk_token_id
        for word, ids in zip(self.words, self.tokens, strict=True):
            # GPT-2 names an ordinary token as its unknown one, which its byte fallback never gives.
            if not ids or (unknown is not None and unknown in ids):
                raise InputError(f"label word {word!r} is unknown to {type(self.tokenizer).__name__}; use another one")

    def _check_single(self) -> None:
        for word, ids in zip(self.words, self.tokens, strict=True):
            if len(ids) > 1 and not self.several:
                parts = " ".join(self.tokenizer.convert_ids_to_tokens(ids))
                raise InputError(
                    f"label word {word!r} is {len(ids)} tokens ({parts}); use a word of one token, or pass several=True"
                )

    def _check_distinct(self) -> None:
        for (word, ids), (other, longer) in permutations(zip(self.words, self.tokens, strict=True), 2):
            if longer[: len(ids)] == ids:
                how = "the same tokens as" if ids == longer else "the first tokens of"
                raise InputError(f"label word {word!r} is {how} {other!r}: they cannot be told apart")
