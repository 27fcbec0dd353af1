"""Steps of few rows as CUDA graphs: on a GPU such a step is bound by starting its kernels, not by computing."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from metapretrain.nests import Nest, layout, map_tensors, rebuild, tensors

log = logging.getLogger(__name__)
MOST = 64  # recorded layouts; others run as they are
FORGET = 1000  # layouts that are counted: a state that differs with each call fills no memory
SIZES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)


class Recorder:
    """Calls a function of nests of tensors; on a GPU, what it does is recorded once per layout of them and replayed.

    A function that cannot be recorded, as it reads values or finds no memory, runs as it is, with one warning.

    Args:
        function: returns a nest of tensors. What it reads beside its arguments must stay where it is in memory.
        plain: calls with a layout before it is recorded: rare layouts do not pay.
        aside: these calls run on a stream of their own, to warm up a function that returns nothing.
        warmups: further calls just before the recording, without results; the tensors `changed` are put back.
        prepare: called before these; may raise RuntimeError. `most`: layouts that are recorded.
    """

    def __init__(
        self,
        function: Callable[..., Nest],
        *,
        plain: int = 2,
        aside: bool = False,
        warmups: int = 1,
        changed: Callable[[], Iterable[Tensor]] = tuple,
        prepare: Callable[[], None] | None = None,
        most: int = MOST,
    ) -> None:
        self.function, self.plain, self.aside, self.warmups = function, plain, aside, warmups
        self.changed, self.prepare, self.most = changed, prepare, most
        self.seen: dict[Any, int] = {}
        self.graphs: dict[Any, _Graph] = {}
        self.pool: Any = None  # one for all graphs: they run one after the other and leave nothing that the next reads
        self.possible = True

    def __call__(self, *given: Nest) -> Any:
        """What the function returns for nests of tensors on one device; the result is the caller's own."""
        leaves = tensors(given)
        if not self.possible or not leaves or not leaves[0].is_cuda:
            return self.function(*given)
        with torch.cuda.device_of(leaves[0]):  # a graph belongs to the current one
            key = layout(given)
            if key not in self.graphs:
                if len(self.seen) > FORGET:
                    self.seen.clear()
                self.seen[key] = self.seen.get(key, 0) + 1
                if self.seen[key] <= self.plain or len(self.graphs) >= self.most or not self._record(key, given):
                    return _aside(self.function, given) if self.aside else self.function(*given)
            return self.graphs[key](leaves)

    def _record(self, key: Any, given: Sequence[Nest]) -> bool:
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        before = [(tensor, tensor.clone()) for tensor in self.changed()]
        restore = _restoring()
        static = map_tensors(Tensor.clone, tuple(given))
        try:
            try:
                if self.prepare is not None:
                    self.prepare()
                for _ in range(self.warmups):
                    _aside(self.function, static)
            finally:
                for tensor, value in before:
                    tensor.copy_(value)
            self.graphs[key] = _Graph(self.function, static, self.pool)
        except RuntimeError as error:  # what is wrong with the function itself is raised by the plain call that follows
            self.possible = False
            self.graphs.clear()
            torch.cuda.synchronize()
            restore()
            log.warning("steps are not recorded as CUDA graphs: %s", str(error).partition("\n")[0])
        return self.possible


def _restoring() -> Callable[[], None]:
    """What undoes a failed recording, which leaves its stream current and refuses random numbers outside a graph."""
    stream, generator = torch.cuda.current_stream(), torch.cuda.default_generators[torch.cuda.current_device()]
    state = generator.clone_state()

    def restore() -> None:
        torch.cuda.set_stream(stream)
        generator.graphsafe_set_state(state)

    return restore


class _Graph:
    """What a function does with these tensors, to be done again with others in their place."""

    def __init__(self, function: Callable[..., Nest], given: Sequence[Nest], pool: Any) -> None:
        torch.cuda.empty_cache()  # a graph has memory of its own: what the plain calls left would be held beside it
        self.given, self.graph = tensors(given), torch.cuda.CUDAGraph()
        torch.clear_autocast_cache()  # casts from before are of the weights as they were, those within are of no value
        # Other threads (NCCL's, JAX's, those that pin memory) may call CUDA meanwhile.
        with torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local"):
            self.found = function(*given)
        torch.clear_autocast_cache()

    def __call__(self, leaves: Sequence[Tensor]) -> Any:
        for fixed, tensor in zip(self.given, leaves, strict=True):
            fixed.copy_(tensor, non_blocking=True)
        self.graph.replay()
        static = tensors(self.found)
        with torch.no_grad():
            fresh = [torch.empty_like(tensor) for tensor in static]
            if fresh:
                torch._foreach_copy_(fresh, static)  # one kernel for all, where each clone would start one
        return rebuild(self.found, iter(fresh))


def _aside(function: Callable[..., Nest], given: Sequence[Nest]) -> Any:
    """What a function returns, computed on a stream of its own, as recording asks of the calls before it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        found = function(*given)
    torch.cuda.current_stream().wait_stream(side)
    return found


@contextmanager
def own_gradients(parameters: Sequence[Tensor]) -> Iterator[list[Tensor | None]]:
    """Collect what is added to the gradient of each parameter inside; ``.grad`` stays as it was."""
    outside, found = [parameter.grad for parameter in parameters], list[Tensor | None]()
    for parameter in parameters:
        parameter.grad = None
    try:
        yield found
        found += [parameter.grad for parameter in parameters]
    finally:
        for parameter, gradient in zip(parameters, outside, strict=True):
            parameter.grad = gradient


def add_gradients(parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Add gradients, which become the parameters' own, to ``.grad``; None adds nothing."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None:
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


def rounded_up(count: int) -> int:
    """The next of a few sizes, so that few shapes are recorded."""
    return next((size for size in SIZES if size >= count), -(-count // 64) * 64)
