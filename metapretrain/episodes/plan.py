"""The plan of an episode: which rows, as which classes, before any data is read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from metapretrain.episodes.draws import Ints
from metapretrain.errors import InputError


@dataclass(frozen=True)
class PlanTable:
    """Plans of one shape side by side: T episodes of W classes, S support and Q query rows each.

    `rows` (T, S+Q), `query_y` (T, Q) or (1, Q), `support_y` likewise, `classes` (T, W) codes into
    `class_names`, `groups` (T,) codes into `group_names`. A table of W=0 codes stands for "all classes".
    """

    index: Ints
    rows: Ints
    support_y: Ints
    query_y: Ints
    classes: Ints
    class_names: tuple[Any, ...]
    groups: Ints
    group_names: tuple[Any, ...]


class EpisodePlan(list[int]):
    """The rows of one episode, support rows then query rows, as the list that a `batch_sampler` yields.

    Attributes:
        index: the episode's number within its epoch.
        support_y: labels 0..W-1 of the support rows, int64 (S,).
        query_y: labels 0..W-1 of the query rows, int64 (Q,).
        classes: the W label values that 0..W-1 stand for; with ``ways=None`` all label values of the data.
        group: the group that the episode was drawn from, None without groups.

    All but the rows are made when they are read, so a plan costs little more than its list. Plans pickle by
    value.

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
        """A plan from its parts.

        Raises:
            InputError: there is not one label a row.

        Example:
            see the class.
        """
        if len(rows) != len(support_y) + len(query_y):
            raise InputError(
                f"a plan needs one label a row: got {len(rows)} rows, {len(support_y)} support labels"
                f" and {len(query_y)} query labels"
            )
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
        """The support rows."""
        return self[: self._table.support_y.shape[1]]

    @property
    def query(self) -> list[int]:
        """The query rows."""
        return self[self._table.support_y.shape[1] :]

    def __reduce__(self) -> tuple[Any, ...]:
        support_y, query_y = self.support_y.tolist(), self.query_y.tolist()
        return _rebuild, (list(self), self.index, support_y, query_y, self.classes, self.group)


def _rebuild(
    rows: list[int], index: int, support_y: list[int], query_y: list[int], classes: Any, group: Any
) -> Any:
    return EpisodePlan.of(
        rows, index=index, support_y=support_y, query_y=query_y, classes=classes, group=group
    )


def plan_at(table: PlanTable, lane: int) -> EpisodePlan:
    """The plan in one lane of a table."""
    plan = EpisodePlan(table.rows[lane].tolist())
    plan._table = table
    plan._lane = lane
    return plan


def plans_at(tables: Sequence[PlanTable], places: Iterable[tuple[int, int]]) -> Iterator[EpisodePlan]:
    """The plans at some (table, lane) places, in that order."""
    rows = [table.rows for table in tables]
    for which, lane in places:
        plan = EpisodePlan(rows[which][lane].tolist())
        plan._table = tables[which]
        plan._lane = lane
        yield plan
