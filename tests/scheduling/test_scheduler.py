"""Decisions from utilities: exploration, ties, sources that fail or run out, updates, state, streams."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from scipy.stats import binomtest
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from metapretrain.episodes import TaskStream
from metapretrain.errors import InputError
from metapretrain.scheduling import FunctionProbe, LoaderProbe, UtilityScheduler, probe_units

GOALS = {"good": 1.0, "fair": 0.5, "bad": -1.0}


def pull(w: Tensor, goal: float) -> FunctionProbe:
    return FunctionProbe(lambda generator: goal, lambda batch: (w - batch).square().sum())


def made(w: Tensor | None = None, goals: dict[str, float] = GOALS, **options: Any) -> UtilityScheduler:
    w = torch.zeros(2, dtype=torch.float64, requires_grad=True) if w is None else w
    sources = options.pop("sources", None) or {name: pull(w, goal) for name, goal in goals.items()}
    targets = options.pop("targets", None) or {"goal": pull(w, 1.0)}
    return UtilityScheduler(sources, targets, [w], **{"alpha": 0.1, "updates": 1, **options})


def chosen(scheduler: UtilityScheduler, times: int) -> list[str]:
    return [scheduler.choose().source for _ in range(times)]


def test_epsilon_0_takes_the_best_and_1_draws_without_probes() -> None:
    assert chosen(made(), 20) == ["good"] * 20
    scheduler = made(epsilon=1.0)
    choices = [scheduler.choose() for _ in range(300)]
    counts = Counter(choice.source for choice in choices)
    assert all(binomtest(counts[name], 300, 1 / 3).pvalue > 1e-3 for name in GOALS)
    assert all(choice.explored and not choice.utilities for choice in choices)
    assert scheduler.cost.units == 0


def test_epsilon_decays_to_its_floor() -> None:
    scheduler = made(epsilon=1.0, decay=0.9, floor=0.2)
    explored = [scheduler.choose().explored for _ in range(400)]
    assert sum(explored[:5]) >= 3
    assert binomtest(sum(explored[50:]), 350, 0.2).pvalue > 1e-3


def test_equal_utilities_are_settled_at_random() -> None:
    counts = Counter(chosen(made(goals={"a": 1.0, "b": 1.0, "worse": 0.0}), 200))
    assert counts.keys() == {"a", "b"}
    assert binomtest(counts["a"], 200).pvalue > 1e-3


def test_one_source_needs_no_probe() -> None:
    scheduler = made(goals={"only": -1.0})
    assert chosen(scheduler, 3) == ["only"] * 3
    assert scheduler.cost.units == 0


def test_a_decision_holds_for_its_updates() -> None:
    w = torch.zeros(2, requires_grad=True)
    scheduler = made(w, updates=3)
    choices = []
    for step in range(6):
        choices.append(scheduler.choose())
        if step == 0:
            w.data.fill_(9.0)  # beyond the goal: from here on "bad" pulls hardest
    assert [choice.source for choice in choices] == ["good"] * 3 + ["bad"] * 3
    assert [choice.updates for choice in choices] == [3, 2, 1] * 2
    assert [choice.cost.forwards > 0 for choice in choices] == [True, False, False] * 2
    assert choices[1].utilities == choices[0].utilities
    assert scheduler.cost.units == 2 * probe_units(3, 1, 2)
    assert scheduler.counts == {"good": 3, "fair": 0, "bad": 3}
    assert scheduler.decisions == 2


@pytest.mark.parametrize("utility", ["exact", "taylor"])
@pytest.mark.parametrize("normalise", [None, "relative"])
def test_by_default_probes_take_at_most_a_quarter_and_one_update_less_would_not_do(
    utility: str, normalise: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = made(updates=None, utility=utility, normalise=normalise)
    for _ in range(scheduler.updates):
        scheduler.choose()
    assert scheduler.share == 0.25
    assert not caplog.records
    made(updates=scheduler.updates - 1, utility=utility, normalise=normalise).choose()
    assert "of the compute" in caplog.text


def test_a_source_with_a_nan_utility_is_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    w = torch.zeros(2, requires_grad=True)
    sources = {name: pull(w, goal) for name, goal in GOALS.items()}
    sources["good"] = FunctionProbe(lambda generator: 0.0, lambda batch: (w * float("nan")).sum())
    scheduler = made(w, sources=sources)
    choice = scheduler.choose()
    assert choice.source == "fair"
    assert choice.utilities["good"] != choice.utilities["good"]
    warned = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert warned == ["source 'good' is passed over in decision 0: its utility is nan"]
    json.dumps(scheduler.state_dict(), allow_nan=False)


@pytest.mark.parametrize("utility", ["exact", "taylor"])
def test_only_nan_utilities_are_an_error(utility: str) -> None:
    w = torch.zeros(2, requires_grad=True)
    targets = {"fine": pull(w, 1.0), "broken": pull(w, float("inf"))}
    with pytest.raises(InputError, match=r"all sources \(good, fair, bad\) .*losses of target broken are not finite"):
        made(w, targets=targets, utility=utility).choose()


@pytest.mark.parametrize("utility", ["exact", "taylor"])
def test_it_is_told_once_that_no_utility_differs(utility: str, caplog: pytest.LogCaptureFixture) -> None:
    w = torch.zeros(2, requires_grad=True)
    frozen = FunctionProbe(lambda generator: 1.0, lambda batch: torch.tensor(batch))
    assert set(chosen(made(w, targets={"frozen": frozen}, utility=utility), 20)) == set(GOALS)
    (told,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert told.startswith("all utilities are equal in decision 0 (good, fair, bad), so one is drawn at random")
    assert "alpha=" in told
    caplog.clear()
    chosen(made(w, targets={"frozen": frozen, "goal": pull(w, 1.0)}, utility=utility), 2)
    assert not [record for record in caplog.records if record.levelno == logging.WARNING]


def test_a_source_that_runs_out_is_not_chosen_again() -> None:
    w = torch.zeros(2, requires_grad=True)

    def ending(goal: float, batches: int) -> LoaderProbe:
        return LoaderProbe([goal] * batches, pull(w, goal).loss, endless=False)

    sources = {"good": ending(1.0, 5), "fair": ending(0.5, 8)}
    scheduler = made(w, sources=sources)
    assert chosen(scheduler, 3) == ["good", "good", "fair"]
    assert scheduler.active == ("fair",)
    scheduler.drop("fair")
    with pytest.raises(InputError, match="every source has run out: good, fair"):
        scheduler.choose()
    with pytest.raises(InputError, match="the target 'goal' has run out"):
        made(w, targets={"goal": ending(1.0, 1)}).choose()


def test_dropping_gives_up_the_remaining_updates() -> None:
    scheduler = made(updates=5)
    assert chosen(scheduler, 2) == ["good"] * 2
    scheduler.drop("good")
    assert chosen(scheduler, 2) == ["fair"] * 2


def test_smoothing_follows_the_past() -> None:
    w = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    goals = {"left": 0.2, "right": -0.2}
    state = {"goal": 1.0}
    target = FunctionProbe(lambda generator: state["goal"], lambda batch: (w - batch).square().sum())
    after = {}
    for smoothing in (0.0, 0.9):
        state["goal"] = 1.0
        scheduler = made(w, goals, targets={"goal": target}, smoothing=smoothing)
        assert chosen(scheduler, 3) == ["left"] * 3
        saved = scheduler.state_dict()
        scheduler = made(w, goals, targets={"goal": target}, smoothing=smoothing)
        scheduler.load_state_dict(saved)
        state["goal"] = -1.0
        after[smoothing] = chosen(scheduler, 12)
    assert after[0.0] == ["right"] * 12
    # 0.9**n - (1 - 0.9**n) turns negative at n = 7
    assert after[0.9] == ["left"] * 6 + ["right"] * 6


def sources_of(w: Tensor) -> dict[str, Any]:
    """Noisy tasks: one draws by the generator, one from a shuffled DataLoader, one from a short list."""
    data = TensorDataset(torch.linspace(-2, 2, 11, dtype=torch.float64))
    loss = lambda batch: (w - batch[0].mean()).square().sum()  # noqa: E731
    return {
        "drawn": FunctionProbe(lambda g: [torch.randn(3, generator=g, dtype=torch.float64)], loss),
        "loader": LoaderProbe(DataLoader(data, batch_size=3, shuffle=True), loss, seed=1),
        "list": LoaderProbe([[torch.tensor([x], dtype=torch.float64)] for x in (0.5, -1.0, 2.0)], loss),
    }


def run(stop: int | None, steps: int = 60, **options: Any) -> Iterator[tuple[Any, ...]]:
    """Train by a stream that the scheduler leads; at `stop`, go on in new objects from the saved state."""

    def start() -> tuple[Tensor, TaskStream]:
        w = torch.zeros(2, dtype=torch.float64, requires_grad=True)
        scheduler = made(w, sources=sources_of(w), targets=sources_of(w), updates=2, seed=5, **options)
        return w, TaskStream({name: [1.0, 2.0, 3.0] for name in sources_of(w)}, scheduler, seed=0, steps=steps)

    w, stream = start()
    step, batches = 0, iter(stream)
    while (batch := next(batches, None)) is not None:
        (name, value), step = *batch.items(), step + 1
        with torch.no_grad():
            w += 0.05 * (value - w) * {"drawn": 1.0, "loader": -0.5, "list": 0.3}[name]
        yield name, value, dict(stream.choice.utilities), stream.choice.updates
        if step == stop:
            state, weights = json.loads(json.dumps(stream.state_dict(), allow_nan=False)), w.detach().clone()
            w, stream = start()
            w.data.copy_(weights)
            stream.load_state_dict(state)
            batches = iter(stream)


@pytest.mark.parametrize("utility", ["exact", "taylor"])
@pytest.mark.parametrize("stop", [1, 2, 17, 40])
def test_a_resumed_stream_goes_on_as_the_unbroken_one(stop: int, utility: str) -> None:
    options = {"epsilon": 0.3, "smoothing": 0.5, "utility": utility}
    unbroken = list(run(None, **options))
    assert len({name for name, *_ in unbroken}) == 3
    assert [a == b for (a, *_), (b, *_) in zip(unbroken[::2], unbroken[1::2], strict=True)] == [True] * 30
    assert list(run(stop, **options)) == unbroken


def test_comparing_leaves_the_sequence_as_it_was() -> None:
    w = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    plain, compared = (made(w, sources=sources_of(w), targets=sources_of(w)) for _ in range(2))
    for _ in range(10):
        exact = compared.compare()["exact"]
        choice = compared.choose()
        assert choice.utilities == plain.choose().utilities == exact


def test_the_state_of_another_scheduler_is_refused() -> None:
    state = made().state_dict()
    for options, what in [({"alpha": 0.2}, "alpha"), ({"updates": 2}, "updates"), ({"seed": 1}, "seed")]:
        with pytest.raises(InputError, match=f"is of {what}"):
            made(**options).load_state_dict(state)
    with pytest.raises(InputError, match="is of sources"):
        made(goals={"good": 1.0}).load_state_dict(state)


def test_wrong_arguments_are_one_line() -> None:
    for options, message in [
        ({"alpha": 0}, "alpha is 0; give a number above 0"),
        ({"samples": 0}, "samples is 0; give a whole number from 1 to 100"),
        ({"epsilon": 1.5}, "epsilon is 1.5; give a number of at least 0 and at most 1"),
        ({"floor": 0.1}, "floor is 0.1, above epsilon 0.0"),
        ({"smoothing": 1}, "smoothing is 1; give a number of at least 0 and below 1"),
        ({"utility": "tailor"}, "unknown utility 'tailor'; did you mean 'taylor'"),
        ({"normalise": "z"}, "unknown normalise 'z'"),
        ({"targets": [1]}, "targets must be {name: probe}"),
        ({"alpha": 1e300}, r"alpha is 1e\+300; give a number above 0 and at most 1e\+30"),
        ({"target_losses": 3}, "target_losses is 3; give a function"),
    ]:
        with pytest.raises(InputError, match=message):
            made(**options)
    scheduler = made()
    for reward in (float("nan"), "high"):
        with pytest.raises(InputError, match="reward of 'good' is"):
            scheduler.observe("good", reward)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="state_dict gave, not None"):
        scheduler.load_state_dict(None)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="unknown source 'god'; did you mean 'good'"):
        scheduler.observe("god", 1.0)
