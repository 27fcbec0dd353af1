"""Schedules by name: parsing, the reward of exp3, resumes, and probes that leave no trace."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from metapretrain.errors import InputError
from metapretrain.scheduling import (
    SCHEDULERS,
    BlockScheduler,
    Choice,
    FunctionProbe,
    LossExp3,
    Schedule,
    build_scheduler,
    option_defaults,
    parse_schedule,
    register,
)

SIZES = {"big": 300, "small": 100}


def problem() -> tuple[nn.Sequential, dict[str, FunctionProbe]]:
    """A line with dropout, and a probe for each of two goals."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 1))
    x = torch.randn(300, 3)

    def probe(name: str, goal: float) -> FunctionProbe:
        return FunctionProbe(
            lambda random: torch.randperm(SIZES[name], generator=random)[:8],
            lambda rows: (model(x[rows]) - goal).square().mean(),
        )

    return model, {"big": probe("big", 1.0), "small": probe("small", -1.0)}


@pytest.mark.parametrize(
    "text", [*(name for name in SCHEDULERS if name != "fixed"), "fixed:small", "exp3:updates=2,turn=3"]
)
def test_a_schedule_goes_on_where_another_stopped(text: str) -> None:
    schedule = parse_schedule(text, SIZES)
    model, probes = problem()
    one, other = (build_scheduler(schedule, SIZES, probes, model, seed=4) for _ in range(2))
    for scheduler in (one, other):
        scheduler.follow(torch.optim.AdamW(model.parameters()))
    chosen = [one.choose().source for _ in range(25)]
    assert set(chosen) <= set(SIZES) and one.spent()["updates"] == one.counts
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert [one.choose().source for _ in range(25)] == [other.choose().source for _ in range(25)]


def test_options_of_utility_reach_its_scheduler() -> None:
    given = {"alpha": 0.2, "samples": 3, "epsilon": 0.4, "floor": 0.1, "decay": 0.5, "smoothing": 0.3}
    text = ",".join([*(f"{name}={value}" for name, value in given.items()), "utility=taylor,normalise=relative"])
    model, probes = problem()
    scheduler = build_scheduler(parse_schedule(f"utility:{text}", SIZES), SIZES, probes, model, seed=0)
    named = given | {"utility": "taylor", "normalise": "relative"}
    assert {name: getattr(scheduler, name) for name in named} == named


def test_proportional_draws_by_size() -> None:
    scheduler = build_scheduler(Schedule("proportional"), SIZES, {}, [], seed=0)
    for _ in range(400):
        scheduler.choose()
    assert scheduler.counts["big"] / 400 == pytest.approx(0.75, abs=0.06)


def test_the_reward_of_exp3_is_the_relative_fall_of_the_losses() -> None:
    w = torch.zeros(1, requires_grad=True)
    goals = {
        "near": FunctionProbe(lambda _: None, lambda _: (w - 1).square().sum()),
        "far": FunctionProbe(lambda _: None, lambda _: (w - 2).square().sum()),
    }
    scheduler = LossExp3(["a", "b"], goals, [w], reward=0.5, gamma=0.2, updates=2)
    first = scheduler.choose().source
    scheduler.choose()
    w.data.fill_(0.1)
    told: list[Any] = []
    scheduler.observe = lambda source, reward: told.append((source, reward))  # type: ignore[method-assign]
    choice = scheduler.choose()
    assert told == [(first, pytest.approx(((1 - 0.81) + (4 - 3.61) / 4) / 2))]
    assert choice.cost.forwards == 4 and choice.cost.backwards == 0


def test_targets_whose_losses_are_not_finite_are_named() -> None:
    w = torch.zeros(1, requires_grad=True)
    goals = {
        "fine": FunctionProbe(lambda _: None, lambda _: (w - 1).square().sum()),
        "broken": FunctionProbe(lambda _: None, lambda _: (w / 0).sum()),
    }
    with pytest.raises(InputError, match="losses of target broken are not finite"):
        LossExp3(["a", "b"], goals, [w]).choose()


def test_looking_leaves_no_trace() -> None:
    model, probes = problem()
    scheduler = LossExp3(SIZES, probes, model, updates=1)
    before, state = torch.get_rng_state(), {name: value.clone() for name, value in model.state_dict().items()}
    losses = [scheduler._losses(list(SIZES), 0) for _ in range(2)]
    assert losses[0] == losses[1] and model.training and all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("unifrm", "uniform"),
        ("fixed", "fixed:big"),
        ("fixed:bug", "big"),
        ("utility:alpha=0", "alpha"),
        ("utility:alpha", "name=value"),
        ("utility:utility=exat", "exact"),
        (
            "utility:samples=100000",
            "samples is 100000; give a whole number from 1 to 100",
        ),  # not more than memory holds
        ("exp3:samples=0", "samples is 0; give a whole number from 1 to 100"),
        ("exp3:gama=0.1", "gamma"),
        ("exp3:reward=0", "reward"),
        ("softmax:temperature=1,temperature=2", "temperature of softmax is given twice"),
        ("uniform:updates=0", "updates"),
        ("uniform:task=big", "updates"),
        ("uniform:name=exp3", "updates"),  # not another schedule under this one's name
        ("exp3:alpha=0.1", "unknown option of exp3 'alpha'"),  # it would be without effect
    ],
)
def test_bad_schedules_are_one_line(text: str, told: str) -> None:
    with pytest.raises(InputError, match=told):
        parse_schedule(text, SIZES)


@pytest.mark.usefixtures("registries")
def test_a_scheduler_is_added_by_one_class_and_one_call() -> None:
    class Nth(BlockScheduler):
        def __init__(self, sources: Any, place: int, *, back: bool = False, updates: int = 1, seed: int = 0) -> None:
            super().__init__(sources, updates=updates, seed=seed)
            self.place = -place if back else place

        def _decide(self) -> Choice:
            return Choice(self.active[self.place], self.updates)

    register("nth", Nth)
    register("nth", Nth)  # the file was read again
    assert list(option_defaults("nth")) == ["place", "back", "updates"]
    for text, source in (("nth:1", "small"), ("nth:place=0", "big"), ("nth:1,back=true,updates=3", "small")):
        scheduler = build_scheduler(parse_schedule(text, SIZES), SIZES, {}, [])
        assert scheduler.choose().source == source
    for text, told in (("nth", "nth needs its place"), ("nth:x", "a whole number"), ("nth:1,bak=true", "back")):
        with pytest.raises(InputError, match=told):
            parse_schedule(text, SIZES)


def test_what_cannot_be_registered_is_one_line() -> None:
    class Vague(BlockScheduler):
        def __init__(self, *sources: str, **options: Any) -> None: ...

        def _decide(self) -> Choice: ...

    wrong: list[tuple[str, Any, str]] = [
        ("My own", Vague, "lower-case letters"),
        ("mine", object, "a subclass of BlockScheduler"),
        ("mine", Vague, "name each option"),
        ("uniform", Vague, "there is a scheduler uniform already"),
    ]
    for name, scheduler, told in wrong:
        with pytest.raises(InputError, match=told):
            register(name, scheduler)
