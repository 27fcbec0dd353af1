"""The schedulers of the benchmark as policies of a stream, which write down what they chose."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from metapretrain.scheduling import BlockScheduler, Choice, Probe
from metapretrain.scheduling.utility import TargetLosses
from metapretrain.tasks.schedule_methods import UTILITY, ScheduleMethod, ScheduleRecipe, decisions_of
from metapretrain.tasks.schedules import Schedule, build_scheduler

Watch = Callable[[int, Choice], None]


def make_scheduler(
    method: ScheduleMethod,
    sources: Mapping[str, Probe],
    targets: Mapping[str, Probe],
    params: Any,
    sizes: Mapping[str, int],
    recipe: ScheduleRecipe,
    seed: int,
    target_losses: TargetLosses | None = None,
) -> BlockScheduler:
    """Build the scheduler of a row.

    Args:
        sources, targets: probes by name.
        params: the module that the probes' losses use.
        sizes: training examples of each source.
        target_losses: the losses of all targets at once.
    """
    updates = decisions_of(method, len(sources), len(targets), recipe).updates
    schedule = Schedule(
        "utility" if method.scheduler in UTILITY else method.scheduler, method.source or "", updates, recipe.samples,
        alpha=recipe.alpha, utility=UTILITY.get(method.scheduler, "exact"), normalise=recipe.normalise,
        epsilon=recipe.epsilon, floor=min(recipe.floor, recipe.epsilon), decay=recipe.decay,
        smoothing=recipe.smoothing, gamma=recipe.gamma, reward=recipe.fall,
    )  # fmt: skip
    return build_scheduler(schedule, sizes, sources, params, targets=targets, target_losses=target_losses, seed=seed)


class Policy:
    """A scheduler as a stream's policy.

    Args:
        scheduler: decides.
        watch: called with the number of the update that a decision begins with, from 1, and the choice.

    Attributes:
        choices: what was chosen so far, as [source, updates in a row].

    Example:
        >>> from metapretrain.scheduling import RoundRobin
        >>> policy = Policy(RoundRobin(["mlm", "order"], updates=2))
        >>> for _ in range(5):
        ...     choice = policy.choose()
        >>> policy.choices
        [['mlm', 2], ['order', 2], ['mlm', 1]]
    """

    def __init__(self, scheduler: BlockScheduler, watch: Watch | None = None) -> None:
        self.scheduler, self.watch = scheduler, watch
        self.choices: list[list[Any]] = []

    @property
    def updates(self) -> int:
        """Updates chosen for so far."""
        return sum(self.scheduler.counts.values())

    def choose(self) -> Choice:
        """The source of the next update."""
        decisions = self.scheduler.decisions
        choice = self.scheduler.choose()
        if self.choices and self.choices[-1][0] == choice.source:
            self.choices[-1][1] += 1
        else:
            self.choices.append([choice.source, 1])
        if self.watch is not None and self.scheduler.decisions > decisions:
            self.watch(self.updates, choice)
        return choice

    def state_dict(self) -> dict[str, Any]:
        """The state as JSON values."""
        return {"scheduler": self.scheduler.state_dict(), "choices": [list(run) for run in self.choices]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where another such policy was.

        Raises:
            InputError: the state is of another scheduler.
        """
        self.scheduler.load_state_dict(state["scheduler"])
        self.choices = [list(run) for run in state["choices"]]
