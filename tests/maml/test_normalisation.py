"""A module as a function: its policies for batch normalisation, and what it must not do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from metapretrain.errors import InputError
from metapretrain.maml import adapt, engine_for, functional, meta_backward
from tests.maml.nets import TASKS, cnn, flat, images, loss_of, task


def state(net: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in net.state_dict().items()}


def trained() -> nn.Module:
    net = cnn()
    for _ in range(3):
        net(images(4, 7)[0][0] * 2 + 1)
    return net


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("policy", ["batch", "frozen"])
def test_policies_are_the_modules_own_modes(policy: str, training: bool) -> None:
    net, x = trained().train(training), images(3, 1)[0][0]
    reference = copy.deepcopy(net).train(policy == "batch")
    before = state(net)
    apply, params, buffers = functional(net, policy)
    torch.testing.assert_close(apply(params, buffers, x), reference(x))
    after = state(net)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert net.training == training


def test_batch_policy_has_no_buffers_and_frozen_has_the_running_statistics() -> None:
    net = trained()
    assert functional(net).buffers == {}
    names = set(functional(net, "frozen").buffers)
    assert names == {name for name, _ in net.named_buffers()}
    with pytest.raises(InputError, match="needs running statistics, but 1 keeps none"):
        functional(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, track_running_stats=False)), "frozen")


def test_mode_and_weights_follow_the_module() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    apply, params, buffers = functional(net)
    x = torch.ones(8, 4)
    net.eval()
    assert torch.equal(apply(params, buffers, x), net(x))
    net.train()
    assert not torch.equal(apply(params, buffers, x), apply(params, buffers, x))
    net.eval()
    with torch.no_grad():
        net[0].weight.zero_()
    assert torch.equal(apply({}, buffers, x), net[0].bias.expand(8, 4))


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_per_step_statistics_are_recorded_and_used_by_step(engine: str) -> None:
    net, (x, y) = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 3)).double(), images(2, 0)
    x = x.flatten(2)[..., :2]
    apply, params, buffers = functional(net, "per-step", steps=2)
    assert buffers["0.running_mean"].shape == (3, 2)

    def loss_fn(params: Any, batch: Any) -> Tensor:
        return F.cross_entropy(apply(params, buffers, batch[0]), batch[1])

    options: Any = {"tasks": TASKS, "lr": 0.1, "steps": 2, "engine": engine}
    meta_backward(loss_fn, params, (x, y), (x + 5, y), checkpoint=True, **options)
    means, each = x.mean(1), torch.zeros(2, dtype=torch.float64)
    if engine == "vmap":
        each = 0.1 * means.mean(0)
    else:
        for mean in means:
            each = each.lerp(mean, 0.1)
    weight = 0.1 if engine == "vmap" else 1 - 0.9**TASKS
    torch.testing.assert_close(buffers["0.running_mean"][0], each)
    torch.testing.assert_close(buffers["0.running_mean"][1], each)
    torch.testing.assert_close(buffers["0.running_mean"][2], each + 5 * weight)
    net.eval()
    kept = buffers["0.running_mean"].clone()
    fast = adapt(loss_fn, params, task((x, y), 0), lr=0.1, steps=1)
    logits = apply(params, buffers, x[0])
    norm = (x[0] - kept[0]) / (buffers["0.running_var"][0] + 1e-5).sqrt()
    torch.testing.assert_close(logits, norm @ params["1.weight"].T + params["1.bias"])
    assert fast["0.weight"].shape == (2,)
    assert torch.equal(buffers["0.running_mean"], kept)


def test_probing_for_an_engine_records_nothing() -> None:
    for engine in ("vmap", "auto"):
        net, (x, y) = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 3)).double(), images(2, 0)
        x = x.flatten(2)[..., :2]
        apply, params, buffers = functional(net, "per-step", steps=1)

        def loss_fn(params: Any, batch: Any, apply: Any = apply, buffers: Any = buffers) -> Tensor:
            return F.cross_entropy(apply(params, buffers, batch[0]), batch[1])

        assert engine_for(loss_fn, params, (x, y), lr=0.1, tasks=TASKS).engine == "vmap"
        adapt(loss_fn, params, (x, y), lr=0.1, tasks=TASKS, engine=engine)
        torch.testing.assert_close(buffers["0.running_mean"][0], 0.1 * x.mean((0, 1)))


def test_per_step_needs_the_number_of_steps() -> None:
    with pytest.raises(InputError, match="give steps as well"):
        functional(nn.BatchNorm1d(2), "per-step")
    with pytest.raises(InputError, match="unknown batchnorm 'batsh'; did you mean 'batch'"):
        functional(nn.BatchNorm1d(2), "batsh")


def test_a_module_that_changes_its_state_in_place_is_named() -> None:
    net = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)))
    apply, params, buffers = functional(net)
    with pytest.raises(InputError, match=r"changes 0\.parametrizations\.weight\.0\._u.* in place"):
        apply(params, buffers, torch.ones(2, 3))
    net.eval()
    torch.testing.assert_close(apply(params, buffers, torch.ones(2, 3)), net(torch.ones(2, 3)))


class Tied(nn.Module):
    """One weight under two names, and a method kept as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.run = self._run

    def _run(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x).tanh())
        return out

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


