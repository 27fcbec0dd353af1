"""Algorithm 1 line by line, on a copy of the model, in place, one batch at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = tuple[Tensor, Tensor]


class Net(nn.Module):
    """An encoder with everything that can leave a trace, and a head for each task."""

    def __init__(self, names: tuple[str, ...] = ("a", "b", "c", "x", "y"), dropout: float = 0.5) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(dropout))
        self.heads = nn.ModuleDict({name: nn.Linear(8, 3) for name in names})
        self.register_buffer("calls", torch.tensor(0))

    def loss(self, name: str, batch: Batch) -> Tensor:
        self.calls.add_(1)
        x, y = batch
        return F.cross_entropy(self.heads[name](self.encoder(x)), y)


class TaskProbe:
    """Batches that the generator draws; it remembers those that it gave."""

    def __init__(self, net: Net, name: str, scale: float = 1.0) -> None:
        self.net, self.name, self.scale = net, name, scale
        self.given: list[Batch] = []

    def sample(self, generator: torch.Generator) -> Batch:
        x = torch.randn(6, 4, generator=generator, dtype=torch.float64)
        y = torch.randint(3, (6,), generator=generator)
        self.given.append((x, y))
        return x, y

    def loss(self, batch: Batch) -> Tensor:
        return self.scale * self.net.loss(self.name, batch)


def utilities(
    net: Net,
    sources: Mapping[str, list[Any]],
    targets: Mapping[str, list[Any]],
    alpha: float,
    loss: Callable[[Net, str, Any], Tensor],
    weight: Callable[[str], float] = lambda name: 1.0,
) -> dict[str, float]:
    """Lines 4 to 9; dropout is off and batch normalisation uses the batch."""
    values = {}
    for s, subtasks in sources.items():
        values[s] = 0.0
        for subtask in subtasks:
            moved = probe_mode(copy.deepcopy(net))
            loss(moved, s, subtask).backward()
            with torch.no_grad():
                for p in moved.parameters():
                    if p.grad is not None:
                        p -= alpha * p.grad
                scorer = 0.0
                for t, batches in targets.items():
                    for batch in batches:
                        scorer -= weight(t) * loss(moved, t, batch).item()
            values[s] += scorer
    return values


def probe_mode(net: Net) -> Net:
    net.encoder[3].eval()
    return net


def exp3(rewards: list[dict[str, float]], chosen: list[str], names: list[str], gamma: float) -> dict[str, float]:
    """Probabilities after some rounds, with the weights themselves (Auer et al., 2002, figure 1)."""
    weights = dict.fromkeys(names, 1.0)

    def probabilities() -> dict[str, float]:
        total = sum(weights.values())
        return {name: (1 - gamma) * weights[name] / total + gamma / len(names) for name in names}

    for reward, source in zip(rewards, chosen, strict=True):
        estimate = reward[source] / probabilities()[source]
        weights[source] *= 2.718281828459045 ** (gamma * estimate / len(names))
    return probabilities()
