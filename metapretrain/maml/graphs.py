"""A meta-step as one CUDA graph: on a GPU a small network's meta-step is bound by starting its kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from metapretrain.errors import InputError
from metapretrain.maml.compiled import CompiledMeta
from metapretrain.maml.learner import pair
from metapretrain.nests import layout, rebuild, tensors

WARMUPS = 3  # eager meta-steps before recording: the engine's probe, lazy buffers and autotuning have to settle


class MetaGraph:
    """Records a learner's `backward` once for each shape of batch and replays it with a single launch.

    On a CPU it is the learner's `backward` as it is. Steps, rates in numbers, the engine and the training mode are
    those of the first call with a shape; weights and learned rates are read anew at each call. The learner's
    parameters must stay where they are in memory, as optimizers and `load_state_dict` leave them.

    Args:
        learner: :class:`metapretrain.maml.MAML`, its kin or :class:`metapretrain.maml.ProtoNet`.
        compile: fuse operations first, on a CPU too; for :class:`metapretrain.maml.CompiledMeta`'s learners.

    Raises:
        InputError: something that is no learner, or a learner that cannot be compiled.

    Example:
        >>> from metapretrain.maml import MAML
        >>> maml = MAML(torch.nn.Linear(4, 2), lr=0.1)
        >>> x, y = torch.randn(3, 6, 4), torch.tensor([[0, 1] * 3] * 3)
        >>> MetaGraph(maml).backward((x, y), (x, y)).shape
        torch.Size([3])
    """

    def __init__(self, learner: Any, compile: bool = False) -> None:
        if not hasattr(learner, "backward"):
            raise InputError(f"a {type(learner).__name__} is no learner: give MAML, its kin or ProtoNet over it")
        self.learner, self.step = learner, CompiledMeta(learner) if compile else learner
        self._recorded: dict[Any, _Recorded] = {}

    def backward(self, support: Any, query: Any) -> Tensor:
        """Add the gradient of the mean query loss to ``.grad``; return the losses (T,), detached.

        Args:
            support, query: (inputs, labels) of T tasks; every tensor is (T, ...).

        Raises:
            InputError: what the learner's `backward` refuses; on a GPU, an lr that is computed from other tensors.
        """
        batch = pair(support), pair(query)
        leaves = tensors(batch)
        if not leaves or not leaves[0].is_cuda:
            losses: Tensor = self.step.backward(*batch)
            return losses
        key = layout(batch)
        with torch.cuda.device_of(leaves[0]):  # a graph belongs to the current one
            if key not in self._recorded:
                self._recorded[key] = _Recorded(self.learner, self.step, batch)
            return self._recorded[key](leaves)


class _Recorded:
    def __init__(self, learner: Any, step: Any, batch: Any) -> None:
        rates = tensors(getattr(learner, "lr", None))  # which are not registered unless they are parameters
        learned = {id(p): p for p in (*learner.parameters(), *rates) if p.requires_grad}
        self.parameters = list(learned.values())
        if not all(p.is_leaf for p in self.parameters):
            raise InputError("lr comes from further computations, which a recorded meta-step would miss; use backward")
        self.static = [leaf.clone() for leaf in tensors(batch)]
        batch = rebuild(batch, iter(self.static))
        outside = [p.grad for p in self.parameters]
        for p in self.parameters:  # gradients would be added in place
            p.grad = None
        try:
            self.graph, self.losses = _record(learner, step, batch, self.parameters)
            self.gradients = [p.grad for p in self.parameters]
        finally:
            for p, grad in zip(self.parameters, outside, strict=True):
                p.grad = grad

    def __call__(self, leaves: list[Tensor]) -> Tensor:
        for fixed, leaf in zip(self.static, leaves, strict=True):
            fixed.copy_(leaf, non_blocking=True)
        self.graph.replay()
        for p, grad in zip(self.parameters, self.gradients, strict=True):
            if grad is not None:
                p.grad = grad.clone() if p.grad is None else p.grad.add_(grad)
        losses: Tensor = self.losses
        return losses.clone()


def _record(learner: Any, step: Any, batch: Any, parameters: list[Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """The graph and the losses that it writes; the parameters' gradients are those that it writes."""
    buffers = [(buffer, buffer.clone()) for buffer in learner.buffers()]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARMUPS):
            step.backward(*batch)
    torch.cuda.current_stream().wait_stream(side)
    for buffer, value in buffers:  # what the warm-ups tracked
        buffer.copy_(value)
    for p in parameters:
        p.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        losses: Tensor = step.backward(*batch)
    return graph, losses
