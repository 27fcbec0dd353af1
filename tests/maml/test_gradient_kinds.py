"""Kinds of modules in every engine and order: central differences in float64, and the engines against each other."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from metapretrain import MAML
from metapretrain.errors import InputError
from tests.maml.nets import TASKS, WAYS, flat, relative, spread

ENGINES = ("loop", "vmap", "mixed", "auto", "higher", "learn2learn")
LR = 0.2


class Kind(nn.Module):
    """Parts, a free parameter, what is done with them, and a head."""

    def __init__(self, features: Callable[[Any, Tensor], Tensor], x: Tensor, *parts: nn.Module) -> None:
        super().__init__()
        self.parts, self.features = nn.ModuleList(parts), features
        self.free = nn.Parameter(torch.linspace(-1, 1, 15).view(5, 3))
        with torch.no_grad():
            width = features(self, x[0]).flatten(1).shape[1]
        self.head = nn.Linear(width, WAYS)

    def __getitem__(self, number: int) -> Any:
        return self.parts[number]

    def forward(self, x: Tensor) -> Tensor:
        z = self.features(self, x).flatten(1)
        out: Tensor = self.head(z) + 0.1 * self.free.sin().sum()
        return out


class Tied(nn.Module):
    """An embedding whose weight is that of the output too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.out(self.embed(x).mean(1))
        return z


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(TASKS, 6, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


IDS = torch.randint(0, 7, (TASKS, 6, 5), generator=torch.Generator().manual_seed(0))
IDS[1:, :, 3:] = 2  # padding, of which the first task has little
V, S, A, M, B = draw(5), draw(4, 5), draw(2, 7), draw(2, 6, 6), draw(1, 4, 4, 4)  # vectors to volumes
Y = torch.arange(WAYS).repeat(TASKS, 2)
norm, spectral = nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm


KINDS: dict[str, Callable[[], tuple[Kind, Tensor]]] = {}
OPTIONS: dict[str, dict[str, Any]] = {}


def kind(name: str, x: Tensor, make: Callable[[], list[nn.Module]], of: Any = None, **options: Any) -> None:
    def chain(owner: Any, x: Tensor) -> Tensor:
        for one in owner.parts:
            x = one(x)
        return x

    KINDS[name] = lambda: (Kind(of or chain, x.float() if x.is_floating_point() else x, *make()), x)
    OPTIONS[name] = options


def evaluated(*parts: nn.Module) -> list[nn.Module]:
    for one in parts:
        for _ in range(3):
            one(M[0].float() + 1 if isinstance(one, nn.BatchNorm2d) else V[0].float())
    return [one.eval() for one in parts]


def unpooled(owner: Any, x: Tensor) -> Tensor:
    pooled, where = F.max_pool2d(owner[0](x), 2, return_indices=True)
    return F.max_unpool2d(pooled * pooled, where, 2)


def sampled(owner: Any, x: Tensor) -> Tensor:
    return F.grid_sample(owner[0](x), owner[1](x[:, 0, 0]).tanh().view(-1, 2, 2, 2), align_corners=False)


def scattered(owner: Any, x: Tensor) -> Tensor:
    rows = owner.free[:, :2].tanh()
    return owner.free.new_zeros(7, 2).scatter_add(0, x[0][:, None].expand(5, 2), rows)[x]


def attended(owner: Any, x: Tensor) -> Tensor:
    z = owner[0](x)[:, None]
    return F.scaled_dot_product_attention(z, z.sin(), z.cos(), is_causal=True)


def similar(owner: Any, x: Tensor) -> Tensor:
    return F.cosine_similarity(x[:, None], owner[0](x)[None], dim=-1)


def apart(owner: Any, x: Tensor) -> Tensor:
    return torch.cdist(owner[0](x), owner.free.T)


linear = lambda: [nn.Linear(5, 5)]  # noqa: E731
bare = lambda: [nn.Linear(5, 5, bias=False)]  # noqa: E731
conv = lambda: [nn.Conv2d(2, 3, 3, padding=1)]  # noqa: E731
kind("linear", V, lambda: [nn.Linear(5, 6), nn.Tanh()])
kind("conv 1d", A, lambda: [nn.Conv1d(2, 3, 3, stride=2), nn.Tanh()])
kind("conv 2d, groups and dilation", M, lambda: [nn.Conv2d(2, 4, 2, dilation=2, groups=2), nn.Softplus()])
kind("conv 2d, circular", M, lambda: [nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular"), nn.GELU()])
kind("conv 3d", B, lambda: [nn.Conv3d(1, 2, 3), nn.Tanh()])
kind("transposed conv", M, lambda: [nn.ConvTranspose2d(2, 2, 2, stride=2), nn.Tanh(), nn.AvgPool2d(3)])
kind("embedding", IDS, lambda: [nn.Embedding(7, 4), nn.Tanh()])
kind("embedding with padding", IDS, lambda: [nn.Embedding(7, 4, padding_idx=2), nn.Tanh()])
kind("embedding bag", IDS, lambda: [nn.EmbeddingBag(7, 4, mode="mean"), nn.Tanh()])
kind("tied weights", IDS, lambda: [Tied(), nn.Tanh()])
kind("weight norm", V, lambda: [norm(nn.Linear(5, 4)), nn.Tanh()])
kind("weight norm of a conv", M, lambda: [norm(nn.Conv2d(2, 2, 3), dim=1), nn.Tanh()])
kind("spectral norm, evaluated", V, lambda: evaluated(spectral(nn.Linear(5, 4)), nn.Tanh()))
kind("batch norm", M, lambda: [*conv(), nn.BatchNorm2d(3), nn.Tanh()])
kind("batch norm, frozen", M, lambda: [*evaluated(nn.BatchNorm2d(2)), *conv(), nn.Tanh()], batchnorm="frozen")
kind("batch norm by the support", M, lambda: [*conv(), nn.BatchNorm2d(3), nn.Tanh()], batchnorm="support")
kind("group norm", M, lambda: [nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Tanh()])
kind("layer norm", V, lambda: [nn.Linear(5, 6), nn.LayerNorm(6), nn.Tanh()])
kind("instance norm", M, lambda: [*conv(), nn.InstanceNorm2d(3, affine=True), nn.Tanh()])
kind("rms norm", V, lambda: [nn.Linear(5, 6), nn.RMSNorm(6), nn.Tanh()])
kind("local response norm", M, lambda: [*conv(), nn.LocalResponseNorm(2), nn.Tanh()])
kind("dropout, evaluated", V, lambda: [nn.Linear(5, 6), nn.Dropout(0.5).eval(), nn.Tanh()])
kind("gru", S, lambda: [nn.GRU(5, 3, batch_first=True)], lambda owner, x: owner[0](x)[0][:, -1])
kind("lstm", S, lambda: [nn.LSTM(5, 3, batch_first=True)], lambda owner, x: owner[0](x)[0][:, -1])
kind("attention", S, lambda: [nn.MultiheadAttention(5, 1, batch_first=True)], lambda owner, x: owner[0](x, x, x)[0])
kind("transformer", S, lambda: [nn.TransformerEncoderLayer(5, 1, 6, 0.0, batch_first=True, activation="gelu")])
kind("scaled dot product", S, linear, attended)
kind("grid sample", M, lambda: [*conv(), nn.Linear(6, 8)], sampled)
kind("bilinear", V, lambda: [nn.Bilinear(5, 5, 3)], lambda owner, x: owner[0](x, x.sin()))
kind("prelu", V, lambda: [nn.Linear(5, 6), nn.PReLU(6)])
kind("gather", IDS, bare, lambda owner, x: torch.gather(owner[0].weight, 0, x % 5).tanh())
kind("scatter", IDS, list, scattered)
kind("index select", IDS, bare, lambda owner, x: owner[0].weight.index_select(0, x.flatten() % 5).view(6, 5, 5).tanh())
kind("take along dim", IDS, bare, lambda owner, x: torch.take_along_dim(owner[0].weight, x % 5, 0).tanh())
kind("indexing", IDS, bare, lambda owner, x: owner[0].weight[x % 5, x % 3].tanh())
kind("pooling with indices", M, conv, unpooled)
kind("interpolate", M, conv, lambda owner, x: F.interpolate(owner[0](x), size=4, mode="bilinear").tanh())
kind("pixel shuffle", M, lambda: [nn.Conv2d(2, 4, 3), nn.PixelShuffle(2), nn.Tanh()])
kind("unfold", M, conv, lambda owner, x: F.unfold(owner[0](x), 3, stride=3).tanh())
kind("cosine", V, linear, similar)
kind("distances", V, lambda: [nn.Linear(5, 5)], apart)
kind("glu and log softmax", V, lambda: [nn.Linear(5, 6), nn.GLU(), nn.LogSoftmax(1)])
kind("sorting", V, linear, lambda owner, x: owner[0](x).sort(1).values.tanh())
kind("einsum", S, bare, lambda owner, x: torch.einsum("nld,de,nme->nlm", x, owner[0].weight, x).tanh())
kind("cumulated", S, linear, lambda owner, x: owner[0](x).tanh().cumsum(1).logsumexp(2))

NOT_BY_VMAP = {"gru", "lstm", "grid sample"}  # refused by torch, which cannot trace them, or by us


def made(name: str) -> tuple[Kind, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    net, x = KINDS[name]()
    spread(net)
    other = x.flip(1) if not x.is_floating_point() else x.flip(1) * 1.1 + 0.1
    return net, (x, Y), (other, Y)


def meta_gradient(net: nn.Module, support: Any, query: Any, **options: Any) -> tuple[Tensor, Tensor]:
    net.zero_grad()
    losses = MAML(net, LR, **options).backward(support, query)
    return losses, flat([p.grad for p in net.parameters()])


def by_hand(net: nn.Module, support: Any, query: Any, steps: int) -> Tensor:
    """The meta-gradient of first order by torch alone, for modules whose mode is their policy."""
    total = []
    for t in range(TASKS):
        params = dict(net.named_parameters())
        for _ in range(steps):
            loss = F.cross_entropy(functional_call(net, params, (support[0][t],)), support[1][t])
            gradients = torch.autograd.grad(loss, list(params.values()))
            params = {n: p - LR * g for (n, p), g in zip(params.items(), gradients, strict=True)}
        total.append(F.cross_entropy(functional_call(net, params, (query[0][t],)), query[1][t]))
    return flat(torch.autograd.grad(torch.stack(total).mean(), list(net.parameters())))


def quotient(net: nn.Module, support: Any, query: Any, direction: Tensor, step: float, **options: Any) -> float:
    """The difference quotient of the mean query loss along a direction, of the engine loop."""
    parameters, values = list(net.parameters()), []
    start = nn.utils.parameters_to_vector(parameters).detach().clone()
    for sign in (1, -1):
        nn.utils.vector_to_parameters(start + sign * step * direction, parameters)
        values.append(float(MAML(net, LR, engine="loop", **options).losses(support, query).detach().mean()))
    nn.utils.vector_to_parameters(start, parameters)
    return (values[0] - values[1]) / (2 * step)


def check_engines(name: str, steps: int, first_order: bool) -> None:
    net, support, query = made(name)
    options = {"steps": steps, "first_order": first_order, **OPTIONS[name]}
    if name == "embedding bag" and not first_order:
        for engine in ENGINES:
            with pytest.raises(InputError, match="torch has no second derivative of EmbeddingBag"):
                meta_gradient(net, support, query, engine=engine, **options)
        return
    try:
        losses, expected = meta_gradient(net, support, query, engine="loop", **options)
    except RuntimeError as error:
        if torch.__version__ < "2.14" and re.search("derivative for .* is not implemented", str(error)):
            pytest.skip(str(error))
        raise
    assert expected.isfinite().all()
    if not first_order:
        signs = torch.randint(0, 2, expected.shape, generator=torch.Generator().manual_seed(1)) * 2.0 - 1
        for direction in (expected / expected.norm(), torch.where(expected == 0, 0, signs.double())):
            slope = pytest.approx(float(expected @ direction), rel=2e-6, abs=1e-7)
            # A smaller step where a sample crosses a pixel's border, at which the inner gradient jumps.
            assert any(quotient(net, support, query, direction, step, **options) == slope for step in (1e-5, 1e-7))
    elif "batchnorm" not in options:
        assert relative(expected, by_hand(net, support, query, steps)) < 1e-10
    for engine in ENGINES[1:]:
        if name in NOT_BY_VMAP and engine in ("vmap", "mixed"):
            with pytest.raises((InputError, RuntimeError), match=r"grid_sample|Batching rule not implemented"):
                meta_gradient(net, support, query, engine=engine, **options)
            continue
        found_losses, found_gradient = meta_gradient(net, support, query, engine=engine, **options)
        torch.testing.assert_close(found_losses, losses, rtol=1e-9, atol=1e-11, msg=engine)
        assert relative(found_gradient, expected) < 1e-8, engine


@pytest.mark.parametrize("name", KINDS)
def test_the_second_order_of_three_steps(name: str) -> None:
    check_engines(name, 3, first_order=False)


@pytest.mark.parametrize("name", KINDS)
def test_the_first_order_of_one_step(name: str) -> None:
    check_engines(name, 1, first_order=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(("steps", "first_order"), [(1, False), (5, False), (3, True), (5, True)])
def test_further_steps_and_orders(name: str, steps: int, first_order: bool) -> None:
    check_engines(name, steps, first_order)


def test_there_are_many_kinds() -> None:
    assert len(KINDS) >= 40
