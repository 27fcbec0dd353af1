"""Streams of batches: the shuffled batches of one task, and several tasks side by side, resumable."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from metapretrain.checks import check_rank, check_seed, whole
from metapretrain.draws import Bits, Ints, Use, permutations, pick_by_size, take_turns
from metapretrain.episodes.sampler import read_labels
from metapretrain.errors import InputError, one_of


class ShuffledBatches:
    """Yields int64 row indices (B,) on the CPU; batch i of an epoch depends on (seed, epoch, i) alone.

    The one order of batches of the package. Without `labels` an epoch visits every row once (but for a dropped last
    batch). With `labels` the batches are class-balanced: every class comes once in each round, so that class counts
    within a batch differ by at most two. A class with fewer rows than its share of the epoch is repeated, each time in
    a new order; of one with more, a new random part is seen in each epoch.

    With `widths` the rows of a batch are of similar length: the epochs' orders are laid end to end, so that no row is
    dropped, and `pool` batches at a time are sorted by length and given in a random order that depends on `seed` and
    `pool` alone. Several tasks with one seed thus give their short batches together, to be padded to one width.

    Args:
        n: rows.
        batch_size: rows of a rank's batch, which is a part of that of one process with batch_size * world_size.
        seed: 0..2**64-1.
        epoch, start: the epoch, and the first batch to give: what resumes a run.
        labels: one per row (N,), for class-balanced batches.
        widths: length of each row, int64 (N,); pool: batches that are sorted together, 1 for none.
        task: number of the task: tasks of one seed see their rows in different orders.
        order: rows (N,) of an epoch by its number, in place of the random order of 0..n-1.

    Raises InputError: there is no batch, or ranks would get unequal parts.

    Example:
        >>> batches = ShuffledBatches(10, 4, seed=0, drop_last=False)
        >>> len(batches), sorted(torch.cat(list(batches)).tolist())
        (3, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
        >>> alike = ShuffledBatches(4, 2, seed=0, widths=torch.tensor([9, 1, 8, 2]), pool=2)
        >>> sorted(sorted(rows.tolist()) for rows in alike)
        [[0, 2], [1, 3]]
    """

    def __init__(
        self,
        n: int,
        batch_size: int,
        *,
        seed: int,
        epoch: int = 0,
        drop_last: bool = True,
        start: int = 0,
        rank: int = 0,
        world_size: int = 1,
        labels: Any = None,
        widths: torch.Tensor | None = None,
        pool: int = 16,
        task: int = 0,
        order: Callable[[int], torch.Tensor] | None = None,
    ) -> None:
        self.n, self.batch_size = whole("n", n), whole("batch_size", batch_size, 1)
        self.seed, self.drop_last = check_seed(seed), drop_last
        self.rank, self.world_size = check_rank(rank, world_size)
        self.widths, self._given_order = widths, order
        self.pool, self.task = whole("pool", pool, 1), whole("task", task)
        self._codes = None if labels is None else read_labels(labels).codes
        for what, given in (("labels", self._codes), ("widths", widths)):
            if given is not None and len(given) != self.n:
                raise InputError(f"{what} must be one a row: got {len(given)} {what} and {self.n} rows")
        self._rows = self.batch_size * self.world_size  # of a batch over all ranks
        self.total = self.n // self._rows if drop_last else -(-self.n // self._rows)
        if not self.total:
            other = " or keep the last batch with drop_last=False" if self.n else ""
            raise InputError(f"{self.n} rows do not fill one batch of {self._rows}: lower batch_size{other}")
        last = 0 if self.drop_last or widths is not None else self.n % self._rows
        if last % self.world_size:
            told = f"the last batch of {last} rows cannot be shared equally by {self.world_size} ranks"
            raise InputError(f"{told}: use drop_last=True")
        self._cached: tuple[int, torch.Tensor] | None = None
        self._pooled: tuple[int, list[torch.Tensor]] | None = None
        self.epoch, self.start = whole("epoch", epoch), whole("start", start)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch and begin it at its first batch."""
        self.epoch, self.start = whole("epoch", epoch), 0

    def __len__(self) -> int:
        return max(self.total - self.start, 0)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return self.iter_from(self.start)

    def iter_from(self, position: int) -> Iterator[torch.Tensor]:
        """The batches of the epoch but for the first `position`."""
        first = self.epoch * self.total
        return map(self.batch, range(first + whole("position", position), first + self.total))

    def batch(self, number: int) -> torch.Tensor:
        """This rank's rows (B,) of the batch with this number, counted from 0 over all epochs."""
        if self.widths is None:
            epoch, i = divmod(number, self.total)
            batch = self._order(epoch)[i * self._rows : (i + 1) * self._rows]
        else:
            batch = self._of_similar_length(number, self.widths)
        part = len(batch) // self.world_size
        return batch[self.rank * part : (self.rank + 1) * part].clone()

    def _of_similar_length(self, number: int, widths: torch.Tensor) -> torch.Tensor:
        block, place = divmod(number, self.pool)
        if self._pooled is None or self._pooled[0] != block:
            size = self.pool * self._rows
            epoch, begin = divmod(block * size, self.n)
            epochs = range(epoch, epoch - (-(begin + size) // self.n))
            rows = torch.cat([self._order(epoch) for epoch in epochs])[begin : begin + size]
            parts = rows[widths[rows].argsort(stable=True)].split(self._rows)
            order = permutations(Bits(self.seed, Use.BATCHES, block, 1), np.array([self.pool]))[0]
            self._pooled = block, [parts[part] for part in order.tolist()]
        return self._pooled[1][place]

    def _order(self, epoch: int) -> torch.Tensor:
        if self._cached is None or self._cached[0] != epoch:
            self._cached = epoch, self._random_order(epoch) if self._given_order is None else self._given_order(epoch)
        return self._cached[1]

    def _random_order(self, epoch: int) -> torch.Tensor:
        bits = Bits((self.seed + (self.task << 32)) % 2**64, Use.BATCHES, epoch, 0)
        if self._codes is None:
            return torch.from_numpy(permutations(bits, np.array([self.n]))[0])
        return torch.from_numpy(_balanced(bits, self._codes))


def _balanced(bits: Bits, codes: Ints) -> Ints:
    """len(codes) rows in rounds of one row of every class, each round in its own random order of classes."""
    size = np.bincount(codes)
    classes, n = len(size), len(codes)
    rounds = -(-n // classes)
    rows, first = np.argsort(codes, kind="stable"), np.cumsum(size) - size
    passes = -(-rounds // size)
    lane_class = np.repeat(np.arange(classes), passes)
    order = permutations(bits, size[lane_class])
    inside = np.arange(order.shape[1]) < size[lane_class][:, None]
    sequence = rows[(order + first[lane_class][:, None])[inside]]  # class after class, pass after pass
    begin = np.cumsum(passes * size) - passes * size
    table = sequence[begin[:, None] + np.arange(rounds)]  # (classes, rounds)
    class_order = permutations(bits, np.full(rounds, classes))
    result: Ints = np.take_along_axis(table.T, class_order, axis=1).reshape(-1)[:n]
    return result


def check_stream_state(state: Any, here: Mapping[str, Any], lengths: Mapping[str, int | None]) -> None:
    """Raise InputError unless `state` is of a stream like that of the state `here`, with loaders of these `lengths`."""
    _check_keys("the stream's state", state, here)
    for what in ("seed", "policy"):
        if state[what] != here[what]:
            raise InputError(f"the stream's state is of {what} {state[what]!r}, this stream has {here[what]!r}")
    tasks, own = state["tasks"], here["tasks"]
    if not isinstance(tasks, Mapping) or set(tasks) != set(own):
        given = ", ".join(sorted(map(str, tasks))) if isinstance(tasks, Mapping) else repr(tasks)
        raise InputError(f"the stream's state is of tasks {given}; this stream has {', '.join(sorted(own))}")
    for what in ("step", "done"):
        whole(f"{what} of the stream's state", state[what])
    for name, task in tasks.items():
        _check_keys(f"task {name!r} of the stream's state", task, own[name])
        for what in own[name]:
            whole(f"{what} of task {name!r} of the stream's state", task[what])
        if (length := lengths[name]) is not None and task["position"] > length:
            told = f"the stream's state is at batch {task['position']} of task {name!r}, whose loader has {length}"
            raise InputError(f"{told}; give the loaders that the state was saved with")


def _check_keys(what: str, given: Any, wanted: Mapping[str, Any]) -> None:
    if not isinstance(given, Mapping):
        raise InputError(f"{what} is {given!r}; give what state_dict returned")
    if missing := [key for key in wanted if key not in given]:
        raise InputError(f"{what} lacks {', '.join(missing)}; give what state_dict returned")


POLICIES = ("longest", "shortest", "proportional", "round-robin")
_END = object()


@runtime_checkable
class Scheduler(Protocol):
    """Decides which task is next: `choose()` returns an object whose `source` is a loader's name."""

    def choose(self) -> Any: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class TaskStream:
    """Yields dicts {task: batch} from one loader per task.

    A pass over a loader is an epoch of it, for which its `set_epoch` is called and PyTorch's CPU generator seeded, so
    that a DataLoader with shuffle=True also depends on (seed, task, epoch) alone.

    Args:
        loaders: a re-iterable of batches for each task.
        policy: "longest" and "shortest" give a batch of every task at each step (the text paper's two strategies: draw
            from each until the longest has been seen, and zip); "proportional" gives one task's batch, drawn with
            probability proportional to its loader's length; "round-robin" gives each task its turn; a scheduler chooses
            the task (the stream does not call its `observe`).
        seed: 0..2**64-1.
        steps: all the steps of the stream. None: an iteration is one epoch, which is the longest or shortest loader's
            length, the sum of lengths, or a turn each until the longest is through; the next one goes on from there.

    Attributes:
        counts: batches given so far, of each task.
        choice: the scheduler's last choice.

    Raises InputError: no or empty loaders, or a length that is needed and missing.

    Example:
        >>> stream = TaskStream({"a": [1, 2, 3], "b": [10]}, "longest", seed=0)
        >>> list(stream), stream.counts
        ([{'a': 1, 'b': 10}, {'a': 2, 'b': 10}, {'a': 3, 'b': 10}], {'a': 3, 'b': 3})
    """

    def __init__(
        self, loaders: Mapping[str, Iterable[Any]], policy: str | Scheduler, *, seed: int, steps: int | None = None
    ) -> None:
        if not isinstance(loaders, Mapping) or not loaders:
            given = "empty" if isinstance(loaders, Mapping) else f"a {type(loaders).__name__}"
            raise InputError(f"loaders is {given}: give at least one, as {{name: loader}}")
        self.loaders, self.seed = dict(loaders), check_seed(seed)
        self.policy = policy if not isinstance(policy, str) else one_of("policy", policy, POLICIES)
        if not isinstance(policy, str) and (not isinstance(policy, Scheduler) or isinstance(policy, type)):
            told = f"policy must be one of {', '.join(POLICIES)}, or have choose"
            raise InputError(f"{told}, state_dict and load_state_dict, not {type(policy).__name__}")
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
        self._sizes = dict(zip(self.loaders, self._sized(), strict=True)) if policy == "proportional" else {}

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

    def follow(self, optimizer: Any, clip: float | None = None) -> None:
        """Tell a scheduler that has a method `follow` which optimizer makes the updates."""
        if (follow := getattr(self.policy, "follow", None)) is not None:
            follow(optimizer, clip)

    def state_dict(self) -> dict[str, Any]:
        """Where the stream is, as JSON values (with a scheduler: as far as its state is)."""
        return {
            "seed": self.seed,
            "policy": self.policy if isinstance(self.policy, str) else "scheduler",
            "scheduler": None if isinstance(self.policy, str) else self.policy.state_dict(),
            "step": self.step,
            "done": self.done,
            "tasks": {
                name: {"epoch": self._epoch[name], "position": self._position[name], "count": self.counts[name]}
                for name in self.loaders
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where another stream with the same tasks, policy and seed was.

        Raises InputError: the state is of another stream, incomplete, or behind the end of a loader.

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
            return (take_turns(names, self.done, names),)
        if self.policy == "proportional":
            return (pick_by_size(self._sizes, self.seed, self.done),)
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
                told = f"loader {name!r} gave no batch in pass {self._epoch[name]}: a loader"
                raise InputError(f"{told} must not be empty and must give its batches again at each iteration")
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
        for name, length in self._lengths.items():
            if length is None:
                needed = "policy 'proportional' needs" if self.steps is not None else "an epoch needs; give steps=..."
                raise InputError(f"loader {name!r} has no length, which {needed}")
        return [length for length in self._lengths.values() if length is not None]


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
