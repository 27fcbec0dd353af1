"""Uniform, proportional, round-robin, fixed and Exp3: their draws, their state, and Exp3 against a slow version."""

from __future__ import annotations

import json
import math
import warnings
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import pytest
from scipy.stats import chisquare

from metapretrain.episodes import Scheduler, TaskStream
from metapretrain.errors import InputError
from metapretrain.scheduling import (
    BlockScheduler,
    Exp3,
    Fixed,
    LoaderProbe,
    Proportional,
    RoundRobin,
    Uniform,
    agreement,
    build_scheduler,
    parse_schedule,
)
from tests.scheduling import slow

NAMES = ["a", "b", "c"]
MAKERS: dict[str, Callable[..., BlockScheduler]] = {
    "uniform": lambda **options: Uniform(NAMES, **options),
    "proportional": lambda **options: Proportional({"a": 1, "b": 2, "c": 5}, **options),
    "round-robin": lambda **options: RoundRobin(NAMES, **options),
    "fixed": lambda **options: Fixed(NAMES, "b", **options),
    "exp3": lambda **options: Exp3(NAMES, gamma=0.3, **options),
}


@pytest.mark.parametrize(
    ("name", "expected"),
    [("uniform", [1, 1, 1]), ("proportional", [1, 2, 5]), ("round-robin", [1, 1, 1]), ("exp3", [1, 1, 1])],
)
def test_shares(name: str, expected: list[float]) -> None:
    scheduler = MAKERS[name](seed=3)
    counts = Counter(scheduler.choose().source for _ in range(3000))
    shares = [3000 * part / sum(expected) for part in expected]
    assert chisquare([counts[n] for n in NAMES], shares).pvalue > 1e-3
    assert scheduler.counts == counts
    assert scheduler.share == 0.0


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("stop", [0, 1, 7])
def test_a_resumed_scheduler_goes_on_as_the_unbroken_one(name: str, stop: int) -> None:
    def rounds(scheduler: BlockScheduler, count: int) -> list[str]:
        chosen = []
        for _ in range(count):
            chosen.append(scheduler.choose().source)
            scheduler.observe(chosen[-1], {"a": 0.1, "b": 0.9, "c": 0.4}[chosen[-1]])
        return chosen

    unbroken, first, second = (MAKERS[name](updates=2, seed=1) for _ in range(3))
    unbroken.choices, first.choices, second.choices = [], [], []
    decided: list[int] = []
    unbroken.watch = lambda update, choice: decided.append(update)
    before = rounds(first, stop)
    second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    chosen = rounds(unbroken, stop + 20)
    assert before + rounds(second, 20) == chosen
    assert [source for source, count in unbroken.choices for _ in range(count)] == chosen
    assert decided == list(range(1, stop + 21, 2)) and all(a[0] != b[0] for a, b in pairwise(unbroken.choices))
    assert second.state_dict() == unbroken.state_dict()


@pytest.mark.parametrize("name", MAKERS)
def test_each_leads_a_stream_in_blocks(name: str) -> None:
    scheduler = MAKERS[name](updates=3)
    assert isinstance(scheduler, Scheduler)
    given = [next(iter(batch)) for batch in TaskStream({n: [1] for n in NAMES}, scheduler, seed=0, steps=30)]
    assert all(len(set(given[i : i + 3])) == 1 for i in range(0, 30, 3))


@pytest.mark.parametrize("name", ["uniform", "proportional", "round-robin", "exp3"])
def test_a_dropped_source_is_not_chosen(name: str) -> None:
    scheduler = MAKERS[name]()
    scheduler.choose()
    scheduler.drop("b")
    assert {scheduler.choose().source for _ in range(60)} == {"a", "c"}
    scheduler.drop("a"), scheduler.drop("c")
    with pytest.raises(InputError, match="every source has run out: a, b, c"):
        scheduler.choose()


def test_round_robin_after_a_drop_keeps_its_turns() -> None:
    scheduler = RoundRobin(NAMES)
    assert [scheduler.choose().source for _ in range(2)] == ["a", "b"]
    scheduler.drop("c")
    assert [scheduler.choose().source for _ in range(3)] == ["a", "b", "a"]


@pytest.mark.parametrize("gamma", [0.05, 0.4, 1.0])
def test_exp3_is_the_slow_version(gamma: float) -> None:
    scheduler = Exp3(NAMES, gamma=gamma, low=-1.0, high=3.0, seed=2)
    rewards, chosen = [], []
    for step in range(200):
        reward = {name: math.sin(step * (i + 1)) * 2 + 1 for i, name in enumerate(NAMES)}
        chosen.append(scheduler.choose().source)
        scheduler.observe(chosen[-1], reward[chosen[-1]])
        rewards.append({name: (min(max(r, -1.0), 3.0) + 1) / 4 for name, r in reward.items()})
    assert scheduler.probabilities() == pytest.approx(slow.exp3(rewards, chosen, NAMES, gamma), rel=1e-9)


def test_exp3_weights_that_would_overflow_stay_finite() -> None:
    scheduler = Exp3(NAMES, gamma=0.9)
    for _ in range(20_000):
        scheduler.choose()
        scheduler.observe("a", 1.0)
    chances = scheduler.probabilities()
    assert chances["a"] == pytest.approx(0.1 + 0.3)
    assert sum(chances.values()) == pytest.approx(1.0)


