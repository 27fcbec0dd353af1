"""Steps of few rows as CUDA graphs: on a GPU such a step is bound by starting its kernels, not by computing."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)
WARMUPS = 2  # plain calls of a shape before it is recorded: rare shapes do not pay
MOST = 64  # recorded shapes; others run as they are
SIZES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)
Function = Callable[..., tuple[Tensor, ...]]


class Replay:
    """Calls a function of tensors; on a GPU, what it does is recorded once for each shape of them and replayed.

    Args:
        function: returns tensors; reads nothing from the device and writes nothing that it does not return. What it
            reads beside its arguments must stay where it is in memory.

    Example:
        >>> Replay(lambda a, b: (a + b,))(torch.ones(2), torch.ones(2))
        (tensor([2., 2.]),)
    """

    def __init__(self, function: Function) -> None:
        self.function = function
        self.seen: dict[Any, int] = {}
        self.recorded: dict[Any, _Recorded] = {}
        self.pool: Any = None
        self.possible = True

    def __call__(self, *given: Tensor) -> tuple[Tensor, ...]:
        """What the function returns for tensors on one device; the result is the caller's own."""
        if not self.possible or not given[0].is_cuda:
            return self.function(*given)
        with torch.cuda.device_of(given[0]):  # a graph belongs to the current one
            return self._replayed(given)

    def _replayed(self, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        key = tuple((tuple(tensor.shape), tensor.dtype, tensor.device) for tensor in given)
        if key not in self.recorded:
            self.seen[key] = self.seen.get(key, 0) + 1
            if self.seen[key] <= WARMUPS or len(self.recorded) >= MOST or not self._record(key, given):
                return self.function(*given)
        return self.recorded[key](given)

    def _record(self, key: Any, given: tuple[Tensor, ...]) -> bool:
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        try:
            self.recorded[key] = _Recorded(self.function, given, self.pool)
        except RuntimeError as error:
            # The model looks at values on the way, or there is no memory for it. What else is wrong with the function
            # is raised by the plain call that follows.
            self.possible = False
            self.recorded.clear()
            torch.cuda.synchronize()
            log.warning("steps are not recorded as CUDA graphs: %s", str(error).partition("\n")[0])
        return self.possible


class _Recorded:
    def __init__(self, function: Function, given: tuple[Tensor, ...], pool: Any) -> None:
        self.given = [tensor.clone() for tensor in given]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            function(*self.given)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.empty_cache()  # a graph has memory of its own: what the plain calls left would be held beside it
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            self.found = function(*self.given)

    def __call__(self, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        for fixed, tensor in zip(self.given, given, strict=True):
            fixed.copy_(tensor, non_blocking=True)
        self.graph.replay()
        return tuple(tensor.clone() for tensor in self.found)


def rounded_up(count: int) -> int:
    """The next of a few sizes, so that few shapes are recorded.

    Example:
        >>> rounded_up(5), rounded_up(64), rounded_up(65)
        (6, 64, 128)
    """
    return next((size for size in SIZES if size >= count), -(-count // 64) * 64)
