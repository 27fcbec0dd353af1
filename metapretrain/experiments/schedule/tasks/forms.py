"""The forms that tasks have: a class of a text, a label for each word, a choice among texts, a span of words."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from metapretrain.experiments.schedule.tasks.base import IGNORE, Batch, PretrainingTask
from metapretrain.models.text_encoders import TextEncoder


class PooledHead(nn.Module):
    """A linear layer, tanh, dropout and a linear layer over an embedding, as BERT's for sentences.

    Example:
        >>> PooledHead(8, 3)(torch.zeros(2, 8)).shape
        torch.Size([2, 3])
    """

    def __init__(self, features: int, outputs: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.hidden = nn.Linear(features, features)
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(features, outputs)

    def forward(self, z: Tensor) -> Tensor:
        """Embeddings (..., D) to logits (..., C)."""
        logits: Tensor = self.output(self.dropout(torch.tanh(self.hidden(z))))
        return logits


class ClassTask(PretrainingTask):
    """Cross entropy of a class of each row, from the pooled states; the batch has `labels` (B,)."""

    metric = "accuracy"
    classes: int

    def head(self, hidden: int) -> nn.Module:
        """See :class:`PretrainingTask`."""
        return PooledHead(hidden, self.classes)

    def logits(self, encoder: TextEncoder, head: nn.Module, states: Tensor, batch: Batch) -> Tensor:
        """Logits (B, C)."""
        logits: Tensor = head(encoder.pool(states, batch["attention_mask"]))
        return logits.float()

    def loss_of(self, encoder: TextEncoder, head: nn.Module, states: Tensor, batch: Batch) -> Tensor:
        """See :class:`PretrainingTask`."""
        return F.cross_entropy(self.logits(encoder, head, states, batch), batch["labels"])

    def outcome(self, encoder: TextEncoder, head: nn.Module, states: Tensor, batch: Batch) -> Batch:
        """Predicted and true classes (B,)."""
        return {"found": self.logits(encoder, head, states, batch).argmax(1), "labels": batch["labels"]}

    def measure(self, outcomes: list[Batch]) -> dict[str, float]:
        """The share of right classes."""
        found, labels = joined(outcomes, "found"), joined(outcomes, "labels")
        return {"accuracy": float((found == labels).mean())}


class LabelTask(PretrainingTask):
    """Cross entropy of a class of each word, from its first token; the batch has `labels` (B, L), IGNORE elsewhere."""

    metric = "f1"
    classes: int

    def head(self, hidden: int) -> nn.Module:
        """See :class:`PretrainingTask`."""
        return nn.Sequential(nn.Dropout(0.1), nn.Linear(hidden, self.classes))

    def loss_of(self, encoder: TextEncoder, head: nn.Module, states: Tensor, batch: Batch) -> Tensor:
        """See :class:`PretrainingTask`; 0 for a batch without any label."""
        labels = batch["labels"]
        total = F.cross_entropy(
            head(states).float().flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum"
        )
        return total / (labels != IGNORE).sum().clamp(min=1)

    def outcome(self, encoder: TextEncoder, head: nn.Module, states: Tensor, batch: Batch) -> Batch:
        """Predicted and true classes of the words that have one, and the row of each."""
        row, place = (batch["labels"] != IGNORE).nonzero(as_tuple=True)
        return {"found": head(states)[row, place].argmax(1), "labels": batch["labels"][row, place], "row": row}

    def measure(self, outcomes: list[Batch]) -> dict[str, float]:
        """F1 of class 1, its mean over all classes, and accuracy."""
        found, labels = joined(outcomes, "found"), joined(outcomes, "labels")
        each = [f1(found == label, labels == label) for label in range(self.classes)]
        return {"f1": each[1], "macro_f1": sum(each) / len(each), "accuracy": float((found == labels).mean())}


class ChoiceTask(PretrainingTask):
    """Cross entropy of the right one of C texts, by a score of each; `input_ids` (B C, L), `labels` (B,)."""

    metric = "accuracy"
    choices: int

    def head(self, hidden: int) -> nn.Module:
        """See :class:`PretrainingTask`."""
        return PooledHead(hidden, 1)

    def scores(self, encoder: TextEncoder, head: nn.Module, states: Tensor, batch: Batch) -> Tensor:
        """Scores (B, C)."""
        scores: Tensor = head(encoder.pool(states, batch["attention_mask"]))
        return scores.float().view(-1, self.choices)

    def loss_of(self, encoder: TextEncoder, head: nn.Module, states: Tensor, batch: Batch) -> Tensor:
        """See :class:`PretrainingTask`."""
        return F.cross_entropy(self.scores(encoder, head, states, batch), batch["labels"])

    def outcome(self, encoder: TextEncoder, head: nn.Module, states: Tensor, batch: Batch) -> Batch:
        """Chosen and right texts (B,)."""
        return {"found": self.scores(encoder, head, states, batch).argmax(1), "labels": batch["labels"]}

    def measure(self, outcomes: list[Batch]) -> dict[str, float]:
        """The share of right choices."""
        found, labels = joined(outcomes, "found"), joined(outcomes, "labels")
        return {"accuracy": float((found == labels).mean())}


class SpanTask(PretrainingTask):
    """Mean cross entropy of a span's first and last token; `begin`, `end` (B,), and `allowed` (B, L), bool.

    Source: Devlin et al. (2019), section 4.2.
    """

    metric = "f1"
    longest = 16  # tokens of a predicted span

    def head(self, hidden: int) -> nn.Module:
        """See :class:`PretrainingTask`."""
        return nn.Sequential(nn.Dropout(0.1), nn.Linear(hidden, 2))

    def logits(self, head: nn.Module, states: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Logits (B, L) of a span's first and of its last token; the lowest number where it cannot be."""
        logits = head(states).float()
        logits = logits.masked_fill(~batch["allowed"].unsqueeze(-1), torch.finfo(logits.dtype).min)
        return logits[..., 0], logits[..., 1]

    def loss_of(self, encoder: TextEncoder, head: nn.Module, states: Tensor, batch: Batch) -> Tensor:
        """See :class:`PretrainingTask`."""
        begin, end = self.logits(head, states, batch)
        return (F.cross_entropy(begin, batch["begin"]) + F.cross_entropy(end, batch["end"])) / 2

    def outcome(self, encoder: TextEncoder, head: nn.Module, states: Tensor, batch: Batch) -> Batch:
        """The best span (B, 2) of at most `longest` tokens and its score, beside the true one."""
        span, score = best_spans(*self.logits(head, states, batch), self.longest)
        return {"found": span, "score": score, "true": torch.stack([batch["begin"], batch["end"]], 1)}

    def measure(self, outcomes: list[Batch]) -> dict[str, float]:
        """Exact matches, and F1 of the tokens that both spans have, averaged over rows."""
        found, true = joined(outcomes, "found"), joined(outcomes, "true")
        same = np.minimum(found[:, 1], true[:, 1]) - np.maximum(found[:, 0], true[:, 0]) + 1
        sizes = (found[:, 1] - found[:, 0] + 1) + (true[:, 1] - true[:, 0] + 1)
        return {"f1": float((2 * same.clip(0) / sizes).mean()), "exact": float((found == true).all(1).mean())}


