"""Rates and losses of each inner step (MAML++), and Reptile, against loops in float64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from metapretrain import ANIL, MAML, MetaSGD
from metapretrain.errors import InputError
from metapretrain.maml import MetaGraph, Reptile, adapt, fading_weights, meta_loss
from tests.maml.nets import TASKS, cnn, images, relative, task
from tests.maml.test_engines import untracked

LR, STEPS = 0.2, 3
ENGINES = ("loop", "vmap", "mixed")
WEIGHTS = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)


def by_loop(net: nn.Module, support: Any, query: Any, rates: Any, weights: Tensor, first: bool) -> list[Tensor]:
    """The loss of each task, by one gradient after the other: weighted losses after each step."""
    found = []
    for t in range(TASKS):
        fast = dict(net.named_parameters())
        (x, y), (qx, qy) = task(support, t), task(query, t)
        total = torch.zeros((), dtype=torch.float64)
        for step in range(STEPS):
            loss = F.cross_entropy(functional_call(net, fast, (x,)), y)
            gradients = torch.autograd.grad(loss, list(fast.values()), create_graph=not first)
            fast = {name: p - rates[name][step] * g for (name, p), g in zip(fast.items(), gradients, strict=True)}
            total = total + weights[step] * F.cross_entropy(functional_call(net, fast, (qx,)), qy)
        found.append(total)
    return found


def learner_of(net: nn.Module, **options: Any) -> MAML:
    """Rates differ between parameters and steps, so that none can stand in for another."""
    maml = MAML(net, LR, steps=STEPS, learn_rates=True, **options)
    with torch.no_grad():
        for number, rate in enumerate(maml.rates):
            rate += 0.01 * torch.arange(number, number + STEPS)
    return maml


@pytest.mark.parametrize(("engine", "first"), list(itertools.product(ENGINES, (False, True))))
def test_rates_and_losses_of_each_step_have_the_gradient_of_a_loop(engine: str, first: bool) -> None:
    net, support, query = untracked(cnn()), images(2, 0), images(3, 1)
    maml = learner_of(net, engine=engine, first_order=first)
    rates = dict(zip(maml.rated, maml.rates, strict=True))
    assert list(rates) == [name for name, _ in net.named_parameters()]
    expected = by_loop(net, support, query, rates, WEIGHTS, first)
    wanted = [*net.parameters(), *maml.rates]
    by_hand = torch.autograd.grad(torch.stack(expected).mean(), wanted)
    for chunk in (None, 1, 2):
        maml.chunk = chunk
        maml.zero_grad()
        losses = maml.backward(support, query, WEIGHTS)
        torch.testing.assert_close(losses, torch.stack(expected).detach())
        assert max(relative(p.grad, g) for p, g in zip(wanted, by_hand, strict=True) if g.norm() > 1e-12) < 1e-9
    found = torch.autograd.grad(maml.losses(support, query, WEIGHTS).mean(), wanted)
    assert max(relative(f, g) for f, g in zip(found, by_hand, strict=True) if g.norm() > 1e-12) < 1e-9


@pytest.mark.parametrize("engine", [*ENGINES, "auto", "higher", "learn2learn"])
def test_rates_by_layer_and_step_are_those_of_a_list_in_every_engine(engine: str) -> None:
    if engine in ("higher", "learn2learn"):
        pytest.importorskip(engine, exc_type=ImportError)
    support, query = images(2, 0), images(3, 1)
    maml = learner_of(untracked(cnn()), engine=engine)
    maml.backward(support, query)
    given = [{n: r[step].item() for n, r in zip(maml.rated, maml.rates, strict=True)} for step in range(STEPS)]
    other = MAML(untracked(cnn()), given, steps=STEPS, engine="loop")
    other.backward(support, query)
    for p, q in zip(maml.module.parameters(), other.module.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    assert all(rate.grad is not None for rate in maml.rates)
    recorded = MetaGraph(maml)
    before = [rate.grad.clone() for rate in maml.rates]
    maml.zero_grad()
    recorded.backward(support, query)
    assert all(torch.equal(rate.grad, grad) for rate, grad in zip(maml.rates, before, strict=True))


def test_all_weight_on_the_last_step_is_the_loss_without_weights() -> None:
    support, query = images(2, 0), images(3, 1)
    for policy in ("batch", "support"):
        maml = MAML(cnn(), LR, steps=STEPS, batchnorm=policy)
        plain = maml.losses(support, query)
        torch.testing.assert_close(maml.losses(support, query, fading_weights(STEPS, 1.0).double()), plain)
        assert not torch.allclose(maml.losses(support, query, fading_weights(STEPS, 0.0).double()), plain)


def test_weights_fade_to_the_last_step_and_sum_to_one() -> None:
    for done in (0.0, 0.25, 1.0):
        weights = fading_weights(4, done)
        torch.testing.assert_close(weights.sum(), torch.tensor(1.0))
        assert weights[:-1].tolist() == pytest.approx([(1 - done) / 4] * 3)
    with pytest.raises(InputError, match="done is 2"):
        fading_weights(4, 2)


def test_evaluation_may_take_other_steps_than_training() -> None:
    support, query = images(2, 0), images(3, 1)
    maml = learner_of(untracked(cnn()), test_steps=5)
    rates = dict(zip(maml.rated, maml.rates, strict=True))
    longer = [{name: rate[min(step, 2)].item() for name, rate in rates.items()} for step in range(5)]
    expected = MAML(maml.module, longer, steps=5).logits(support, query)
    torch.testing.assert_close(maml.logits(support, query), expected)
    outputs = maml.adapted(task(support, 1))
    torch.testing.assert_close(outputs(query[0][1]), expected[1])


def test_learned_rates_of_anil_are_those_of_the_head() -> None:
    anil = ANIL(cnn(), LR, steps=2, learn_rates=True)
    assert anil.rated == ["9.weight", "9.bias"] and [rate.shape for rate in anil.rates] == [(2,), (2,)]
    assert {"rates.0", "rates.1"} <= set(anil.state_dict())
    anil.backward(images(2, 0), images(3, 1))
    assert all(rate.grad.abs().min() > 0 for rate in anil.rates)


def test_bad_step_weights_and_rates_are_refused() -> None:
    support, query = images(2, 0), images(3, 1)
    maml = MAML(cnn(), LR, steps=STEPS)
    with pytest.raises(InputError, match=r"step_weights are \(2,\) for steps=3; give one for each step"):
        maml.losses(support, query, WEIGHTS[:2])
    with pytest.raises(InputError, match="step_weights are a list for steps=3; give one for each step, in a tensor"):
        maml.backward(support, query, WEIGHTS.tolist())  # type: ignore[arg-type]
    with pytest.raises(InputError, match="need engine 'loop', 'vmap' or 'mixed', without checkpoint"):
        MAML(cnn(), LR, steps=STEPS, checkpoint=True).backward(support, query, WEIGHTS)
    with pytest.raises(InputError, match="leave step_weights out"):
        Reptile(cnn(), LR, steps=STEPS).backward(support, query, WEIGHTS)
    with pytest.raises(InputError, match="MetaSGD learns its rates already"):
        MetaSGD(cnn(), LR, learn_rates=True)
    with pytest.raises(InputError, match="leave learn_rates out"):
        Reptile(cnn(), LR, learn_rates=True)
    for steps, most in ((99, 15), (4, 4), (0, 1)):  # as many as a task has examples, or as there are inner steps
        with pytest.raises(InputError, match=f"batches is 99; give a whole number from 1 to {most}"):
            Reptile(cnn(), LR, steps=steps, batches=99).backward(support, query)
    with pytest.raises(InputError, match="lr is -1"):
        MAML(cnn(), -1, learn_rates=True)
    learner = learner_of(cnn()).clone()
    loss = F.cross_entropy(learner(support[0][0]), support[1][0])
    with pytest.raises(InputError, match="do not count steps"):
        learner.adapt(loss)


@pytest.mark.parametrize("batches", [1, 3])
@pytest.mark.parametrize("engine", [*ENGINES, "auto"])
def test_reptiles_gradient_is_the_weights_minus_the_adapted_ones(engine: str, batches: int) -> None:
    net, support, query = untracked(cnn()), images(2, 0), images(1, 1)
    learner = Reptile(net, LR, steps=STEPS + 1, engine=engine, batches=batches)
    losses = learner.backward(support, query)
    both = torch.cat([support[0], query[0]], 1), torch.cat([support[1], query[1]], 1)
    for t in range(TASKS):
        fast = {name: p.detach().clone().requires_grad_() for name, p in net.named_parameters()}
        x, y = task(both, t)
        rows = [row for _, row in sorted((int(label), row) for row, label in enumerate(y))]
        for step in range(STEPS + 1):  # plain gradient descent of one network
            part = rows[step % batches :: batches]
            assert len(y[part].unique()) == len(y.unique())
            loss = F.cross_entropy(functional_call(net, fast, (x[part],)), y[part])
            gradients = torch.autograd.grad(loss, list(fast.values()))
            fast = {
                n: (p - LR * g).detach().requires_grad_() for (n, p), g in zip(fast.items(), gradients, strict=True)
            }
        x, y = task(query, t)
        torch.testing.assert_close(losses[t], F.cross_entropy(functional_call(net, fast, (x,)), y).detach())
        for name, p in net.named_parameters():
            p.grad -= (p.detach() - fast[name].detach()) / TASKS
    assert max(float(p.grad.abs().max()) for p in net.parameters()) < 1e-12


def test_reptiles_batches_of_probabilities_are_those_of_their_labels() -> None:
    found = []
    for form in (lambda y: y, lambda y: F.one_hot(y).double()):
        torch.manual_seed(0)
        learner = Reptile(nn.Linear(2, 3).double(), LR, steps=2, batches=2)
        x, y = torch.randn(2, 12, 2).double(), torch.arange(12).remainder(2).expand(2, 12).contiguous()
        y[:, 1] = 2  # so that every other row is not one part
        learner.backward((x, form(y)), (x, form(y)))
        found.append(learner.module.weight.grad)
    torch.testing.assert_close(*found)


def test_reptile_joins_inputs_by_their_names() -> None:
    class Difference(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2).double()

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.layer(a - b)

    net, (a, b), y = Difference(), torch.randn(2, 1, 4, 2).double(), torch.tensor([[0, 1, 0, 1]])
    given = ({"a": a, "b": b}, y), ({"b": b, "a": a}, y)
    found = []
    for query in given:
        learner = Reptile(net, LR)
        learner.backward(given[0], query)
        found.append([p.grad for p in net.parameters()])
        net.zero_grad()
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize("engine", ENGINES)
def test_step_weights_take_the_dtype_of_the_losses(engine: str) -> None:
    net, support, query = untracked(cnn()), images(2, 0), images(1, 1)
    learner = MAML(net, LR, steps=STEPS, engine=engine)
    found = learner.backward(support, query, step_weights=WEIGHTS.float())
    torch.testing.assert_close(found, learner.backward(support, query, step_weights=WEIGHTS), rtol=1e-6, atol=1e-6)


def test_reptile_with_one_step_is_the_gradient_of_the_joined_loss() -> None:
    """One step moves by -lr times the gradient, so the outer gradient is lr times it (Nichol et al., section 5)."""
    net, support, query = untracked(cnn()), images(2, 0), images(1, 1)
    learner = Reptile(net, LR)
    learner.backward(support, query)
    both = torch.cat([support[0], query[0]], 1), torch.cat([support[1], query[1]], 1)
    losses = [F.cross_entropy(net(task(both, t)[0]), task(both, t)[1]) for t in range(TASKS)]
    expected = torch.autograd.grad(LR * torch.stack(losses).mean(), list(net.parameters()))
    for p, g in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, g)
    torch.testing.assert_close(learner.logits(support, query), MAML(net, LR).logits(support, query))


def test_the_multi_step_loss_is_right_by_finite_differences() -> None:
    def loss_fn(w: Tensor, x: Tensor) -> Tensor:
        return (w.sin() * x).sum().square()

    w, x = torch.tensor([0.3, 0.8], dtype=torch.float64).requires_grad_(), torch.randn(2, 2).double()
    rate = torch.tensor([0.1, 0.05], dtype=torch.float64).requires_grad_()
    how: dict[str, Any] = {"tasks": 2, "steps": 2, "step_weights": torch.tensor([0.4, 0.6]).double(), "engine": "vmap"}
    assert torch.autograd.gradcheck(lambda w, r: meta_loss(loss_fn, w, x, x.flip(0), lr=r, **how), (w, rate))
    after = [adapt(loss_fn, w, x, lr=[0.1, 0.05][:n], steps=n, tasks=2) for n in (1, 2)]
    expected = [0.4 * loss_fn(after[0][t], x.flip(0)[t]) + 0.6 * loss_fn(after[1][t], x.flip(0)[t]) for t in (0, 1)]
    torch.testing.assert_close(meta_loss(loss_fn, w, x, x.flip(0), lr=rate, **how), torch.stack(expected))
