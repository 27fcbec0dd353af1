"""Arguments of adapt: rates, filters, nests, optimizers, dropout; and what is refused."""

from __future__ import annotations

import gc
import math
import sys
import weakref
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from metapretrain.errors import InputError
from metapretrain.maml import adapt, functional, meta_backward, meta_loss
from tests.maml.nets import TASKS, cnn, flat, gradient, images, loss_of, relative, task

PARAMS = {"w": torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)}
X = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
STACKED = ("loop", "vmap", "mixed")


def square(params: Any, x: Tensor) -> Tensor:
    return ((params["w"] - x) ** 2).sum() / 2


@pytest.mark.parametrize("engine", ["loop", "vmap", "higher", "learn2learn"])
def test_rates_by_step_and_by_parameter(engine: str) -> None:
    if engine in ("higher", "learn2learn"):
        pytest.importorskip(engine, exc_type=ImportError)
    per_entry = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)
    w = PARAMS["w"]
    fast = adapt(square, PARAMS, X, lr={"w": per_entry}, tasks=4, engine=engine)["w"]
    torch.testing.assert_close(fast, w - per_entry * (w - X))
    fast = adapt(square, PARAMS, X, lr=[0.5, {"w": 0.1}], steps=2, tasks=4, engine=engine)["w"]
    torch.testing.assert_close(fast, X + 0.5 * 0.9 * (w - X))
    fast = adapt(square, PARAMS, X, lr=torch.tensor([0.5, 0.1]).double(), steps=2, tasks=4, engine=engine)
    torch.testing.assert_close(fast["w"], X + 0.5 * 0.9 * (w - X))


@pytest.mark.parametrize("engine", ["loop", "vmap", "higher", "learn2learn"])
@pytest.mark.parametrize("order", [1, 2])
def test_learned_rates_get_their_gradient(engine: str, order: int) -> None:
    if engine in ("higher", "learn2learn"):
        pytest.importorskip(engine, exc_type=ImportError)
    rate = torch.tensor(0.2, dtype=torch.float64, requires_grad=True)
    losses = meta_loss(square, PARAMS, X, X, lr=rate, tasks=4, order=order, engine=engine)
    (found,) = torch.autograd.grad(losses.sum(), rate)
    torch.testing.assert_close(found, -(1 - rate.detach()) * ((PARAMS["w"] - X) ** 2).sum())


@pytest.mark.parametrize("engine", STACKED)
def test_only_what_is_chosen_adapts_and_the_rest_keeps_its_meta_gradient(engine: str) -> None:
    loss_fn, params = loss_of(cnn())
    support, query = images(2, 0), images(3, 1)
    options: Any = {"lr": 0.3, "tasks": TASKS, "only": ["9"], "engine": engine}
    fast = adapt(loss_fn, params, support, **options)
    for name, p in params.items():
        assert fast[name].shape == (TASKS, *p.shape)
        assert torch.equal(fast[name][1], p) == (not name.startswith("9."))
    losses = meta_loss(loss_fn, params, support, query, **options)
    expected = []
    for t in range(TASKS):
        inner = loss_fn(params, task(support, t))
        g = torch.autograd.grad(inner, [params["9.weight"], params["9.bias"]], create_graph=True)
        moved = {"9.weight": params["9.weight"] - 0.3 * g[0], "9.bias": params["9.bias"] - 0.3 * g[1]}
        expected.append(loss_fn({**params, **moved}, task(query, t)))
    assert relative(gradient(losses, params), gradient(torch.stack(expected), params)) < 1e-12


def test_filters_by_prefix_pattern_and_function_choose_the_same() -> None:
    loss_fn, params = loss_of(cnn())
    support = task(images(2, 0), 0)
    found = [
        flat(adapt(loss_fn, params, support, lr=0.1, only=only))
        for only in ("4", "4.*", ["4.weight", "4.bias"], lambda name: name.startswith("4."))
    ]
    assert all(torch.equal(f, found[0]) for f in found)
    assert not torch.equal(found[0], flat(params))


