"""Rows of tokens with the place of the answer in each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from metapretrain.errors import InputError

WHOLE = (torch.int32, torch.int64)


@dataclass(frozen=True)
class PromptBatch:
    """Tokenised rows; `...` is (B,), or (K, m) for m rows of each of K tasks.

    `answer` is the position of the mask or sentinel token; for decoder-only models, of the token before the
    answer. `truncated` counts the rows that were cut.

    Example:
        >>> ids = torch.tensor([[5, 6, 0], [7, 8, 9]])
        >>> batch = PromptBatch(ids, (ids > 0).long(), torch.tensor([1, 2]))
        >>> batch.shape, batch.take(torch.tensor([[0], [1]])).shape
        ((2,), (2, 1))
    """

    input_ids: Tensor  # (..., N) int64
    attention_mask: Tensor  # (..., N) int64
    answer: Tensor  # (...) int64
    labels: Tensor | None = None  # (...) int64
    truncated: int = 0

    @classmethod
    def of(cls, *leaves: Tensor) -> PromptBatch:
        """The batch of :meth:`leaves`."""
        ids, mask, answer, *labels = leaves
        return cls(ids, mask, answer, labels[0] if labels else None)

    def leaves(self) -> list[Tensor]:
        """Its tensors: ids, mask, answers, and labels if there are any."""
        return [self.input_ids, self.attention_mask, self.answer, *([] if self.labels is None else [self.labels])]

    @property
    def shape(self) -> tuple[int, ...]:
        """The leading dimensions."""
        return tuple(self.answer.shape)

    def __len__(self) -> int:
        return len(self.answer)

    def take(self, rows: Tensor) -> PromptBatch:
        """The rows of these numbers, in the shape of `rows`."""
        return self._each(lambda tensor: tensor[rows])

    def to(self, device: torch.device | str) -> PromptBatch:
        """The batch on `device`."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def trimmed(self, multiple: int = 8) -> PromptBatch:
        """Without columns that are padding in every row, to a width that is a multiple (waits for the device).

        Raises:
            InputError: there are no rows, or `multiple` is below 1.

        Example:
            >>> ids = torch.tensor([[5, 6, 0, 0, 0]])
            >>> PromptBatch(ids, (ids > 0).long(), torch.tensor([1])).trimmed(multiple=1).input_ids
            tensor([[5, 6]])
        """
        if isinstance(multiple, bool) or not isinstance(multiple, int) or multiple < 1:
            raise InputError(f"multiple must be an integer of at least 1, not {multiple!r}")
        check_batch("the batch", self)
        rows = right_padded(self)
        longest = int(rows.attention_mask.sum(-1).max())
        width = max(multiple, -(-longest // multiple) * multiple)
        return replace(rows, input_ids=rows.input_ids[..., :width], attention_mask=rows.attention_mask[..., :width])

    def flat(self) -> PromptBatch:
        """The same rows with one leading dimension."""
        width, count = self.input_ids.shape[-1], len(self.shape)
        return self._each(lambda t: t.reshape(-1, width) if t.ndim > count else t.reshape(-1))

    def _each(self, change: Callable[[Tensor], Tensor]) -> PromptBatch:
        labels = None if self.labels is None else change(self.labels)
        return PromptBatch(
            change(self.input_ids), change(self.attention_mask), change(self.answer), labels, self.truncated
        )


def check_batch(what: str, batch: PromptBatch) -> None:
    """Raise InputError unless the tensors of `batch` fit each other; no value is read, so no device is waited for.

    Example:
        >>> ids = torch.zeros(0, 4, dtype=torch.int64)
        >>> check_batch("query", PromptBatch(ids, ids, ids[:, 0]))
        Traceback (most recent call last):
        ...
        metapretrain.errors.InputError: query has no rows: its shape is (0,)
    """
    if not isinstance(batch, PromptBatch):
        raise InputError(f"{what} must be a PromptBatch, as encode returns it, not a {type(batch).__name__}")
    ids, shape = batch.input_ids, batch.shape
    if not batch.answer.numel() or not shape:
        raise InputError(f"{what} has no rows: its shape is {shape}")
    parts = {"input_ids": ids, "attention_mask": batch.attention_mask, "answer": batch.answer, "labels": batch.labels}
    for name, tensor in parts.items():
        if tensor is None:
            continue
        wanted = shape if name in ("answer", "labels") else (*shape, *ids.shape[-1:])
        if tuple(tensor.shape) != wanted or tensor.dtype not in WHOLE or tensor.device != ids.device:
            raise InputError(
                f"{name} of {what} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device};"
                f" give int64 {wanted} on {ids.device}"
            )
    if not ids.shape[-1]:
        raise InputError(f"{what} has rows of no tokens: its input_ids are {tuple(ids.shape)}")


def check_tasks(what: str, batch: PromptBatch) -> None:
    """Raise InputError unless the batch holds labelled rows (K, m), m of each of K tasks."""
    check_batch(what, batch)
    if len(batch.shape) != 2 or batch.labels is None:
        given = "no labels" if batch.labels is None else f"rows of shape {batch.shape}"
        raise InputError(f"{what} has {given}; give labelled rows (K, m): m rows of each of K tasks")


def right_padded(batch: PromptBatch) -> PromptBatch:
    """The rows with all padding moved behind the tokens, which neither prompt nor positions then see.

    Example:
        >>> ids = torch.tensor([[0, 5, 6]])
        >>> right_padded(PromptBatch(ids, (ids > 0).long(), torch.tensor([2])))
        PromptBatch(input_ids=tensor([[5, 6, 0]]), ..., answer=tensor([1]), ...)
    """
    mask = batch.attention_mask
    order = torch.argsort(1 - mask, dim=-1, stable=True)
    before = mask.cumsum(-1).gather(-1, batch.answer.clamp(min=0)[..., None])[..., 0] - 1
    return replace(
        batch,
        input_ids=batch.input_ids.gather(-1, order),
        attention_mask=mask.gather(-1, order),
        answer=torch.where(batch.answer < 0, batch.answer, before),
    )


def padded(rows: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Ids and mask (B, N) of rows of unequal length, padded on the right.

    Raises:
        InputError: there are no rows.
    """
    if not rows:
        raise InputError("no texts were given; give at least one row")
    lengths = torch.tensor([len(row) for row in rows])
    mask = (torch.arange(max(1, int(lengths.max()))) < lengths[:, None]).long()
    ids = torch.full(mask.shape, pad)
    ids[mask.bool()] = torch.tensor([token for row in rows for token in row], dtype=torch.int64)
    return ids, mask
