"""Rows in front of the embedded text that are learned while the model stays as it is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from metapretrain.errors import InputError
from metapretrain.prompts.adapter import read_adapter
from metapretrain.prompts.tokens import plain_ids


class SoftPrompt(nn.Module):
    """A learned prompt of L rows, (L, D), where D is the size of the model's embeddings (Lester et al., 2021).

    Args:
        weight: initial values (L, D), floating point; copied.

    Raises:
        InputError: `weight` is not a floating point (L, D) with L, D of at least 1.

    Example:
        >>> SoftPrompt.random(100, 768)
        SoftPrompt(length=100, features=768)
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        if not isinstance(weight, Tensor) or weight.ndim != 2 or not weight.numel() or not weight.is_floating_point():
            given = f"{weight.dtype} {tuple(weight.shape)}" if isinstance(weight, Tensor) else type(weight).__name__
            raise InputError(f"a soft prompt is a floating point tensor (length, features), not {given}")
        self.weight = nn.Parameter(weight.detach().clone())

    @property
    def length(self) -> int:
        """L."""
        return self.weight.shape[0]

    @property
    def features(self) -> int:
        """D."""
        return self.weight.shape[1]

    def forward(self) -> Tensor:
        """The prompt (L, D)."""
        return self.weight

    def extra_repr(self) -> str:
        """Length and features."""
        return f"length={self.length}, features={self.features}"

    @classmethod
    def random(cls, length: int, features: int, *, spread: float = 0.5, seed: int = 0) -> SoftPrompt:
        """Uniform in (-spread, spread); 0.5 is that of Lester et al., 2021, section 3.2.

        Raises:
            InputError: a size below 1, a spread that is not above 0 and finite, a seed below 0.

        Example:
            >>> SoftPrompt.random(5, 3, spread=0.1)().abs().max().item() < 0.1
            True
        """
        _at_least_one(length=length, features=features)
        if isinstance(spread, bool) or not isinstance(spread, int | float) or not 0 < spread < math.inf:
            raise InputError(f"spread of a soft prompt must be a number above 0, not {spread!r}")
        generator = _generator(seed)
        return cls((torch.rand(length, features, generator=generator) * 2 - 1) * spread)

    @classmethod
    def from_vocabulary(
        cls, model: Any, length: int, *, seed: int = 0, among: Sequence[int] | Tensor | None = None
    ) -> SoftPrompt:
        """The model's embeddings of `length` tokens drawn at random, different ones while there are enough.

        Args:
            model: a language model of transformers.
            among: token ids to draw from, for example the most frequent ones; None: the whole vocabulary.

        Raises:
            InputError: `length` is below 1, or `among` is empty or holds ids that the model does not have.
        """
        _at_least_one(length=length)
        table = _embeddings(model)
        ids = torch.arange(len(table)) if among is None else _whole_numbers(among)
        if ids.ndim != 1 or not len(ids) or int(ids.min()) < 0 or int(ids.max()) >= len(table):
            raise InputError(f"among must hold token ids in 0..{len(table) - 1}, at least one")
        generator = _generator(seed)
        rounds = -(-length // len(ids))
        drawn = torch.cat([torch.randperm(len(ids), generator=generator) for _ in range(rounds)])[:length]
        return cls(table[ids[drawn]])

    @classmethod
    def from_text(cls, model: Any, tokenizer: Any, text: str, length: int | None = None) -> SoftPrompt:
        """The model's embeddings of the tokens of `text`, cut or repeated to `length` rows.

        Raises:
            InputError: the text has no tokens.
        """
        ids = torch.tensor(plain_ids(tokenizer, [text])[0], dtype=torch.int64)
        if not len(ids):
            raise InputError(f"the text {text!r} has no tokens; a soft prompt needs at least one row")
        length = len(ids) if length is None else length
        _at_least_one(length=length)
        return cls(_embeddings(model)[ids.repeat(-(-length // len(ids)))[:length]])

    @classmethod
    def from_adapter(cls, folder: str | Path) -> SoftPrompt:
        """The prompt of a PEFT prompt tuning adapter, saved here or by PEFT.

        Raises:
            InputError: as :func:`read_adapter`.
        """
        return cls(read_adapter(folder))


def _whole_numbers(given: Any) -> Tensor:
    try:
        ids = torch.as_tensor(given).cpu()
    except (TypeError, ValueError, RuntimeError):
        ids = torch.zeros(())
    if ids.numel() and (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool):
        raise InputError(f"among must be a list of token ids, whole numbers, not {given!r}")
    return ids.long()


def _embeddings(model: Any) -> Tensor:
    if not hasattr(model, "get_input_embeddings"):
        raise InputError(f"give a language model of transformers, not a {type(model).__name__}")
    table: Tensor = model.get_input_embeddings().weight.detach().cpu()
    return table


def _generator(seed: int) -> torch.Generator:
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise InputError(f"seed must be an integer of 0 to 2**63 - 1, not {seed!r}")
    return torch.Generator().manual_seed(seed)


def _at_least_one(**counts: int) -> None:
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise InputError(f"{name} of a soft prompt must be an integer of at least 1, not {count!r}")
