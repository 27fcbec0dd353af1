"""What all schedulers share; and uniform, proportional, round-robin and fixed choice, Exp3, Exp3 by falling losses."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, SupportsFloat

import torch

from metapretrain.checks import check_names, number, whole
from metapretrain.draws import generator, pick, pick_by_size, take_turns
from metapretrain.errors import InputError, one_of
from metapretrain.files import plain
from metapretrain.scheduling.probes import Params, Probe, Weights, check_probes, mean_losses

MOST_SAMPLES = 100  # all batches of a decision are held at once


@dataclass(frozen=True)
class Cost:
    """What probes cost: batches passed forwards, batches passed backwards, and seconds of wall time.

    Example:
        >>> (Cost(8, 2, 0.5) + Cost(2, 2, 0.25)).units
        18
    """

    forwards: int = 0
    backwards: int = 0
    seconds: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.forwards + other.forwards, self.backwards + other.backwards, self.seconds + other.seconds)

    @property
    def units(self) -> int:
        """The cost in forward passes: a backward pass counts as two, so an update is 3 units."""
        return self.forwards + 2 * self.backwards


@dataclass(frozen=True)
class Choice:
    """The source that the next update is for."""

    source: str
    updates: int  # left with this source until the next decision, this one included
    explored: bool = False  # whether it was drawn at random in place of the best
    utilities: Mapping[str, float] = field(default_factory=dict)  # of the decision, NaN: passed over; empty: none
    cost: Cost = Cost()  # what this call spent on probes: nothing unless it made a decision


_log = logging.getLogger(__name__)


class BlockScheduler(ABC):
    """Chooses a source for `updates` updates at a time; to write another scheduler, fill in `_decide`.

    Call `choose` once before each update. Random draws depend on the seed and the number of the decision.

    Attributes:
        counts, decisions, cost: updates given to each source, decisions, and what probes took so far.
        active: names of the sources that have not run out.
        choices: [source, updates in a row] of all updates so far; None: they are not kept, set it to [] to do so.
        watch: called at each decision with the number of its first update, from 1, and the choice.
        units: what probes cost in forward passes of a batch, once every `every` updates; 0 without probes.

    Raises InputError: no sources, a name twice, a bad number.
    """

    units = 0

    def __init__(self, sources: Iterable[str], *, updates: int = 1, seed: int = 0) -> None:
        self.sources = check_names("sources", sources)
        self.updates, self.seed = whole("updates", updates, 1), whole("seed", seed, 0)
        self.counts = dict.fromkeys(self.sources, 0)
        self.decisions, self.cost = 0, Cost()
        self.every = self.updates
        self._left, self._last = 0, Choice(self.sources[0], 0)
        self._followed: torch.optim.Optimizer | None = None
        self._clip: float | None = None
        self._gone: set[str] = set()
        self.choices: list[list[Any]] | None = None
        self.watch: Callable[[int, Choice], None] | None = None

    @property
    def active(self) -> tuple[str, ...]:
        return tuple(name for name in self.sources if name not in self._gone)

    @property
    def share(self) -> float:
        """Probes' part of the compute so far, in [0, 1]: their units to those and 3 an update (:class:`Cost`)."""
        total = self.cost.units + 3 * sum(self.counts.values())
        return self.cost.units / total if total else 0.0

    def spent(self) -> dict[str, Any]:
        """The updates of each source and what the probes took, as a result file has them; `probe_share` is `share`."""
        return {
            "updates": dict(self.counts),
            "decisions": self.decisions,
            "probe_share": round(self.share, 4),
            "probe_forwards": self.cost.forwards,
            "probe_backwards": self.cost.backwards,
            "probe_seconds": round(self.cost.seconds, 3),
        }

    def choose(self) -> Choice:
        """The source of the next update; InputError when all have run out."""
        choice = dataclasses.replace(self._last, updates=self._left, cost=Cost())
        if decided := self._left == 0:
            self._require_active()
            choice = self._last = self._decide()
            self.cost += choice.cost
            self._left = self.updates
            self.decisions += 1
        self._left -= 1
        self.counts[choice.source] += 1
        if self.choices is not None:
            if not self.choices or self.choices[-1][0] != choice.source:
                self.choices.append([choice.source, 0])
            self.choices[-1][1] += 1
        if decided and self.watch is not None:
            self.watch(sum(self.counts.values()), choice)
        return choice

    def observe(self, source: str, reward: float) -> None:
        """Tell how good an update with `source` was (a finite number); most schedulers make nothing of it."""
        one_of("source", source, self.sources)
        if not isinstance(reward, SupportsFloat) or not math.isfinite(reward):
            raise InputError(f"the reward of {source!r} is {reward!r}; give a finite number")

    def follow(self, optimizer: torch.optim.Optimizer, clip: float | None = None) -> None:
        """Tell which optimizer makes the updates, and the norm that gradients are cut to, for probes to do the same."""
        self._followed, self._clip = optimizer, clip

    def drop(self, source: str) -> None:
        """Say that a source has run out: it is not chosen again, and its remaining updates are given up."""
        if one_of("source", source, self.sources) not in self._gone:
            _log.info("source %r has run out: it is not chosen again", source)
            self._gone.add(source)
        if self._last.source == source:
            self._left = 0

    def state_dict(self) -> dict[str, Any]:
        """The state as JSON values."""
        kept = {} if self.choices is None else {"choices": [list(run) for run in self.choices]}
        return {
            **self._identity(),
            **kept,
            "decisions": self.decisions,
            "left": self._left,
            "counts": dict(self.counts),
            "gone": sorted(self._gone),
            "cost": dataclasses.asdict(self.cost),
            "last": {
                "source": self._last.source,
                "explored": self._last.explored,
                "utilities": plain(self._last.utilities),
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where another scheduler of the same kind and arguments was; InputError if they differ."""
        if not isinstance(state, Mapping):
            raise InputError(f"a scheduler's state is what state_dict gave, not {state!r}")
        for what, here in self._identity().items():
            if state.get(what) != here:
                raise InputError(f"the scheduler's state is of {what} {state.get(what)!r}, this one has {here!r}")
        last = state["last"]
        self.decisions, self._left = state["decisions"], state["left"]
        self.counts, self._gone = dict(state["counts"]), set(state["gone"])
        self.cost = Cost(**state["cost"])
        if self.choices is not None:
            self.choices = [list(run) for run in state["choices"]]
        self._last = Choice(last["source"], self.updates, last["explored"], none_to_nan(last["utilities"]))

    def _identity(self) -> dict[str, Any]:
        return {"kind": type(self).__name__, "sources": list(self.sources), "updates": self.updates, "seed": self.seed}

    def _require_active(self) -> None:
        if not self.active:
            raise InputError(f"every source has run out: {', '.join(self.sources)}")

    @abstractmethod
    def _decide(self) -> Choice:
        """The next decision; `self.decisions` is its number, from 0."""


def none_to_nan(values: Mapping[str, float | None]) -> dict[str, float]:
    """Numbers as they were before :func:`metapretrain.files.plain` put None for what is not finite."""
    return {name: math.nan if value is None else value for name, value in values.items()}


class Uniform(BlockScheduler):
    """Each source with the same probability."""

    def _decide(self) -> Choice:
        return Choice(pick(self.active, None, self.seed, self.decisions, "uniform"), self.updates)


class Proportional(BlockScheduler):
    """Each source with probability proportional to size ** (1 / temperature): a size is 0 or more, not all 0.

    Temperature 1 goes by size, above 1 small sources are drawn more often (Raffel et al., 2020, section 3.5.2).

    Example:
        >>> Proportional({"mlm": 900, "order": 0}, seed=0).choose().source
        'mlm'
    """

    def __init__(
        self, sizes: Mapping[str, float], *, temperature: float = 1.0, updates: int = 1, seed: int = 0
    ) -> None:
        if not isinstance(sizes, Mapping):
            raise InputError(f"sizes is a {type(sizes).__name__}; give {{source: size}}")
        super().__init__(sizes, updates=updates, seed=seed)
        self.temperature = number("temperature", temperature, above=0)
        self.sizes = {name: number(f"size of {name!r}", size, least=0) for name, size in sizes.items()}
        self._require_active()

    def _require_active(self) -> None:
        super()._require_active()
        if not any(self.sizes[name] for name in self.active):
            raise InputError(f"the sizes of {', '.join(self.active)} are all 0; give one above 0")

    def _identity(self) -> dict[str, Any]:
        told = {} if self.temperature == 1 else {"temperature": self.temperature}
        return {**super()._identity(), **told}

    def _decide(self) -> Choice:
        left = {name: self.sizes[name] for name in self.active}
        if self.temperature != 1:
            most = max(left.values())  # shares of the largest stay finite
            left = {name: (size / most) ** (1 / self.temperature) for name, size in left.items()}
        return Choice(pick_by_size(left, self.seed, self.decisions), self.updates)


class RoundRobin(BlockScheduler):
    """Each source in its turn.

    Example:
        >>> scheduler = RoundRobin(["mlm", "order"], updates=2)
        >>> [scheduler.choose().source for _ in range(6)]
        ['mlm', 'mlm', 'order', 'order', 'mlm', 'mlm']
    """

    def _decide(self) -> Choice:
        first = self.sources.index(self._last.source) + 1 if self.decisions else 0
        return Choice(take_turns(self.sources, first, self.active), self.updates)


class Fixed(BlockScheduler):
    """Always the same source, one of `sources`."""

    def __init__(self, sources: Iterable[str], source: str, *, updates: int = 1, seed: int = 0) -> None:
        super().__init__(sources, updates=updates, seed=seed)
        self.source = one_of("source", source, self.sources)

    def _decide(self) -> Choice:
        if self.source not in self.active:
            raise InputError(f"the fixed source {self.source!r} has run out")
        return Choice(self.source, self.updates)


class Exp3(BlockScheduler):
    """Exponential weights for exploration and exploitation (Auer et al., 2002, section 3), kept as logarithms.

    Source i of K is drawn with p_i = (1 - gamma) w_i / sum(w) + gamma / K, gamma in (0, 1]; a reward x for it, mapped
    from `low`..`high` to [0, 1] and clipped, adds gamma x / (p_i K) to log w_i, with p_i as of the last decision.

    Example:
        >>> scheduler = Exp3(["good", "bad"])
        >>> scheduler.observe("good", 1.0)
        >>> scheduler.probabilities()["good"] > 0.5
        True
    """

    def __init__(
        self,
        sources: Iterable[str],
        *,
        gamma: float = 0.1,
        low: float = 0.0,
        high: float = 1.0,
        updates: int = 1,
        seed: int = 0,
    ) -> None:
        super().__init__(sources, updates=updates, seed=seed)
        self.gamma = number("gamma", gamma, above=0, most=1)
        self.high = number("high", high)
        self.low = number("low", low, below=self.high)
        self._log_weights = dict.fromkeys(self.sources, 0.0)
        self._drawn_with = self.probabilities()

    def probabilities(self) -> dict[str, float]:
        """How likely each source that has not run out is to be drawn next."""
        names = self.active
        most = max((self._log_weights[name] for name in names), default=0.0)
        weights = [math.exp(self._log_weights[name] - most) for name in names]
        total = sum(weights)
        shares = [(1 - self.gamma) * weight / total + self.gamma / len(names) for weight in weights]
        return dict(zip(names, shares, strict=True))

    def observe(self, source: str, reward: float) -> None:
        """Learn from the reward of an update with `source`, which was drawn in the last decision."""
        super().observe(source, reward)
        if source not in self._drawn_with:
            return
        scaled = (min(max(reward, self.low), self.high) - self.low) / (self.high - self.low)
        share = self.gamma / (self._drawn_with[source] * len(self._drawn_with))
        self._log_weights[source] += share * scaled

    def state_dict(self) -> dict[str, Any]:
        learned = {"log_weights": dict(self._log_weights), "drawn_with": dict(self._drawn_with)}
        return {**super().state_dict(), **learned}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._log_weights, self._drawn_with = dict(state["log_weights"]), dict(state["drawn_with"])

    def _identity(self) -> dict[str, Any]:
        return {**super()._identity(), "gamma": self.gamma, "low": self.low, "high": self.high}

    def _decide(self) -> Choice:
        self._drawn_with = self.probabilities()
        names, weights = zip(*self._drawn_with.items(), strict=True)
        return Choice(pick(names, weights, self.seed, self.decisions, "exp3"), self.updates)


class LossExp3(Exp3):
    """Exp3 that rewards the last decision by how far the targets' losses fell since.

    The reward is the mean over targets of (before - now) / before, of the same M = `samples` (1..100) training batches
    of each target at every decision; -`reward` to `reward` (above 0) is mapped to [0, 1]. Probes leave no trace in
    weights or generators. `params` is the module that the losses use; `updates` N: over one update a reward is mostly
    noise. With `turn` a decision looks at one target alone, and after so many at new batches of the next, whose first
    decision has no reward: with M = N = 1 probes are a quarter of all compute, whatever the targets.
    Raises InputError: bad probes or numbers; from `choose`, losses of targets that are not finite.
    """

    def __init__(
        self,
        sources: Iterable[str],
        targets: Mapping[str, Probe],
        params: Params,
        *,
        samples: int = 2,
        reward: float = 0.05,
        gamma: float = 0.1,
        updates: int = 10,
        turn: int | None = None,
        seed: int = 0,
    ) -> None:
        reward = number("reward", reward, above=0)
        super().__init__(sources, gamma=gamma, low=-reward, high=reward, updates=updates, seed=seed)
        self.targets, self.samples = check_probes("targets", targets), whole("samples", samples, 1, MOST_SAMPLES)
        self.turn = turn if turn is None else whole("turn", turn, 1)
        self.units = self.samples * (len(self.targets) if turn is None else 1)
        self._weights = Weights(params)
        self._before: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "before": list(self._before)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._before = list(state["before"])

    def _identity(self) -> dict[str, Any]:
        told = {} if self.turn is None else {"turn": self.turn}
        return {**super()._identity(), "targets": list(self.targets), "samples": self.samples, **told}

    def _decide(self) -> Choice:
        start = time.perf_counter()
        turn, looked = 0, list(self.targets)
        if self.turn is not None:
            turn, looked = self.decisions // self.turn, [looked[self.decisions // self.turn % len(looked)]]
            self._before = self._before if self.decisions % self.turn else []
        now = self._losses(looked, turn)
        bad = [name for name, loss in zip(looked, now, strict=True) if not math.isfinite(loss)]
        if bad:
            raise InputError(f"losses of target {', '.join(bad)} are not finite: look at the weights and the losses")
        falls = [(before - loss) / before for before, loss in zip(self._before, now, strict=False) if before > 0]
        if falls:
            self.observe(self._last.source, sum(falls) / len(falls))
        self._before = now
        cost = Cost(forwards=self.units, seconds=time.perf_counter() - start)
        return dataclasses.replace(super()._decide(), cost=cost)

    def _losses(self, looked: list[str], turn: int) -> list[float]:
        """Mean loss of each target's batches, the same ones in every call of a turn."""
        numbers = range(turn * self.samples, (turn + 1) * self.samples)
        probes = {name: self.targets[name] for name in looked}
        with self._weights.untouched():
            batches = {
                name: [probe.sample(generator(self.seed, "exp3 batch", name, i)) for i in numbers]
                for name, probe in probes.items()
            }
            return list(mean_losses(self._weights, probes, batches, self.seed, "exp3 loss").values())
