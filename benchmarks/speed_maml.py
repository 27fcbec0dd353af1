"""Rows of run_speed.py about MAML: a meta-step by each engine and by each peer, and whether the gradients agree."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from speed_contenders import Contender, Missing, device_clock, plain_jax
from torch import nn
from torch.nn.functional import cross_entropy

from metapretrain.maml import MAML, MetaGraph, engine_for, functional


@dataclass(frozen=True)
class MamlWork:
    """A meta-step: the mean query loss of `tasks` tasks after `steps` inner steps, and its gradient."""

    tasks: int
    shots: int
    queries: int
    size: int
    channels: int
    width: int
    steps: int
    order: int
    pooled: bool
    ways: int = 5
    rate: float = 0.1
    hidden: int = 0

    def network(self) -> Any:
        """CNN4: four blocks of convolution, batch normalisation, ReLU, and stride 2 or max-pooling.

        With `hidden` an MLP of as many hidden layers.
        """
        layers: list[Any] = []
        if self.hidden:
            widths = [self.channels * self.size**2, *[self.width] * self.hidden]
            for inputs, outputs in pairwise(widths):
                layers += [nn.Linear(inputs, outputs), nn.ReLU()]
            return nn.Sequential(nn.Flatten(), *layers, nn.Linear(self.width, self.ways))
        for inputs in (self.channels, *[self.width] * 3):
            stride = 1 if self.pooled else 2
            layers += [nn.Conv2d(inputs, self.width, 3, stride, 1), nn.BatchNorm2d(self.width), nn.ReLU()]
            layers += [nn.MaxPool2d(2)] if self.pooled else []
        features = self.width * (25 if self.pooled else 4)
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(features, self.ways))

    def data(self, device: str, dtype: Any) -> Any:
        generator = torch.Generator().manual_seed(0)

        def part(each: int) -> tuple[Any, Any]:
            shape = self.tasks, self.ways * each, self.channels, self.size, self.size
            x = torch.randn(shape, generator=generator).to(device, dtype)
            return x, torch.arange(self.ways, device=device).repeat(self.tasks, each)

        return part(self.shots), part(self.queries)

    def changed(self, steps: int, order: int) -> MamlWork:
        """The same work with other inner steps and another order."""
        return replace(self, steps=steps, order=order)

    def flop(self) -> float:
        """Operations that a second-order meta-step needs: products forward, backward, and along one direction.

        The first layer needs no gradient by its inputs. Additions and what is done number by number are left out.
        """
        size, layers, inputs = self.size, list[float](), self.channels
        for _ in range(4):
            size = size if self.pooled else -(-size // 2)
            layers.append(2.0 * size * size * 9 * inputs * self.width)
            size, inputs = (size // 2 if self.pooled else size), self.width
        layers.append(2.0 * size * size * self.width * self.ways)
        once = 2 * layers[0] + 3 * sum(layers[1:])
        along = 2 * layers[0] + 6 * sum(layers[1:])
        per_image = self.shots * self.steps * (once + (along if self.order == 2 else 0)) + self.queries * once
        return self.tasks * self.ways * per_image


def meta_step_of_engine(engine: str) -> Any:
    def make(work: MamlWork, net: Any, support: Any, query: Any) -> Callable[[], Any]:
        maml = MAML(net, work.rate, work.order == 1, steps=work.steps, engine=engine)
        return lambda: maml.backward(support, query)

    return make


def recorded_meta_step(work: MamlWork, net: Any, support: Any, query: Any) -> Callable[[], Any]:
    graph = MetaGraph(MAML(net, work.rate, work.order == 1, steps=work.steps))
    return lambda: graph.backward(support, query)


def compiled_meta_step(work: MamlWork, net: Any, support: Any, query: Any) -> Callable[[], Any]:
    graph = MetaGraph(MAML(net, work.rate, work.order == 1, steps=work.steps), compile=True)
    return lambda: graph.backward(support, query)


def meta_step_of_jax(work: MamlWork, net: Any, support: Any, query: Any, patches: bool = True) -> Callable[[], Any]:
    """The meta-step as one jitted function: a gradient of a mean over vmapped tasks, convolutions by patches or XLA."""
    jax, jnp = plain_jax()
    stride = 1 if work.pooled else 2

    def array(tensor: Any) -> Any:
        return jnp.asarray(tensor.detach().cpu().numpy())

    def convolved(x: Any, filters: Any) -> Any:
        """x (N, H, W, C) by filters (O, C, 3, 3) with a border of one."""
        if not patches:
            layouts = "NHWC", "OIHW", "NHWC"
            return jax.lax.conv_general_dilated(
                x, filters, (stride, stride), [(1, 1), (1, 1)], dimension_numbers=layouts
            )
        images, height, width, _ = x.shape
        rows, columns = -(-height // stride), -(-width // stride)
        bordered = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
        shifts = [
            bordered[
                :, down : down + stride * (rows - 1) + 1 : stride, right : right + stride * (columns - 1) + 1 : stride
            ]
            for down in range(3)
            for right in range(3)
        ]
        flat = filters.transpose(2, 3, 1, 0).reshape(-1, filters.shape[0])
        return (jnp.concatenate(shifts, -1).reshape(-1, len(flat)) @ flat).reshape(images, rows, columns, -1)

    def loss(weights: Any, x: Any, y: Any) -> Any:
        rest = iter(weights)
        for _ in range(4):
            filters, bias, scale, shift = (next(rest) for _ in range(4))
            x = convolved(x, filters) + bias
            x = (x - x.mean((0, 1, 2))) / jnp.sqrt(x.var((0, 1, 2)) + 1e-5) * scale + shift
            x = jnp.maximum(x, 0)
            if work.pooled:
                even = x[:, : x.shape[1] // 2 * 2, : x.shape[2] // 2 * 2]
                # not by `max`: XLA computes twice what its derivative compares, and the two round differently
                parts = (even[:, i::2, j::2] for i in (0, 1) for j in (0, 1))
                x = functools.reduce(lambda a, b: jnp.where(a >= b, a, b), parts)
        logits = x.transpose(0, 3, 1, 2).reshape(len(x), -1) @ next(rest).T + next(rest)
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1).mean()

    def of_task(weights: Any, s: Any, q: Any) -> Any:
        for _ in range(work.steps):
            moves = jax.grad(loss)(weights, *s)
            if work.order == 1:
                moves = jax.lax.stop_gradient(moves)
            weights = [w - work.rate * move for w, move in zip(weights, moves, strict=True)]
        return loss(weights, *q)

    def mean_loss(weights: Any, s: Any, q: Any) -> Any:
        return jax.vmap(of_task, in_axes=(None, 0, 0))(weights, s, q).mean()

    parts = [(array(x).transpose(0, 1, 3, 4, 2), array(y)) for x, y in (support, query)]
    weights = [array(p) for p in net.parameters()]
    step = jax.jit(jax.value_and_grad(mean_loss))
    return lambda: step(weights, *parts)


def meta_step_of_learn2learn(work: MamlWork, net: Any, support: Any, query: Any) -> Callable[[], Any]:
    try:
        import learn2learn
    except ImportError:
        raise Missing("learn2learn (installed by `make`, see the README)") from None
    maml = learn2learn.algorithms.MAML(net, work.rate, first_order=work.order == 1)

    def step() -> None:
        for t in range(work.tasks):
            learner = maml.clone()
            for _ in range(work.steps):
                learner.adapt(cross_entropy(learner(support[0][t]), support[1][t]))
            (cross_entropy(learner(query[0][t]), query[1][t]) / work.tasks).backward()

    return step


def meta_step_of_higher(work: MamlWork, net: Any, support: Any, query: Any) -> Callable[[], Any]:
    try:
        import higher
    except ImportError:
        raise Missing("higher (pip install higher)") from None
    optimizer = torch.optim.SGD(net.parameters(), lr=work.rate)

    def constant(gradients: Any) -> Any:
        return [g.detach() for g in gradients] if work.order == 1 else gradients

    def step() -> None:
        for t in range(work.tasks):
            with higher.innerloop_ctx(net, optimizer, copy_initial_weights=False) as (made, inner):
                for _ in range(work.steps):
                    inner.step(cross_entropy(made(support[0][t]), support[1][t]), grad_callback=constant)
                (cross_entropy(made(query[0][t]), query[1][t]) / work.tasks).backward()

    return step


def meta_step_of_torchopt(work: MamlWork, net: Any, support: Any, query: Any) -> Callable[[], Any]:
    try:
        import torchopt
    except ImportError:
        raise Missing("torchopt (pip install torchopt)") from None
    if work.order == 1:
        raise Missing("first order, which torchopt has not")
    optimizer = torchopt.MetaSGD(net, lr=work.rate)

    def step() -> None:
        weights = torchopt.extract_state_dict(net, by="reference", detach_buffers=True)
        state = torchopt.extract_state_dict(optimizer, by="reference")
        for t in range(work.tasks):
            for _ in range(work.steps):
                optimizer.step(cross_entropy(net(support[0][t]), support[1][t]))
            (cross_entropy(net(query[0][t]), query[1][t]) / work.tasks).backward()
            torchopt.recover_state_dict(net, weights)
            torchopt.recover_state_dict(optimizer, state)

    return step


def maml(work: MamlWork) -> list[Contender]:
    """Meta-steps on the GPU if there is one, else on the CPU; in float32 without TF32, which is far off here.

    A meta-gradient of TF32 products differs by a tenth from that of float32 (docs/maml.md).
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False

    def prepared(make: Any, dtype: Any) -> tuple[Any, Callable[[], Any]]:
        torch.manual_seed(0)
        net = work.network().to(device, dtype)
        return net, make(work, net, *work.data(device, dtype))

    def timed(make: Any) -> Callable[[int], None]:
        net, step = prepared(make, torch.float32)

        def steps(n: int) -> None:
            for _ in range(n):
                net.zero_grad()
                found = step()
            if isinstance(found, tuple):  # of JAX
                found[0].block_until_ready()
            if device == "cuda":
                torch.cuda.synchronize()

        return steps

    def gradient(make: Any) -> Any:
        net, step = prepared(make, torch.float64)
        starts = list(net.parameters())
        found = step()
        if isinstance(found, tuple):  # of JAX
            return torch.cat([torch.tensor(gradient.__array__()).flatten() for gradient in found[1]]).to(device)
        return torch.cat([p.grad.flatten() for p in starts])

    reference = functools.cache(lambda: gradient(meta_step_of_engine("loop")))

    def difference(make: Any) -> float:
        return float((gradient(make) - reference()).norm() / reference().norm())

    def contender(name: str, make: Any, ours: bool = False) -> Contender:
        flop = work.flop() if device == "cuda" else 0.0
        return Contender(name, lambda: timed(make), ours, device_clock(), lambda: difference(make), flop=flop)

    # compiling takes a minute, and once more for the difference
    on_gpu = device == "cuda"
    compilable = on_gpu and work.order == 2
    return [
        contender("engine loop", meta_step_of_engine("loop"), ours=True),
        contender("engine vmap", meta_step_of_engine("vmap"), ours=True),
        contender("engine mixed", meta_step_of_engine("mixed"), ours=True),
        contender(f"engine auto: {chosen(work, device)}", meta_step_of_engine("auto"), ours=True),
        *[contender("one CUDA graph (MetaGraph)", recorded_meta_step, ours=True)] * on_gpu,
        *[contender("compiled, one CUDA graph", compiled_meta_step, ours=True)] * compilable,
        *[contender("jax, one jitted function", meta_step_of_jax)] * on_gpu,
        *[contender("jax, convolutions of XLA", functools.partial(meta_step_of_jax, patches=False))]
        * (on_gpu and work.pooled),
        contender("learn2learn", meta_step_of_learn2learn),
        contender("higher", meta_step_of_higher),
        contender("torchopt", meta_step_of_torchopt),
    ]


def chosen(work: MamlWork, device: str) -> str:
    """The engine that `auto` takes."""
    apply, params, buffers = functional(work.network().to(device))

    def loss(params: Any, batch: Any) -> Any:
        return cross_entropy(apply(params, buffers, batch[0]), batch[1])

    data = work.data(device, torch.float32)
    return engine_for(loss, params, *data, lr=work.rate, tasks=work.tasks).engine


def omniglot(steps: int, order: int) -> list[Contender]:
    """On Omniglot's shape: 32 tasks, or 8 on a CPU."""
    tasks = 32 if torch.cuda.is_available() else 8
    return maml(MamlWork(tasks, 1, 15, 28, 1, 64, steps, order, pooled=False))


def colour(order: int) -> list[Contender]:
    """On mini-ImageNet's shape, with max-pooling: 4 tasks, 5 inner steps."""
    return maml(MamlWork(4, 1, 15, 84, 3, 32, 5, order, pooled=True))
