"""What a scheduler answers, and what the answer cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Cost:
    """What probes took: batches passed forwards, batches passed backwards, and seconds of wall time.

    Example:
        >>> total = Cost(8, 2, 0.5) + Cost(2, 2, 0.25)
        >>> total, total.units
        (Cost(forwards=10, backwards=4, seconds=0.75), 18)
    """

    forwards: int = 0
    backwards: int = 0
    seconds: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.forwards + other.forwards, self.backwards + other.backwards, self.seconds + other.seconds
        )

    @property
    def units(self) -> int:
        """The cost in forward passes: a backward pass counts as two, so an update is 3 units."""
        return self.forwards + 2 * self.backwards


@dataclass(frozen=True)
class Choice:
    """The source that the next update is for.

    Attributes:
        source: its name.
        updates: updates left with this source until the next decision, this one included.
        explored: whether it was drawn at random in place of the best.
        utilities: utility of each source that the decision looked at (NaN: passed over); empty where it
            looked at none. The same for all updates of a decision.
        cost: what this call spent on probes: nothing unless it made a decision.
    """

    source: str
    updates: int
    explored: bool = False
    utilities: Mapping[str, float] = field(default_factory=dict)
    cost: Cost = Cost()
