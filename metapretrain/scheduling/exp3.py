"""A bandit that learns from rewards alone, without probes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from metapretrain.errors import InputError
from metapretrain.scheduling.blocks import BlockScheduler
from metapretrain.scheduling.checks import check_number
from metapretrain.scheduling.choice import Choice
from metapretrain.scheduling.draws import pick


class Exp3(BlockScheduler):
    """Exponential weights for exploration and exploitation (Auer et al., 2002, section 3), kept as logarithms.

    Source i of K is drawn with p_i = (1 - gamma) w_i / sum(w) + gamma / K; a reward x of [0, 1] for it adds
    gamma x / (p_i K) to log w_i, with p_i as of the last decision.

    Args:
        gamma: share of uniform draws, in (0, 1].
        low, high: range of rewards, which is mapped to [0, 1]; what lies outside counts as its nearest end.

    Raises:
        InputError: also gamma out of range, low not below high.

    Example:
        >>> scheduler = Exp3(["good", "bad"], gamma=0.2, seed=0)
        >>> for _ in range(300):
        ...     source = scheduler.choose().source
        ...     scheduler.observe(source, 1.0 if source == "good" else 0.0)
        >>> scheduler.probabilities()["good"] > 0.85
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
        self.gamma = check_number("gamma", gamma, 0, 1, above=True)
        self.low, self.high = check_number("low", low, -math.inf), check_number("high", high, -math.inf)
        if self.low >= self.high:
            raise InputError(f"low is {low} and high is {high}; low must be below high")
        self._log_weights = dict.fromkeys(self.sources, 0.0)
        self._drawn_with = self.probabilities()

    def probabilities(self) -> dict[str, float]:
        """How likely each source that has not run out is to be drawn next."""
        names = self.active
        most = max((self._log_weights[name] for name in names), default=0.0)
        weights = [math.exp(self._log_weights[name] - most) for name in names]
        total = sum(weights)
        return {
            name: (1 - self.gamma) * weight / total + self.gamma / len(names)
            for name, weight in zip(names, weights, strict=True)
        }

    def observe(self, source: str, reward: float) -> None:
        """Learn from the reward of an update with `source`, which was drawn in the last decision.

        Raises:
            InputError: an unknown source, a reward that is not finite.
        """
        super().observe(source, reward)
        if source not in self._drawn_with:
            return
        scaled = (min(max(reward, self.low), self.high) - self.low) / (self.high - self.low)
        share = self.gamma / (self._drawn_with[source] * len(self._drawn_with))
        self._log_weights[source] += share * scaled

    def state_dict(self) -> dict[str, Any]:
        """The state as JSON values."""
        learned = {"log_weights": dict(self._log_weights), "drawn_with": dict(self._drawn_with)}
        return {**super().state_dict(), **learned}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where another such scheduler was.

        Raises:
            InputError: the state is of one that differs in kind, sources, updates, seed, gamma or range.
        """
        super().load_state_dict(state)
        self._log_weights, self._drawn_with = dict(state["log_weights"]), dict(state["drawn_with"])

    def _identity(self) -> dict[str, Any]:
        return {**super()._identity(), "gamma": self.gamma, "low": self.low, "high": self.high}

    def _decide(self) -> Choice:
        self._drawn_with = self.probabilities()
        names, weights = zip(*self._drawn_with.items(), strict=True)
        return Choice(pick(names, weights, self.seed, self.decisions, "exp3"), self.updates)
