"""Small networks, episodes and the references that the engines are compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from metapretrain.maml import functional
from metapretrain.nests import map_tensors

TASKS, WAYS = 3, 3
Batch = tuple[Tensor, Tensor]


def spread(net: nn.Module, seed: int = 0) -> nn.Module:
    """The net in float64 with weights off their special values (affine 1 and 0)."""
    generator = torch.Generator().manual_seed(seed)
    net = net.double()
    for p in net.parameters():
        p.data += 0.1 * torch.randn(p.shape, generator=generator, dtype=torch.float64)
    return net


def cnn() -> nn.Module:
    torch.manual_seed(1)
    return spread(
        nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(4, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(16, WAYS),
        )
    )


class Transformer(nn.Module):
    """One attention layer over tokens, with layer normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, WAYS)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layer(self.embed(x)).mean(1))
        return out


def transformer() -> nn.Module:
    torch.manual_seed(2)
    return spread(Transformer())


def images(per_class: int, seed: int, tasks: int = TASKS) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tasks, WAYS * per_class, 1, 8, 8, generator=generator, dtype=torch.float64)
    return x, torch.arange(WAYS).repeat(tasks, per_class)


def tokens(per_class: int, seed: int, tasks: int = TASKS) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tasks, WAYS * per_class, 5, 4, generator=generator, dtype=torch.float64)
    return x, torch.arange(WAYS).repeat(tasks, per_class)


NETS: Mapping[str, tuple[Callable[[], nn.Module], Callable[..., Batch]]] = {
    "cnn": (cnn, images),
    "transformer": (transformer, tokens),
}


def loss_of(net: nn.Module, **options: Any) -> tuple[Callable[[Any, Any], Tensor], dict[str, Tensor]]:
    """(loss_fn, params) of a network."""
    apply, params, buffers = functional(net, **options)

    def loss_fn(params: Any, batch: Any) -> Tensor:
        return F.cross_entropy(apply(params, buffers, batch[0]), batch[1])

    return loss_fn, params


def flat(gradients: Any) -> Tensor:
    """All tensors of a dict or list as one vector."""
    values = gradients.values() if isinstance(gradients, Mapping) else gradients
    return torch.cat([value.reshape(-1) for value in values])


def gradient(losses: Tensor, params: Mapping[str, Tensor]) -> Tensor:
    """Of the mean of the losses by all params, one vector; those without a part have zero."""
    found = torch.autograd.grad(losses.mean(), list(params.values()), allow_unused=True)
    return flat([torch.zeros_like(p) if g is None else g for p, g in zip(params.values(), found, strict=True)])


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def task(batch: Any, t: int) -> Any:
    return map_tensors(lambda value: value[t], batch)
