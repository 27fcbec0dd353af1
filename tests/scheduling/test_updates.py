"""Schedulers that draw each update: softmax of utilities, PiKE and Exp3 against their formulas, steps of AdamW."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from pike import PiKE
from torch import Tensor, nn

from metapretrain.draws import generator
from metapretrain.episodes import TaskStream
from metapretrain.errors import InputError
from metapretrain.scheduling import (
    BlockScheduler,
    Exp3,
    FunctionProbe,
    LossExp3,
    SoftmaxUtility,
    UtilityScheduler,
    step_of,
)
from metapretrain.training import RunFolder, TrainSettings, train

NAMES = ("a", "b", "c")


class Net(nn.Module):
    """An encoder with a head a task, whose passes are counted: {task: batch} to {task: loss}."""

    def __init__(self, names: tuple[str, ...] = (*NAMES, "x", "y")) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.encoder = nn.Sequential(nn.Linear(4, 6), nn.Tanh())
        self.heads = nn.ModuleDict({name: nn.Linear(6, 3) for name in names})
        self.double()
        self.passes = [0, 0]

    def forward(self, batches: dict[str, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        return {name: self.loss(name, batch) for name, batch in batches.items()}

    def loss(self, name: str, batch: tuple[Tensor, Tensor]) -> Tensor:
        self.passes[0] += 1
        states = self.encoder(batch[0])
        if states.requires_grad:
            states.register_hook(self._backward)
        return nn.functional.cross_entropy(self.heads[name](states), batch[1])

    def _backward(self, gradient: Tensor) -> None:
        self.passes[1] += 1


def draw(name: str, random: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(8, 4, generator=random, dtype=torch.float64)
    return x, (x[:, :3] * (1 + NAMES.index(name) if name in NAMES else 1)).argmax(1)


def probes(net: Net, names: str = "abc") -> dict[str, FunctionProbe]:
    return {n: FunctionProbe(lambda g, n=n: draw(n, g), lambda batch, n=n: net.loss(n, batch)) for n in names}


def softmax(net: Net, targets: str = "xy", **options: Any) -> SoftmaxUtility:
    return SoftmaxUtility(probes(net), probes(net, targets), net, **{"step": "sgd", "every": 2, "seed": 3, **options})


@pytest.mark.parametrize("smoothing", [0.0, 0.7])
@pytest.mark.parametrize("utility", ["exact", "taylor", "cosine"])
def test_shares_are_a_softmax_of_moving_averages(utility: str, smoothing: float) -> None:
    net = Net()
    scheduler = softmax(net, utility=utility, smoothing=smoothing, temperature=0.4, epsilon=0.3)
    above, spread = np.zeros(3), 0.0
    for update in range(8):
        choice = scheduler.choose()
        assert bool(choice.utilities) == (update % 2 == 0) and choice.updates == 1
        if choice.utilities:
            values = np.array([choice.utilities[name] for name in NAMES])
            above = smoothing * above + (1 - smoothing) * (values - values.mean())
            spread = smoothing * spread + (1 - smoothing) * values.std() if update else values.std()
            logits = above / (0.4 * spread)
            expected = 0.7 * np.exp(logits) / np.exp(logits).sum() + 0.3 / 3
        assert [scheduler.probabilities()[name] for name in NAMES] == pytest.approx(expected, rel=1e-9)
        with torch.no_grad():
            for p in net.parameters():
                p.add_(0.1 * torch.randn(p.shape, generator=generator(update), dtype=p.dtype))


def test_draws_follow_the_shares() -> None:
    scheduler = softmax(Net(), every=10_000, smoothing=0.0, temperature=2.0)
    for _ in range(4000):
        scheduler.choose()
    expected = scheduler.probabilities()
    assert max(expected.values()) - min(expected.values()) > 0.2
    assert {name: count / 4000 for name, count in scheduler.counts.items()} == pytest.approx(expected, abs=0.03)


def test_cosine_is_the_angle_of_a_step_and_the_targets_gradient() -> None:
    net = Net()
    scheduler = softmax(net, utility="cosine", samples=2)
    drawn = scheduler._prober.draw(NAMES, 3, 0)
    found = scheduler.choose().utilities

    def gradient(batches: Any) -> Tensor:
        net.zero_grad()
        sum(net.loss(name, batch) for name, own in batches.items() for batch in own).backward()  # type: ignore
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in net.parameters()]
        return torch.cat([g.flatten() for g in grads]).clone()

    ascent = gradient(drawn.targets)
    for name in NAMES:
        expected = torch.cosine_similarity(gradient({name: drawn.sources[name]}), ascent, dim=0)
        assert found[name] == pytest.approx(float(expected), rel=1e-10)


def trained(net: Net, kind: type[torch.optim.Adam], steps: int = 5, **options: Any) -> torch.optim.Optimizer:
    """An optimizer that has made steps, not for the heads of x and c."""
    optimizer = kind(net.parameters(), **options)
    for step in range(steps):
        name = "aby"[step % 3]
        optimizer.zero_grad()
        net.loss(name, draw(name, generator("before", step))).backward()
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
@pytest.mark.parametrize(("beta", "clip"), [(0.0, None), (0.9, None), (0.9, 0.05)])
@pytest.mark.parametrize("steps", [0, 5])
def test_taylor_by_the_optimizer_is_the_fall_of_the_loss_in_its_next_step(
    kind: type[torch.optim.Adam], beta: float, clip: float | None, steps: int
) -> None:
    """At a small rate; of momentum, which all sources share, the part is taken off that a step without gradient has."""
    net, rate = Net(), 1e-7
    optimizer = trained(net, kind, steps, betas=(beta, 0.99), eps=1e-6, weight_decay=0.0)
    scheduler = softmax(net, utility="taylor", step="optimizer", alpha=rate, samples=1, every=1)
    scheduler.follow(optimizer, clip)
    drawn = scheduler._prober.draw(NAMES, 3, 0)
    utilities = scheduler.choose().utilities
    for name in NAMES:
        other = copy.deepcopy(net)
        own = kind(other.parameters())
        own.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for group in own.param_groups:
            group["lr"] = rate
        other.zero_grad()
        other.loss(name, drawn.sources[name][0]).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(other.parameters(), clip)
        # AdamW moves by m / (1 - beta1^t) over the root: the gradient's part of m is (1 - beta1) g
        done = {id(p): float(own.state[p]["step"]) if p in own.state else 0.0 for p in other.parameters()}
        averages = {id(p): state["exp_avg"].clone() for p, state in own.state.items()}
        shared = [averages.get(id(p), 0.0) for p in other.parameters()]
        before = [p.detach().clone() for p in other.parameters()]
        own.step()
        with torch.no_grad():
            for p, old, average in zip(other.parameters(), before, shared, strict=True):
                if p.grad is not None:
                    bias = 1 - beta ** (done[id(p)] + 1)
                    root = (own.state[p]["exp_avg_sq"] / (1 - 0.99 ** (done[id(p)] + 1))).sqrt() + 1e-6
                    step = (old - p) / rate - beta * average / bias / root
                    p.copy_(old - rate * step * bias / (1 - beta))
        fall = [sum(float(n.loss(t, b).detach()) for t, bs in drawn.targets.items() for b in bs) for n in (net, other)]

        assert utilities[name] + fall[0] == pytest.approx(fall[0] - fall[1], rel=1e-4, abs=1e-12)


def test_steps_of_sgd_are_gradients_and_what_is_not_trained_does_not_step() -> None:
    w, other = torch.ones(3, requires_grad=True), torch.ones(2, requires_grad=True)
    gradients: list[Tensor | None] = [torch.tensor([3.0, 0.0, 4.0]), torch.ones(2)]
    found = step_of(torch.optim.SGD([w], 0.1, momentum=0.9), [w, other], gradients, None)
    assert found[1] is None and torch.equal(found[0], gradients[0])  # type: ignore[arg-type]
    cut = step_of(torch.optim.SGD([w], 0.1), [w, other], gradients, 1.0)[0]
    torch.testing.assert_close(cut, torch.tensor([0.6, 0.0, 0.8]))


def test_a_step_of_an_optimizer_that_nobody_told_of_is_one_line() -> None:
    with pytest.raises(InputError, match="step=optimizer needs the optimizer: call follow"):
        softmax(Net(), step="optimizer").choose()


@pytest.mark.parametrize("samples", [2, 3])
def test_pike_is_its_formula(samples: int) -> None:
    net = Net()
    scheduler = PiKE(probes(net), net, zeta1=0.7, zeta2=0.9, samples=samples, every=3, seed=1)
    weights = np.ones(3) / 3
    for update in range(7):
        if update % 3 == 0:
            for place, name in enumerate(NAMES):
                random, gradients = generator(1, update, "source", name), []
                for batch in [draw(name, random) for _ in range(samples)]:
                    net.zero_grad()
                    net.loss(name, batch).backward()
                    gradients.append(torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None]))
                rows = torch.stack(gradients).numpy()
                variance = rows.var(0, ddof=1).sum()
                squared = max(0.0, (rows.mean(0) ** 2).sum() - variance / samples)
                weights[place] *= np.exp(0.7 * squared - 0.9 / 2 * variance)
            weights /= weights.sum()
        scheduler.choose()
        assert [scheduler.probabilities()[name] for name in NAMES] == pytest.approx(weights, rel=1e-9)
    assert scheduler.cost.forwards == scheduler.cost.backwards == 3 * 3 * samples


def test_estimates_of_norms_and_variances_are_unbiased() -> None:
    w = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    mean = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    noisy = FunctionProbe(
        lambda random: mean + 2 * torch.randn(3, generator=random, dtype=torch.float64), lambda batch: (w * batch).sum()
    )
    scheduler = PiKE({"noisy": noisy, "same": noisy}, [w], samples=2)
    found = np.array([scheduler.estimates("noisy") for scheduler.decisions in range(4000)])
    assert found.mean(0) == pytest.approx([5.25, 12.0], abs=5 * found.std(0).max() / 4000**0.5)


def test_the_estimates_of_exp3_are_unbiased() -> None:
    """E[x_i / p_i if i is drawn] = x_i (Auer et al., 2002, section 3), whatever was learned before."""
    rewards, gamma, total = {"a": 0.9, "b": 0.2, "c": 0.5}, 0.3, dict.fromkeys(NAMES, 0.0)
    weights = {"a": 1.2, "b": -0.4, "c": 0.3}
    for seed in range(6000):
        scheduler = Exp3(NAMES, gamma=gamma, seed=seed)
        scheduler._log_weights = dict(weights)
        source = scheduler.choose().source
        scheduler.observe(source, rewards[source])
        total[source] += (scheduler._log_weights[source] - weights[source]) * 3 / gamma
    assert {name: value / 6000 for name, value in total.items()} == pytest.approx(rewards, abs=0.06)


def test_exp3_an_update_at_a_time_looks_at_one_target_in_its_turn() -> None:
    net = Net()
    scheduler = LossExp3(NAMES, probes(net, "xy"), net, samples=1, updates=1, turn=3, reward=0.5)
    told: list[float] = []
    scheduler.observe = lambda source, reward: told.append(reward)  # type: ignore[method-assign]
    seen: list[tuple[str, Any]] = []
    for name in "xy":
        batch_of = scheduler.targets[name].sample
        scheduler.targets[name] = FunctionProbe(
            lambda g, name=name, of=batch_of: seen.append((name, batch := of(g))) or batch,  # type: ignore
            scheduler.targets[name].loss,
        )
    expected, before = [], 0.0
    for update in range(12):
        scheduler.choose()
        name, batch = seen[-1]
        now = float(net.loss(name, batch).detach())
        expected += [(before - now) / before] if update % 3 else []
        before = now
        with torch.no_grad():
            net.encoder[0].weight.mul_(0.9)
    assert [name for name, _ in seen] == [*"xxxyyyxxxyyy"] and told == pytest.approx(expected, rel=1e-3)
    batches = [float(batch[0].sum()) for _, batch in seen]
    assert len(set(batches)) == 4 and batches[0] == batches[2] != batches[6]
    assert scheduler.share == 0.25


MAKERS: dict[str, Any] = {
    "softmax": lambda net: SoftmaxUtility(probes(net), probes(net, "xy"), net, every=4),
    "agnostic": lambda net: SoftmaxUtility(probes(net), probes(net), net, every=4, normalise="relative", samples=2),
    "exact": lambda net: softmax(net, utility="exact", every=5),
    "exact by the optimizer": lambda net: softmax(net, utility="exact", every=5, step="optimizer", alpha=1e-3),
    "taylor in blocks": lambda net: UtilityScheduler(
        probes(net), probes(net, "xy"), net, utility="taylor", step="optimizer", updates=4
    ),
    "pike": lambda net: PiKE(probes(net), net, every=4),
    "exp3": lambda net: LossExp3(NAMES, probes(net, "xy"), net, updates=1, turn=4, samples=1),
}


class Loader:
    """Batches of a task, that position and pass decide."""

    def __init__(self, name: str) -> None:
        self.name, self.epoch = name, 0

    def __len__(self) -> int:
        return 7

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (draw(self.name, generator(self.name, self.epoch, i)) for i in range(7))

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("stop", [6, 9])
def test_a_killed_training_goes_on_to_the_same_choices_weights_and_costs(name: str, stop: int, tmp_path: Any) -> None:
    class Killed(Exception):
        pass

    def go(folder: str, kill: int | None = None) -> tuple[Net, BlockScheduler]:
        net = Net()
        scheduler: BlockScheduler = MAKERS[name](net)
        scheduler.choices = []
        stream = TaskStream({source: Loader(source) for source in NAMES}, scheduler, seed=0, steps=20)

        def watch(done: int) -> dict[str, float]:
            if done == kill:
                raise Killed
            return {}

        settings = TrainSettings(
            20, 0.01, "adamw", clip=0.5, checkpoint_every=3, evaluate_every=1, device="cpu", log_every=5
        )
        with RunFolder.open(tmp_path / folder, {"method": name}, resume=True) as run:
            train(net, stream, settings, run=run, evaluate=watch, title=name)
        return net, scheduler

    whole, one = go("whole")
    with pytest.raises(Killed):
        go("cut", stop)
    again, other = go("cut")
    assert one.choices == other.choices and one.cost.units == other.cost.units > 0
    assert json.dumps(one.state_dict()["counts"]) == json.dumps(other.state_dict()["counts"])
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize("name", MAKERS)
def test_costs_are_the_passes_that_were_made(name: str) -> None:
    net = Net()
    scheduler: BlockScheduler = MAKERS[name](net)
    optimizer = torch.optim.AdamW(net.parameters(), 0.01)
    scheduler.follow(optimizer)
    made = [0, 0]
    for update in range(23):
        net.passes = [0, 0]
        source = scheduler.choose().source
        made = [a + b for a, b in zip(made, net.passes, strict=True)]
        optimizer.zero_grad()
        net.loss(source, draw(source, generator("update", update))).backward()
        optimizer.step()
    assert [scheduler.cost.forwards, scheduler.cost.backwards] == made
    decisions = -(-23 // scheduler.every)
    assert scheduler.cost.units == decisions * scheduler.units
    assert scheduler.share == scheduler.cost.units / (scheduler.cost.units + 3 * 23)


@pytest.mark.parametrize("name", ["softmax", "pike", "exp3"])
def test_by_default_probes_are_a_quarter_of_the_compute(name: str) -> None:
    net = Net()
    made: dict[str, BlockScheduler] = {
        "softmax": softmax(net, every=None),
        "pike": PiKE(probes(net), net),
        "exp3": LossExp3(NAMES, probes(net, "xy"), net, updates=1, turn=4, samples=1),
    }
    for _ in range(2 * made[name].every):
        made[name].choose()
    assert made[name].share == 0.25


def test_wrong_arguments_are_one_line() -> None:
    net = Net()
    for options, message in [
        ({"temperature": 0}, "temperature is 0; give a number above 0"),
        ({"every": 0}, "every is 0; give a whole number of at least 1"),
        ({"utility": "cosinus"}, "unknown utility 'cosinus'; did you mean 'cosine'"),
        ({"step": "adam"}, "unknown step 'adam'"),
    ]:
        with pytest.raises(InputError, match=message):
            softmax(net, **options)
    for options, message in [
        ({"samples": 1}, "samples is 1; give a whole number from 2 to 100"),
        ({"zeta1": -1}, "zeta1 is -1; give a number of at least 0"),
        ({"sources": {}}, "sources must be {name: probe}"),
    ]:
        with pytest.raises(InputError, match=message):
            PiKE(**{"sources": probes(net), "params": net, **options})