def test_params_and_batches_may_be_nests() -> None:
    @dataclass(frozen=True)
    class Part:
        x: Tensor
        note: str

    Pair = namedtuple("Pair", "first second")
    params = {"body": {"w": torch.tensor(2.0)}, "heads": [torch.tensor(3.0)]}
    batch = {"a": Pair(Part(torch.tensor([1.0, 2.0]), "kept"), None), "n": 2}

    def loss_fn(params: Any, batch: Any) -> Tensor:
        assert (batch["a"].first.note, batch["a"].second, batch["n"]) == ("kept", None, 2)
        loss: Tensor = (params["body"]["w"] * params["heads"][0] * batch["a"].first.x) ** 2 / 2
        return loss

    for engine in STACKED:
        fast = adapt(loss_fn, params, batch, lr=0.01, tasks=2, engine=engine)
        torch.testing.assert_close(fast["body"]["w"], 2 - 0.01 * torch.tensor([18.0, 72.0]))
        torch.testing.assert_close(fast["heads"][0], 3 - 0.01 * torch.tensor([12.0, 48.0]))


@pytest.mark.parametrize("engine", ["loop", "vmap", "auto"])
def test_no_steps_return_the_parameters(engine: str) -> None:
    assert adapt(square, PARAMS, X[0], lr=0.1, steps=0, engine=engine)["w"] is PARAMS["w"]
    stacked = adapt(square, PARAMS, X, lr=0.1, steps=0, tasks=4, engine=engine)["w"]
    assert torch.equal(stacked, PARAMS["w"].expand(4, 3))


@pytest.mark.parametrize(
    ("name", "factory"),
    [
        ("adam", lambda groups: torch.optim.Adam(groups, lr=0.1)),
        ("momentum", lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9)),
        (
            lambda groups: torch.optim.SGD(groups, lr=1.0, weight_decay=0.5),
            lambda groups: torch.optim.SGD(groups, lr=0.1, weight_decay=0.5),
        ),
    ],
)
def test_other_optimizers_in_the_inner_loop_move_as_torchs(name: Any, factory: Any) -> None:
    pytest.importorskip("higher")
    w = PARAMS["w"].clone().requires_grad_()
    optimizer = factory([w])
    for _ in range(3):
        optimizer.zero_grad()
        square({"w": w}, X[0]).backward()
        optimizer.step()
    start = PARAMS["w"].clone().requires_grad_()
    fast = adapt(square, {"w": start}, X[0], lr=0.1, steps=3, optimizer=name)["w"]
    torch.testing.assert_close(fast, w)
    assert torch.autograd.grad(fast.sum(), start)[0].isfinite().all()


def test_dropout_under_vmap_is_per_task_and_per_step() -> None:
    net = nn.Sequential(nn.Dropout(0.5), nn.Linear(64, 1, bias=False)).double()
    apply, params, buffers = functional(net)

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        out: Tensor = apply(params, buffers, x).sum()
        return out

    x = torch.ones(3, 1, 64, dtype=torch.float64)
    one = adapt(loss_fn, params, x, lr=1.0, tasks=3, engine="vmap")["1.weight"]
    moved = (one - params["1.weight"]).round().flatten(1)
    assert set(moved.unique().tolist()) == {-2.0, 0.0}
    assert len({tuple(row.tolist()) for row in moved}) == 3
    torch.manual_seed(5)
    twice = adapt(loss_fn, params, x, lr=1.0, steps=2, tasks=3, engine="vmap", checkpoint=True)["1.weight"]
    torch.manual_seed(5)
    assert torch.equal(twice, adapt(loss_fn, params, x, lr=1.0, steps=2, tasks=3, engine="vmap")["1.weight"])
    assert -2.0 in (twice - params["1.weight"]).round()


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_a_checkpointed_step_drops_the_same_units_again(engine: str) -> None:
    net = nn.Sequential(nn.Linear(4, 32), nn.Dropout(0.5), nn.Tanh(), nn.Linear(32, 1)).double()
    apply, params, buffers = functional(net)
    x = torch.randn(2, 5, 4, dtype=torch.float64)

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        out: Tensor = apply(params, buffers, x).square().mean()
        return out

    found = []
    for checkpoint in (False, True):
        torch.manual_seed(7)
        options: Any = {"tasks": 2, "lr": 0.1, "steps": 3, "engine": engine, "checkpoint": checkpoint}
        found.append(gradient(meta_loss(loss_fn, params, x, x, **options), params))
    assert relative(found[1], found[0]) < 1e-12


