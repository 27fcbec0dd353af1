"""Looking at a model at other weights and leaving no trace: not in weights, buffers, modes or generators."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from metapretrain.errors import InputError

Params = nn.Module | Mapping[str, Tensor] | Iterable[Tensor]


class Weights:
    """The tensors that probes move.

    Args:
        params: a module with all that the losses use (encoder and heads), or its parameters. Of parameters
            alone, buffers cannot be kept nor dropout switched off. What asks for no gradient does not move.

    Raises:
        InputError: nothing that asks for a gradient, or something that is no leaf.
    """

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
        """A block in which probes may run: dropout is off, and all that they change is put back.

        Modules are in evaluation mode, but normalisation by batch statistics keeps the mode it has, so that
        probes see what updates see. The generators of Python, NumPy, the CPU and the weights' GPUs are kept.
        """
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
        """A block in which the weights are theta - alpha * gradient.

        The tensors get other memory for the while, so theirs is never written, and losses may reach the
        weights in any way.
        """
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
