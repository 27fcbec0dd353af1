"""What a scheduler needs of a task: batches of its own, and their loss at the weights of the moment."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from metapretrain.errors import InputError
from metapretrain.scheduling.draws import key

_END = object()


@runtime_checkable
class Probe(Protocol):
    """A task seen by a scheduler.

    Further methods are used where a probe has them: `loss_many(batches)`, which returns the losses (M,) of M
    batches from one forward pass; `position()` and `go_to(position)`, with a JSON value, where `sample`
    depends on more than the generator.
    """

    def sample(self, generator: torch.Generator) -> Any:
        """A batch, drawn with the generator (on the CPU); StopIteration where the task has run out."""

    def loss(self, batch: Any) -> Tensor:
        """The scalar loss of a batch at the weights that the model has now."""


@dataclass(frozen=True)
class FunctionProbe:
    """A probe of functions.

    Example:
        >>> w, x = torch.zeros(2, requires_grad=True), torch.randn(100, 2)
        >>> probe = FunctionProbe(
        ...     lambda generator: x[torch.randint(100, (8,), generator=generator)],
        ...     lambda batch: (batch - w).square().mean(),
        ... )
        >>> probe.loss(probe.sample(torch.Generator())).shape
        torch.Size([])
    """

    sample: Callable[[torch.Generator], Any]
    loss: Callable[[Any], Tensor]


class LoaderProbe:
    """A probe that takes its batches from a loader, which it goes through again and again.

    Give it a loader of its own: one that training also goes through would lose its place. Pass e over it is
    seeded by (seed, e), so that a DataLoader with shuffle=True gives the same batches after a resume.

    Args:
        loader: a re-iterable of batches; its `set_epoch` is called if there is one.
        loss: batch to scalar loss.
        endless: False: after one pass the task has run out.
        seed: a whole number of at least 0.

    Raises:
        InputError: from `sample`, a loader that gives nothing.

    Example:
        >>> probe = LoaderProbe([1.0, 2.0], lambda batch: torch.tensor(batch))
        >>> [probe.sample() for _ in range(3)]
        [1.0, 2.0, 1.0]
    """

    def __init__(
        self, loader: Iterable[Any], loss: Callable[[Any], Tensor], *, endless: bool = True, seed: int = 0
    ) -> None:
        self.loader, self.loss, self.endless, self.seed = loader, loss, endless, seed
        self._epoch = self._position = 0
        self._batches: Iterator[Any] | None = None

    def sample(self, generator: torch.Generator | None = None) -> Any:
        """The next batch; the generator is not used.

        Raises:
            StopIteration: the pass is over and the probe is not endless.
        """
        batch = self._next()
        if batch is _END and self.endless:
            self._epoch, self._position, self._batches = self._epoch + 1, 0, None
            batch = self._next()
        if batch is _END:
            if not self._position:
                raise InputError("a probe's loader gave no batch; it must not be empty and must iterate again")
            raise StopIteration
        self._position += 1
        return batch

    def position(self) -> list[int]:
        """[pass, batches of it that were given], from 0."""
        return [self._epoch, self._position]

    def go_to(self, position: Sequence[int]) -> None:
        """Go on from a position."""
        (self._epoch, self._position), self._batches = position, None

    def _next(self) -> Any:
        if self._batches is None:
            return self._begin()
        return next(self._batches, _END)

    def _begin(self) -> Any:
        """The batch at the position, read where the global generator is seeded for the pass."""
        before = torch.get_rng_state()
        torch.default_generator.manual_seed(key(self.seed, "pass", self._epoch))
        try:
            set_epoch = getattr(self.loader, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(self._epoch)
            self._batches = itertools.islice(iter(self.loader), self._position, None)
            return next(self._batches, _END)
        finally:
            torch.set_rng_state(before)


def check_probes(what: str, probes: Mapping[str, Probe]) -> dict[str, Probe]:
    """The probes as a dict.

    Raises:
        InputError: not a mapping of names to objects with `sample` and `loss`.
    """
    if not isinstance(probes, Mapping) or not probes:
        raise InputError(f"{what} must be {{name: probe}} with at least one, not {probes!r}")
    for name, probe in probes.items():
        if not callable(getattr(probe, "sample", None)) or not callable(getattr(probe, "loss", None)):
            raise InputError(
                f"{what}[{name!r}] is a {type(probe).__name__}; a probe needs sample(generator) and loss(batch)"
            )
    return dict(probes)


def losses_of(name: str, probe: Probe, batches: Sequence[Any]) -> Tensor:
    """Losses (M,) of the batches: in one forward pass where the probe has `loss_many`.

    Raises:
        InputError: the probe returned something of another shape.
    """
    many = getattr(probe, "loss_many", None)
    if many is None:
        return torch.stack([loss_of(name, probe, batch) for batch in batches])
    losses = many(batches)
    if not isinstance(losses, Tensor) or losses.shape != (len(batches),):
        given = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise InputError(f"loss_many of {name!r} returned {given}; it must return losses ({len(batches)},)")
    return losses


def loss_of(name: str, probe: Probe, batch: Any) -> Tensor:
    """The loss of a batch, checked to be a scalar.

    Raises:
        InputError: it is not.
    """
    loss = probe.loss(batch)
    if not isinstance(loss, Tensor) or loss.ndim:
        given = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise InputError(f"the loss of {name!r} is {given}; it must be a scalar tensor: take its mean or sum")
    return loss