def test_a_gradient_that_only_the_loss_knows_of_is_kept() -> None:
    scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        return scale * square(params, x)

    for engine in STACKED:
        fast = adapt(loss_fn, PARAMS, X, lr=0.1, tasks=4, engine=engine)["w"]
        (found,) = torch.autograd.grad(fast.sum(), scale)
        torch.testing.assert_close(found, -0.1 * (PARAMS["w"] - X).sum())
        assert not adapt(square, PARAMS, X, lr=0.1, tasks=4, engine=engine)["w"].requires_grad


def test_checkpoint_refuses_weights_that_it_cannot_see() -> None:
    scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    w = {"w": PARAMS["w"].clone().requires_grad_()}
    fast = adapt(lambda p, x: scale * square(p, x), w, X[0], lr=0.1, steps=4, checkpoint=True)["w"]
    with pytest.raises(InputError, match="checkpoint=True cannot see tensors that loss_fn uses"):
        fast.sum().backward()


def test_parameters_that_are_not_used_are_named_or_left() -> None:
    params = {**PARAMS, "idle": torch.ones(2, dtype=torch.float64)}
    for engine in ("loop", "vmap", "higher", "learn2learn"):
        if engine in ("higher", "learn2learn"):
            pytest.importorskip(engine, exc_type=ImportError)
        with pytest.raises(InputError, match="unused in the inner loop: idle"):
            adapt(square, params, X, lr=0.1, tasks=4, engine=engine)
        fast = adapt(square, params, X, lr=0.1, tasks=4, engine=engine, allow_unused=True)
        assert torch.equal(fast["idle"], torch.ones(4, 2, dtype=torch.float64))
        assert not torch.equal(fast["w"][0], PARAMS["w"])


