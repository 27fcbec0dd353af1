"""A bandit over tasks that is rewarded by how far the losses of the targets fall."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Collection, Mapping
from typing import Any

import torch

from metapretrain.errors import InputError
from metapretrain.scheduling import Choice, Cost, Exp3, Probe
from metapretrain.scheduling.draws import generator, key
from metapretrain.scheduling.weights import Params, Weights

EXP3_UPDATES = 10  # updates of a decision of exp3, where none are given: a reward over one update is mostly noise


class LossExp3(Exp3):
    """Exp3 that rewards the last decision by how far the targets' losses fell since.

    The reward is the mean over targets of (before - now) / before, of the same M training batches of each target at
    every decision; -`reward` to `reward` is mapped to [0, 1]. Looking leaves no trace in weights, buffers, modes or
    generators.

    Args:
        sources: names of the source tasks.
        targets: a probe for each target.
        params: the module that their losses use.
        samples: M.
        reward: above 0.
        gamma, updates, seed: see :class:`metapretrain.scheduling.Exp3`.

    Raises:
        InputError: samples below 1, a reward that is not above 0, and what `Exp3` refuses; from `choose`, losses of
            targets that are not finite.

    Example:
        >>> from metapretrain.scheduling import FunctionProbe
        >>> w = torch.zeros(1, requires_grad=True)
        >>> goal = FunctionProbe(lambda _: None, lambda _: (w - 1).square().sum())
        >>> scheduler = LossExp3(["good", "idle"], {"goal": goal}, [w], gamma=0.3, updates=1)
        >>> for _ in range(200):
        ...     if scheduler.choose().source == "good":
        ...         w.data += 0.1 * (1 - w.data)
        >>> scheduler.probabilities()["good"] > 0.8
        True
    """

    def __init__(
        self,
        sources: Collection[str] | Mapping[str, Any],
        targets: Mapping[str, Probe],
        params: Params,
        *,
        samples: int = 2,
        reward: float = 0.05,
        gamma: float = 0.1,
        updates: int = EXP3_UPDATES,
        seed: int = 0,
    ) -> None:
        if samples < 1 or not 0 < reward < math.inf:
            raise InputError(f"exp3 needs samples of at least 1 and a reward above 0, got {samples} and {reward}")
        super().__init__(sources, gamma=gamma, low=-reward, high=reward, updates=updates, seed=seed)
        self.targets, self.samples = dict(targets), samples
        self._weights = Weights(params)
        self._before: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        """The state as JSON values."""
        return {**super().state_dict(), "before": list(self._before)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where another such scheduler was."""
        super().load_state_dict(state)
        self._before = list(state["before"])

    def _identity(self) -> dict[str, Any]:
        return {**super()._identity(), "targets": list(self.targets), "samples": self.samples}

    def _decide(self) -> Choice:
        start = time.perf_counter()
        now = self._losses()
        bad = [name for name, loss in zip(self.targets, now, strict=True) if not math.isfinite(loss)]
        if bad:
            raise InputError(f"losses of target {', '.join(bad)} are not finite: look at the weights and the losses")
        falls = [(before - loss) / before for before, loss in zip(self._before, now, strict=False) if before > 0]
        if falls:
            self.observe(self._last.source, sum(falls) / len(falls))
        self._before = now
        cost = Cost(forwards=len(self.targets) * self.samples, seconds=time.perf_counter() - start)
        return dataclasses.replace(super()._decide(), cost=cost)

    def _losses(self) -> list[float]:
        """Mean loss of each target's batches, the same ones in every call."""
        means = []
        with self._weights.untouched(), torch.no_grad():
            for name, probe in self.targets.items():
                losses = []
                for sample in range(self.samples):
                    self._weights.reset(key(self.seed, "exp3 loss", name, sample))
                    losses.append(probe.loss(probe.sample(generator(self.seed, "exp3 batch", name, sample))))
                means.append(torch.stack(losses).float().mean())
            return torch.stack(means).tolist() if means else []
