"""Utilities against Algorithm 1 line by line, their first order, their cost, and no trace of a probe."""

from __future__ import annotations

import copy
import logging
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from metapretrain.errors import InputError
from metapretrain.scheduling import FunctionProbe, UtilityScheduler, agreement, probe_units
from metapretrain.scheduling.probes import Weights
from tests.scheduling import slow
from tests.scheduling.slow import Net, TaskProbe

Probes = dict[str, TaskProbe]


@pytest.fixture
def net() -> Net:
    torch.manual_seed(1)
    return Net().double()


def probes(net: Net, names: str = "abc") -> Probes:
    return {name: TaskProbe(net, name) for name in names}


def scheduler(net: Net, sources: Any, targets: Any, **options: Any) -> UtilityScheduler:
    return UtilityScheduler(sources, targets, net, **{"alpha": 0.5, "samples": 2, "updates": 1, **options})


def reference(net: Net, sources: Probes, targets: Probes, alpha: float, **options: Any) -> dict[str, float]:
    given = ({name: probe.given for name, probe in role.items()} for role in (sources, targets))
    both = {**sources, **targets}
    return slow.utilities(net, *given, alpha, lambda m, name, b: both[name].scale * m.loss(name, b), **options)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("samples", [1, 3])
def test_exact_is_algorithm_1_line_by_line(net: Net, samples: int, training: bool) -> None:
    net.train(training)
    sources, targets = probes(net), probes(net, "xy")
    choice = scheduler(net, sources, targets, samples=samples).choose()
    expected = reference(net, sources, targets, 0.5)
    assert choice.utilities == pytest.approx(expected, rel=1e-12)
    assert choice.source == max(expected, key=expected.__getitem__)
    assert all(len(probe.given) == samples for probe in [*sources.values(), *targets.values()])
    assert choice.cost.forwards == 3 * samples + 3 * samples * 2 * samples
    assert choice.cost.backwards == 3 * samples
    assert choice.cost.units == probe_units(3, 2, samples)
    assert 9 * choice.cost.forwards + choice.cost.backwards == probe_units(3, 2, samples, passes=(9, 1))
    assert choice.cost.seconds > 0


def test_agnostic_target_batches_are_draws_of_their_own(net: Net) -> None:
    both = probes(net)
    scheduler(net, both, both).choose()
    for probe in both.values():
        assert len({tuple(x.flatten().tolist()) for x, _ in probe.given}) == 4


def test_taylor_is_exact_to_first_order(net: Net) -> None:
    net.eval()
    gaps = []
    for alpha in (1e-2, 5e-3):
        compared = scheduler(net, probes(net), probes(net, "xy"), alpha=alpha).compare()
        gaps.append({name: compared["exact"][name] - compared["taylor"][name] for name in "abc"})
    ratios = [gaps[0][name] / gaps[1][name] for name in "abc"]
    assert ratios == pytest.approx([4.0] * 3, rel=0.1)  # what is left is of second order
    small = scheduler(net, probes(net), probes(net, "xy"), alpha=1e-4).compare()
    assert agreement(small["exact"], small["taylor"]) == (pytest.approx(1.0), 0.0)


def test_taylor_costs_less(net: Net) -> None:
    choice = scheduler(net, probes(net), probes(net, "xy"), utility="taylor").choose()
    assert (choice.cost.forwards, choice.cost.backwards) == (6 + 4, 6 + 4)
    assert choice.cost.units == probe_units(3, 2, 2, "taylor")


class ManyProbe(TaskProbe):
    """A task without batch statistics, so that batches can share a forward pass."""

    calls = 0

    def loss(self, batch: slow.Batch) -> Tensor:
        return self.loss_many([batch])[0]

    def loss_many(self, batches: list[slow.Batch]) -> Tensor:
        self.calls += 1
        x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
        z = self.net.heads[self.name](torch.tanh(self.net.encoder[0](x)))
        return nn.functional.cross_entropy(z, y, reduction="none").view(len(batches), -1).mean(1)


