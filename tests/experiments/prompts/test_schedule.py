"""Meta tasks chosen by a scheduler: the same budget, the same rows in turn, utilities in one pass, resumes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from prompts_pretraining import ScheduledTasks, TrainedPrompt, train_meta
from torch import Tensor

from metapretrain.errors import InputError
from metapretrain.prompts import PromptMAML
from metapretrain.scheduling import parse_schedule, probe_units
from metapretrain.training import RunFolder
from tests.experiments.prompts.test_pretraining import RECIPE, groups, kill_at, learner, pool, rows

UTILITY = "utility:alpha=0.5,samples=1,updates=2,epsilon=0.3"


def trained(schedule: str, run: RunFolder | None = None, objective: str = "meta") -> tuple[PromptMAML, TrainedPrompt]:
    maml = learner(inner_steps=int(objective == "meta"))
    recipe = replace(RECIPE, meta=replace(RECIPE.meta, scheduler=schedule))
    return maml, train_meta(maml, rows(), pool(), recipe, run, objective=objective)


@pytest.mark.parametrize("objective", ["meta", "multitask"])
def test_in_turn_is_what_all_at_once_is(objective: str) -> None:
    (one, scheduled), (other, plain) = trained("round-robin", objective=objective), trained("", objective=objective)
    assert torch.equal(one.prompt.weight, other.prompt.weight) and scheduled.steps == plain.steps
    assert scheduled.about["schedule"]["updates"] == dict.fromkeys(["task-0", "task-1", "task-2"], plain.steps)
    assert plain.about == {}


def test_a_task_that_comes_again_brings_other_rows() -> None:
    weights = [torch.zeros(1, requires_grad=True)]
    chosen = ScheduledTasks(rows(), "fixed:task-1", lambda _: torch.zeros(1), weights, seed=0)
    found = torch.cat([chosen.at(step) for step in range(4)])
    assert set(groups()[found.flatten()].tolist()) == {1}
    assert len({tuple(own) for own in found.sort(1).values.tolist()}) == 12  # 3 tasks a step, all different
    assert not set(found.flatten().tolist()) & set(torch.cat(rows().held_out, 1).flatten().tolist())


def test_utilities_are_those_of_the_outer_loss() -> None:
    """The task is taken whose step leads to the lowest losses of all, here found by taking each step."""
    maml = learner()
    asked: list[Tensor] = []

    def losses(given: Tensor) -> Tensor:
        asked.append(given)
        return maml.losses(pool().gather(given[:, :2]), pool().gather(given[:, 2:]))

    schedule = "utility:alpha=0.5,samples=1,updates=1"
    chosen = ScheduledTasks(rows(), schedule, losses, [maml.prompt.weight], seed=3)
    before = maml.prompt.weight.detach().clone()
    choice = chosen.scheduler.choose()
    assert torch.equal(maml.prompt.weight, before)
    sources, targets = [own[0] for own in asked if len(own) == 1], next(own for own in asked if len(own) == 3)
    expected = {}
    for name, own in zip(chosen.numbers, sources, strict=True):
        (gradient,) = torch.autograd.grad(losses(own[None]).sum(), maml.prompt.weight)
        with torch.no_grad():
            maml.prompt.weight.copy_(before - 0.5 * gradient)
        expected[name] = -float(losses(targets).detach().sum())
        with torch.no_grad():
            maml.prompt.weight.copy_(before)
    assert choice.utilities == pytest.approx(expected, rel=1e-9)
    assert choice.source == max(expected, key=expected.__getitem__)


def test_batches_of_a_meta_task_go_together() -> None:
    maml = learner()
    probe = rows().probe(1, lambda given: maml.losses(pool().gather(given[:, :2]), pool().gather(given[:, 2:])))
    batches = [probe.sample(torch.Generator().manual_seed(seed)) for seed in range(3)]
    assert {int(group) for batch in batches for group in groups()[batch]} == {1}
    one_by_one = torch.stack([probe.loss(batch) for batch in batches])
    assert probe.loss_many is not None
    torch.testing.assert_close(probe.loss_many(batches), one_by_one, rtol=1e-9, atol=0)


@pytest.mark.parametrize(("most", "largest"), [(None, 6), (6, 6), (5, 2), (2, 2), (1, 1)])
def test_taylor_keeps_no_larger_graph_than_there_is_memory_for(most: int | None, largest: int) -> None:
    maml = learner()
    asked: list[int] = []

    def losses(given: Tensor) -> Tensor:
        asked.append(len(given))
        return maml.losses(pool().gather(given[:, :2]), pool().gather(given[:, 2:]))

    schedule = "utility:alpha=0.5,samples=2,updates=1,utility=taylor"
    utilities = []
    for limit in (None, most):
        asked.clear()
        chosen = ScheduledTasks(rows(), schedule, losses, [maml.prompt.weight], seed=3, most=limit)
        utilities.append(chosen.scheduler.choose().utilities)
    assert max(asked) == largest and sum(asked) == 2 * (3 + 3)
    assert utilities[1] == pytest.approx(utilities[0], rel=1e-9)


def test_a_scheduled_pretraining_that_was_cut_short_ends_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, first = trained(UTILITY)
    kill_at(monkeypatch, 8)
    with pytest.raises(KeyboardInterrupt), RunFolder.open(tmp_path / "run", {}, resume=True) as run:
        trained(UTILITY, run)
    with RunFolder.open(tmp_path / "run", {}, resume=True) as run:
        maml, second = trained(UTILITY, run)
    assert torch.equal(maml.prompt.weight, whole.prompt.weight)
    mine, theirs = (dict(done.about["schedule"], probe_seconds=0) for done in (first, second))
    assert mine == theirs and mine["probe_forwards"] > 0 and sum(mine["updates"].values()) == 30


def test_probes_are_counted_with_the_inner_steps_of_their_losses() -> None:
    """Exact utilities with one inner step of first order: 3 tasks as sources, each tried on the losses of all 3."""
    recipe = replace(RECIPE, meta=replace(RECIPE.meta, scheduler=UTILITY.replace("0.3", "0"), order=1))
    told = train_meta(learner(order=1), rows(), pool(), recipe, None).about["schedule"]
    decisions, m = told["decisions"], recipe.meta.shots
    losses, gradients = 3 + 3 * 3, 3
    assert (told["probe_forwards"], told["probe_backwards"]) == (decisions * losses, decisions * gradients)
    assert told["probe_passes"] == decisions * m * (3 * losses + gradients)  # adapt there and back, then the query rows
    updates = 4 * m * sum(told["updates"].values())
    assert told["probe_share"] == pytest.approx(told["probe_passes"] / (told["probe_passes"] + updates), abs=1e-4)


@pytest.mark.parametrize("schedule", ["utility", "utility:utility=taylor,samples=3", "utility:normalise=relative"])
@pytest.mark.parametrize("passes", [(1, 2), (12, 12), (36, 4)])
def test_by_default_probes_are_at_or_just_under_a_quarter(schedule: str, passes: tuple[int, int]) -> None:
    parsed, (forward, backward) = parse_schedule(schedule, ["a", "b", "c"]), passes
    samples, utility, normalise = (parsed.option(name) for name in ("samples", "utility", "normalise"))
    table = rows()
    weights = [torch.zeros(1, requires_grad=True)]
    n = ScheduledTasks(table, schedule, lambda _: torch.zeros(()), weights, seed=0, passes=passes).scheduler.updates
    looks = samples * table.tasks
    losses, gradients = (2 * looks, 2 * looks) if utility == "taylor" else (looks * (1 + looks), looks)
    losses += looks if normalise else 0
    probes = forward * losses + backward * gradients
    assert probes == probe_units(3, 3, samples, utility, normalise, passes=passes)
    assert probes / (probes + n * (forward + backward)) <= 0.25
    assert probes / (probes + (n - 1) * (forward + backward)) > 0.25


def test_bad_schedules_are_refused_before_anything_runs() -> None:
    with pytest.raises(InputError, match="unknown schedule 'utilty'"):
        replace(RECIPE.meta, scheduler="utilty")
    with pytest.raises(InputError, match="task-7"):
        replace(RECIPE.meta, scheduler="fixed:task-7")


def test_more_tasks_than_memory_has_names_for_are_refused() -> None:
    with pytest.raises(InputError, match="give a whole number from 1 to 10000"):
        replace(RECIPE.meta, clusters=10**9, scheduler="uniform")
