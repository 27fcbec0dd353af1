"""PiKE, a scheduler by gradient norms and variances, as `pike` in `--schedule` and `--methods` of every script."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from metapretrain.checks import number, whole
from metapretrain.draws import generator, key, pick
from metapretrain.errors import InputError
from metapretrain.scheduling import BlockScheduler, Choice, Cost, Probe, register
from metapretrain.scheduling.probes import Params, Weights, check_probes, loss_of


class PiKE(BlockScheduler):
    """Mixing by gradient norms and variances, with one source an update.

    Every `every` updates the weight w_k of source k is multiplied by ``exp(zeta1 G_k - zeta2 / 2 V_k)`` and all are
    normalised; G_k estimates the squared norm of the gradient of its loss, and V_k the variance of a batch's gradient
    (the paper's sigma_k^2 / b), both without bias from M = `samples` batches, a negative G_k as 0. Each update draws
    its source by weight, where the paper fills that part of every batch.

    Args:
        every: updates from estimate to estimate. None: estimates take a quarter of all compute at most.
        zeta1, zeta2: of norms and of variances, 0 or more.
        samples: M, 2 to 100.

    Raises:
        InputError: bad probes or numbers; from `choose`, gradients that are not finite.

    Source: Li et al., "PiKE: Adaptive data mixing for large-scale multi-task learning under low gradient conflicts",
    2025, Algorithm 1.
    """

    def __init__(
        self,
        sources: Mapping[str, Probe],
        params: Params,
        *,
        zeta1: float = 0.1,
        zeta2: float = 0.1,
        samples: int = 2,
        every: int | None = None,
        seed: int = 0,
    ) -> None:
        self.probes = check_probes("sources", sources)
        super().__init__(sources, seed=seed)
        self.zeta1, self.zeta2 = number("zeta1", zeta1, least=0), number("zeta2", zeta2, least=0)
        self.samples = whole("samples", samples, 2, 100)
        self.units = 3 * self.samples * len(sources)
        self.every = whole("every", self.units if every is None else every, 1)
        self.weights, self._log_weights = Weights(params), dict.fromkeys(self.sources, 0.0)

    def probabilities(self) -> dict[str, float]:
        """The weights of the sources that have not run out."""
        logits = np.array([self._log_weights[name] for name in self.active])
        shares = np.exp(logits - logits.max())
        return dict(zip(self.active, (shares / shares.sum()).tolist(), strict=True))

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "log_weights": dict(self._log_weights)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._log_weights = dict(state["log_weights"])

    def _identity(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("zeta1", "zeta2", "samples", "every")}
        return {**super()._identity(), **own}

    def _decide(self) -> Choice:
        cost = Cost()
        if self.decisions % self.every == 0 and len(self.active) > 1:
            start, passes = time.perf_counter(), self.samples * len(self.active)
            for name in self.active:
                squared, variance = self.estimates(name)
                if not math.isfinite(squared + variance):
                    raise InputError(f"gradients of source {name} are not finite: look at the weights and the losses")
                self._log_weights[name] += self.zeta1 * max(squared, 0.0) - self.zeta2 / 2 * variance
            cost = Cost(passes, passes, time.perf_counter() - start)
        names, shares = zip(*self.probabilities().items(), strict=True)
        return Choice(pick(names, shares, self.seed, self.decisions, "pike"), 1, cost=cost)

    def estimates(self, name: str) -> tuple[float, float]:
        """Unbiased estimates of a source's squared gradient norm, and of the variance of a batch's gradient."""
        place, probe, tensors = (self.seed, self.decisions, "source", name), self.probes[name], self.weights.tensors
        random, squares, total = generator(*place), [], [torch.zeros_like(p) for p in tensors]
        with self.weights.untouched():
            batches = [probe.sample(random) for _ in range(self.samples)]
            for taken, batch in enumerate(batches):
                self.weights.reset(key(*place, taken))
                found = torch.autograd.grad(loss_of(name, probe, batch), tensors, allow_unused=True)
                squares += [g.square().sum() for g in found if g is not None]
                for part, gradient in zip(total, found, strict=True):
                    if gradient is not None:
                        part += gradient
        mean = float(torch.stack([part.square().sum() for part in total]).sum()) / self.samples**2
        variance = (float(torch.stack(squares).sum()) - self.samples * mean) / (self.samples - 1)
        return mean - variance / self.samples, variance


register("pike", PiKE)