def test_tied_weights_stay_tied() -> None:
    net = Tied()
    apply, params, buffers = functional(net)
    assert list(params) == ["first.weight", "first.bias", "second.bias"]
    changed = {**params, "first.weight": torch.zeros(3, 3)}
    out = apply(changed, buffers, torch.ones(2, 3))
    torch.testing.assert_close(out, net.second.bias.expand(2, 3))


class Shared(nn.Module):
    """A layer that is used at two places, and a buffer with it."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.BatchNorm1d(4)
        self.b = nn.Sequential(self.a, nn.Linear(4, 4))
        self.alias = self.b[1].weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.a(self.b(x)) + self.alias.sum()
        return out


@pytest.mark.parametrize("policy", ["batch", "frozen"])
@pytest.mark.parametrize("make", [Shared, Tied, lambda: nn.LSTM(4, 3)])
def test_what_is_left_out_of_a_call_is_the_modules_whatever_the_last_call_was(make: Any, policy: str) -> None:
    net = make().eval()
    x = torch.randn(2, 3 if make is Tied else 4)
    apply, params, buffers = functional(net, policy)

    def output(given: Any) -> Tensor:
        out: Any = apply(given, buffers, x)
        return out if isinstance(out, Tensor) else out[0]  # type: ignore[no-any-return]

    expected = output(params)
    for name, p in params.items():
        changed = output({name: 2 * p.detach()})
        assert torch.equal(output({}), expected), name
        whole = {other: 2 * q.detach() if other == name else q for other, q in params.items()}
        assert torch.equal(output(whole), changed), name
        with pytest.raises((RuntimeError, TypeError, InputError)):
            apply({name: 2 * p.detach()}, buffers, torch.ones(2, 9))
        assert torch.equal(output({}), expected), name
    fast = adapt(lambda p, b: output(p).square().mean(), params, torch.zeros(3, 1), tasks=3, lr=0.1, allow_unused=True)
    assert len(fast) == len(params)
    assert torch.equal(output({}), expected)


def test_unknown_names_and_two_values_of_a_tied_weight_are_refused() -> None:
    apply, params, buffers = functional(Tied())
    with pytest.raises(InputError, match=r"no parameter or buffer 'third'; it has first\.weight, first\.bias, second"):
        apply({"third": torch.zeros(1)}, buffers, torch.ones(2, 3))
    w = params["first.weight"]
    with pytest.raises(InputError, match=r"second\.weight is tied to another parameter that was given another value"):
        apply({"first.weight": w, "second.weight": 2 * w}, buffers, torch.ones(2, 3))
    out = apply({"first.weight": w, "second.weight": w}, buffers, torch.ones(2, 3))
    torch.testing.assert_close(apply({"second.weight": w}, buffers, torch.ones(2, 3)), out)


def test_recurrent_layers_use_the_weights_that_they_are_given() -> None:
    net = nn.LSTM(3, 2)
    apply, params, buffers = functional(net)
    out, _ = apply({name: torch.zeros_like(p) for name, p in params.items()}, buffers, torch.ones(4, 1, 3))
    assert torch.equal(out, torch.zeros(4, 1, 2))
    assert net(torch.ones(4, 1, 3))[0].abs().sum() > 0


def test_adaptation_leaves_the_module_as_it_was() -> None:
    net = trained()
    before = state(net)
    loss_fn, params = loss_of(net)
    adapt(loss_fn, params, images(2, 0), lr=0.3, steps=2, tasks=TASKS)
    after = state(net)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert flat(params).isfinite().all()
