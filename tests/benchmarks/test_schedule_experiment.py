"""Scheduling experiments: the same choices after a resume, parts kept apart, heads fitted alike, costs counted."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from run_schedule import rows_of
from schedule_experiment import CHOICES, ScheduleExperiment, downstream_scores
from scratch_encoders import Encoders

from metapretrain.errors import InputError
from metapretrain.experiments.base import Context, Machine
from metapretrain.experiments.schedule.recipe import ScheduleData, ScheduleMethod, ScheduleRecipe, planned_scheduler
from metapretrain.experiments.schedule.tasks import made_schedule_tasks
from metapretrain.experiments.schedule.tasks.base import TaskLoader
from metapretrain.experiments.schedule.training import ScheduledPretraining, ScheduleStep, TaskProbe
from metapretrain.scheduling import UtilityScheduler, probe_units
from metapretrain.scheduling.probes import losses_of
from metapretrain.training import checkpoint, loop

SOURCES, TARGETS, DOWNSTREAM = ("masked-lm", "reordering"), ("conll04", "squad"), ("rte",)
RECIPE = ScheduleRecipe(
    updates=12,
    batch_size=4,
    encoder="tiny",
    block=3,
    epsilon=0.3,
    floor=0.1,
    head_updates=2,
    target_batches=1,
    evaluations=3,
    finetune_updates=2,
    finetune_batch=4,
    lr=3e-3,
)
Make = Callable[..., ScheduleExperiment]


@pytest.fixture(scope="module")
def data() -> ScheduleData:
    sources, targets = made_schedule_tasks(0, names=(*SOURCES, *TARGETS, *DOWNSTREAM))
    return ScheduleData({**sources, **targets}, SOURCES, TARGETS, DOWNSTREAM)


@pytest.fixture
def make(tmp_path: Path, data: ScheduleData) -> Make:
    def build(out: str = "runs", **changes: Any) -> ScheduleExperiment:
        usual: dict[str, Any] = {"recipe": RECIPE, "data": data, "machine": Machine(), "out": tmp_path / out}
        usual |= {"figures": None, "make_encoder": Encoders("tiny")} | changes
        return ScheduleExperiment("schedule", "made", "short", **usual)

    return build


def pretraining(
    data: ScheduleData, name: str = "uniform", setting: str = "aware", **changes: Any
) -> ScheduledPretraining:
    recipe = replace(RECIPE, **changes)
    return ScheduledPretraining(Encoders("tiny")(0), Context(name, ScheduleMethod(name, setting), 0, recipe, data))


class Killed(Exception):
    pass


@pytest.mark.parametrize(
    ("name", "stop"),  # 4: inside a decision of utilities or exp3; 9: before a new one
    [
        ("utility-exact-aware", 4),
        ("utility-exact-aware", 9),
        ("utility-taylor-agnostic", 9),
        ("exp3-agnostic", 4),
        ("softmax-aware", 4),
        ("softmax-agnostic", 9),
        ("pike-aware", 9),
        ("proportional-aware", 9),
    ],
)
def test_a_resumed_run_makes_the_same_choices(
    make: Make, monkeypatch: pytest.MonkeyPatch, name: str, stop: int
) -> None:
    experiment = make("whole")
    method = rows_of(SOURCES, TARGETS)[name]
    whole = experiment.row(name, method, 0)
    save = checkpoint.save

    def kill(folder: Path, step: int, *rest: Any) -> None:
        save(folder, step, *rest)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(loop._Loop, "_checkpoint_due", lambda self: self.step == stop)
        patch.setattr(loop.checkpoint, "save", kill)
        with pytest.raises(Killed):
            make("cut").row(name, method, 0)
    again = make("cut", resume=True)
    resumed = again.row(name, method, 0)
    paths = [one.path(name, 0) / CHOICES for one in (experiment, again)]
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert sum(count for _, count in json.loads(paths[0].read_text())) == 12
    assert {**resumed["curve"]} == {**whole["curve"]}
    assert resumed["metrics"] == whole["metrics"] and resumed["budget"] == whole["budget"]


@pytest.mark.parametrize("setting", ["aware", "agnostic"])
@pytest.mark.parametrize("name", ["utility-exact", "softmax", "exp3", "pike", "uniform"])
def test_what_utilities_see_is_held_out_of_training_and_never_reported(
    data: ScheduleData, monkeypatch: pytest.MonkeyPatch, name: str, setting: str
) -> None:
    made: dict[str, set[tuple[str, str, int]]] = {"looked": set(), "trained": set()}
    now, make = ["looked"], {name: task.make for name, task in data.tasks.items()}
    for task in data.tasks.values():

        def of(split: str, rows: Any, random: Any, task: Any = task) -> Any:
            made[now[0]] |= {(task.name, split, row) for row in rows}
            return make[task.name](split, rows, random)

        monkeypatch.setattr(task, "make", of)
    row = pretraining(data, name, setting)
    row.scheduler.follow(torch.optim.AdamW(row.step.parameters()))
    watched, held = data.watched(setting), set[tuple[str, str, int]]()
    for task in watched:
        trained, probed = row.held[task]
        size = data.tasks[task].sizes["train"]
        assert [*trained, *probed] == list(range(size)) and len(probed) == max(1, round(0.1 * size))
        held |= {(task, "train", place) for place in probed} if name not in ("uniform", "pike") else set()
    for _ in range(40):
        row.scheduler.choose()
    looked = {split for task, split, _ in made["looked"]}
    assert looked <= {"train"} and bool(made["looked"]) == (name != "uniform")
    assert (held & made["looked"] != set()) == bool(held)
    now[0] = "trained"
    row.fit_heads()
    again = pretraining(data, name, setting, updates=30)
    seen = TaskLoader.__getitem__
    monkeypatch.setattr(TaskLoader, "__getitem__", lambda self, i: (now.__setitem__(0, "trained"), seen(self, i))[1])
    monkeypatch.setattr(TaskProbe, "sample", lambda self, g: (now.__setitem__(0, "looked"), sampled(self, g))[1])
    loop.train(**vars(again.training()))
    assert {split for _, split, _ in made["trained"]} == {"train"} and not made["trained"] & held
    reported = {(task, split) for task, split, _ in made["looked"] if split != "train"}
    assert reported == {(task, "test") for task in watched}
    assert set(again.labels()) == (set(TARGETS) if setting == "aware" else set())
    for task, count in again.labels().items():
        read = {one for part in made.values() for one in part if one[:2] == (task, "train")}
        assert len({one for one in made["trained"] if one[0] == task}) <= count <= data.tasks[task].sizes["train"]
        assert len(read) <= data.tasks[task].sizes["train"]


sampled = TaskProbe.sample


def test_joint_losses_are_those_of_each_batch(data: ScheduleData) -> None:
    step = ScheduleStep(Encoders("tiny")(0), {name: data.tasks[name] for name in SOURCES + TARGETS}, 0).eval()
    generator = torch.Generator().manual_seed(0)
    batches = {name: [task.sample("train", 3, generator) for _ in range(2)] for name, task in step.tasks.items()}
    assert len({batch["input_ids"].shape[1] for listed in batches.values() for batch in listed}) > 1
    joint = step.joint_losses(batches, Machine())
    for name, listed in batches.items():
        alone = torch.stack([step({name: batch})[name] for batch in listed])
        torch.testing.assert_close(joint[name], alone)
        torch.testing.assert_close(
            losses_of(name, TaskProbe(step, name, "train", 3, Machine(), joint=True), listed), alone
        )


@pytest.mark.parametrize("setting", ["aware", "agnostic"])
def test_utilities_of_batches_together_are_those_of_batch_after_batch(data: ScheduleData, setting: str) -> None:
    together, alone = (
        pretraining(data, "utility-taylor", setting, joint=joint, alpha=0.1).scheduler for joint in (True, False)
    )
    assert isinstance(together, UtilityScheduler) and isinstance(alone, UtilityScheduler)
    one, other = together.compare(), alone.compare()
    for utility in ("exact", "taylor"):
        values = list(other[utility].values())
        spread = max(values) - min(values)
        assert spread > 0 and one[utility] == pytest.approx(other[utility], abs=0.01 * spread)


@pytest.mark.parametrize("utility", ["exact", "taylor"])
def test_the_cost_of_a_decision_is_what_the_plan_says(data: ScheduleData, utility: str) -> None:
    made = pretraining(data, f"utility-{utility}", epsilon=0.0, floor=0.0)
    choice = made.scheduler.choose()
    planned = planned_scheduler(made.context.method, SOURCES + TARGETS, TARGETS, RECIPE)
    assert choice.cost.units == planned.units == probe_units(4, 2, 2, utility)
    exp3 = pretraining(data, "exp3")
    assert exp3.scheduler.choose().cost.units == exp3.scheduler.units == 4


def test_heads_are_fitted_alike_in_every_row_and_the_encoder_is_not(data: ScheduleData) -> None:
    states = []
    for name in ("uniform", "utility-taylor"):
        made = pretraining(data, name)
        begin = {key: value.clone() for key, value in made.step.state_dict().items()}
        made.fit_heads()
        after = made.step.state_dict()
        moved = {key for key, value in after.items() if not torch.equal(value, begin[key])}
        assert moved and all(key.startswith(("heads.conll04", "heads.squad")) for key in moved)
        assert all(p.requires_grad for p in made.step.encoder.parameters())
        states.append(after)
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_reported_losses_leave_no_trace_and_are_the_same_again(data: ScheduleData) -> None:
    made, before = pretraining(data), torch.get_rng_state()
    first = made.reported()
    assert made.reported() == first and list(first) == list(TARGETS)
    assert made.step.training and torch.equal(before, torch.get_rng_state())


def test_fine_tuning_leaves_the_pretrained_encoder_as_it_is(data: ScheduleData) -> None:
    encoder = Encoders("tiny")(0)
    before = {key: value.clone() for key, value in encoder.state_dict().items()}
    context = Context("row", ScheduleMethod("uniform", "aware"), 0, RECIPE, data)
    scores = downstream_scores(encoder, "rte", context)
    assert {"rte_accuracy", "validation_rte_accuracy"} <= scores.keys()
    assert all(torch.equal(value, before[key]) for key, value in encoder.state_dict().items())
    assert scores == downstream_scores(encoder, "rte", context)
    tuned = downstream_scores(encoder, "rte", replace(context, data=replace(data, tuning=True)))
    assert all(key.startswith("validation_") for key in tuned)


def test_a_task_has_one_part(data: ScheduleData) -> None:
    with pytest.raises(InputError, match="rte is among targets and downstream"):
        ScheduleData(data.tasks, SOURCES, ("rte",), DOWNSTREAM)
    with pytest.raises(InputError, match="sources names no task"):
        ScheduleData(data.tasks, (), TARGETS, DOWNSTREAM)
    assert (data.chosen("aware"), data.watched("aware")) == (SOURCES + TARGETS, TARGETS)
    assert (data.chosen("agnostic"), data.watched("agnostic")) == (SOURCES, SOURCES)


def test_more_batches_than_memory_holds_are_refused() -> None:
    for name, most in (("samples", 100), ("target_batches", 1000)):
        replace(RECIPE, **{name: most})
        with pytest.raises(InputError, match=f"{name} is 100000; give a whole number from 1 to {most}"):
            replace(RECIPE, **{name: 100_000})


@pytest.mark.parametrize("change", [{"alpha": 0.0}, {"smoothing": 1.0}, {"block": 0}, {"normalise": "mean"}, {"lr": 0}])
def test_a_recipe_refuses_what_would_fail_later(change: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        replace(RECIPE, **change)
