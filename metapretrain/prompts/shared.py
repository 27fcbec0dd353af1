"""Decoder-only models on rows that share a prompt: its states are computed once, and no row sees another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

KINDS = ("llama",)  # rotary positions that are given, and attention that is taken from transformers' registry
NAME = "metapretrain_shared_prompt"


def can_share(model: Any) -> bool:
    """Whether :func:`shared_prompt` works for this model of transformers.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> can_share(BertModel(BertConfig(hidden_size=8, num_attention_heads=1, num_hidden_layers=1, vocab_size=9)))
        False
    """
    return model.config.model_type in KINDS


@contextmanager
def shared_prompt(model: Any, length: int, width: int) -> Iterator[None]:
    """Attention of sequences (K, L + m N): a prompt of `length` L, then m rows of `width` N that see it and themselves.

    Within it, every forward pass of `model` has that form; it is for models that :func:`can_share`.

    A row costs N positions instead of L + N, and attention of N x (L + N) instead of (L + N)^2 pairs. Nothing waits for
    the device, as transformers does to look for several sequences in one.
    """
    from transformers import AttentionInterface

    config = model.config
    before, config._attn_implementation = config._attn_implementation, NAME
    # Models read the function's name anew in each layer of each pass, so this is the one that they call inside.
    AttentionInterface.register(NAME, _Attention(length, width))
    try:
        yield
    finally:
        config._attn_implementation = before


def positions(length: int, width: int, rows: int, device: torch.device) -> Tensor:
    """The place of each token behind the prompt of its own row, int64 (1, L + m N).

    Example:
        >>> positions(2, 3, 2, torch.device("cpu")).tolist()
        [[0, 1, 2, 3, 4, 2, 3, 4]]
    """
    inside = torch.arange(width, device=device) + length
    return torch.cat([torch.arange(length, device=device), inside.repeat(rows)])[None]


class _Attention:
    def __init__(self, length: int, width: int) -> None:
        self.length, self.width = length, width
        self.masks: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None,
        scaling: float | None = None, dropout: float = 0.0, **_: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """Attention of query (K, H, S, d) to key and value (K, G, S, d) of G groups of heads; returns (K, S, H, d)."""
        groups = query.shape[1] // key.shape[1]
        if groups > 1:  # the fused kernels that take a mask know no groups
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        tasks, count = len(query), (query.shape[2] - self.length) // self.width
        own = self._rows(query, count).flatten(0, 1)
        keys, values = (self._with_prompt(states, count).flatten(0, 1) for states in (key, value))
        mask = self._mask(query.device, query.dtype)
        found = scaled_dot_product_attention(own, keys, values, attn_mask=mask, scale=scaling, dropout_p=dropout)
        out: Tensor = found.unflatten(0, (tasks, count)).transpose(2, 3).flatten(1, 2)  # (K, m N, H, d)
        if not self.length:
            return out, None
        heads = [states[:, :, : self.length] for states in (query, key, value)]
        first = scaled_dot_product_attention(
            heads[0], heads[1], heads[2], is_causal=True, scale=scaling, dropout_p=dropout
        )
        return torch.cat([first.transpose(1, 2), out], 1), None

    def _rows(self, states: Tensor, count: int) -> Tensor:
        """States of the rows (K, m, H, N, d)."""
        rows: Tensor = states[:, :, self.length :].unflatten(2, (count, self.width))
        return rows.transpose(1, 2)

    def _with_prompt(self, states: Tensor, count: int) -> Tensor:
        """States of the rows with those of their prompt in front, (K, m, H, L + N, d)."""
        prompt = states[:, None, :, : self.length].expand(-1, count, -1, -1, -1)
        return torch.cat([prompt, self._rows(states, count)], 3)

    def _mask(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """What is added to the scores (N, L + N): a token sees the prompt and its row up to itself."""
        if (device, dtype) not in self.masks:
            seen = torch.ones(self.width, self.length + self.width, dtype=torch.bool, device=device).tril(self.length)
            added = torch.zeros(seen.shape, dtype=dtype, device=device)
            self.masks[device, dtype] = added.masked_fill(~seen, -torch.inf)
        return self.masks[device, dtype]
