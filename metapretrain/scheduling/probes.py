"""Probes: a task's batches and loss at the weights of the moment, looked at without leaving a trace."""

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from metapretrain.draws import key
from metapretrain.errors import InputError

Params = nn.Module | Mapping[str, Tensor] | Iterable[Tensor]


class Weights:
    """What probes move: a module's tensors with gradients, or parameters alone (buffers not kept, dropout stays on)."""

    def __init__(self, params: Params) -> None:
        self.module = params if isinstance(params, nn.Module) else None
        if isinstance(params, Tensor):
            params = [params]
        if not isinstance(params, nn.Module | Iterable):
            raise InputError(f"params is {params!r}; give a module or its parameters")
        if not isinstance(params, nn.Module):
            params = list(params.values() if isinstance(params, Mapping) else params)
            wrong = [p for p in params if not isinstance(p, Tensor) or not p.is_leaf]
            if wrong:
                kind = "a tensor that is no leaf" if isinstance(wrong[0], Tensor) else f"a {type(wrong[0]).__name__}"
                raise InputError(f"params holds {kind}; give a module or its parameters")
        self._given = params
        self._current: list[Tensor] | None = None
        self._buffers: list[tuple[nn.Module, dict[str, Tensor | None]]] = []
        self._copies: dict[int, tuple[Tensor, int]] = {}
        if not self.tensors:
            raise InputError("params holds nothing that asks for a gradient; give a module to train")

    @property
    def tensors(self) -> list[Tensor]:
        """Each tensor that moves, once."""
        if self._current is not None:
            return self._current
        given = self._given.parameters() if isinstance(self._given, nn.Module) else self._given
        return list({id(p): p for p in given if p.requires_grad}.values())

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """A block for probes: dropout is off, BatchNorm keeps its mode, and all that they change is put back."""
        parts = list(self.module.modules()) if self.module is not None else []
        modes = [part.training for part in parts]
        with _generators(self.devices), self._own_buffers(parts), torch.enable_grad():
            try:
                self._current = self.tensors
                for part in parts:
                    part.training = part.training and isinstance(part, _NormBase)
                yield
            finally:
                self._current = None
                for part, mode in zip(parts, modes, strict=True):
                    part.training = mode

    @contextmanager
    def moved(self, gradients: Sequence[Tensor | None], alpha: float) -> Iterator[None]:
        """A block in which the weights are theta - alpha * gradient; the tensors have other memory for the while."""
        pairs = [(p, g) for p, g in zip(self.tensors, gradients, strict=True) if g is not None]
        here = [p.data for p, _ in pairs]
        there = torch._foreach_add(here, [g for _, g in pairs], alpha=-alpha) if pairs else []
        try:
            for (p, _), value in zip(pairs, there, strict=True):
                p.data = value
            yield
        finally:
            for (p, _), value in zip(pairs, here, strict=True):
                p.data = value

    @property
    def devices(self) -> list[int]:
        """Indices of the GPUs that the weights are on."""
        return sorted({p.device.index for p in self.tensors if p.is_cuda})

    def reset(self, seed: int) -> None:
        """Inside `untouched`: buffers as they were, and generators at `seed`, before another loss."""
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        torch.default_generator.manual_seed(seed)
        for device in self.devices:
            torch.cuda.default_generators[device].manual_seed(seed)
        self._renew_buffers()

    @contextmanager
    def _own_buffers(self, parts: list[nn.Module]) -> Iterator[None]:
        self._buffers = [(part, dict(part._buffers)) for part in parts]
        try:
            self._renew_buffers()
            yield
        finally:
            for part, own in self._buffers:
                part._buffers.clear()
                part._buffers.update(own)
            self._buffers, self._copies = [], {}

    def _renew_buffers(self) -> None:
        """Put copies in the place of the buffers; one that a loss has changed is made anew."""
        for part, own in self._buffers:
            if own or part._buffers:
                part._buffers.clear()
                part._buffers.update({name: b if b is None else self._copy(b) for name, b in own.items()})

    def _copy(self, buffer: Tensor) -> Tensor:
        copy, version = self._copies.get(id(buffer), (buffer, -1))
        if version != copy._version:
            copy = buffer.detach().clone()
            self._copies[id(buffer)] = copy, copy._version
        return copy


