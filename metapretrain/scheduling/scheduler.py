"""Train next on the source task whose step helps the target tasks most."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Mapping
from typing import Any

import torch

from metapretrain.errors import InputError, one_of
from metapretrain.scheduling.blocks import BlockScheduler, none_to_nan, numbers_or_none
from metapretrain.scheduling.checks import check_number, check_whole
from metapretrain.scheduling.choice import Choice
from metapretrain.scheduling.draws import pick, uniform
from metapretrain.scheduling.probes import Probe, check_probes
from metapretrain.scheduling.utility import NORMALISATIONS, UTILITIES, Prober, TargetLosses, probe_units
from metapretrain.scheduling.weights import Params, Weights

_log = logging.getLogger(__name__)


class UtilityScheduler(BlockScheduler):
    """Chooses by utility: Algorithm 1 of Luo et al., "Meta-learning for downstream aware and agnostic pretraining".

    The utility of a source is summed over M of its subtasks (batches) i: minus the sum of the losses of
    M batches of each target at ``theta - alpha * gradient of subtask i's loss``, each step from the weights of
    the moment. All sources of a decision meet the same target batches and the same random numbers inside
    losses. Equal utilities are settled at random. Probes leave weights, buffers, modes and generators as
    they were. The updates themselves are the caller's, with any optimizer.

    Args:
        sources: a probe for each task to choose from; see :class:`Probe`.
        targets: a probe for each task that should get better. The same mapping as `sources` is the
            downstream-agnostic setting; target batches are then draws of their own.
        params: the module that holds all that the losses use, or its parameters (then buffers are not looked
            after and dropout is not switched off).
        alpha: rate of a probe's step, above 0.
        samples: M, batches of each source and each target in a decision.
        updates: N, updates until the next decision. None: the least with probes at or under a quarter of all
            compute, which is :func:`probe_units`.
        epsilon: probability that a decision draws a source at random, without probes.
        floor: what epsilon decays to.
        decay: what epsilon is multiplied by after each decision, in (0, 1].
        utility: "exact", or "taylor" for its first order in alpha, from inner products of gradients.
        smoothing: in [0, 1): weight of the past in a moving average over decisions of a source's utility above
            the mean of its decision. 0: the paper.
        normalise: None is the paper's raw sum of losses. "relative": each target's losses are divided by their
            mean at the weights of the moment, so that a target with large losses does not outvote the others.
        target_losses: a function from all targets' batches ``{name: [M batches]}`` to ``{name: losses (M,)}``,
            used in place of the targets' own losses where one forward pass (of Taylor's: one backward pass too, of
            all T M batches together) can serve all.
        seed: what all draws depend on, together with the number of the decision.

    Raises:
        InputError: bad probes, weights or numbers; from `choose`, utilities that are NaN for all sources, a
            target or all sources that have run out, losses that do not depend on params.

    Example:
        >>> from metapretrain.scheduling import FunctionProbe
        >>> w = torch.zeros(2, requires_grad=True)
        >>> def task(goal):
        ...     goal = torch.tensor(goal)
        ...     return FunctionProbe(lambda generator: goal, lambda batch: (w - batch).square().sum())
        >>> sources = {"helps": task([1.0, 0.0]), "harms": task([-1.0, 0.0])}
        >>> scheduler = UtilityScheduler(sources, {"goal": task([1.0, 1.0])}, [w], alpha=0.1, updates=1)
        >>> scheduler.choose().source
        'helps'
    """

    def __init__(
        self,
        sources: Mapping[str, Probe],
        targets: Mapping[str, Probe],
        params: Params,
        *,
        alpha: float,
        samples: int = 2,
        updates: int | None = None,
        epsilon: float = 0.0,
        floor: float = 0.0,
        decay: float = 1.0,
        utility: str = "exact",
        smoothing: float = 0.0,
        normalise: str | None = None,
        target_losses: TargetLosses | None = None,
        seed: int = 0,
    ) -> None:
        sources, targets = check_probes("sources", sources), check_probes("targets", targets)
        self.samples = check_whole("samples", samples, 1)
        self.utility = one_of("utility", utility, UTILITIES)
        self.normalise = normalise if normalise is None else one_of("normalise", normalise, NORMALISATIONS)
        units = probe_units(len(sources), len(targets), self.samples, utility, normalise)
        super().__init__(sources, updates=units if updates is None else updates, seed=seed)
        self.alpha = check_number("alpha", alpha, 0, 1e30, above=True)
        self.epsilon = check_number("epsilon", epsilon, 0, 1)
        self.floor = check_number("floor", floor, 0, 1)
        self.decay = check_number("decay", decay, 0, 1, above=True)
        self.smoothing = check_number("smoothing", smoothing, 0, 1, below=True)
        if floor > epsilon:
            raise InputError(f"floor is {floor}, above epsilon {epsilon}; epsilon decays to it from above")
        if self.updates < units:
            _log.info(
                "probes take %.0f%% of the compute: %d updates a decision, %d would make it a quarter",
                100 * units / (units + 3 * self.updates),
                self.updates,
                units,
            )
        self._prober = Prober(
            Weights(params),
            sources,
            targets,
            alpha=alpha,
            samples=samples,
            normalise=normalise,
            target_losses=target_losses,
        )
        self._smoothed: dict[str, float] = {}
        self._unmoved: set[str] = set()
        self._warned_of_ties = False

    def compare(self) -> dict[str, dict[str, float]]:
        """Exact and Taylor utilities of the next decision's subtasks; the decisions to come stay as they are.

        For :func:`metapretrain.scheduling.agreement`. Sources that have run out are left out.
        """
        kept = self._positions()
        draw = self._prober.draw(self.active, self.seed, self.decisions)
        self._go_to(kept)
        return {utility: self._prober.score(draw, utility).utilities for utility in UTILITIES}

    def state_dict(self) -> dict[str, Any]:
        """The state as JSON values, with the positions of probes that have one."""
        return {
            **super().state_dict(),
            "smoothed": numbers_or_none(self._smoothed),
            "positions": self._positions(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where another such scheduler was; with the same weights it goes on as that would have.

        Raises:
            InputError: the state is of a scheduler of another kind, or with other arguments.
        """
        super().load_state_dict(state)
        self._smoothed = none_to_nan(state["smoothed"])
        self._go_to(state["positions"])

    def _identity(self) -> dict[str, Any]:
        names = ("alpha", "samples", "epsilon", "floor", "decay", "utility", "smoothing", "normalise")
        own = {name: getattr(self, name) for name in names}
        return {**super()._identity(), "targets": list(self._prober.targets), **own}

    def _decide(self) -> Choice:
        place = (self.seed, self.decisions)
        names = self.active
        epsilon = max(self.floor, self.epsilon * self.decay**self.decisions)
        if uniform(*place, "explore") < epsilon:
            return Choice(pick(names, None, *place, "explored"), self.updates, explored=True)
        if len(names) == 1:
            return Choice(names[0], self.updates)
        self._wait()
        start = time.perf_counter()
        draw = self._prober.draw(names, *place)
        for name in draw.gone:
            self.drop(name)
        self._require_active()
        scores = self._prober.score(draw, self.utility)
        cost = dataclasses.replace(scores.cost, seconds=time.perf_counter() - start)
        self._warn_of_unmoved(scores.unmoved)
        finite = self._finite(scores.utilities, scores.bad_targets)
        self._warn_of_ties(finite)
        values = self._smooth(finite)
        best = max(values.values())
        tied = [name for name, value in values.items() if value == best]
        return Choice(pick(tied, None, *place, "tie"), self.updates, False, scores.utilities, cost)

    def _finite(self, utilities: dict[str, float], bad_targets: tuple[str, ...]) -> dict[str, float]:
        """The utilities of sources that can be chosen."""
        finite = {name: value for name, value in utilities.items() if math.isfinite(value)}
        if not finite:
            blame = f"; losses of target {', '.join(bad_targets)} are not finite" if bad_targets else ""
            raise InputError(
                f"the utilities of all sources ({', '.join(utilities)}) are NaN or infinite{blame}: look at the "
                "weights and the losses, or lower alpha"
            )
        for name in utilities.keys() - finite.keys():
            _log.warning(
                "source %r is passed over in decision %d: its utility is %s", name, self.decisions, utilities[name]
            )
        return finite

    def _warn_of_unmoved(self, names: tuple[str, ...]) -> None:
        for name in set(names) - self._unmoved:
            _log.warning("the loss of source %r does not depend on the weights: its steps change nothing", name)
        self._unmoved.update(names)

    def _warn_of_ties(self, utilities: dict[str, float]) -> None:
        if len(utilities) > 1 and len(set(utilities.values())) == 1 and not self._warned_of_ties:
            _log.warning(
                "all utilities are equal in decision %d (%s), so one is drawn at random: see that the losses of the "
                "targets (%s) depend on the weights, and that steps of alpha=%s are not lost to rounding",
                self.decisions,
                ", ".join(utilities),
                ", ".join(self._prober.targets),
                self._prober.alpha,
            )
            self._warned_of_ties = True

    def _smooth(self, utilities: dict[str, float]) -> dict[str, float]:
        """Moving averages of the utilities above their mean: the common level falls as training goes on."""
        if not self.smoothing:
            return utilities
        mean = sum(utilities.values()) / len(utilities)
        for name, value in utilities.items():
            before = self._smoothed.get(name, value - mean)
            self._smoothed[name] = self.smoothing * before + (1 - self.smoothing) * (value - mean)
        return {name: self._smoothed[name] for name in utilities}

    def _wait(self) -> None:
        """Let work on the GPU end that is not the probes'."""
        for device in self._prober.weights.devices:
            torch.cuda.synchronize(device)

    def _positions(self) -> dict[str, dict[str, Any]]:
        return {
            role: {name: probe.position() for name, probe in probes.items() if hasattr(probe, "position")}
            for role, probes in self._roles()
        }

    def _go_to(self, positions: Mapping[str, Mapping[str, Any]]) -> None:
        for role, probes in self._roles():
            for name, position in positions[role].items():
                probes[name].go_to(position)  # type: ignore[attr-defined]

    def _roles(self) -> tuple[tuple[str, dict[str, Probe]], ...]:
        return ("sources", self._prober.sources), ("targets", self._prober.targets)
