"""Planning whole blocks of episodes at once, without data: pure functions of (seed, epoch, block)."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np

from metapretrain.episodes.draws import Bits, Ints, Use, distinct, integers, permutations
from metapretrain.episodes.labels import Labels
from metapretrain.episodes.plan import PlanTable
from metapretrain.episodes.spec import EpisodeSpec
from metapretrain.errors import InputError

logger = logging.getLogger(__name__)

# Tables of plans, and the (table, lane) of each episode in order.
PlanBlock = tuple[list[PlanTable], list[tuple[int, int]]]


@dataclass(frozen=True)
class Pools:
    """The usable classes, sorted by group: class c owns rows[start[c] : start[c] + size[c]].

    Group g owns the classes first[g] : first[g] + count[g]; with ways=None a pool is a whole group. `label`
    (K,) and `group` (G,) are codes of the labels and groups that were given.
    """

    rows: Ints
    start: Ints
    size: Ints
    label: Ints
    first: Ints
    count: Ints
    group: Ints


def make_pools(labels: Labels, groups: Labels, spec: EpisodeSpec) -> Pools:
    """Sort the rows into pools and leave out, with one logged count, what is too small for `spec`.

    Raises:
        InputError: fewer than `ways` classes remain in every group.

    Example:
        >>> from metapretrain.episodes.labels import read_groups, read_labels
        >>> labels = read_labels([0, 1, 0, 1, 2])
        >>> pools = make_pools(labels, read_groups(None, 5), EpisodeSpec(ways=2, shots=1, queries=1))
        >>> pools.size.tolist(), pools.label.tolist()
        ([2, 2], [0, 1])
    """
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
            "left out %d of %d %s with fewer than %d examples (shots + queries)",
            (~big).sum(),
            len(big),
            what,
            need,
        )
    if not many.all():
        logger.warning(
            "left out %d of %d groups with fewer than %d usable classes", (~many).sum(), len(many), ways
        )
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
    """Plans episode blocks for labels and a spec; holds no state that changes.

    Example:
        >>> from metapretrain.episodes.labels import read_groups, read_labels
        >>> labels = read_labels([0, 0, 1, 1, 2, 2])
        >>> planner = Planner(labels, read_groups(None, 6), EpisodeSpec(2, 1, 1), seed=0, block_size=8)
        >>> tables, place = planner.block(epoch=0, block=3)
        >>> tables[0].rows.shape, int(tables[0].index[0])
        ((8, 4), 24)
    """

    def __init__(
        self, labels: Labels, groups: Labels, spec: EpisodeSpec, *, seed: int, block_size: int
    ) -> None:
        self.labels, self.groups, self.spec = labels, groups, spec
        self.seed, self.block_size = seed, block_size
        self.pools = make_pools(labels, groups, spec)

    def block(self, epoch: int, block: int) -> PlanBlock:
        """All episodes of one block: tables by shape, and (table, lane) of each episode in order.

        Example:
            see the class.
        """
        bits = Bits(self.seed, Use.EPISODES, epoch, block)
        pools, lanes = self.pools, self.block_size
        ways, shots, queries = (_counts(bits, lanes, low, high) for low, high in self.spec.ranges)
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
        return PlanTable(
            index=index,
            rows=flat,
            support_y=support_y,
            query_y=query_y,
            classes=classes,
            class_names=self.labels.names,
            groups=self.pools.group[group],
            group_names=self.groups.names,
        )


def _counts(bits: Bits, lanes: int, low: int, high: int) -> Ints:
    if low == high:
        return np.full(lanes, low)
    return integers(bits, np.full(lanes, high - low + 1)) + low
