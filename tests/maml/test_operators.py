"""Operators that torch differentiates wrongly, or maps wrongly over tasks: right in every engine, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from metapretrain import MAML, check_meta_gradient
from metapretrain.errors import InputError
from metapretrain.maml import adapt, engine_for, functional, meta_backward, meta_loss
from tests.maml.nets import TASKS, WAYS, flat, relative, task

GENERATOR = torch.Generator().manual_seed(0)
IDS = torch.randint(0, 7, (TASKS, 6, 5), generator=GENERATOR)
IDS[0, :, 3:], IDS[1, :, 2:], IDS[2, ::2] = 0, 3, 6  # padding of each kind in one task, none or little in others
IDS[0][IDS[0] == 6] = 1
Y = torch.arange(WAYS).repeat(TASKS, 2)
ENGINES = ("loop", "vmap", "mixed", "auto", "higher", "learn2learn")


class Words(nn.Module):
    """The mean of a text's words; `raw` calls the function itself."""

    def __init__(self, raw: bool = False, **options: Any) -> None:
        super().__init__()
        self.raw, self.options = raw, options
        self.embed, self.head = nn.Embedding(7, 4, **options), nn.Linear(4, WAYS)

    def forward(self, x: Tensor) -> Tensor:
        z = F.embedding(x, self.embed.weight, **self.options) if self.raw else self.embed(x)
        out: Tensor = self.head(z.tanh().mean(1))
        return out


def reference(net: nn.Module, x: Tensor, lr: float, steps: int, order: int) -> Tensor:
    """The meta-gradient task by task, by torch alone."""
    total = []
    for t in range(TASKS):
        params = dict(net.named_parameters())
        for _ in range(steps):
            loss = F.cross_entropy(functional_call(net, params, (x[t],)), Y[t])
            gradients = torch.autograd.grad(loss, list(params.values()), create_graph=order == 2)
            params = {name: p - lr * g for (name, p), g in zip(params.items(), gradients, strict=True)}
        total.append(F.cross_entropy(functional_call(net, params, (x[t],)), Y[t]))
    return flat(torch.autograd.grad(torch.stack(total).mean(), list(net.parameters())))


@pytest.mark.parametrize("padding", [0, 3, -1, -7])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("steps", "order"), [(1, 2), (3, 2), (3, 1)])
def test_padding_is_obeyed_in_every_task(padding: int, engine: str, steps: int, order: int) -> None:
    torch.manual_seed(1)
    net = Words(padding_idx=padding).double()
    with torch.no_grad():
        net.embed.weight.normal_()
    expected = reference(net, IDS, 0.5, steps, order)
    MAML(net, 0.5, first_order=order == 1, steps=steps, engine=engine).backward((IDS, Y), (IDS, Y))
    assert relative(flat([p.grad for p in net.parameters()]), expected) < 1e-12
    assert not net.embed.weight.grad[padding].any()


def test_padding_is_obeyed_by_clones() -> None:
    net = Words(padding_idx=0).double()
    expected = reference(net, IDS, 0.5, 1, 2)
    losses = []
    for t in range(TASKS):
        learner = MAML(net, 0.5).clone()
        learner.adapt(F.cross_entropy(learner(IDS[t]), Y[t]))
        losses.append(F.cross_entropy(learner(IDS[t]), Y[t]))
    torch.stack(losses).mean().backward()
    assert relative(flat([p.grad for p in net.parameters()]), expected) < 1e-12


