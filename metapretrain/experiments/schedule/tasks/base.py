"""What a task of the scheduling benchmark is; and the forms: a class, a label per word, a choice, a span of words."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from metapretrain.checks import decisive, whole
from metapretrain.data.documents import Corpus, Documents, tokenize_documents, tokenize_words
from metapretrain.draws import philox_generator
from metapretrain.episodes import ShuffledBatches
from metapretrain.errors import InputError, one_of
from metapretrain.models.text_encoders import TextEncoder
from metapretrain.nests import evaluation_mode

Ids = Sequence[int] | NDArray[np.int32]
Tensors = dict[str, Tensor]
Example = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]


class Frame:
    """How a tokenizer's sequences are put together, and how wide batches are.

    A tokenizer of the transformers library puts at most `max_length` tokens, special ones included, in a sequence;
    widths of batches are multiples of `multiple`. InputError: it has no padding or mask token, or a wrong length.

    Example:
        >>> from metapretrain.models.language_models import tiny_tokenizer
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
        self.prefix, self.suffix = pair[:first], pair[second + len(bare) :]
        self.middle = pair[first + len(bare) : second]
        self.pieces = np.setdiff1d(np.arange(len(tokenizer)), tokenizer.all_special_ids)
        self._corpora: dict[tuple[int, bool], tuple[Documents, Corpus]] = {}

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
        return self.all_ids([text])[0]

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
        """Ids int64 (L,), token types int64 (L,), 1 from the second segment on, and where each segment begins."""
        parts: list[Ids] = [self.prefix, segments[0]]
        for segment in segments[1:]:
            parts += [self.middle, segment]
        starts = np.cumsum([len(part) for part in parts])[::2].tolist()
        ids = np.concatenate([np.asarray(part, np.int64) for part in (*parts, self.suffix)])
        types = np.zeros(len(ids), np.int64)
        types[[*starts, len(ids)][1] :] = 1
        return ids, types, starts

    def fitted(self, *segments: Ids) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        return self.sequence(*self.cut(*segments))[:2]

    def width(self, lengths: Sequence[int]) -> int:
        """Width of a batch of sequences of these lengths; InputError where one is longer than `max_length`."""
        longest = max(lengths)
        if longest > self.max_length:
            raise InputError(f"a sequence of {longest} tokens does not fit max_length {self.max_length}")
        return -(-longest // self.multiple) * self.multiple

    def pad(self, rows: Sequence[tuple[NDArray[np.int64], NDArray[np.int64]]]) -> Tensors:
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


def tokenize_rows(rows: Sequence[Sequence[str]], frame: Frame) -> Iterator[tuple[NDArray[np.int32], NDArray[np.int64]]]:
    """Of each row of W words its token ids (T,), and where each word begins in them, int64 (W + 1,), the last is T."""
    ids, sizes = tokenize_words(rows, frame.tokenizer)
    starts, first = np.concatenate([[0], np.cumsum(sizes)]), 0
    for row in rows:
        places = starts[first : first + len(row) + 1]
        first += len(row)
        yield ids[places[0] : places[-1]], places - places[0]


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

    Attributes:
        name: of the task in :data:`metapretrain.experiments.schedule.tasks.TASKS`.
        metric: the main key of what :meth:`score` returns; higher is better.
        sizes: rows of each split that has any.
        files: what was read, with checksums, under the task's name.
    """

    name: str
    metric: str

    def __init__(self, frame: Frame, texts: Mapping[str, Source], rows: Mapping[str, Sized]) -> None:
        found = {name: about for part in texts.values() for name, about in part.files.items()}
        self.files = {f"{self.name}/{name}": about for name, about in found.items()}
        self.frame, self.sizes = frame, {split: len(part) for split, part in rows.items() if len(part)}
        if "train" not in self.sizes:
            raise InputError(f"{self.name}: there are no training rows; give longer or more texts")

    @abstractmethod
    def head(self, hidden: int) -> nn.Module:
        """A new head over states of `hidden` features, with weights from the global generator."""

    @abstractmethod
    def make(self, split: str, rows: Sequence[int], random: np.random.Generator) -> Tensors:
        """The batch of these rows; what is drawn in it comes from `random`."""

    @abstractmethod
    def loss_of(self, encoder: TextEncoder, head: nn.Module, states: Tensor, batch: Tensors) -> Tensor:
        """The scalar loss of a batch whose states (B, L, D) are given."""

    @abstractmethod
    def outcome(self, encoder: TextEncoder, head: nn.Module, states: Tensor, batch: Tensors) -> Tensors:
        """What :meth:`measure` needs of a batch, as tensors."""

    @abstractmethod
    def measure(self, outcomes: list[Tensors]) -> dict[str, float]:
        """The metrics of the outcomes of a split's batches, in order."""

    def loss(self, encoder: TextEncoder, head: nn.Module, batch: Tensors) -> Tensor:
        """The scalar loss of a batch at the weights that encoder and head have now."""
        return self.loss_of(encoder, head, encoder.hidden(batch), batch)

    def batches(
        self, split: str, *, batch_size: int, seed: int, epoch: int = 0, rows: range | None = None
    ) -> TaskLoader:
        """The batches of an epoch over `rows` (None: all), in an order of its own; InputError for a split it lacks."""
        return TaskLoader(self, self._split(split), batch_size, seed, epoch, rows)

    def sample(self, split: str, batch_size: int, generator: torch.Generator, rows: range | None = None) -> Tensors:
        """A batch of `rows` (None: all) drawn without replacement; for probes of a scheduler."""
        drawn = int(torch.randint(2**62, (), generator=generator))
        random, rows = self.random(split, drawn), rows or range(self.sizes[self._split(split)])
        found = random.choice(len(rows), min(batch_size, len(rows)), replace=False) + rows.start
        return self.make(split, found.tolist(), random)

    def score(
        self, encoder: TextEncoder, head: nn.Module, split: str = "test", *, batch_size: int = 64
    ) -> dict[str, float]:
        """The metrics on a split, without dropout; modes stay as they are."""
        chosen, outcomes = self.scored_rows(self._split(split)), []
        with evaluation_mode(encoder, head), torch.no_grad():
            for begin in range(0, len(chosen), batch_size):
                group = list(chosen[begin : begin + batch_size])
                batch = to_device(self.make(split, group, self.random(split, group[0])), encoder)
                found = self.outcome(encoder, head, encoder.hidden(batch), batch)
                outcomes.append({name: value.detach().cpu() for name, value in found.items()})
        return self.measure_rows(split, chosen, outcomes)

    def scored_rows(self, split: str) -> Sequence[int]:
        """What :meth:`score` makes batches of."""
        return range(self.sizes[split])

    def measure_rows(self, split: str, rows: Sequence[int], outcomes: list[Tensors]) -> dict[str, float]:
        return self.measure(outcomes)

    def random(self, split: str, *place: int) -> np.random.Generator:
        """The generator of a place, such as (seed, epoch, index)."""
        return philox_generator(zlib.crc32(self.name.encode()), SPLITS.index(split), *place)

    def _split(self, split: str) -> str:
        return one_of(f"split of {self.name}", split, tuple(self.sizes))


class CorpusTask(PretrainingTask):
    """A task over running text, which is tokenised once for all of them; `rows` are those of a corpus."""

    def __init__(self, texts: Mapping[str, Documents], frame: Frame, rows: Callable[[Corpus], Any]) -> None:
        self.corpora = {split: frame.corpus(part) for split, part in texts.items()}
        self.rows = {split: rows(corpus) for split, corpus in self.corpora.items()}
        super().__init__(frame, texts, self.rows)


class TaskLoader:
    """Makes the batches of one pass over a task's rows; rows that do not fill a last one are left out.

    Which rows a batch has is :class:`metapretrain.episodes.ShuffledBatches`'s; what is drawn in it has its own seed.
    """

    def __init__(
        self, task: PretrainingTask, split: str, batch_size: int, seed: int, epoch: int = 0, rows: range | None = None
    ) -> None:
        for name, value, least in (("batch_size", batch_size, 1), ("seed", seed, 0), ("epoch", epoch, 0)):
            whole(f"{name} of {task.name}", value, least)
        rows = rows or range(task.sizes[split])

        def order(epoch: int) -> Tensor:
            return torch.from_numpy(task.random(split, seed, epoch).permutation(len(rows)) + rows.start)

        self.task, self.split = task, split
        self.rows = ShuffledBatches(len(rows), min(batch_size, len(rows)), seed=seed, epoch=epoch, order=order)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensors:
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of {len(self)}")
        rows, epoch = self.rows.batch(self.rows.epoch * len(self) + index), self.rows.epoch
        return self.task.make(self.split, rows.tolist(), self.task.random(self.split, self.rows.seed, epoch, index))

    def __iter__(self) -> Iterator[Tensors]:
        return self.iter_from(0)

    def iter_from(self, position: int) -> Iterator[Tensors]:
        return (self[index] for index in range(position, len(self)))

    def set_epoch(self, epoch: int) -> None:
        self.rows.set_epoch(epoch)


def to_device(batch: Tensors, where: nn.Module | torch.device | str) -> Tensors:
    """Move a batch to a device, or to that of a module."""
    device = next(where.parameters()).device if isinstance(where, nn.Module) else where
    return {name: value.to(device, non_blocking=True) for name, value in batch.items()}


class PooledHead(nn.Module):
    """A linear layer, tanh, dropout and a linear layer over embeddings (B, D), as BERT's for sentences."""

    def __init__(self, features: int, outputs: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.hidden = nn.Linear(features, features)
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(features, outputs)

    def forward(self, z: Tensor) -> Tensor:
        logits: Tensor = self.output(self.dropout(torch.tanh(self.hidden(z))))
        return logits


class ClassTask(PretrainingTask):
    """A task with one class per row: cross entropy over the pooled states; batches have `labels` (B,)."""

    metric = "accuracy"
    classes: int

    def head(self, hidden: int) -> nn.Module:
        return PooledHead(hidden, self.classes)

    def logits(self, encoder: TextEncoder, head: nn.Module, states: Tensor, batch: Tensors) -> Tensor:
        logits: Tensor = head(encoder.pool(states, batch["attention_mask"]))
        return logits.float()

    def loss_of(self, encoder: TextEncoder, head: nn.Module, states: Tensor, batch: Tensors) -> Tensor:
        return F.cross_entropy(self.logits(encoder, head, states, batch), batch["labels"])

    def outcome(self, encoder: TextEncoder, head: nn.Module, states: Tensor, batch: Tensors) -> Tensors:
        return {"found": decisive(self.logits(encoder, head, states, batch)).argmax(1), "labels": batch["labels"]}

    def measure(self, outcomes: list[Tensors]) -> dict[str, float]:
        found, labels = joined(outcomes, "found"), joined(outcomes, "labels")
        return {"accuracy": float((found == labels).mean())}


class ChoiceTask(ClassTask):
    """Cross entropy of the right one of C texts, by a score of each; `input_ids` (B C, L), `labels` (B,)."""

    choices: int

    def head(self, hidden: int) -> nn.Module:
        return PooledHead(hidden, 1)

    def logits(self, encoder: TextEncoder, head: nn.Module, states: Tensor, batch: Tensors) -> Tensor:
        return super().logits(encoder, head, states, batch).view(-1, self.choices)


def joined(outcomes: Sequence[Tensors], name: str) -> np.ndarray:
    """One part of all outcomes as one array."""
    return torch.cat([outcome[name] for outcome in outcomes]).numpy()
