"""The step of few-shot learning that the training loop runs: one outer update of a learner."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from metapretrain.maml import MAML, CompiledMeta
from metapretrain.training.devices import mean_over_ranks

EPISODES = "episodes"  # the stream's only task


class MetaStep(nn.Module):
    """One outer update of a learner for :func:`metapretrain.training.train`, and the best weights so far.

    The learner goes backward itself, chunk by chunk; its gradients, and running statistics, are averaged over the
    ranks. The loss that is returned only hands these gradients on. `keep` notes weights by their validation
    accuracy; they are part of the state, so that a resumed run knows them.

    Args:
        learner: MAML and its kin, or ProtoNet.
        images: uint8 (N, C, H, W), which go where the learner goes.
        distort: changes a batch of images (B, C, H, W) at random before the learner sees them; None: nothing does.
        compile: compile the meta-step (:class:`metapretrain.maml.CompiledMeta`); a ProtoNet stays as it is.
    """

    reduces_gradients = True
    images: Tensor

    def __init__(
        self, learner: nn.Module, images: Tensor, distort: nn.Module | None = None, compile: bool = False
    ) -> None:
        super().__init__()
        self.learner, self.distort = learner, distort
        self._compiled = CompiledMeta(learner) if compile and isinstance(learner, MAML) else None
        self.register_buffer("images", images, persistent=False)
        self.best: dict[str, Any] = {"accuracy": -1.0, "step": 0, "weights": {}}

    def forward(self, batches: dict[str, dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return the mean query loss of a batch of episodes, whose backward gives the meta-gradient."""
        batch = batches[EPISODES]
        parameters = [p for p in self.learner.parameters() if p.requires_grad]
        before = [p.grad for p in parameters]
        for p in parameters:
            p.grad = None
        support, query = ((self._shown(batch[part]), batch[f"{part}_y"]) for part in ("support", "query"))
        meta: Any = self.learner if self._compiled is None else self._compiled
        loss = meta.backward(support, query).mean()
        used = [p for p in parameters if p.grad is not None]
        gradients = [p.grad for p in used if p.grad is not None]
        for p, grad in zip(parameters, before, strict=True):
            p.grad = grad
        statistics = [b for b in self.learner.buffers() if b.is_floating_point()]
        with torch.no_grad():
            for tensor, mean in zip(changed := [loss, *gradients, *statistics], mean_over_ranks(changed), strict=True):
                tensor.copy_(mean)
        return {EPISODES: _WithGradients.apply(loss, gradients, *used)}

    def _shown(self, rows: Tensor) -> Tensor:
        """Images (T, S, C, H, W) of the rows (T, S)."""
        if self.distort is None:
            return self.images[rows]
        distorted: Tensor = self.distort(self.images[rows.flatten()])
        return distorted.view(*rows.shape, *distorted.shape[1:])

    def keep(self, step: int, accuracy: float) -> None:
        """Note the weights if they are better than all before."""
        if accuracy > self.best["accuracy"]:
            weights = {name: value.detach().cpu().clone() for name, value in self.learner.state_dict().items()}
            self.best = {"accuracy": accuracy, "step": step, "weights": weights}

    def restore(self) -> None:
        """Give the learner its best weights back, if any were noted."""
        if self.best["weights"]:
            self.learner.load_state_dict(self.best["weights"])

    def get_extra_state(self) -> dict[str, Any]:
        """Return what `keep` noted."""
        return self.best

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Go on from :meth:`get_extra_state`."""
        self.best = state


class _WithGradients(torch.autograd.Function):
    """A loss whose gradients by some parameters are known."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(outer[0] * grad for grad in ctx.gradients)