def test_exp3_finds_the_best_arm_with_little_regret() -> None:
    """Theorem 3.1 bounds the regret over 2,000 rounds by 2.63 sqrt(2000 * 3 ln 3) = 214 with the best gamma."""
    steps, gamma = 2000, math.sqrt(3 * math.log(3) / ((math.e - 1) * 2000))
    scheduler = Exp3(NAMES, gamma=gamma, seed=4)
    total = 0.0
    for _ in range(steps):
        source = scheduler.choose().source
        reward = {"a": 0.2, "b": 0.8, "c": 0.5}[source]
        total += reward
        scheduler.observe(source, reward)
    regret = 0.8 * steps - total
    assert 0 < regret < 2.63 * math.sqrt(steps * 3 * math.log(3))
    assert scheduler.probabilities()["b"] > 0.9


def test_wrong_arguments_are_one_line() -> None:
    for make, message in [
        (lambda: Uniform([]), "sources is \\[\\]; give at least one"),
        (lambda: Uniform("abc"), "sources is 'abc'; give several names"),
        (lambda: Uniform(["a", "a"]), "sources has a more than once"),
        (lambda: Uniform(NAMES, updates=0), "updates is 0; give a whole number of at least 1"),
        (lambda: Uniform(NAMES, seed=-1), "seed is -1"),
        (lambda: Proportional({"a": -1}), "size of 'a' is -1; give a number of at least 0"),
        (lambda: Proportional({"a": 0, "b": 0}), "the sizes of a, b are all 0"),
        (lambda: Proportional(["a"]), "give {source: size}"),
        (lambda: Fixed(NAMES, "d"), "unknown source 'd'"),
        (lambda: Exp3(NAMES, gamma=0), "gamma is 0; give a number above 0 and at most 1"),
        (lambda: Exp3(NAMES, low=1), "low is 1; give a number below 1.0"),
        (lambda: Uniform(NAMES).load_state_dict(RoundRobin(NAMES).state_dict()), "is of kind 'RoundRobin'"),
        (lambda: agreement({"a": 1.0}, {"b": 1.0}), "give the same sources"),
        (lambda: agreement({"a": math.nan}, {"a": 1.0}), "NaN or infinite"),
        (lambda: LoaderProbe([], len).sample(), "loader gave no batch"),
    ]:
        with pytest.raises(InputError, match=message):
            make()
    scheduler = Fixed(NAMES, "b")
    scheduler.drop("b")
    with pytest.raises(InputError, match="the fixed source 'b' has run out"):
        scheduler.choose()


def test_agreement_is_spearmans_with_ties() -> None:
    from scipy.stats import spearmanr

    exact, other = [3.0, 1.0, 1.0, 7.0, -2.0], [0.3, 0.3, 0.1, 0.2, 0.0]
    names = "abcde"
    found = agreement(dict(zip(names, exact, strict=True)), dict(zip(names, other, strict=True)))
    assert found.rank_correlation == pytest.approx(spearmanr(exact, other).statistic)
    assert found.regret == 7.0 - 3.0


@pytest.mark.parametrize("equal", [[2.0, 2.0, 2.0], [0.0, -0.0, 0.0], [1.0]])
def test_no_agreement_with_equal_utilities_and_no_warning(equal: list[float]) -> None:
    other = [1.0, 3.0, 2.0][: len(equal)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for pair in ((equal, other), (other, equal)):
            exact, approximate = ({str(row): value for row, value in enumerate(values)} for values in pair)
            assert math.isnan(agreement(exact, approximate).rank_correlation)


@pytest.mark.parametrize(("temperature", "wanted"), [(0.5, 16 / 17), (1.0, 4 / 5), (2.0, 2 / 3), (1e6, 1 / 2)])
def test_temperature_flattens_the_shares_of_sizes(temperature: float, wanted: float) -> None:
    scheduler = Proportional({"large": 4e300, "small": 1e300}, temperature=temperature, seed=3)
    chosen = [scheduler.choose().source for _ in range(2000)]
    assert abs(chosen.count("large") / 2000 - wanted) < 0.03
    plain = Proportional({"large": 4e300, "small": 1e300}, seed=3)
    assert (chosen == [plain.choose().source for _ in range(2000)]) == (temperature == 1)
    assert scheduler.state_dict().get("temperature", 1.0) == temperature


def test_temperature_is_an_option_of_schedules() -> None:
    schedule = parse_schedule("proportional:temperature=2", ["a", "b"])
    assert schedule.options == {"temperature": 2.0}
    with pytest.raises(InputError, match=r"temperature is 0.0; give a number above 0"):
        parse_schedule("proportional:temperature=0", ["a", "b"])
    never = build_scheduler(schedule, {"a": 5, "b": 0}, {}, [])
    assert {never.choose().source for _ in range(50)} == {"a"}
    with pytest.raises(InputError, match=r"temperature None, this one has 2.0"):
        Proportional({"a": 1}, temperature=2).load_state_dict(Proportional({"a": 1}).state_dict())