def test_padding_of_the_function_itself_is_right_by_auto_and_refused_by_vmap() -> None:
    net = Words(raw=True, padding_idx=0).double()
    expected = reference(net, IDS, 0.5, 2, 2)
    MAML(net, 0.5, steps=2).backward((IDS, Y), (IDS, Y))
    assert relative(flat([p.grad for p in net.parameters()]), expected) < 1e-12
    for engine in ("vmap", "mixed"):
        with pytest.raises(InputError, match=r"for the first task only; use engine='loop', or nn\.Embedding"):
            MAML(net, 0.5, engine=engine).losses((IDS, Y), (IDS, Y))
    params = dict(net.named_parameters())

    def loss(params: Any, batch: Any) -> Tensor:
        return F.cross_entropy(functional_call(net, params, (batch[0],)), batch[1])

    assert engine_for(loss, params, (IDS, Y), lr=0.1, tasks=TASKS).engine == "loop"
    assert engine_for(loss, params, (IDS % 2 + 1, Y), lr=0.1, tasks=TASKS).engine == "loop"  # no padding in these
    one = MAML(net, 0.5)
    with pytest.raises(InputError, match="padding_idx for the first task only"):
        meta_loss(loss, params, (IDS, Y), (IDS, Y), tasks=TASKS, lr=0.1, engine="vmap")
    assert one.losses((IDS[:1], Y[:1]), (IDS[:1], Y[:1])).shape == (1,)


@pytest.mark.parametrize("raw", [False, True])
def test_gradients_scaled_by_frequency_are_refused_in_second_order_only(raw: bool) -> None:
    net = Words(raw, scale_grad_by_freq=True).double()
    for engine in ENGINES:
        with pytest.raises(InputError, match="scale_grad_by_freq is wrong; leave it out, or use order=1"):
            MAML(net, 0.5, engine=engine).losses((IDS, Y), (IDS, Y))
        net.zero_grad()
        MAML(net, 0.5, first_order=True, engine=engine).backward((IDS, Y), (IDS, Y))
        expected = reference(net, IDS, 0.5, 1, 1)
        assert relative(flat([p.grad for p in net.parameters()]), expected) < 1e-12


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_embeddings_that_change_or_have_sparse_gradients_are_refused(kind: Any) -> None:
    make: Callable[..., nn.Module] = lambda **o: nn.Sequential(kind(7, 4, **o), nn.Flatten(), nn.LazyLinear(WAYS))  # noqa: E731
    net = make(max_norm=1.0)
    net(IDS[0])
    uses: list[Callable[[], Any]] = [
        lambda: functional(net),
        lambda: MAML(net, 0.1).clone(),
        lambda: MAML(net, 0.1).losses((IDS, Y), (IDS, Y)),
    ]
    for use in uses:
        with pytest.raises(
            InputError, match=r"Embedding.*\(max_norm=...\) changes its weights in place; leave max_norm"
        ):
            use()
    net = make(sparse=True)
    net(IDS[0])
    for engine in ENGINES[:1] if kind is nn.EmbeddingBag else ENGINES:
        with pytest.raises(InputError, match="sparse=True"):
            MAML(net, 0.1, engine=engine).losses((IDS, Y), (IDS, Y))


