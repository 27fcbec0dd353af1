"""Streams of batches from several tasks, which say what they gave and resume where they were."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from metapretrain.episodes.checks import check_seed, whole
from metapretrain.episodes.draws import Bits, Use, integers
from metapretrain.episodes.stream_state import check_stream_state
from metapretrain.errors import InputError, one_of

POLICIES = ("longest", "shortest", "proportional", "round-robin")
_END = object()


@runtime_checkable
class Scheduler(Protocol):
    """Decides which task is next: `choose()` returns an object whose `source` is a loader's name."""

    def choose(self) -> Any:
        """The next choice."""

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's state as JSON values."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a state."""


class TaskStream:
    """Yields dicts {task: batch} from one loader a task.

    Every pass over a loader is an epoch of it: the stream counts them from 0, calls the loader's `set_epoch`
    if there is one, and seeds PyTorch's CPU generator for the start of the pass, so that an ordinary
    DataLoader with shuffle=True also depends on (seed, task, epoch) alone.

    Args:
        loaders: a re-iterable of batches for each task.
        policy: "longest" and "shortest" give a batch of every task at each step (the text paper's two
            strategies: draw from each until the longest has been seen, and zip); "proportional" gives one
            task's batch, drawn with probability proportional to its loader's length; "round-robin" gives each
            task its turn; a scheduler chooses the task (the stream does not call its `observe`).
        seed: 0..2**64-1.
        steps: all the steps of the stream, over as many passes as that takes. None: an iteration is one
            epoch, which is the longest or shortest loader's length, the sum of lengths, or a turn each until
            the longest is through; the next iteration goes on where the last stopped.

    Attributes:
        counts: batches given so far, of each task.
        choice: the scheduler's last choice.

    Raises:
        InputError: an unknown policy, no or empty loaders, a length that is needed and missing.

    Example:
        >>> stream = TaskStream({"a": [1, 2, 3], "b": [10]}, "longest", seed=0)
        >>> list(stream), stream.counts
        ([{'a': 1, 'b': 10}, {'a': 2, 'b': 10}, {'a': 3, 'b': 10}], {'a': 3, 'b': 3})
    """

    def __init__(
        self,
        loaders: Mapping[str, Iterable[Any]],
        policy: str | Scheduler,
        *,
        seed: int,
        steps: int | None = None,
    ) -> None:
        if not isinstance(loaders, Mapping) or not loaders:
            given = "empty" if isinstance(loaders, Mapping) else f"a {type(loaders).__name__}"
            raise InputError(f"loaders is {given}: give at least one, as {{name: loader}}")
        self.loaders, self.seed = dict(loaders), check_seed(seed)
        self.policy = policy if not isinstance(policy, str) else one_of("policy", policy, POLICIES)
        if not isinstance(policy, str) and (not isinstance(policy, Scheduler) or isinstance(policy, type)):
            raise InputError(
                f"policy must be one of {', '.join(POLICIES)}, or have choose, state_dict and"
                f" load_state_dict, not {type(policy).__name__}"
            )
        self.steps = None if steps is None else whole("steps", steps, 1)
        self.choice: Any = None
        self.done = self.step = 0
        self.counts = dict.fromkeys(self.loaders, 0)
        self._epoch = dict.fromkeys(self.loaders, 0)
        self._position = dict.fromkeys(self.loaders, 0)
        self._open: dict[str, Iterator[Any]] = {}
        for loader in self.loaders.values():
            _set_epoch(loader, 0)
        self._lengths = {name: _length(name, loader) for name, loader in self.loaders.items()}
        self._total = self.steps if self.steps is not None else self._epoch_steps()
        self._shares = list(itertools.accumulate(self._sized())) if policy == "proportional" else []

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while self.step < self._total:
            batch = {name: self._next(name) for name in self._choose()}
            self.step += 1
            self.done += 1
            yield batch
        if self.steps is None:
            self.step = 0

    def __len__(self) -> int:
        return self._total

    @property
    def epochs(self) -> dict[str, int]:
        """The pass over each loader that the last batch was drawn from, counted from 0."""
        return dict(self._epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where the stream is, as JSON values (with a scheduler: as far as its state is).

        Example:
            >>> TaskStream({"a": [1, 2]}, "longest", seed=0).state_dict()["tasks"]
            {'a': {'epoch': 0, 'position': 0, 'count': 0}}
        """
        named = isinstance(self.policy, str)
        return {
            "seed": self.seed,
            "policy": self.policy if named else "scheduler",
            "scheduler": None if isinstance(self.policy, str) else self.policy.state_dict(),
            "step": self.step,
            "done": self.done,
            "tasks": {
                name: {
                    "epoch": self._epoch[name],
                    "position": self._position[name],
                    "count": self.counts[name],
                }
                for name in self.loaders
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where another stream with the same tasks, policy and seed was.

        Raises:
            InputError: the state is of other tasks, another policy or another seed, is incomplete, or lies behind
                the end of a loader.

        Example:
            >>> stream, resumed = (TaskStream({"a": [1, 2, 3]}, "longest", seed=0) for _ in range(2))
            >>> first = next(iter(stream))
            >>> resumed.load_state_dict(stream.state_dict())
            >>> list(resumed)
            [{'a': 2}, {'a': 3}]
        """
        check_stream_state(state, self.state_dict(), self._lengths)
        self.step, self.done = state["step"], state["done"]
        for name, task in state["tasks"].items():
            self._epoch[name], self._position[name] = task["epoch"], task["position"]
            self.counts[name] = task["count"]
        if not isinstance(self.policy, str):
            self.policy.load_state_dict(state["scheduler"])
        self._open = {}

    def _choose(self) -> tuple[str, ...]:
        names = tuple(self.loaders)
        if not isinstance(self.policy, str):
            self.choice = self.policy.choose()
            return (one_of("task of the scheduler's choice", self.choice.source, names),)
        if self.policy == "round-robin":
            return (names[self.done % len(names)],)
        if self.policy == "proportional":
            bits = Bits(self.seed, Use.TASKS, self.done, 0)
            drawn = int(integers(bits, np.array([self._shares[-1]]))[0])
            return (names[bisect.bisect_right(self._shares, drawn)],)
        return names

    def _next(self, name: str) -> Any:
        if name not in self._open:
            self._open[name] = self._begin(name)
        batch = next(self._open[name], _END)
        if batch is _END:
            if self._position[name]:
                self._epoch[name], self._position[name] = self._epoch[name] + 1, 0
                self._open[name] = self._begin(name)
                batch = next(self._open[name], _END)
            if batch is _END:
                raise InputError(
                    f"loader {name!r} gave no batch in pass {self._epoch[name]}: a loader must not be empty"
                    " and must give its batches again at each iteration"
                )
        self._position[name] += 1
        self.counts[name] += 1
        return batch

    def _begin(self, name: str) -> Iterator[Any]:
        """The rest of the current pass; its first batch is read here, where the generator is seeded."""
        loader, position = self.loaders[name], self._position[name]
        bits = Bits(self.seed, Use.TASKS, self._epoch[name], 1 + list(self.loaders).index(name))
        state = torch.get_rng_state()
        torch.default_generator.manual_seed(int(bits.words(1, wide=True)[0] >> np.uint64(1)))
        try:
            _set_epoch(loader, self._epoch[name])
            jump = getattr(loader, "iter_from", None)
            if jump is not None:
                return iter(jump(position))
            rest = iter(loader)
            for _ in itertools.islice(rest, position):
                pass
            if position:
                return rest
            first = next(rest, _END)
            return iter(()) if first is _END else itertools.chain((first,), rest)
        finally:
            torch.set_rng_state(state)

    def _epoch_steps(self) -> int:
        lengths = self._sized()
        if self.policy == "longest":
            return max(lengths)
        if self.policy == "shortest":
            return min(lengths)
        return max(lengths) * len(lengths) if self.policy == "round-robin" else sum(lengths)

    def _sized(self) -> list[int]:
        lengths = []
        for name, length in self._lengths.items():
            if length is None:
                raise InputError(
                    f"loader {name!r} has no length, which "
                    + (
                        "policy 'proportional' needs"
                        if self.steps is not None
                        else "an epoch needs; give steps=..."
                    )
                )
            lengths.append(length)
        return lengths


def _length(name: str, loader: Any) -> int | None:
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise InputError(f"loader {name!r} is {loader!r}; give a DataLoader, a list or another iterable of batches")
    try:
        length = len(loader)
    except (TypeError, NotImplementedError):
        return None
    if not length:
        raise InputError(f"loader {name!r} is empty: it has no batch to give")
    return length


def _set_epoch(loader: Any, epoch: int) -> None:
    for owner in (loader, getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)):
        set_epoch = getattr(owner, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
            return
