"""Rows of run_speed.py about MAML: a meta-step by each engine and by each peer, and whether the gradients agree."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from speed_contenders import Contender, Missing, device_clock
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

    def network(self) -> Any:
        """CNN4: four blocks of convolution, batch normalisation, ReLU, and stride 2 or max-pooling."""
        layers: list[Any] = []
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
                step()
            if device == "cuda":
                torch.cuda.synchronize()

        return steps

    def gradient(make: Any) -> Any:
        net, step = prepared(make, torch.float64)
        starts = list(net.parameters())
        step()
        return torch.cat([p.grad.flatten() for p in starts])

    reference = functools.cache(lambda: gradient(meta_step_of_engine("loop")))

    def difference(make: Any) -> float:
        return float((gradient(make) - reference()).norm() / reference().norm())

    def contender(name: str, make: Any, ours: bool = False) -> Contender:
        return Contender(name, lambda: timed(make), ours, device_clock(), lambda: difference(make))

    # compiling takes a minute, and once more for the difference: on the rows of Omniglot alone
    compilable = device == "cuda" and work.order == 2 and not work.pooled
    return [
        contender("engine loop", meta_step_of_engine("loop"), ours=True),
        contender("engine vmap", meta_step_of_engine("vmap"), ours=True),
        contender("engine mixed", meta_step_of_engine("mixed"), ours=True),
        contender(f"engine auto: {chosen(work, device)}", meta_step_of_engine("auto"), ours=True),
        *[contender("one CUDA graph (MetaGraph)", recorded_meta_step, ours=True)] * (device == "cuda"),
        *[contender("compiled, one CUDA graph", compiled_meta_step, ours=True)] * compilable,
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