def best_spans(begin: Tensor, end: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    """The spans with the highest sum of logits.

    Args:
        begin: logits (B, L) of first tokens.
        end: logits (B, L) of last tokens.
        longest: tokens of a span at most.

    Returns:
        first and last token int64 (B, 2), and the sums (B,).

    Example:
        >>> best_spans(torch.tensor([[0.0, 5.0, 0.0]]), torch.tensor([[9.0, 0.0, 1.0]]), 2)[0].tolist()
        [[0, 0]]
    """
    size = begin.shape[1]
    place = torch.arange(size, device=begin.device)
    gap = place - place.unsqueeze(1)
    # log-probabilities, so that sums stay finite and windows of one question can be compared by them
    sums = begin.log_softmax(1).unsqueeze(2) + end.log_softmax(1).unsqueeze(1)
    sums = sums.masked_fill((gap < 0) | (gap >= longest), -torch.inf).flatten(1)
    score, best = sums.max(1)
    return torch.stack([best // size, best % size], 1), score


def joined(outcomes: Sequence[Batch], name: str) -> np.ndarray:
    """One part of all outcomes as one array."""
    return torch.cat([outcome[name] for outcome in outcomes]).numpy()


def f1(found: np.ndarray, true: np.ndarray) -> float:
    """F1 of two bool arrays (N,); 0 where nothing is right.

    Example:
        >>> f1(np.array([True, True, False]), np.array([True, False, True]))
        0.5
    """
    both = int((found & true).sum())
    total = int(found.sum() + true.sum())
    return 2 * both / total if total else 0.0
