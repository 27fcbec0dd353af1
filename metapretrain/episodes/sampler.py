"""The sampler of episodes: episode i is a function of (seed, epoch, i, block size) alone."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler, Subset, TensorDataset

from metapretrain.checks import check_rank, check_seed, whole
from metapretrain.draws import Bits, Ints, Use, distinct, integers, permutations
from metapretrain.errors import InputError, brief

Count = int | tuple[int, int]


@dataclass(frozen=True)
class EpisodeSpec:
    """The size of an episode: classes (ways), and support (shots) and query examples of each class.

    Each is an integer of at least 1, or a range (low, high), both included, from which every episode draws uniformly.
    ``ways=None`` means shots + queries disjoint examples of a group whatever their labels, as for prompts.

    Example:
        >>> EpisodeSpec(ways=(3, 5), shots=1, queries=15).longest
        80
    """

    ways: Count | None
    shots: Count
    queries: Count

    def __post_init__(self) -> None:
        _ = self.ranges

    @property
    def ranges(self) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
        """(low, high) of ways, shots and queries; ways=None counts as one."""
        ways = (1, 1) if self.ways is None else _range("ways", self.ways)
        return ways, _range("shots", self.shots), _range("queries", self.queries)

    @property
    def per_class(self) -> int:
        """The most examples that an episode takes from one class."""
        _, shots, queries = self.ranges
        return shots[1] + queries[1]

    @property
    def longest(self) -> int:
        """The most examples that an episode holds."""
        return self.ranges[0][1] * self.per_class


def _range(what: str, given: Any) -> tuple[int, int]:
    if not isinstance(given, (tuple, list)):
        number = whole(what, given, 1)
        return number, number
    if len(given) != 2:
        raise InputError(f"{what} must be an integer or a range (low, high), not {given!r}")
    low, high = whole(f"{what}'s low", given[0], 1), whole(f"{what}'s high", given[1], 1)
    if low > high:
        raise InputError(f"{what} must be a range (low, high) with low <= high, not {given!r}")
    return low, high


@dataclass(frozen=True)
class Labels:
    """Codes (N,) in 0..C-1 and the C label values they stand for, in sorted order."""

    codes: Ints
    names: tuple[Any, ...]


def read_labels(source: Any, what: str = "labels") -> Labels:
    """Read one label per row, an integer of at least 0 or a string, by position.

    They are a list, tuple, array, tensor, pandas or polars column, or a data set's `.targets`, `.labels`,
    `.indices_to_labels` (learn2learn's `MetaDataset`) or last tensor (of a TensorDataset); a Subset is seen through.
    Raises InputError: there are no such labels, or not as many as the data set has rows.

    Example:
        >>> read_labels([7, 3, 7]).names
        (3, 7)
    """
    values = _as_array(_column(source, what), what)
    if values.ndim != 1:
        raise InputError(f"{what} must be one-dimensional, one a row, not of shape {values.shape}")
    if not values.size:
        raise InputError(f"{what} are empty: give one label for each row of the data set")
    if values.dtype.kind in "OT":
        values = _of_objects(values.tolist(), what)
    if values.dtype.kind not in "iubU":
        raise InputError(f"{what} must be integers or strings, not {values.dtype}")
    if values.dtype.kind == "b":
        values = values.astype(np.int64)
    names, codes = np.unique(values, return_inverse=True)
    if values.dtype.kind == "i" and names[0] < 0:
        told = f"{what} must not be negative, but the least is {names[0]}"
        raise InputError(f"{told}: -1 marks rows without one; give only rows that have one")
    return Labels(codes.reshape(-1).astype(np.int64), tuple(names.tolist()))


def read_groups(source: Any, rows: int) -> Labels:
    """Read one group (domain, cluster, alphabet) per row, as :func:`read_labels`; None puts all rows into one group."""
    if source is None:
        return Labels(np.zeros(rows, dtype=np.int64), (None,))
    groups = read_labels(source, "groups")
    if len(groups.codes) != rows:
        raise InputError(f"groups must be one a label: got {len(groups.codes)} groups and {rows} labels")
    return groups


def _column(source: Any, what: str) -> Any:
    listed = isinstance(source, (torch.Tensor, np.ndarray, Sequence)) and not isinstance(source, (str, bytes))
    if listed or hasattr(source, "to_numpy"):
        return source
    if isinstance(source, Subset):
        return _as_array(_column(source.dataset, what), what)[np.asarray(source.indices)]
    if isinstance(source, TensorDataset) and len(source.tensors) > 1:
        return source.tensors[-1]
    by_index = getattr(source, "indices_to_labels", None)
    if by_index is not None:
        return [by_index[i] for i in range(len(source))]
    for name in ("targets", "labels"):
        column = getattr(source, name, None)
        if column is not None:
            if isinstance(source, Sized) and len(column) != len(source):
                raise InputError(
                    f"{what} must be one a row: {type(source).__name__} has {len(source)} rows and {len(column)} {name}"
                )
            return column
    told = f"{what} must be a list, an array, a tensor, a column of a table"
    raise InputError(f"{told}, or a data set with .targets or .labels, not {type(source).__name__}")


def _as_array(column: Any, what: str) -> Any:
    if isinstance(column, torch.Tensor):
        if column.is_floating_point() or column.is_complex():
            raise InputError(f"{what} must be integers or strings, not {str(column.dtype).removeprefix('torch.')}")
        return column.detach().cpu().numpy()
    if hasattr(column, "to_numpy"):  # of pandas and polars: by position, whatever the index
        return column.to_numpy()
    if masked := int(np.sum(getattr(column, "mask", False))) if isinstance(column, np.ma.MaskedArray) else 0:
        raise InputError(f"{what} have {masked} masked values; leave these rows out")
    try:
        values = np.asarray(column)
    except ValueError:
        raise InputError(f"{what} must be one-dimensional, one a row, not nested lists of unequal length") from None
    if values.dtype.kind == "U" and not isinstance(column, np.ndarray):
        return _of_objects(list(column), what)
    return values


def _of_objects(items: list[Any], what: str) -> Any:
    """All strings or all integers, as an array; NumPy would turn a mixture into strings."""
    for row, item in enumerate(items):
        if not isinstance(item, (str, int, np.integer)):
            raise InputError(f"{what} must be integers or strings, but row {row} has {item!r}")
    if len({isinstance(item, str) for item in items}) > 1:
        raise InputError(f"{what} must be all integers or all strings, not a mixture")
    return np.asarray(items)


@dataclass(frozen=True)
class PlanTable:
    """Plans of one shape side by side: T episodes of W classes, S support and Q query rows each."""

    index: Ints  # (T,)
    rows: Ints  # (T, S+Q)
    support_y: Ints  # (T, S) or (1, S)
    query_y: Ints  # (T, Q) or (1, Q)
    classes: Ints  # (T, W), of class_names; W = 0 stands for all
    class_names: tuple[Any, ...]
    groups: Ints  # (T,), of group_names
    group_names: tuple[Any, ...]


class EpisodePlan(list[int]):
    """The rows of one episode, support rows then query rows, as the list that a `batch_sampler` yields.

    Attributes:
        index: the episode's number within its epoch.
        support_y, query_y: labels 0..W-1 of the rows, int64 (S,) and (Q,).
        classes: the W label values that 0..W-1 stand for; with ``ways=None`` all label values of the data.
        group: the group that the episode was drawn from, None without groups.

    Example:
        >>> plan = EpisodePlan.of([4, 9, 5, 8], index=0, support_y=[0, 1], query_y=[0, 1], classes=(7, 3))
        >>> plan, plan.support, plan.query, plan.query_y.tolist()
        ([4, 9, 5, 8], [4, 9], [5, 8], [0, 1])
    """

    __slots__ = ("_lane", "_table")

    _table: PlanTable
    _lane: int

    @classmethod
    def of(
        cls,
        rows: Sequence[int],
        *,
        index: int,
        support_y: Sequence[int],
        query_y: Sequence[int],
        classes: Sequence[Any],
        group: Any = None,
    ) -> EpisodePlan:
        """A plan from its parts, with one label per row."""
        if len(rows) != len(support_y) + len(query_y):
            told = f"a plan needs one label a row: got {len(rows)} rows"
            raise InputError(f"{told}, {len(support_y)} support labels and {len(query_y)} query labels")
        labels = np.asarray([*support_y, *query_y])
        if labels.ndim != 1 or (labels < 0).any():
            raise InputError(f"labels of a plan are {brief(labels.tolist())}; give one class index 0..W-1 per row")
        one = np.zeros(1, dtype=np.int64)
        table = PlanTable(
            index=one + index,
            rows=np.asarray([rows], dtype=np.int64),
            support_y=np.asarray([support_y], dtype=np.int64),
            query_y=np.asarray([query_y], dtype=np.int64),
            classes=np.arange(len(classes))[None],
            class_names=tuple(classes),
            groups=one,
            group_names=(group,),
        )
        return plan_at(table, 0)

    @property
    def index(self) -> int:  # type: ignore[override]  # the design's name; list.index(row) is not needed
        return int(self._table.index[self._lane])

    @property
    def support_y(self) -> torch.Tensor:
        return self._labels(self._table.support_y)

    @property
    def query_y(self) -> torch.Tensor:
        return self._labels(self._table.query_y)

    def _labels(self, y: Ints) -> torch.Tensor:
        return torch.tensor(y[self._lane if len(y) > 1 else 0])

    @property
    def classes(self) -> tuple[Any, ...]:
        names = self._table.class_names
        if not self._table.classes.shape[1]:
            return names
        return tuple(names[code] for code in self._table.classes[self._lane].tolist())

    @property
    def group(self) -> Any:
        return self._table.group_names[self._table.groups[self._lane]]

    @property
    def support(self) -> list[int]:
        return self[: self._table.support_y.shape[1]]

    @property
    def query(self) -> list[int]:
        return self[self._table.support_y.shape[1] :]

    def __reduce__(self) -> tuple[Any, ...]:
        labels = {"support_y": self.support_y.tolist(), "query_y": self.query_y.tolist()}
        about = {"index": self.index, **labels, "classes": self.classes, "group": self.group}
        return partial(EpisodePlan.of, list(self), **about), ()


def plan_at(table: PlanTable, lane: int) -> EpisodePlan:
    """The plan in one lane of a table."""
    plan = EpisodePlan(table.rows[lane].tolist())
    plan._table, plan._lane = table, lane
    return plan


logger = logging.getLogger(__name__)

# Tables of plans, and the (table, lane) of each episode in order.
PlanBlock = tuple[list[PlanTable], list[tuple[int, int]]]


@dataclass(frozen=True)
class Pools:
    """The K usable classes (with ways=None whole groups), sorted by their G groups."""

    rows: Ints
    start: Ints  # (K,): class c owns rows[start[c] : start[c] + size[c]]
    size: Ints
    label: Ints  # (K,), codes
    first: Ints  # (G,): group g owns the classes first[g] : first[g] + count[g]
    count: Ints
    group: Ints  # (G,), codes


def make_pools(labels: Labels, groups: Labels, spec: EpisodeSpec) -> Pools:
    """Sort the rows into pools and leave out, with one logged count, what is too small for `spec`."""
    anything = spec.ways is None
    codes = np.zeros_like(labels.codes) if anything else labels.codes
    pool_of_row = groups.codes * (int(codes.max()) + 1) + codes
    rows = np.argsort(pool_of_row, kind="stable")
    pool, start, size = np.unique(pool_of_row[rows], return_index=True, return_counts=True)
    group, label = np.divmod(pool, int(codes.max()) + 1)
    ways, need = spec.ranges[0][1], spec.per_class
    big = size >= need
    many = np.bincount(group[big], minlength=len(groups.names)) >= ways
    keep = big & many[group]
    if not keep.any():
        raise InputError(_too_small(spec, size, big, group, len(groups.names)))
    what = "groups" if anything else "classes"
    if not big.all():
        logger.warning(
            "left out %d of %d %s with fewer than %d examples (shots + queries)", (~big).sum(), len(big), what, need
        )
    if not many.all():
        logger.warning("left out %d of %d groups with fewer than %d usable classes", (~many).sum(), len(many), ways)
    used, first, count = np.unique(group[keep], return_index=True, return_counts=True)
    return Pools(rows, start[keep], size[keep], label[keep], first, count, used)


def _too_small(spec: EpisodeSpec, size: Ints, big: Any, group: Ints, groups: int) -> str:
    ways, need = spec.ranges[0][1], spec.per_class
    what = "group" if spec.ways is None else "class"
    if not big.any():
        return (
            f"shots + queries = {need} is above the size of every {what}: the largest has {int(size.max())}"
            " examples; lower shots or queries"
        )
    if groups > 1:
        most = int(np.bincount(group[big]).max())
        return (
            f"ways = {ways}, but no group has as many classes with at least {need} examples (shots +"
            f" queries): the best has {most}; lower ways, shots or queries"
        )
    if ways > len(size):
        return f"ways = {ways} is above the number of classes, {len(size)}; lower ways"
    return (
        f"ways = {ways}, but only {int(big.sum())} of {len(size)} classes have at least {need} examples"
        " (shots + queries); lower ways, shots or queries"
    )


class Planner:
    """Plans episode blocks for labels and a spec; holds no state that changes."""

    def __init__(self, labels: Labels, groups: Labels, spec: EpisodeSpec, *, seed: int, block_size: int) -> None:
        self.labels, self.groups, self.spec = labels, groups, spec
        self.seed, self.block_size = seed, block_size
        self.pools = make_pools(labels, groups, spec)

    def block(self, epoch: int, block: int) -> PlanBlock:
        """All episodes of one block: tables by shape, and (table, lane) of each episode in order."""
        bits = Bits(self.seed, Use.EPISODES, epoch, block)
        pools, lanes = self.pools, self.block_size
        ways, shots, queries = (
            np.full(lanes, low) if low == high else integers(bits, np.full(lanes, high - low + 1)) + low
            for low, high in self.spec.ranges
        )
        group = integers(bits, np.full(lanes, len(pools.group)))
        chosen = distinct(bits, pools.count[group], self.spec.ranges[0][1]) + pools.first[group][:, None]
        position = distinct(bits, pools.size[chosen].reshape(-1), self.spec.per_class)
        rows = pools.rows.take(position + pools.start[chosen].reshape(-1, 1)).reshape(lanes, -1)
        order = permutations(bits, ways * queries)
        index = np.arange(lanes) + block * lanes

        shape = np.stack([ways, shots, queries])
        if (shape == shape[:, :1]).all():
            w, s, q = shape[:, 0].tolist()
            table = self._table((w, s, q), index, rows, order, chosen[:, :w], group)
            return [table], [(0, lane) for lane in range(lanes)]
        tables, place = [], [(0, 0)] * lanes
        shapes, which = np.unique(shape, axis=1, return_inverse=True)
        for number, (w, s, q) in enumerate(shapes.T.tolist()):
            mine = np.flatnonzero(which.reshape(-1) == number)
            cut = order[mine, : w * q], chosen[mine, :w]
            tables.append(self._table((w, s, q), index[mine], rows[mine], *cut, group[mine]))
            for lane, episode in enumerate(mine.tolist()):
                place[episode] = (number, lane)
        return tables, place

    def _table(
        self, shape: tuple[int, int, int], index: Ints, rows: Ints, order: Ints, chosen: Ints, group: Ints
    ) -> PlanTable:
        """Pick the support slots and the shuffled query slots out of rows (T, most ways * most per class)."""
        ways, shots, queries = shape
        slot = np.arange(ways)[:, None] * self.spec.per_class + np.arange(shots + queries)
        support = np.broadcast_to(slot[:, :shots].reshape(-1), (len(rows), ways * shots))
        slots = np.concatenate([support, slot[:, shots:].reshape(-1).take(order)], axis=1)
        slots += np.arange(0, rows.size, rows.shape[1])[:, None]
        flat = rows.reshape(-1).take(slots)
        if self.spec.ways is None:  # labels keep one meaning over all episodes
            y = self.labels.codes[flat]
            support_y, query_y, classes = y[:, :shots], y[:, shots:], chosen[:, :0]
        else:
            support_y = np.repeat(np.arange(ways), shots)[None]
            query_y = order // queries
            classes = self.pools.label[chosen]
        names, groups = self.labels.names, self.pools.group[group]
        return PlanTable(index, flat, support_y, query_y, classes, names, groups, self.groups.names)


BLOCK = 512


class EpisodeSampler(Sampler[list[int]]):
    """Yields episode plans of random classes and rows; give it to a DataLoader as `batch_sampler`.

    Every episode draws a group uniformly (with `groups`), classes in uniformly random order, and different rows of each
    class. Classes with fewer rows than the most shots + queries of the spec are left out.

    Args:
        labels: one per row (N,), in any form that :func:`read_labels` takes.
        episodes: episodes of an epoch over all ranks; None is endless.
        seed: 0..2**64-1.
        rank, world_size: rank r gives episodes r, r + world_size, ...; let no `prepare` of accelerate shard them again.
        groups: one per row (N,); an episode stays inside a group.
        epoch, start: see :meth:`set_epoch`.
        uneven: allow ranks to give different numbers of episodes: for evaluation; training would hang.
        block_size: episodes planned together; part of what an episode depends on.

    Raises InputError: fewer than `ways` classes are large enough, or `episodes` does not divide by `world_size` and
    `uneven` is off.

    Example:
        >>> sampler = EpisodeSampler([0, 0, 0, 1, 1, 1], EpisodeSpec(ways=2, shots=1, queries=2), 4, seed=0)
        >>> len(sampler), [len(plan) for plan in sampler]
        (4, [6, 6, 6, 6])
        >>> list(sampler) == [sampler.plan(i) for i in range(4)]
        True
    """

    def __init__(
        self,
        labels: Any,
        spec: EpisodeSpec,
        episodes: int | None,
        *,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        groups: Any = None,
        start: int = 0,
        epoch: int = 0,
        uneven: bool = False,
        block_size: int = BLOCK,
    ) -> None:
        super().__init__()
        if not isinstance(spec, EpisodeSpec):
            raise InputError(f"spec must be EpisodeSpec(ways, shots, queries), not {type(spec).__name__}")
        self.spec = spec
        self.episodes = None if episodes is None else whole("episodes", episodes, 1)
        self.rank, self.world_size = check_rank(rank, world_size)
        self.set_epoch(epoch, start)
        if self.episodes is not None and self.episodes % self.world_size and not uneven:
            told = "episodes must divide by world_size so that all ranks take the same number of steps"
            raise InputError(f"{told}, not {self.episodes} over {self.world_size}; for evaluation pass uneven=True")
        read = read_labels(labels)
        self.rows = len(read.codes)
        self._last: tuple[int, int, PlanBlock] | None = None
        numbers = {"seed": check_seed(seed), "block_size": whole("block_size", block_size, 1)}
        self._planner = Planner(read, read_groups(groups, self.rows), spec, **numbers)

    @property
    def labels(self) -> list[Any]:
        """The label value of every row."""
        names = self._planner.labels.names
        return [names[code] for code in self._planner.labels.codes.tolist()]

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Choose the epoch, and its first episode to give, counted over all ranks: what resumes a run."""
        self.epoch, self.start = whole("epoch", epoch), whole("start", start)

    def __len__(self) -> int:
        if self.episodes is None:
            raise TypeError("an endless EpisodeSampler (episodes=None) has no length")
        return len(range(self._first(), self.episodes, self.world_size))

    def __iter__(self) -> Iterator[EpisodePlan]:
        return self._from(self._first())

    def iter_from(self, position: int) -> Iterator[EpisodePlan]:
        """This rank's episodes of the epoch but for the first `position`, whatever `start` is."""
        return self._from(self.rank + whole("position", position) * self.world_size)

    def plan(self, index: int) -> EpisodePlan:
        """Episode `index` of the epoch, whichever rank's it is."""
        block, lane = divmod(whole("index", index), self._planner.block_size)
        if self._last is None or self._last[:2] != (self.epoch, block):
            self._last = self.epoch, block, self._planner.block(self.epoch, block)
        tables, place = self._last[2]
        table, at = place[lane]
        return plan_at(tables[table], at)

    def index_of(self, position: int) -> int:
        """The number of the episode that this rank gives `position` episodes after its first."""
        return self._first() + position * self.world_size

    def _first(self) -> int:
        return self.start + (self.rank - self.start) % self.world_size

    def _from(self, first: int) -> Iterator[EpisodePlan]:
        size, epoch = self._planner.block_size, self.epoch
        for block in itertools.count(first // size):
            begin = block * size
            end = begin + size if self.episodes is None else min(begin + size, self.episodes)
            if first >= end and end < begin + size:
                return
            mine = np.arange(first, end, self.world_size)
            if mine.size:
                tables, place = self._planner.block(epoch, block)
                for number in (mine - begin).tolist():
                    table, lane = place[number]
                    yield plan_at(tables[table], lane)
                first = int(mine[-1]) + self.world_size
