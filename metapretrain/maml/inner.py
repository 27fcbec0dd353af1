"""One inner step: the loss of the fast weights, its gradient by name, the update."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from metapretrain.errors import InputError
from metapretrain.maml.nests import Nest, rebuild
from metapretrain.maml.rates import Rates

LossFunction = Callable[[Nest, Nest], Tensor]
Named = dict[str, Tensor]
OptimizerFactory = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


class HiddenWeights(Exception):
    """The loss depends on tensors that want a gradient, though neither params nor lr nor batch do."""


@dataclass(frozen=True)
class Inner:
    """What every engine needs to know of the inner loop, apart from parameters and data.

    `nest` is the user's params, whose form the loss function is given; `adapted` names the leaves that move.
    `graph` says whether the result carries a gradient: without it, each step is cut off from the one before
    and memory does not grow with the steps.
    """

    loss_fn: LossFunction
    nest: Nest
    names: tuple[str, ...]
    adapted: tuple[str, ...]
    rates: Rates
    steps: int
    order: int
    graph: bool
    allow_unused: bool = False
    checkpoint: bool = False
    optimizer: OptimizerFactory | None = None

    def split(self, params: Named) -> tuple[Named, Named]:
        """(those that are adapted, the others)."""
        return {n: params[n] for n in self.adapted}, {n: p for n, p in params.items() if n not in set(self.adapted)}

    def start(self, fast: Named) -> Named:
        """Weights that a gradient can be taken of: detached leaves where no graph is wanted."""
        if self.graph:
            return {n: p if p.requires_grad else p.detach().requires_grad_() for n, p in fast.items()}
        return {n: p.detach().requires_grad_() for n, p in fast.items()}

    def call(self, function: LossFunction, params: Named, batch: Nest) -> Tensor:
        """`function` of the parameters in the user's nest."""
        return function(rebuild(self.nest, iter([params[name] for name in self.names])), batch)

    def loss(self, params: Named, batch: Nest) -> Tensor:
        """The inner loss of one task, checked to be a scalar."""
        return scalar(self.call(self.loss_fn, params, batch), "loss_fn")

    def check_loss(self, step: int, loss: Tensor, fast: Named) -> None:
        """Raise for a loss that gradients cannot be taken of as planned.

        Raises:
            InputError: the loss has no gradient.
            HiddenWeights: it has one by tensors that adapt was not given, and no graph was planned for.
        """
        if not loss.requires_grad:
            raise InputError(
                "the loss of the inner loop has no gradient: it does not depend on params, or loss_fn works "
                "under torch.no_grad() or on detached tensors; use the params that loss_fn is given"
            )
        if self.order == 2 and not self.graph and step == 0:
            known = {id(p) for p in fast.values()}
            if any(id(leaf) not in known for leaf in leaves_of([loss])):
                raise HiddenWeights

    def gradient(self, step: int, loss: Tensor, fast: Named) -> list[Tensor | None]:
        """Gradient of the (summed) loss by the fast weights.

        Raises:
            InputError: the loss has no gradient, or not by some parameters (unless `allow_unused`).
        """
        self.check_loss(step, loss, fast)
        create = self.order == 2 and self.graph
        gradients = torch.autograd.grad(loss, list(fast.values()), create_graph=create, allow_unused=True)
        return self.checked(gradients)

    def checked(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients, or an error that names the parameters that have none."""
        unused = [name for name, g in zip(self.adapted, gradients, strict=True) if g is None]
        if unused and not self.allow_unused:
            raise InputError(
                f"unused in the inner loop: {', '.join(unused)}; leave them out with only=..., "
                "or pass allow_unused=True to keep them as they are"
            )
        return list(gradients)

    def update(self, step: int, fast: Named, gradients: Sequence[Tensor | None]) -> Named:
        """Gradient descent: equation 1 of Finn et al., 2017, with a rate for each parameter and step."""
        uniform = self.rates.uniform(step)
        if uniform is not None and all(g is not None for g in gradients):
            moved = torch._foreach_add(list(fast.values()), list(gradients), alpha=-uniform)  # type: ignore[arg-type]
            updated = dict(zip(fast, moved, strict=True))
        else:
            updated = {
                name: p if g is None else p - self.rates.at(step, name) * g
                for (name, p), g in zip(fast.items(), gradients, strict=True)
            }
        if self.graph:
            return updated
        return {name: p.detach().requires_grad_() for name, p in updated.items()}

    def finish(self, fast: Named) -> Named:
        """The result: without a graph it asks for no gradient either."""
        return fast if self.graph else {name: p.detach() for name, p in fast.items()}


def scalar(loss: Any, what: str) -> Tensor:
    """Return `loss`.

    Raises:
        InputError: it is not a floating point tensor without dimensions.
    """
    if not isinstance(loss, Tensor):
        raise InputError(f"{what} returned a {type(loss).__name__}; it must return a scalar tensor")
    if loss.ndim:
        raise InputError(f"{what} returned shape {tuple(loss.shape)}; it must return a scalar: take its mean or sum")
    return loss


@contextmanager
def differentiable_twice(order: int) -> Iterator[None]:
    """Attention by the math kernel in second order: the fused kernels have no double backward."""
    if order == 1:
        yield
        return
    with sdpa_kernel(SDPBackend.MATH):
        yield


def leaves_of(outputs: Iterable[Tensor]) -> list[Tensor]:
    """The leaf tensors that a gradient of `outputs` would reach."""
    nodes: list[Any] = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen, found = set(nodes), []
    while nodes:
        node = nodes.pop()
        if hasattr(node, "variable"):
            found.append(node.variable)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
    return found
