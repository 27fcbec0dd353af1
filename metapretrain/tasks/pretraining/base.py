"""What a task of the scheduling benchmark is: batches by seed, a loss and a score over one encoder and a head."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from metapretrain.errors import InputError, one_of
from metapretrain.models.text_encoders import TextEncoder
from metapretrain.tasks.pretraining.frame import Batch, Frame

SPLITS = ("train", "validation", "test")
IGNORE = -100  # label of a place that counts for nothing


class Source(Protocol):
    """A split's texts, of any form."""

    @property
    def files(self) -> dict[str, dict[str, Any]]:
        """What was read, with checksums."""


class PretrainingTask(ABC):
    """A task: rows in up to three splits, batches made of them, a head, a loss and a metric.

    A batch is a dict of tensors and depends on (split, batch size, seed, epoch, index) alone. Losses use no Python
    value of a tensor, so that updates on a GPU do not wait.

    Args:
        frame: how sequences are put together.
        texts: what the task is made of, by split.
        sizes: rows of each split.

    Attributes:
        name: of the task in :data:`metapretrain.tasks.pretraining.TASKS`.
        metric: the main key of what :meth:`score` returns; higher is better.
        files: what was read, with checksums, under the task's name.

    Raises:
        InputError: no training rows.
    """

    name: str
    metric: str

    def __init__(self, frame: Frame, texts: Mapping[str, Source], sizes: Mapping[str, int]) -> None:
        found = {name: about for part in texts.values() for name, about in part.files.items()}
        self.files = {f"{self.name}/{name}": about for name, about in found.items()}
        self.frame, self.sizes = frame, {split: size for split, size in sizes.items() if size}
        if "train" not in self.sizes:
            raise InputError(f"{self.name}: there are no training rows; give longer or more texts")

    @abstractmethod
    def head(self, hidden: int) -> nn.Module:
        """A new head over states of `hidden` features, with weights from the global generator."""

    @abstractmethod
    def make(self, split: str, rows: Sequence[int], random: np.random.Generator) -> Batch:
        """The batch of these rows; what is drawn in it comes from `random`."""

    @abstractmethod
    def loss_of(self, encoder: TextEncoder, head: nn.Module, states: Tensor, batch: Batch) -> Tensor:
        """The scalar loss of a batch whose states (B, L, D) are given."""

    @abstractmethod
    def outcome(self, encoder: TextEncoder, head: nn.Module, states: Tensor, batch: Batch) -> Batch:
        """What :meth:`measure` needs of a batch, as tensors."""

    @abstractmethod
    def measure(self, outcomes: list[Batch]) -> dict[str, float]:
        """The metrics of the outcomes of a split's batches, in order."""

    def loss(self, encoder: TextEncoder, head: nn.Module, batch: Batch) -> Tensor:
        """The scalar loss of a batch at the weights that encoder and head have now."""
        return self.loss_of(encoder, head, encoder.hidden(batch), batch)

    def batches(self, split: str, *, batch_size: int, seed: int, epoch: int = 0) -> Batches:
        """The batches of an epoch, in an order of its own; see :class:`Batches`.

        Raises:
            InputError: a split that the task lacks, or a batch size below 1.
        """
        return Batches(self, self._split(split), batch_size, seed, epoch)

    def sample(self, split: str, batch_size: int, generator: torch.Generator) -> Batch:
        """A batch of rows drawn without replacement; for probes of a scheduler."""
        drawn = int(torch.randint(2**62, (), generator=generator))
        random = self.random(split, drawn)
        size = self.sizes[self._split(split)]
        return self.make(split, random.choice(size, min(batch_size, size), replace=False).tolist(), random)

    def score(
        self,
        encoder: TextEncoder,
        head: nn.Module,
        split: str = "test",
        *,
        batch_size: int = 64,
        rows: int | None = None,
    ) -> dict[str, float]:
        """The metrics on a split, without dropout; with the main one under :attr:`metric`.

        Args:
            encoder: of the head.
            head: of :meth:`head`.
            split: ``"train"``, ``"validation"`` or ``"test"``.
            batch_size: rows at once.
            rows: only so many, the first; None: all.
        """
        size = self.sizes[self._split(split)]
        size = size if rows is None else min(rows, size)
        groups = [list(range(begin, min(begin + batch_size, size))) for begin in range(0, size, batch_size)]
        batches = (self.make(split, group, self.random(split, group[0])) for group in groups)
        return self.measure(scored(self, encoder, head, batches))

    def random(self, split: str, *place: int) -> np.random.Generator:
        """The generator of a place, such as (seed, epoch, index)."""
        words = [zlib.crc32(self.name.encode()), SPLITS.index(split), *place]
        return np.random.Generator(np.random.Philox(np.random.SeedSequence(words)))

    def _split(self, split: str) -> str:
        return one_of(f"split of {self.name}", split, tuple(self.sizes))


