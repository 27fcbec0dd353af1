"""Heads over sentence embeddings: one text, a pair through an MLP, a pair by its cosine."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from metapretrain.errors import InputError, one_of

COMBINES = ("add", "concat", "mult")


class ClassHead(nn.Module):
    """Dropout and one linear layer over an embedding of one text, or of a pair encoded together (table 3).

    Args:
        features: D.
        outputs: C; with 1 the result is (B,).
        dropout: probability, 0..1.

    Source: prototypical pretraining for text, appendix A.1.1.

    Example:
        >>> ClassHead(384, 5)(torch.zeros(2, 384)).shape
        torch.Size([2, 5])
    """

    def __init__(self, features: int, outputs: int, dropout: float = 0.3) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(features, outputs)

    def forward(self, z: Tensor) -> Tensor:
        """Embeddings (B, D) to logits (B, C), or to scores (B,) with one output."""
        return _one_column(self.output(self.dropout(z)))


class PairHead(nn.Module):
    """An MLP over two embeddings: dropout and a linear layer for each, their combination, a linear layer.

    It has no activation (tables 4 and 5): `mult` is bilinear in the two embeddings, `add` and `concat` are linear.

    Args:
        features: D.
        outputs: C; with 1 the result is (B,).
        combine: step 3 of the tables: `mult`, `add` or `concat`.
        dropout: probability, 0..1.

    Raises:
        InputError: unknown combination.

    Source: prototypical pretraining for text, appendix A.1.1; `add` and `concat` are rows of its poster.

    Example:
        >>> head = PairHead(384)
        >>> sum(p.numel() for p in head.parameters())
        296065
        >>> head(torch.zeros(2, 384), torch.zeros(2, 384)).shape
        torch.Size([2])
    """

    def __init__(self, features: int, outputs: int = 1, combine: str = "mult", dropout: float = 0.3) -> None:
        super().__init__()
        self.combine = one_of("combination", combine, COMBINES)
        self.dropout = nn.Dropout(dropout)
        self.first = nn.Linear(features, features)
        self.second = nn.Linear(features, features)
        self.output = nn.Linear(2 * features if combine == "concat" else features, outputs)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """Embeddings (B, D) of both sentences to logits (B, C), or to scores (B,) with one output."""
        a, b = self.first(self.dropout(a)), self.second(self.dropout(b))
        if self.combine == "mult":
            z = a * b
        elif self.combine == "add":
            z = a + b
        else:
            z = torch.cat([a, b], dim=-1)
        return _one_column(self.output(z))


def share_hidden(head: PairHead, other: PairHead) -> None:
    """Let `other` use the hidden layers of `head`: one pair of linear layers, trained by both tasks.

    Raises:
        InputError: their embeddings differ in size.

    Example:
        >>> para, sts = PairHead(8), PairHead(8)
        >>> share_hidden(para, sts)
        >>> sum(p.numel() for p in nn.ModuleList([para, sts]).parameters())  # 2 x 72 hidden, 2 x 9 output
        162
    """
    sizes = head.first.in_features, other.first.in_features
    if sizes[0] != sizes[1]:
        raise InputError(f"heads over {sizes[0]} and {sizes[1]} features cannot share hidden layers; build both alike")
    other.first, other.second = head.first, head.second


class CosineHead(nn.Module):
    """Similarity of two embeddings as a score: low + (high - low) ReLU(cos(a, b)); it has no parameters.

    Pairs with a negative cosine score `low` and give no gradient.

    Args:
        low, high: the range of the scores.

    Raises:
        InputError: `low` is not below `high`.

    Source: prototypical pretraining for text, section 4.2.

    Example:
        >>> CosineHead()(torch.tensor([[1.0, 0.0]]), torch.tensor([[3.0, 4.0]]))
        tensor([3.])
    """

    def __init__(self, low: float = 0.0, high: float = 5.0) -> None:
        super().__init__()
        if not low < high:
            raise InputError(f"scores must have a range: low {low} is not below high {high}")
        self.low, self.high = low, high

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """Embeddings (B, D) of both sentences to scores (B,) in low..high."""
        return self.low + (self.high - self.low) * F.relu(F.cosine_similarity(a, b, dim=-1))


def _one_column(z: Tensor) -> Tensor:
    return z.squeeze(-1) if z.shape[-1] == 1 else z
