"""Batches of rows of similar length, at the same place of the length order in every task, with one width for all."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from metapretrain.checks import check_rank
from metapretrain.data.tokens import Tokens, padded_width
from metapretrain.episodes import ShuffledBatches, TaskStream
from metapretrain.errors import InputError

POLICIES = ("longest", "shortest")


def share_of(batch_size: int, world_size: int) -> int:
    """Return the rows of a batch that each rank has; InputError if the ranks would not have the same number."""
    if batch_size % world_size:
        raise InputError(f"batch_size {batch_size} must be a multiple of the {world_size} processes")
    return batch_size // world_size


class TextStream(TaskStream):
    """Yields {task: {"rows": (B,), "width": (L, 0)}}, with one width L for all tasks of an update.

    L is the longest row's length rounded up to `multiple`, at most `limit` (the encoder's positions), so that few
    shapes occur and the training loop can record a CUDA graph for each. It is the first size of an empty tensor:
    known without a device. `tokens_given` and `places_given` (with padding) count over all ranks and steps.

    Args:
        tokens: of the training rows of each task, in the order of the tasks; batch_size: rows of a task in an update.
        policy: `longest` or `shortest`: an epoch is the longest or the shortest loader (text paper, section 5.3); or
            another policy of :class:`metapretrain.episodes.TaskStream`, or a scheduler.
        pool, seed: see :class:`metapretrain.episodes.ShuffledBatches`; `labels`: (N,) of each task, to balance them.
        rank, world_size: rank r of w gives the r-th of w equal parts of each batch, at the width of the whole batch.
    """

    def __init__(
        self,
        tokens: Mapping[str, Tokens],
        batch_size: int,
        policy: Any,
        *,
        seed: int,
        steps: int,
        pool: int = 16,
        labels: Mapping[str, Tensor] | None = None,
        multiple: int = 16,
        limit: int | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.rank, self.world_size = check_rank(rank, world_size)
        self.share = share_of(batch_size, world_size)
        loaders = {}
        for number, (name, rows) in enumerate(tokens.items()):
            n, own = len(rows.widths), None if labels is None else labels[name]
            if batch_size > n:
                raise InputError(f"{name}: batch_size {batch_size} is more than the {n} training rows; lower it")
            alike: dict[str, Any] = {"widths": rows.widths, "pool": pool, "task": number}
            loaders[name] = ShuffledBatches(n, batch_size, seed=seed, labels=own, **alike)
        super().__init__(loaders, policy, seed=seed, steps=steps)
        self.tokens, self.multiple, self.limit = dict(tokens), multiple, limit
        self.tokens_given = self.places_given = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in super().__iter__():
            widest = torch.stack([self.tokens[name].widths[rows].max() for name, rows in batch.items()])
            width = padded_width(widest, self.multiple)
            if self.limit is not None:
                width = max(min(width, self.limit), int(widest.max()))
            for name, rows in batch.items():
                for part in filter(None, (self.tokens[name], self.tokens[name].second)):
                    self.tokens_given += int(part.lengths[rows].sum())
                    self.places_given += len(rows) * width
            mine = slice(self.rank * self.share, (self.rank + 1) * self.share)
            yield {name: {"rows": rows[mine], "width": torch.empty(width, 0)} for name, rows in batch.items()}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "given": [self.tokens_given, self.places_given]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        try:
            self.tokens_given, self.places_given = state["given"]
        except (KeyError, TypeError, ValueError):
            raise InputError("the stream's state does not hold `given`, two counts; is it of another stream?") from None

    @property
    def padding_share(self) -> float:
        """Share of padding in what was given so far, 0..1."""
        return 1 - self.tokens_given / self.places_given if self.places_given else 0.0