def test_batches_together_give_the_same_utilities(net: Net) -> None:
    many = {name: ManyProbe(net, name) for name in "abcxy"}
    one = {name: FunctionProbe(probe.sample, probe.loss) for name, probe in many.items()}
    sources, targets = {name: one[name] for name in "abc"}, {name: one[name] for name in "xy"}
    plain = scheduler(net, sources, targets).compare()
    many["x"].calls = 0
    stacked = scheduler(net, sources, {name: many[name] for name in "xy"}).compare()
    assert many["x"].calls == 3 * 2 + 1  # once a candidate, once for Taylor
    for utility in plain:
        assert stacked[utility] == pytest.approx(plain[utility], rel=1e-12)
    all_many = scheduler(net, {name: many[name] for name in "abc"}, targets).compare()
    assert all_many["taylor"] == pytest.approx(plain["taylor"], rel=1e-12)

    def joint(batches: Any) -> dict[str, Tensor]:
        return {name: many[name].loss_many(given) for name, given in batches.items()}

    joined = scheduler(net, sources, targets, target_losses=joint).choose()
    assert joined.utilities == pytest.approx(plain["exact"], rel=1e-12)
    assert joined.cost.units == probe_units(3, 2, 2)
    for normalise in (None, "relative"):
        alone = scheduler(net, sources, targets, utility="taylor", normalise=normalise).choose()
        joined = scheduler(net, sources, targets, utility="taylor", normalise=normalise, target_losses=joint).choose()
        assert joined.utilities == pytest.approx(alone.utilities, rel=1e-12)
        assert joined.cost.units == alone.cost.units == probe_units(3, 2, 2, "taylor")
    for wrong in ({}, {"y": [0.0, 0.0]}, {"y": np.zeros(2)}, {"y": torch.zeros(())}):
        given = {"x": torch.zeros(2), **wrong}
        with pytest.raises(InputError, match=r"target_losses gave no tensor of losses \(2,\) for y"):
            scheduler(net, sources, targets, target_losses=lambda b, given=given: given).choose()
    with pytest.raises(InputError, match="target_losses gave a NoneType"):
        scheduler(net, sources, targets, target_losses=lambda b: None).choose()


@pytest.mark.parametrize("together", [False, True])
def test_products_of_gradients_keep_their_precision_where_losses_are_bfloat16(together: bool) -> None:
    w = torch.zeros(4, requires_grad=True)

    def slope(steep: float) -> FunctionProbe:
        return FunctionProbe(lambda generator: None, lambda batch: (steep * w).sum().bfloat16())

    sources, targets = {"steep": slope(1.001), "flat": slope(1.0)}, {"down": slope(1.0)}
    joint = (lambda b: {"down": torch.stack([targets["down"].loss(None)] * 2)}) if together else None
    made = UtilityScheduler(sources, targets, [w], alpha=1.0, updates=1, utility="taylor", target_losses=joint)
    assert made.choose().utilities == pytest.approx({"steep": 16 * 1.001, "flat": 16.0}, rel=1e-6)


@pytest.mark.parametrize("utility", ["exact", "taylor"])
def test_a_probe_leaves_no_trace(net: Net, utility: str) -> None:
    class Noisy(TaskProbe):
        def loss(self, batch: slow.Batch) -> Tensor:
            noise = torch.rand(()) + random.random() + float(np.random.rand())  # noqa: NPY002
            self.net.register_buffer("new", torch.zeros(1))
            return super().loss(batch) * noise

    sources = {name: Noisy(net, name) for name in "abc"}
    optimizer = torch.optim.Adam(net.parameters())
    sources["a"].loss(sources["a"].sample(torch.Generator())).backward()
    optimizer.step()
    del net.new
    net.heads["b"].eval()
    before = copy.deepcopy((net.state_dict(), optimizer.state_dict(), [p.grad for p in net.parameters()]))
    held = {name: (id(t), t.data_ptr(), t._version) for name, t in net.state_dict(keep_vars=True).items()}
    modes = [part.training for part in net.modules()]
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()  # noqa: NPY002
    scheduler(net, sources, sources, utility=utility, normalise="relative").choose()
    after = (net.state_dict(), optimizer.state_dict(), [p.grad for p in net.parameters()])
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert {n: (id(t), t.data_ptr(), t._version) for n, t in net.state_dict(keep_vars=True).items()} == held
    assert [part.training for part in net.modules()] == modes
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert random.getstate() == generators[1]
    assert (np.random.get_state()[1] == generators[2]).all()  # noqa: NPY002


def test_a_loss_that_fails_leaves_no_trace_either(net: Net) -> None:
    targets = probes(net, "x")
    targets["x"].loss = lambda batch: 1 / 0  # type: ignore[method-assign, assignment]
    before = copy.deepcopy(net.state_dict())
    held = [p.data_ptr() for p in net.parameters()]
    with pytest.raises(ZeroDivisionError):
        scheduler(net, probes(net), targets).choose()
    torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0)
    assert [p.data_ptr() for p in net.parameters()] == held
    assert net.training