def same(**options: Any) -> Any:
    return adapt(square, PARAMS, X, **{"lr": 0.1, "tasks": 4, **options})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: same(lr=0.0), r"lr is 0.0; give a number above 0"),
        (lambda: same(lr=-1), r"lr is -1"),
        (lambda: same(lr=math.nan), r"lr is nan"),
        (lambda: same(lr="fast"), r"lr is 'fast'"),
        (lambda: same(lr={"v": 0.1}), r"lr has no entry for w; it has: v"),
        (lambda: same(lr=[0.1, 0.1], steps=3), r"lr has 2 entries for steps=3"),
        (lambda: same(lr={"w": torch.ones(2)}), r"lr\['w'\] has shape \(2,\), which does not fit \(3,\)"),
        (lambda: same(steps=-1), r"steps is -1"),
        (lambda: same(order=3), r"order is 3; give 2 \(MAML\) or 1"),
        (lambda: same(engine="lop"), r"unknown engine 'lop'; did you mean 'loop'"),
        (lambda: same(only="head"), r"only='head' matches none of the parameters: w"),
        (lambda: same(only=lambda name: False), r"chooses none of the parameters: w"),
        (lambda: same(only=[]), r"chooses none"),
        (lambda: same(optimizer="adan"), r"unknown optimizer 'adan'; did you mean 'adam'"),
        (lambda: same(optimizer="adam", engine="vmap"), r"engine 'vmap' has SGD only"),
        (lambda: same(engine="higher", checkpoint=True), r"checkpoint=True needs engine"),
        (lambda: same(tasks=5), r"tasks=5, but batch has batch \(4, 3\)"),
        (lambda: adapt(square, PARAMS, (X, X[:2]), lr=0.1, tasks=4), r"has 1 \(2, 3\) \(beside 0 \(4, 3\)\)"),
        (lambda: adapt(lambda p, x: p["w"] - x, PARAMS, X, lr=0.1, tasks=4), r"returned shape \(3,\)"),
        (lambda: adapt(lambda p, x: 1.0, PARAMS, X[0], lr=0.1), r"loss_fn returned a float"),
        (lambda: adapt(lambda p, x: x.sum(), PARAMS, X[0], lr=0.1), r"has no gradient"),
        (lambda: adapt(square, {}, X[0], lr=0.1), r"params is empty"),
        (lambda: adapt(square, {"w": torch.ones(3).long()}, X[0], lr=0.1), r"'w' is torch.int64"),
        (lambda: adapt(square, {"a": {"b": X}, "a.b": X}, X, lr=0.1), r"two parameters are named 'a.b'"),
        (lambda: meta_loss(square, PARAMS, X, X[:3], lr=0.1, tasks=4), r"tasks=4, but query has"),
        (lambda: meta_backward(square, PARAMS, X, X, lr=0.1, tasks=4), r"neither params nor lr ask"),
        (lambda: meta_loss(square, PARAMS, X, X, lr=0.1, tasks=4, chunk=0), r"chunk is 0"),
    ],
)
def test_bad_input_is_one_clear_line(call: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("package", ["higher", "learn2learn"])
def test_an_engine_that_is_not_installed_says_how(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InputError, match=f"engine '{package}' .*pip install"):
        same(engine=package)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_gradients_that_are_switched_off_are_an_error(mode: Any) -> None:
    with mode(), pytest.raises(InputError, match=f"runs under torch.{mode.__name__}"):
        same()


def test_tensors_of_inference_mode_are_named() -> None:
    with torch.inference_mode():
        made = torch.ones(3, dtype=torch.float64)
    with pytest.raises(InputError, match=r"w: made under torch\.inference_mode"):
        adapt(square, {"w": made}, X[0], lr=0.1)


def test_compiled_functions_and_modules_are_refused() -> None:
    net = nn.Linear(3, 1)
    compiled = torch.compile(net)
    with pytest.raises(InputError, match=r"compiled: torch\.compile has no second order"):
        functional(compiled)
    nested = nn.Sequential(nn.Linear(3, 3))
    nested[0].compile()
    with pytest.raises(InputError, match="its part '0' is compiled"):
        functional(nested)

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        out: Tensor = compiled(x).sum()
        return out

    for function in (loss_fn, torch.compile(square)):
        with pytest.raises(InputError, match=r"compiled: torch\.compile has no second order"):
            adapt(function, PARAMS, X[0], lr=0.1)


@pytest.mark.parametrize("order", [1, 2])
def test_an_update_keeps_no_weights_of_earlier_steps_and_its_gradient_is_exact(order: int) -> None:
    seen: list[weakref.ref[Tensor]] = []

    def loss(w: Tensor, x: Tensor) -> Tensor:
        seen.append(weakref.ref(w))
        return ((w - x) ** 4).mean()

    w, x = torch.randn(5, dtype=torch.float64, requires_grad=True), torch.randn(1, 5, dtype=torch.float64)
    fast = adapt(loss, w, x, lr=0.1, steps=4, order=order, engine="loop", tasks=1)
    gc.collect()
    assert fast.requires_grad and len(seen) == 4
    assert sum(ref() is not None for ref in seen) <= 1
    by_hand = w
    for _ in range(4):
        (moves,) = torch.autograd.grad(((by_hand - x[0]) ** 4).mean(), by_hand, create_graph=True)
        by_hand = by_hand - 0.1 * (moves if order == 2 else moves.detach())
    expected, found = (torch.autograd.grad(end.cos().sum(), w)[0] for end in (by_hand, fast))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_a_tensor_that_the_loss_holds_as_well_is_constant_in_the_inner_gradient() -> None:
    w, x = torch.randn(5, dtype=torch.float64, requires_grad=True), torch.randn(2, 5, dtype=torch.float64)

    def loss(given: Tensor, x: Tensor) -> Tensor:
        return ((given - x) ** 4 + (given * w).exp()).mean()

    def by_hand(x: Tensor) -> Tensor:
        start = w.clone()
        (moves,) = torch.autograd.grad(loss(start, x), start, create_graph=True)
        return loss(start - 0.1 * moves, x)

    (expected,) = torch.autograd.grad((by_hand(x[0]) + by_hand(x[1])) / 2, w)
    for engine in ("loop", "vmap"):
        (found,) = torch.autograd.grad(meta_loss(loss, w, x, x, tasks=2, lr=0.1, engine=engine).mean(), w)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
        w.grad = None
        meta_backward(loss, w, x, x, tasks=2, lr=0.1, engine=engine)
        torch.testing.assert_close(w.grad, expected, rtol=0, atol=1e-12)


def test_adaptation_can_be_mapped_and_differentiated_by_torch_func() -> None:
    def end(w: Tensor) -> Tensor:
        found: Tensor = adapt(lambda w, x: (w - x).square().sum(), w, torch.zeros(3), lr=0.1)
        return found.sum()

    found = torch.vmap(torch.func.grad(end))(torch.ones(2, 3))
    torch.testing.assert_close(found, torch.full((2, 3), 0.8))  # 1 - 2 lr
