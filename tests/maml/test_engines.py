"""Every engine gives the meta-gradient of learn2learn, of higher, and of central differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from metapretrain.maml import adapt, engines, meta_backward, meta_loss
from metapretrain.maml.normalisation import copy_tree
from tests.maml.nets import NETS, TASKS, WAYS, flat, gradient, images, loss_of, relative, spread, task

ENGINES = ("loop", "vmap", "higher", "learn2learn")
LR, STEPS = 0.3, 2


@pytest.fixture(autouse=True)
def _peers(request: pytest.FixtureRequest) -> None:
    for name in ("higher", "learn2learn"):
        if name in request.node.name:
            pytest.importorskip(name, exc_type=ImportError)


def by_learn2learn(net: nn.Module, support: Any, query: Any, first_order: bool) -> Tensor:
    """Meta-gradient as a learn2learn script computes it. The net must not track statistics."""
    import learn2learn as l2l

    maml = l2l.algorithms.MAML(copy_tree(net, lambda p: nn.Parameter(p.detach().clone())), LR, first_order)
    for t in range(TASKS):
        learner = maml.clone()
        for _ in range(STEPS):
            x, y = task(support, t)
            learner.adapt(F.cross_entropy(learner(x), y))
        x, y = task(query, t)
        (F.cross_entropy(learner(x), y) / TASKS).backward()
    return flat([p.grad for p in maml.parameters()])


def by_higher(net: nn.Module, support: Any, query: Any, first_order: bool) -> Tensor:
    """Meta-gradient as a higher script computes it; first order by detaching each gradient."""
    import higher

    copied = copy_tree(net, lambda p: nn.Parameter(p.detach().clone()))
    optimizer = torch.optim.SGD(copied.parameters(), lr=LR)

    def constant(gradients: Any) -> Any:
        return [g.detach() for g in gradients] if first_order else gradients

    for t in range(TASKS):
        with higher.innerloop_ctx(copied, optimizer, copy_initial_weights=False) as (made, inner):
            x, y = task(support, t)
            for _ in range(STEPS):
                inner.step(F.cross_entropy(made(x), y), grad_callback=constant)
            x, y = task(query, t)
            (F.cross_entropy(made(x), y) / TASKS).backward()
    return flat([p.grad for p in copied.parameters()])


def untracked(net: nn.Module) -> nn.Module:
    for part in net.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.track_running_stats, part.running_mean, part.running_var = False, None, None
    return net


def differences(mean_loss: Callable[[dict[str, Tensor]], Tensor], params: dict[str, Tensor]) -> list[float]:
    """Errors of the gradient along some directions against central differences, over its norm."""
    analytic = gradient(mean_loss(params), params)
    generator = torch.Generator().manual_seed(0)
    errors = []
    for number in range(3):
        direction = torch.randint(0, 2, analytic.shape, generator=generator).double() * 2 - 1
        direction = analytic / analytic.norm() if number == 0 else direction
        tried = []
        for step in (1e-6, 1e-8):
            ends = [float(mean_loss(moved(params, sign * step * direction))) for sign in (1, -1)]
            slope = (ends[0] - ends[1]) / (2 * step)
            tried.append(abs(slope - float(analytic @ direction)) / float(analytic.norm()))
        errors.append(min(tried))
    return errors


def moved(params: dict[str, Tensor], by: Tensor) -> dict[str, Tensor]:
    parts = by.split([p.numel() for p in params.values()])
    return {n: (p.detach() + d.view(p.shape)) for (n, p), d in zip(params.items(), parts, strict=True)}


@pytest.mark.parametrize("order", [2, 1])
@pytest.mark.parametrize("name", ["cnn", "transformer"])
def test_all_engines_agree_with_learn2learn_and_higher_called_directly(name: str, order: int) -> None:
    pytest.importorskip("higher")
    pytest.importorskip("learn2learn", exc_type=ImportError)
    make, data = NETS[name]
    net, support, query = untracked(make()), data(2, 0), data(3, 1)
    loss_fn, params = loss_of(net)
    found = {
        engine: meta_loss(loss_fn, params, support, query, tasks=TASKS, lr=LR, steps=STEPS, order=order, engine=engine)
        for engine in (*ENGINES, "mixed", "auto")
    }
    gradients = {engine: gradient(losses, params) for engine, losses in found.items()}
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        gradients["learn2learn directly"] = by_learn2learn(net, support, query, order == 1)
        gradients["higher directly"] = by_higher(net, support, query, order == 1)
    for engine, losses in found.items():
        torch.testing.assert_close(losses, found["loop"], rtol=1e-12, atol=0, msg=engine)
    for engine, value in gradients.items():
        assert relative(value, gradients["loop"]) < 1e-10, engine


@pytest.mark.parametrize("engine", ["loop", "vmap"])
@pytest.mark.parametrize("name", ["cnn", "transformer"])
def test_second_order_agrees_with_central_differences(name: str, engine: str) -> None:
    make, data = NETS[name]
    loss_fn, params = loss_of(make())
    support, query = data(2, 0), data(3, 1)

    def mean_loss(values: dict[str, Tensor]) -> Tensor:
        options: Any = {"tasks": TASKS, "lr": LR, "steps": STEPS, "engine": engine}
        return meta_loss(loss_fn, values, support, query, **options).mean()

    assert max(differences(mean_loss, params)) < 1e-6


@pytest.mark.parametrize("name", ["cnn", "transformer"])
def test_first_order_agrees_with_central_differences_of_a_fixed_step(name: str) -> None:
    make, data = NETS[name]
    loss_fn, params = loss_of(make())
    support, query = task(data(2, 0), 0), task(data(3, 1), 0)
    fast = adapt(loss_fn, params, support, lr=LR, steps=STEPS, order=1)
    fixed = {n: (fast[n] - params[n]).detach() for n in params}

    def shifted(values: dict[str, Tensor]) -> Tensor:
        return loss_fn({n: p + fixed[n] for n, p in values.items()}, query)

    assert relative(gradient(loss_fn(fast, query), params), gradient(shifted(params), params)) < 1e-12
    assert max(differences(shifted, params)) < 1e-6


NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch": lambda: nn.BatchNorm2d(4),
    "layer": lambda: nn.LayerNorm([4, 4, 4]),
    "instance": lambda: nn.InstanceNorm2d(4, affine=True),
    "tracked instance": lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
    "group": lambda: nn.GroupNorm(2, 4),
    "rms": lambda: nn.RMSNorm([4, 4, 4]),
}


def with_norm(name: str) -> nn.Module:
    torch.manual_seed(3)
    conv = nn.Conv2d(1, 4, 3, stride=2, padding=1)
    return spread(nn.Sequential(conv, NORMS[name](), nn.Tanh(), nn.Flatten(), nn.Linear(64, WAYS)))


def by_vmap_of_grad(loss_fn: Any, params: dict[str, Tensor], support: Any, query: Any) -> Tensor:
    """The usual way with torch.func, one inner step: silently wrong for some layers."""

    def one(params: Any, support: Any, query: Any) -> Tensor:
        gradients = torch.func.grad(loss_fn)(params, support)
        return loss_fn({n: p - LR * gradients[n] for n, p in params.items()}, query)

    losses: Tensor = torch.vmap(one, in_dims=(None, 0, 0))(params, support, query)
    return gradient(losses, params)


@pytest.mark.parametrize("name", list(NORMS))
def test_normalisation_is_differentiated_rightly_under_vmap(name: str) -> None:
    loss_fn, params = loss_of(with_norm(name))
    support, query = images(2, 0), images(3, 1)
    found = {}
    for engine in ("loop", "vmap"):
        losses = meta_loss(loss_fn, params, support, query, tasks=TASKS, lr=LR, engine=engine)
        found[engine] = gradient(losses, params)
    assert relative(found["vmap"], found["loop"]) < 1e-10

    def mean_loss(values: dict[str, Tensor]) -> Tensor:
        return meta_loss(loss_fn, values, support, query, tasks=TASKS, lr=LR, engine="vmap").mean()

    assert max(differences(mean_loss, params)) < 1e-6
    usual = relative(by_vmap_of_grad(loss_fn, params, support, query), found["loop"])
    if "instance" in name or name in ("batch", "layer"):
        assert usual > 1e-4, "torch has mended vmap(grad): tell docs/maml.md"
    else:
        assert usual < 1e-10


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("order", [1, 2])
def test_closed_form_on_a_quadratic(engine: str, order: int) -> None:
    """loss = (w - x)^2 / 2 for `steps` at rate a: w moves to x + (1 - a)^steps (w - x)."""
    w = torch.tensor([3.0, -1.0], dtype=torch.float64, requires_grad=True)
    x = torch.tensor([[0.0, 2.0], [1.0, 5.0], [-2.0, 0.5]], dtype=torch.float64)
    rate, steps = 0.1, 4

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        return ((params["w"] - x) ** 2).sum() / 2

    fast = adapt(loss_fn, {"w": w}, x, lr=rate, steps=steps, order=order, engine=engine, tasks=3)["w"]
    torch.testing.assert_close(fast, x + (1 - rate) ** steps * (w - x))
    query = torch.zeros(3, 2, dtype=torch.float64)
    losses = meta_loss(loss_fn, {"w": w}, x, query, lr=rate, steps=steps, order=order, engine=engine, tasks=3)
    expected = (fast.detach() * ((1 - rate) ** steps if order == 2 else 1.0)).sum(0)
    torch.testing.assert_close(torch.autograd.grad(losses.sum(), w)[0], expected)


@pytest.mark.parametrize("engine", ["loop", "vmap"])
@pytest.mark.parametrize("steps", [1, 5])
def test_checkpointed_steps_are_exact(engine: str, steps: int) -> None:
    loss_fn, params = loss_of(NETS["cnn"][0]())
    rates = torch.full((steps,), 0.2, dtype=torch.float64, requires_grad=True)
    found = []
    for checkpoint in (False, True):
        losses = meta_loss(
            loss_fn,
            params,
            images(2, 0),
            images(3, 1),
            tasks=TASKS,
            lr=rates,
            steps=steps,
            engine=engine,
            checkpoint=checkpoint,
            only=lambda name: name != "4.weight",
        )
        found.append(gradient(losses, {**params, "rates": rates}))
    assert relative(found[1], found[0]) < 1e-12


@pytest.mark.parametrize("chunk", [None, 1, 2])
@pytest.mark.parametrize("engine", ["loop", "vmap", "mixed"])
def test_chunks_give_the_gradient_of_the_whole(engine: str, chunk: int | None) -> None:
    loss_fn, params = loss_of(NETS["cnn"][0]())
    support, query = images(2, 0), images(3, 1)
    options: Any = {"tasks": TASKS, "lr": LR, "engine": engine}
    expected = meta_loss(loss_fn, params, support, query, chunk=chunk, **options)
    losses = meta_backward(loss_fn, params, support, query, chunk=chunk, **options)
    assert not losses.requires_grad
    torch.testing.assert_close(losses, expected.detach())
    assert relative(flat([p.grad for p in params.values()]), gradient(expected, params)) < 1e-12


def test_meta_backward_goes_back_through_what_params_and_rates_come_from() -> None:
    base = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    log_rate = torch.tensor(-1.0, dtype=torch.float64, requires_grad=True)
    x = torch.randn(4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def loss_fn(w: Tensor, x: Tensor) -> Tensor:
        return ((w - x) ** 4).sum()

    def run(function: Any) -> Tensor:
        made: Tensor = function(loss_fn, base**2, x, x + 1, tasks=4, lr=log_rate.exp() / 50, chunk=1)
        return made

    expected = torch.autograd.grad(run(meta_loss).mean(), [base, log_rate])
    run(meta_backward)
    torch.testing.assert_close((base.grad, log_rate.grad), tuple(expected))


SHARED: dict[str, Callable[[Tensor], dict[str, Tensor]]] = {
    "one tensor": lambda w: {"a": w, "b": w},
    "views of one": lambda w: {"a": w.view(4, 4), "b": w.T},
    "computed": lambda w: {"a": w, "b": 2 * w},
    "computed from each other": lambda w: (lambda a: {"a": a, "b": a.sin()})(w.cos()),
}


@pytest.mark.parametrize("engine", [*ENGINES, "mixed", "auto"])
@pytest.mark.parametrize("only", [None, "a", "b"])
@pytest.mark.parametrize("kind", SHARED)
def test_parameters_that_share_a_tensor_adapt_each_by_itself(kind: str, only: str | None, engine: str) -> None:
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(4, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    x = torch.randn(2, 6, 4, generator=generator, dtype=torch.float64)
    names = ("a", "b") if only is None else (only,)

    def loss(p: Any, x: Tensor) -> Tensor:
        return (torch.tanh(x @ p["a"]) @ p["b"]).square().mean()

    def by_hand(w: Tensor) -> Tensor:
        losses = []
        for one in x:
            params = SHARED[kind](w)
            for _ in range(STEPS):
                given = {name: p + 0 for name, p in params.items()}  # each a tensor of its own
                found = torch.autograd.grad(loss(given, one), [given[n] for n in names], create_graph=True)
                params = {**params, **{n: params[n] - LR * g for n, g in zip(names, found, strict=True)}}
            losses.append(loss(params, one))
        return torch.stack(losses)

    expected = by_hand(w)
    options: Any = {"tasks": 2, "lr": LR, "steps": STEPS, "engine": engine, "only": only}
    losses = meta_loss(loss, SHARED[kind](w), x, x, **options)
    torch.testing.assert_close(losses, expected)
    (wanted,) = torch.autograd.grad(expected.mean(), w)
    torch.testing.assert_close(torch.autograd.grad(losses.mean(), w)[0], wanted)
    torch.testing.assert_close(meta_backward(loss, SHARED[kind](w), x, x, **options), expected.detach())
    torch.testing.assert_close(w.grad, wanted)
    if engine in ("loop", "vmap", "mixed"):
        again = meta_loss(loss, SHARED[kind](w), x, x, checkpoint=True, **options)
        torch.testing.assert_close(torch.autograd.grad(again.mean(), w)[0], wanted)


@pytest.mark.parametrize("engine", ENGINES)
def test_no_graph_is_kept_where_nothing_asks_for_a_gradient(engine: str) -> None:
    w, x = torch.randn(3), torch.randn(5, 3)
    fast = adapt(lambda p, x: (x @ p["w"]).square().mean(), {"w": w}, x, lr=0.1, steps=3, engine=engine)
    assert fast["w"].grad_fn is None
    assert not fast["w"].requires_grad


def test_settings_of_the_process_are_put_back_after_blocks_of_several_threads() -> None:
    before = torch.backends.mha.get_fastpath_enabled()
    first, second = engines._no_fast_path(), engines._no_fast_path()
    with first:
        second.__enter__()
        assert not torch.backends.mha.get_fastpath_enabled()
    assert not torch.backends.mha.get_fastpath_enabled()  # the second block, of another thread, goes on
    second.__exit__(None, None, None)
    assert torch.backends.mha.get_fastpath_enabled() is before