def test_all_candidates_meet_the_same_random_numbers_and_buffers(net: Net) -> None:
    seen: list[tuple[float, int]] = []

    class Random(TaskProbe):
        def loss(self, batch: slow.Batch) -> Tensor:
            seen.append((float(torch.rand(())), int(self.net.calls)))
            return super().loss(batch)

    scheduler(net, probes(net), {"x": Random(net, "x")}).choose()
    assert len(seen) == 12
    assert len({value for value, _ in seen}) == 2  # one for each of the two target batches
    assert {calls for _, calls in seen} == {0}


def test_relative_losses_do_not_outvote_each_other(net: Net) -> None:
    """Targets of other scales: the raw sum follows the large one, relative losses count the same."""
    sources = probes(net, "xy")
    found = {}
    for scale in (1.0, 1000.0):
        targets = {"x": TaskProbe(net, "x", scale), "y": TaskProbe(net, "y")}
        for utility in ("exact", "taylor"):
            made = scheduler(net, sources, targets, normalise="relative", utility=utility, alpha=1e-3)
            found[utility, scale] = made.choose()
    for utility in ("exact", "taylor"):
        one, thousand = found[utility, 1.0], found[utility, 1000.0]
        assert thousand.utilities == pytest.approx(one.utilities, rel=1e-9)
        assert one.cost.units == probe_units(2, 2, 2, utility, "relative")
        told = 9 * one.cost.forwards + one.cost.backwards
        assert told == probe_units(2, 2, 2, utility, "relative", passes=(9, 1))
    for probe in [*sources.values(), *targets.values()]:
        probe.given.clear()
    made = scheduler(net, sources, targets, normalise="relative")
    utilities = made.choose().utilities
    base = {}
    at_rest = slow.probe_mode(copy.deepcopy(net))
    for name, probe in targets.items():
        losses = [probe.scale * at_rest.loss(name, batch).item() for batch in probe.given]
        base[name] = 2 / sum(losses)
    expected = {}
    for name, probe in sources.items():
        expected |= slow.utilities(
            net,
            {name: probe.given},
            {t: p.given for t, p in targets.items()},
            0.5,
            lambda m, n, b: m.loss(n, b),
            weight=lambda t: base[t] * targets[t].scale,
        )
    assert utilities == pytest.approx(expected, rel=1e-10)


def test_a_task_that_ignores_the_encoder_moves_nothing(net: Net, caplog: pytest.LogCaptureFixture) -> None:
    sources: dict[str, Any] = probes(net, "ab")
    sources["none"] = FunctionProbe(lambda generator: None, lambda batch: torch.tensor(3.0))
    targets = probes(net, "x")
    made = scheduler(net, sources, targets)
    choice = made.choose()
    made.choose()
    assert [r.message for r in caplog.records if r.levelno == logging.WARNING] == [
        "the loss of source 'none' does not depend on the weights: its steps change nothing"
    ]
    at_rest = slow.probe_mode(copy.deepcopy(net))
    total = sum(at_rest.loss("x", batch).item() for batch in targets["x"].given[:2])
    assert choice.utilities["none"] == pytest.approx(-2 * total, rel=1e-12)
    del sources["a"], sources["b"]
    sources["other"] = sources["none"]
    with pytest.raises(InputError, match="no loss of the sources none, other has a gradient by params"):
        scheduler(net, sources, targets).choose()


def test_parameters_without_a_module() -> None:
    w = torch.zeros(2, requires_grad=True)
    pull = {
        name: FunctionProbe(lambda generator: None, lambda batch, goal=goal: (w - goal).square().sum())
        for name, goal in {"up": 1.0, "down": -1.0}.items()
    }
    for params in ([w], {"w": w}, w, [w, w]):
        choice = UtilityScheduler(pull, {"goal": pull["up"]}, params, alpha=0.1, updates=1).choose()
        assert choice.utilities == pytest.approx({"up": -2 * 2 * 2 * 0.64, "down": -2 * 2 * 2 * 1.44})
    assert w.tolist() == [0.0, 0.0]
    with pytest.raises(InputError, match="nothing that asks for a gradient"):
        Weights([torch.zeros(2)])
    with pytest.raises(InputError, match="no leaf"):
        Weights([w * 2])
    with pytest.raises(InputError, match="params is None"):
        Weights(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("outer", [torch.no_grad, torch.enable_grad])
def test_choosing_under_no_grad(net: Net, outer: Any) -> None:
    with outer():
        choice = scheduler(net, probes(net), probes(net, "x")).choose()
    assert len(set(choice.utilities.values())) == 3
