"""Schedulers that look at nothing: what a utility has to beat."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from metapretrain.errors import InputError, one_of
from metapretrain.scheduling.blocks import BlockScheduler
from metapretrain.scheduling.checks import check_number
from metapretrain.scheduling.choice import Choice
from metapretrain.scheduling.draws import pick


class Uniform(BlockScheduler):
    """Each source with the same probability.

    Example:
        >>> scheduler = Uniform(["mlm", "order"], seed=0)
        >>> sorted({scheduler.choose().source for _ in range(20)})
        ['mlm', 'order']
    """

    def _decide(self) -> Choice:
        return Choice(pick(self.active, None, self.seed, self.decisions, "uniform"), self.updates)


class Proportional(BlockScheduler):
    """Each source with probability proportional to its size.

    Args:
        sizes: a number of 0 or more for each source, such as its examples.

    Raises:
        InputError: also sizes that are negative or all 0.

    Example:
        >>> Proportional({"mlm": 900, "order": 0}, seed=0).choose().source
        'mlm'
    """

    def __init__(self, sizes: Mapping[str, float], *, updates: int = 1, seed: int = 0) -> None:
        if not isinstance(sizes, Mapping):
            raise InputError(f"sizes is a {type(sizes).__name__}; give {{source: size}}")
        super().__init__(sizes, updates=updates, seed=seed)
        self.sizes = {name: check_number(f"size of {name!r}", size, 0) for name, size in sizes.items()}
        self._require_active()

    def _require_active(self) -> None:
        super()._require_active()
        if not any(self.sizes[name] for name in self.active):
            raise InputError(f"the sizes of {', '.join(self.active)} are all 0; give one above 0")

    def _decide(self) -> Choice:
        weights = [self.sizes[name] for name in self.active]
        return Choice(pick(self.active, weights, self.seed, self.decisions, "proportional"), self.updates)


class RoundRobin(BlockScheduler):
    """Each source in its turn.

    Example:
        >>> scheduler = RoundRobin(["mlm", "order"], updates=2)
        >>> [scheduler.choose().source for _ in range(6)]
        ['mlm', 'mlm', 'order', 'order', 'mlm', 'mlm']
    """

    def _decide(self) -> Choice:
        first = self.sources.index(self._last.source) + 1 if self.decisions else 0
        turns = (*self.sources[first:], *self.sources[:first])
        return Choice(next(name for name in turns if name in self.active), self.updates)


class Fixed(BlockScheduler):
    """Always the same source.

    Args:
        source: its name.

    Raises:
        InputError: also a source that is none of `sources`; from `choose`, one that has run out.

    Example:
        >>> Fixed(["mlm", "order"], "order").choose().source
        'order'
    """

    def __init__(self, sources: Iterable[str], source: str, *, updates: int = 1, seed: int = 0) -> None:
        super().__init__(sources, updates=updates, seed=seed)
        self.source = one_of("source", source, self.sources)

    def _decide(self) -> Choice:
        if self.source not in self.active:
            raise InputError(f"the fixed source {self.source!r} has run out")
        return Choice(self.source, self.updates)
