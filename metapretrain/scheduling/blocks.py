"""What all schedulers share: a decision holds for several updates, is counted, and can be resumed."""

from __future__ import annotations

import dataclasses
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, SupportsFloat

from metapretrain.errors import InputError, one_of
from metapretrain.scheduling.checks import check_names, check_whole
from metapretrain.scheduling.choice import Choice, Cost

_log = logging.getLogger(__name__)


class BlockScheduler(ABC):
    """Chooses a source for `updates` updates at a time; to write another scheduler, fill in `_decide`.

    Call `choose` once before each update: it decides, and then gives the same source until the `updates` of
    the decision are through.

    Args:
        sources: names of the source tasks.
        updates: N, updates from one decision to the next.
        seed: what random draws depend on, together with the number of the decision.

    Attributes:
        counts: updates given to each source so far.
        decisions: decisions so far.
        cost: what probes took so far.
        active: names of the sources that have not run out.

    Raises:
        InputError: no sources, a name twice, a bad number.
    """

    def __init__(self, sources: Iterable[str], *, updates: int = 1, seed: int = 0) -> None:
        self.sources = check_names("sources", sources)
        self.updates, self.seed = check_whole("updates", updates, 1), check_whole("seed", seed, 0)
        self.counts = dict.fromkeys(self.sources, 0)
        self.decisions, self.cost = 0, Cost()
        self._left, self._last = 0, Choice(self.sources[0], 0)
        self._gone: set[str] = set()

    @property
    def active(self) -> tuple[str, ...]:
        return tuple(name for name in self.sources if name not in self._gone)

    @property
    def share(self) -> float:
        """Probes' part of the compute so far, in [0, 1]: their units to those and 3 an update (:class:`Cost`)."""
        total = self.cost.units + 3 * sum(self.counts.values())
        return self.cost.units / total if total else 0.0

    def choose(self) -> Choice:
        """The source of the next update.

        Raises:
            InputError: all sources have run out.
        """
        if self._left == 0:
            self._require_active()
            self._last = self._decide()
            self.cost += self._last.cost
            self._left = self.updates
            self.decisions += 1
            choice = self._last
        else:
            choice = dataclasses.replace(self._last, updates=self._left, cost=Cost())
        self._left -= 1
        self.counts[choice.source] += 1
        return choice

    def observe(self, source: str, reward: float) -> None:
        """Tell how good an update with `source` was; most schedulers make nothing of it.

        Raises:
            InputError: an unknown source, a reward that is not finite.
        """
        one_of("source", source, self.sources)
        if not isinstance(reward, SupportsFloat) or not math.isfinite(reward):
            raise InputError(f"the reward of {source!r} is {reward!r}; give a finite number")

    def drop(self, source: str) -> None:
        """Say that a source has run out: it is not chosen again, and its remaining updates are given up.

        Raises:
            InputError: an unknown source.
        """
        one_of("source", source, self.sources)
        if source not in self._gone:
            _log.info("source %r has run out: it is not chosen again", source)
            self._gone.add(source)
        if self._last.source == source:
            self._left = 0

    def state_dict(self) -> dict[str, Any]:
        """The state as JSON values."""
        return {
            **self._identity(),
            "decisions": self.decisions,
            "left": self._left,
            "counts": dict(self.counts),
            "gone": sorted(self._gone),
            "cost": dataclasses.asdict(self.cost),
            "last": {
                "source": self._last.source,
                "explored": self._last.explored,
                "utilities": numbers_or_none(self._last.utilities),
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where another scheduler of the same kind, sources, updates and seed was.

        Raises:
            InputError: the state is of a scheduler that differs in one of these.
        """
        if not isinstance(state, Mapping):
            raise InputError(f"a scheduler's state is what state_dict gave, not {state!r}")
        for what, here in self._identity().items():
            if state.get(what) != here:
                raise InputError(
                    f"the scheduler's state is of {what} {state.get(what)!r}, this one has {here!r}"
                )
        last = state["last"]
        self.decisions, self._left = state["decisions"], state["left"]
        self.counts, self._gone = dict(state["counts"]), set(state["gone"])
        self.cost = Cost(**state["cost"])
        self._last = Choice(
            last["source"], self.updates, last["explored"], none_to_nan(last["utilities"])
        )

    def _identity(self) -> dict[str, Any]:
        return {
            "kind": type(self).__name__,
            "sources": list(self.sources),
            "updates": self.updates,
            "seed": self.seed,
        }

    def _require_active(self) -> None:
        if not self.active:
            raise InputError(f"every source has run out: {', '.join(self.sources)}")

    @abstractmethod
    def _decide(self) -> Choice:
        """The next decision; `self.decisions` is its number, from 0."""


def numbers_or_none(values: Mapping[str, float]) -> dict[str, float | None]:
    """The values with None for what is not finite, which JSON cannot hold."""
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def none_to_nan(values: Mapping[str, float | None]) -> dict[str, float]:
    """The opposite of :func:`numbers_or_none`."""
    return {name: math.nan if value is None else value for name, value in values.items()}