class Sampled(nn.Module):
    """A convolution, sampled where the images say."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.where = nn.Conv2d(1, WAYS, 3, padding=1), nn.Linear(6, 32)

    def forward(self, x: Tensor) -> Tensor:
        grid = self.where(x[:, 0, 0]).tanh().view(-1, 4, 4, 2)
        return F.grid_sample(self.convolution(x), grid, align_corners=False).mean((2, 3))


@pytest.mark.skipif(torch.__version__ < "2.14", reason="older versions have no second derivative of grid_sample")
def test_grid_sample_is_right_by_auto_and_refused_by_vmap() -> None:
    net, x = Sampled().double(), torch.randn(TASKS, 6, 1, 6, 6, generator=GENERATOR, dtype=torch.float64)
    expected = reference(net, x, 0.5, 2, 2)
    MAML(net, 0.5, steps=2).backward((x, Y), (x, Y))
    assert relative(flat([p.grad for p in net.parameters()]), expected) < 1e-12
    with pytest.raises(InputError, match="mixes up the tasks and images of F"):
        MAML(net, 0.5, engine="vmap").losses((x, Y), (x, Y))


def test_as_many_results_as_tasks_come_back() -> None:
    net, x = nn.Linear(6, 2), torch.randn(TASKS, 6, 6)
    grid = torch.rand(6, 4, 4, 2) * 2 - 1

    def loss(params: Any, x: Tensor) -> Tensor:  # of images without gradient, which the graph does not show
        turned = F.grid_sample(x.expand(6, 6, 6).movedim(0, 1)[:, None], grid, align_corners=False)
        return functional_call(net, params, (turned.flatten(1)[:, :6],)).square().mean()

    params = dict(net.named_parameters())
    expected = adapt(loss, params, x, lr=0.1, tasks=TASKS, engine="loop")
    found = adapt(loss, params, x, lr=0.1, tasks=TASKS)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dim", [0, 1, -1, None])
@pytest.mark.parametrize("layer", ["linear", "convolution"])
@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_weight_norm_is_what_central_differences_give(dim: int | None, layer: str, engine: str) -> None:
    torch.manual_seed(0)
    inner: nn.Module = nn.Linear(4, 5) if layer == "linear" else nn.Conv1d(1, 2, 2)
    width = 5 if layer == "linear" else 6
    normed = nn.utils.parametrizations.weight_norm(inner, dim=dim)  # type: ignore[arg-type]
    net = nn.Sequential(normed, nn.Tanh(), nn.Flatten(), nn.Linear(width, WAYS)).double()
    x = torch.randn(TASKS, 6, *((4,) if layer == "linear" else (1, 4)), generator=GENERATOR, dtype=torch.float64)
    apply, params, buffers = functional(net)
    torch.testing.assert_close(apply(params, buffers, x[0]), net(x[0]))
    for steps in (1, 3):
        assert check_meta_gradient(MAML(net, 0.3, steps=steps, engine=engine), ((x, Y), (x, Y))).ok


def test_other_weight_norms_are_refused_in_second_order() -> None:
    with pytest.warns(FutureWarning):
        old = nn.Sequential(nn.utils.weight_norm(nn.Linear(4, WAYS)))
    x = torch.randn(TASKS, 6, 4, generator=GENERATOR)
    new = nn.utils.parametrizations.weight_norm(nn.Linear(4, WAYS))

    def loss(params: Any, batch: Any) -> Tensor:
        return F.cross_entropy(functional_call(new, params, (batch[0],)), batch[1])

    match = r"torch's second derivative of weight norm is wrong; use torch\.nn\.utils\.parametrizations"
    for engine in ("loop", "higher", "learn2learn"):
        with pytest.raises(InputError, match=match):
            MAML(old, 0.1, engine=engine).losses((x, Y), (x, Y))
        with pytest.raises(InputError, match=match):
            meta_backward(loss, dict(new.named_parameters()), (x, Y), (x, Y), tasks=TASKS, lr=0.1, engine=engine)
    learner = MAML(old, 0.1).clone()
    with pytest.raises(InputError, match=match):
        learner.adapt(F.cross_entropy(learner(x[0]), Y[0]))
    learner.adapt(F.cross_entropy(learner(x[0]), Y[0]), first_order=True)
    assert MAML(old, 0.1, first_order=True).losses((x, Y), (x, Y)).shape == (TASKS,)
    assert MAML(old, 0.1).logits((x, Y), (x, Y)).shape == (TASKS, 6, WAYS)  # evaluation takes no second derivative


def test_only_the_part_since_the_parameters_is_looked_at() -> None:
    v, g, x = torch.randn(3, 4, requires_grad=True), torch.rand(3, 1, requires_grad=True), torch.randn(6, 4)
    params = {"w": torch._weight_norm(v, g, 0)}  # once is right: the second derivative is by `w` alone
    fast = adapt(lambda p, b: F.cross_entropy(b[0] @ p["w"].T, b[1]), params, (x, task(Y, 0)), lr=0.1, steps=2)
    assert fast["w"].requires_grad