class Batches:
    """The batches of one pass over a task's rows: iterate, index, or give to a scheduler's LoaderProbe.

    Rows that do not fill a last batch are left out, unless there is no full one.

    Example:
        >>> from metapretrain.tasks.pretraining.made import made_schedule_tasks
        >>> batches = made_schedule_tasks(0)[0]["masked-lm"].batches("train", batch_size=4, seed=0)
        >>> batches[1]["input_ids"].shape[0], len(batches) == len(list(batches))
        (4, True)
    """

    def __init__(self, task: PretrainingTask, split: str, batch_size: int, seed: int, epoch: int = 0) -> None:
        if batch_size < 1 or seed < 0 or epoch < 0:
            raise InputError(
                f"{task.name}: batch_size must be at least 1, seed and epoch at least 0; "
                f"got {batch_size}, {seed} and {epoch}"
            )
        self.task, self.split, self.seed, self.epoch = task, split, seed, epoch
        self.batch_size = min(batch_size, task.sizes[split])
        self._order: tuple[int, Any] = (-1, None)

    def __len__(self) -> int:
        """Return the number of batches."""
        return self.task.sizes[self.split] // self.batch_size

    def __getitem__(self, index: int) -> Batch:
        """Return one batch."""
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of {len(self)}")
        if self._order[0] != self.epoch:
            random = self.task.random(self.split, self.seed, self.epoch)
            self._order = self.epoch, random.permutation(self.task.sizes[self.split])
        rows = self._order[1][index * self.batch_size : (index + 1) * self.batch_size]
        random = self.task.random(self.split, self.seed, self.epoch, index)
        return self.task.make(self.split, rows.tolist(), random)

    def __iter__(self) -> Iterator[Batch]:
        """Give each batch once."""
        return (self[index] for index in range(len(self)))

    def set_epoch(self, epoch: int) -> None:
        """Go to another pass."""
        self.epoch = epoch


def scored(task: PretrainingTask, encoder: TextEncoder, head: nn.Module, batches: Iterable[Batch]) -> list[Batch]:
    """The outcomes of batches on the CPU, without dropout; modes of encoder and head stay as they are."""
    modes, outcomes = (encoder.training, head.training), []
    encoder.eval()
    head.eval()
    try:
        with torch.no_grad():
            for batch in batches:
                moved = to_device(batch, encoder)
                found = task.outcome(encoder, head, encoder.hidden(moved), moved)
                outcomes.append({name: value.detach().cpu() for name, value in found.items()})
    finally:
        encoder.train(modes[0])
        head.train(modes[1])
    return outcomes


def to_device(batch: Batch, where: nn.Module | torch.device | str) -> Batch:
    """The batch on a device, or on that of a module."""
    device = next(where.parameters()).device if isinstance(where, nn.Module) else where
    return {name: value.to(device, non_blocking=True) for name, value in batch.items()}
