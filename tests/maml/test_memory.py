"""No graph is kept: memory is flat over episodes, and small where it should be."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from metapretrain import MAML
from metapretrain.maml import engine_for, functional, meta_loss
from tests.maml.nets import cnn, images, task


def resident() -> int:
    """Bytes of this process in memory."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_memory_is_flat_over_fifty_episodes() -> None:
    maml = MAML(nn.Sequential(nn.Linear(64, 512), nn.BatchNorm1d(512), nn.Linear(512, 3)), 0.1, steps=2)
    x, y = torch.randn(2, 6, 64), torch.arange(3).repeat(2, 2)
    kept: list[float] = []

    def episode() -> None:
        kept.append(float(maml.backward((x, y), (x, y)).mean()))
        maml.zero_grad()
        kept.append(float(maml.logits((x, y), (x, y)).mean()))
        learner = maml.clone()
        learner.adapt(F.cross_entropy(learner(x[0]), y[0]))
        kept.append(float(F.cross_entropy(learner(x[0]), y[0]).detach()))

    for _ in range(10):
        episode()
    tensors, size = live_tensors(), resident()
    for _ in range(50):
        episode()
    assert live_tensors() <= tensors
    # One episode's graph holds over 1 MB: fifty that are kept would show.
    assert resident() - size < 20e6


def test_evaluation_keeps_no_graph() -> None:
    maml = MAML(cnn(), 0.1, steps=2)
    support, query = images(2, 0), images(3, 1)
    logits = maml.logits(support, query)
    assert logits.shape == (3, 9, 3)
    assert logits.grad_fn is None
    assert all(p.grad is None for p in maml.parameters())


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_checkpointed_memory_grows_with_the_square_root_of_the_steps(engine: str) -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    apply, params, buffers = functional(net)
    x = torch.randn(2, 6, 8, dtype=torch.float64)

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        out: Tensor = apply(params, buffers, x).square().mean()
        return out

    def most(steps: int, checkpoint: bool) -> int:
        """The most bytes that graphs held at one time, forward and backward."""
        Saved.now = Saved.most = 0
        with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
            losses = meta_loss(
                loss_fn, params, x, x, tasks=2, lr=0.1, steps=steps, engine=engine, checkpoint=checkpoint
            )
            losses.sum().backward()
        return Saved.most

    assert most(64, False) > 12 * most(4, False)
    assert most(64, True) < 3 * most(8, False)
    assert most(64, True) < most(64, False) / 3


class Saved:
    """A tensor that a graph has saved, counted while it is."""

    now = most = 0

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()
        Saved.now += tensor.nbytes
        Saved.most = max(Saved.most, Saved.now)

    def __del__(self) -> None:
        Saved.now -= self.tensor.nbytes


def test_meta_backward_holds_one_chunk() -> None:
    support, query = images(2, 0, tasks=8), images(3, 1, tasks=8)
    maml = MAML(cnn(), 0.1, engine="vmap", chunk=2)
    sizes: list[int] = []
    original = maml._outputs()

    def outputs(params: Any, x: Any) -> Tensor:
        made: Tensor = original(params, x)
        sizes.append(torch._C._functorch.get_unwrapped(made).shape[0])
        return made

    maml._outputs = lambda: outputs  # type: ignore[method-assign]
    losses = maml.backward(support, query)
    assert len(losses) == 8
    assert set(sizes) == {2}
    assert len(sizes) == 8
    assert task(support, 0)[0].shape == (6, 1, 8, 8)


def test_a_meta_step_loads_no_further_libraries(modules_after: Callable[..., set[str]]) -> None:
    code = (
        "import torch, metapretrain; maml = metapretrain.MAML(torch.nn.Linear(4, 2), 0.1, engine='loop');"
        "task = torch.randn(3, 6, 4), torch.arange(2).repeat(3, 3); maml.backward(task, task)"
    )
    assert "sympy" not in modules_after(code)


def test_a_stack_is_as_large_as_a_few_megabytes_hold() -> None:
    for width, engine in ((8, "vmap"), (64, "vmap"), (800, "loop")):
        maml = MAML(nn.Sequential(nn.Linear(100, width), nn.ReLU(), nn.Linear(width, 3)), 0.1, steps=2)
        loss_fn, params = maml._task_loss(), maml._values()
        task = torch.randn(64, 6, 100), torch.arange(3).repeat(64, 2)
        assert engine_for(loss_fn, params, task, task, lr=0.1, steps=2, tasks=64).engine == engine
        whole, chunked = [], []
        for found, options in ((whole, {"engine": "loop"}), (chunked, {})):
            maml.zero_grad()
            maml.engine = options.get("engine", "auto")
            maml.backward(task, task)
            found += [p.grad for p in maml.parameters()]
        torch.testing.assert_close(chunked, whole)
