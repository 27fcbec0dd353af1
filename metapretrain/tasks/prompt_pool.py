"""Tokens of many rows on the device, read by number and no wider than the rows need, and scores of label words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from metapretrain.data.texts import TextSet
from metapretrain.prompts import PromptBatch, PromptedModel, PromptTemplate
from metapretrain.training.devices import mixed_precision

SENTIMENT = ("terrible", "bad", "maybe", "good", "great")
WORDS = {2: ("bad", "good"), 3: ("bad", "maybe", "good"), 5: SENTIMENT}
PAIR_WORDS = ("no", "yes")
ALL_WORDS = SENTIMENT + PAIR_WORDS


def words_of(classes: int, pairs: bool) -> tuple[int, ...]:
    """Numbers in `ALL_WORDS` of the words of a set's classes.

    Example:
        >>> [ALL_WORDS[word] for word in words_of(3, False)]
        ['bad', 'maybe', 'good']
    """
    return tuple(ALL_WORDS.index(word) for word in (PAIR_WORDS if pairs else WORDS[classes]))


@dataclass(frozen=True)
class Pool:
    """Rows on a device, right-padded; `labels` of the batch are numbers of label words, `lengths` lie on the CPU."""

    batch: PromptBatch
    lengths: Tensor

    @classmethod
    def of(cls, batch: PromptBatch, device: str) -> Pool:
        """Put rows (N,) on the device."""
        return cls(batch.to(device), batch.attention_mask.sum(1).cpu())

    def __len__(self) -> int:
        return len(self.lengths)

    def gather(self, rows: Tensor) -> PromptBatch:
        """Rows of these numbers, on the CPU and of any shape, as wide as the longest; the host does not wait."""
        multiple = 16 if self.batch.answer.is_cuda else 8  # a recorded step pays for few shapes
        width = -(-int(self.lengths[rows].max()) // multiple) * multiple
        batch = self.batch
        narrow = replace(
            batch, input_ids=batch.input_ids[:, :width], attention_mask=batch.attention_mask[:, :width]
        )
        return narrow.take(rows.to(batch.answer.device, non_blocking=True))


def encode_rows(model: PromptedModel, template: str, rows: TextSet, words: Sequence[int]) -> PromptBatch:
    """Tokens and word numbers of a set's rows."""
    labels = torch.tensor(words)[rows.require_labels()]
    fitted = PromptedModel(
        model.model, PromptTemplate(template), model.verbalizer, max_length=model.max_length, normalise=model.normalise
    )
    return fitted.encode(rows.first, rows.second, labels)


def joined(batches: Sequence[PromptBatch]) -> PromptBatch:
    """All rows of several batches, with padding on the right where they are shorter."""
    width = max(batch.input_ids.shape[1] for batch in batches)

    def wide(tensor: Tensor) -> Tensor:
        return torch.nn.functional.pad(tensor, (0, width - tensor.shape[1]))

    return PromptBatch(
        torch.cat([wide(batch.input_ids) for batch in batches]),
        torch.cat([wide(batch.attention_mask) for batch in batches]),
        torch.cat([batch.answer for batch in batches]),
        torch.cat([batch.labels for batch in batches if batch.labels is not None]),
        sum(batch.truncated for batch in batches),
    )


def allowed_words(words: Sequence[Sequence[int]], device: str) -> Tensor:
    """Which words each of R sets uses, bool (R, number of words)."""
    mask = torch.zeros(len(words), len(ALL_WORDS), dtype=torch.bool)
    for row, own in enumerate(words):
        mask[row, list(own)] = True
    return mask.to(device)


def word_scores(model: PromptedModel, prompts: Tensor, batch: PromptBatch, allowed: Tensor, normalise: str) -> Tensor:
    """Log-probabilities of the words, -inf for those that a set does not use.

    Args:
        model: with `normalise="vocabulary"`.
        prompts: (R, L, D).
        batch: rows (R, B).
        allowed: (R, W).

    Returns:
        (R, B, W).
    """
    scores: Tensor = model(prompts, batch)
    scores = scores.masked_fill(~allowed[:, None, :], -torch.inf)
    return scores.log_softmax(-1) if normalise == "labels" else scores


@torch.no_grad()
def predict(
    model: PromptedModel, prompt: Tensor, pool: Pool, rows: Tensor, words: Sequence[int], *,
    device: str, precision: str, batch_size: int = 128,
) -> Tensor:  # fmt: skip
    """The class of each row under a prompt (L, D), int64 (N,) in 0..C-1, on the CPU."""
    order = torch.argsort(pool.lengths[rows], stable=True)
    allowed = allowed_words([words], device)
    found = torch.empty(len(rows), dtype=torch.int64)
    parts = []
    for part in order.split(batch_size):
        with mixed_precision(device, precision):
            scores = word_scores(model, prompt[None].to(device), pool.gather(rows[part][None]), allowed, "vocabulary")
        parts.append(scores[0][:, list(words)].argmax(-1))
    found[order] = torch.cat(parts).cpu()
    return found