@contextmanager
def _generators(devices: list[int]) -> Iterator[None]:
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002


_END = object()


@runtime_checkable
class Probe(Protocol):
    """A task seen by a scheduler.

    Used where a probe has them: `loss_many(batches)`, the losses (M,) of M batches from one forward pass; `position()`
    and `go_to(position)`, with a JSON value, where `sample` depends on more than the generator.
    """

    def sample(self, generator: torch.Generator) -> Any:
        """A batch, drawn with the generator (on the CPU); StopIteration where the task has run out."""

    def loss(self, batch: Any) -> Tensor:
        """The scalar loss of a batch at the weights that the model has now."""


@dataclass(frozen=True)
class FunctionProbe:
    """A probe of functions; `loss_many`: of M batches in one forward pass, their losses (M,).

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
    loss_many: Callable[[Sequence[Any]], Tensor] | None = None


class LoaderProbe:
    """A probe that takes its batches from a loader that training does not use, which it goes through again and again.

    `loader` is a re-iterable of batches. Pass e is seeded by (seed, e) and calls its `set_epoch` if there is one, so
    that shuffled batches are the same after a resume. Not `endless`: after one pass the task has run out.
    Raises InputError: from `sample`, a loader that gives nothing.

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
        """The next batch, without the generator; StopIteration when the pass is over and the probe not endless."""
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
        return self._begin() if self._batches is None else next(self._batches, _END)

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
    """The probes as a dict; InputError unless they map names to objects with `sample` and `loss`."""
    if not isinstance(probes, Mapping) or not probes:
        raise InputError(f"{what} must be {{name: probe}} with at least one, not {probes!r}")
    for name, probe in probes.items():
        if not callable(getattr(probe, "sample", None)) or not callable(getattr(probe, "loss", None)):
            given = f"{what}[{name!r}] is a {type(probe).__name__}"
            raise InputError(f"{given}; a probe needs sample(generator) and loss(batch)")
    return dict(probes)


def losses_of(name: str, probe: Probe, batches: Sequence[Any]) -> Tensor:
    """Losses (M,) of the batches: in one forward pass where the probe has `loss_many`."""
    many = getattr(probe, "loss_many", None)
    if many is None:
        return torch.stack([loss_of(name, probe, batch) for batch in batches])
    losses = many(batches)
    if not isinstance(losses, Tensor) or losses.shape != (len(batches),):
        given = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise InputError(f"loss_many of {name!r} returned {given}; it must return losses ({len(batches)},)")
    return losses


def loss_of(name: str, probe: Probe, batch: Any) -> Tensor:
    """The loss of a batch, checked to be a scalar."""
    loss = probe.loss(batch)
    if not isinstance(loss, Tensor) or loss.ndim:
        given = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise InputError(f"the loss of {name!r} is {given}; it must be a scalar tensor: take its mean or sum")
    return loss


def mean_losses(
    weights: Weights, probes: Mapping[str, Probe], batches: Mapping[str, Sequence[Any]], *seed: int | str
) -> dict[str, float]:
    """The mean loss of each probe's batches, without gradients; call it inside `weights.untouched()`."""
    means = []
    with torch.no_grad():
        for name, probe in probes.items():
            losses = []
            for number, batch in enumerate(batches[name]):
                weights.reset(key(*seed, name, number))
                losses.append(probe.loss(batch))
            means.append(torch.stack(losses).float().mean())
        values: list[float] = torch.stack(means).tolist()
    return dict(zip(probes, values, strict=True))
