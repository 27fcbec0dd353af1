"""Pretraining of prompts: rows of meta tasks, Algorithm 1 written out, the joint control, resumes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from prompts_experiment import mixed_stack, run_stack
from prompts_pretraining import MetaTasks, TrainedPrompt, crossed, train_meta
from torch import Tensor, nn

from metapretrain.data.made import made_sentiment
from metapretrain.errors import InputError
from metapretrain.experiments.prompts.data import ALL_WORDS, Pool, encode_rows
from metapretrain.experiments.prompts.recipe import (
    SENTIMENT,
    Fair,
    Meta,
    PromptMethod,
    PromptRecipe,
    Tuning,
    passes_per_step,
)
from metapretrain.experiments.prompts.tuning import Job, Stack
from metapretrain.graphs import Recorder
from metapretrain.models.language_models import load_language_model
from metapretrain.prompts import PromptedModel, PromptMAML, PromptTemplate, SoftPrompt, Verbalizer
from metapretrain.prompts import learner as learning
from metapretrain.training import RunFolder, loop

RECIPE = PromptRecipe(
    model="tiny",
    length=3,
    max_length=40,
    reads=120,
    validations=3,
    held_out=2,
    meta=Meta(clusters=3, shots=2, lr=0.1, inner_lr=0.5, weight_decay=0.1),
    mixed=Tuning(lr=0.1, epochs=2),
)


@cache
def net() -> tuple[Any, Any]:
    model, tokenizer = load_language_model("tiny")
    return model.double(), tokenizer


@cache
def pool() -> Pool:
    model = PromptedModel(net()[0], PromptTemplate("It was <X>."), Verbalizer(ALL_WORDS, net()[1]), max_length=40)
    return Pool.of(encode_rows(model, "It was <X>.", made_sentiment()["yelp5"].train, range(5)), "cpu")


def groups() -> Tensor:
    return torch.arange(200) * 7 % 3


def learner(inner_steps: int = 1, **options: Any) -> PromptMAML:
    soft = SoftPrompt(SoftPrompt.random(3, 32).weight.detach().double())
    words = Verbalizer(SENTIMENT, net()[1])
    settings = {"inner_lr": 0.5, "inner_steps": inner_steps, "max_length": 40} | options
    return PromptMAML(net()[0], soft, PromptTemplate("It was <X>."), words, **settings)


def rows(recipe: PromptRecipe = RECIPE) -> MetaTasks:
    return MetaTasks(groups(), shots=recipe.meta.shots, held_out=recipe.held_out, seed=4)


def kill_at(monkeypatch: pytest.MonkeyPatch, number: int) -> list[int]:
    """Interrupt this outer step of prompt MAML; the list grows with each step begun."""
    plain = PromptMAML.backward
    calls: list[int] = []

    def killed(self: PromptMAML, *pair: Any) -> Tensor:
        calls.append(1)
        if len(calls) == number:
            raise KeyboardInterrupt
        return plain(self, *pair)

    monkeypatch.setattr(PromptMAML, "backward", killed)
    return calls


def test_rows_of_a_step_are_of_their_task_and_never_held_out() -> None:
    found, held = rows(), torch.cat(rows().held_out, 1)
    seen: set[int] = set()
    for step in range(60):
        step_rows = found.at(step)
        assert step_rows.shape == (3, 4) and torch.equal(step_rows, rows().at(step))
        assert len(step_rows.unique()) == 12  # support and query rows are different ones
        assert all(len(groups()[own].unique()) == 1 for own in step_rows)
        seen |= set(step_rows.flatten().tolist())
    assert all(len(groups()[own].unique()) == 1 for own in held)
    assert not seen & set(held.flatten().tolist())
    assert len(seen) > 100


def test_small_tasks_are_merged_and_counted() -> None:
    few = MetaTasks([0] * 20 + [1] * 20 + [2] * 7, shots=2, held_out=3, seed=0)
    assert (few.tasks, few.moved, sorted(few.sizes)) == (2, 7, [20, 27])
    with pytest.raises(InputError, match="no group has 8 rows"):
        MetaTasks([0] * 7, shots=2, held_out=1, seed=0)


def by_hand(recipe: PromptRecipe, steps: int, inner: bool = True) -> Tensor:
    """Algorithm 1, task after task; without the inner step, the mean loss of all 2m rows of each."""
    maml = learner()
    prompt = nn.Parameter(maml.prompt.weight.detach().clone())
    optimizer = torch.optim.AdamW([prompt], lr=recipe.meta.lr, weight_decay=recipe.meta.weight_decay)
    for step in range(steps):
        total = torch.zeros((), dtype=torch.float64)
        taken = rows(recipe).at(step)
        for place, own in enumerate(taken):
            if recipe.meta.query == "other":
                own = torch.cat([own[:2], taken[(place - 1 - step % (len(taken) - 1)) % len(taken)][2:]])
            support, query, both = (pool().gather(part) for part in (own[:2], own[2:], own))
            if not inner:
                total = total + maml.prompted.losses(prompt, both).mean()
                continue
            (gradient,) = torch.autograd.grad(maml.prompted.losses(prompt, support).mean(), prompt, create_graph=True)
            total = total + maml.prompted.losses(prompt - recipe.meta.inner_lr * gradient, query).mean()
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
    return prompt.detach()


@pytest.fixture
def last_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last weights stay, and not the best."""
    monkeypatch.setattr(loop._Loop, "restore_best", lambda _: None)


@pytest.fixture(autouse=True)
def _attention_that_can_be_differentiated_twice() -> Any:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        yield


@pytest.mark.usefixtures("last_kept")
def test_meta_training_is_algorithm_1() -> None:
    maml = learner()
    done = train_meta(maml, rows(), pool(), RECIPE, None)
    assert (done.steps, done.tasks) == (10, 3)  # 120 reads: 3 tasks x 2 x 2 rows a step
    torch.testing.assert_close(maml.prompt.weight.detach(), by_hand(RECIPE, 10), rtol=1e-8, atol=1e-10)


@pytest.mark.usefixtures("last_kept")
def test_query_rows_of_another_task() -> None:
    recipe = replace(RECIPE, meta=replace(RECIPE.meta, query="other"))
    maml = learner()
    assert train_meta(maml, rows(), pool(), recipe, None).steps == 10
    torch.testing.assert_close(maml.prompt.weight.detach(), by_hand(recipe, 10), rtol=1e-8, atol=1e-10)
    for step in range(4):
        own = rows().at(step)
        other = crossed(own, step)
        assert torch.equal(other[:, :2], own[:, :2]) and sorted(other.flatten()) == sorted(own.flatten())
        kinds = groups()[other]
        assert not (kinds[:, 0] == kinds[:, 2]).any()
    with pytest.raises(InputError, match="query=other needs clusters of at least 2"):
        Meta(clusters=1, query="other")
    with pytest.raises(InputError, match="needs two meta tasks or more"):
        crossed(rows().at(0)[:1], 0)


@pytest.mark.usefixtures("last_kept")
def test_the_control_reads_the_same_rows_without_an_inner_step() -> None:
    maml = learner(inner_steps=0)
    assert train_meta(maml, rows(), pool(), RECIPE, None, objective="multitask").steps == 10
    torch.testing.assert_close(maml.prompt.weight.detach(), by_hand(RECIPE, 10, inner=False), rtol=1e-8, atol=1e-10)


def test_the_best_validated_prompt_is_kept(tmp_path: Path) -> None:
    maml = learner()
    with RunFolder.open(tmp_path / "run", {}) as run:
        done = train_meta(maml, rows(), pool(), replace(RECIPE, meta=replace(RECIPE.meta, lr=5.0)), run)
        lines = [line for line in read(run) if line["split"] == "validation"]
    accuracies = {line["step"]: line["value"] for line in lines if line["name"] == "accuracy"}
    assert list(accuracies) == [0, 3, 6, 9, 10]
    assert done.accuracy == max(accuracies.values())
    assert done.best_step == min(step for step, value in accuracies.items() if value == done.accuracy)
    names = {line["name"] for line in lines}
    watched = {"support_loss", "query_loss_before", "query_loss_after", "inner_gradient_norm"}
    assert watched | {f"accuracy_task_{k}" for k in range(3)} <= names


def test_steps_and_validations_are_recorded_and_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[str, int]] = []

    class Watched(Recorder):
        def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
            given.append((self.function.__name__, len(tensors)))
            return super().__call__(*tensors)

    monkeypatch.setattr(learning, "Recorder", Watched)
    train_meta(learner(), rows(), pool(), RECIPE, None)
    assert given.count(("_gradients", 8)) == 10 and given.count(("curves", 8)) == 5 * RECIPE.held_out


def read(run: RunFolder) -> list[Any]:
    from metapretrain.training.logs import read_metrics

    return list(read_metrics(run.path))


@pytest.mark.usefixtures("last_kept")
def test_a_pretraining_that_was_cut_short_ends_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rate = nn.Parameter(torch.full((3, 1), 0.5, dtype=torch.float64))
    whole = learner(inner_lr=rate)
    first = train_meta(whole, rows(), pool(), RECIPE, None)
    assert not torch.equal(rate, torch.full_like(rate, 0.5))  # learned as well

    def again() -> tuple[PromptMAML, TrainedPrompt]:
        maml = learner(inner_lr=nn.Parameter(torch.full((3, 1), 0.5, dtype=torch.float64)))
        with RunFolder.open(tmp_path / "run", {}, resume=True) as run:
            return maml, train_meta(maml, rows(), pool(), RECIPE, run)

    calls = kill_at(monkeypatch, 8)
    with pytest.raises(KeyboardInterrupt):
        again()
    maml, second = again()
    assert len(calls) == 8 + 4  # from the validation after 6 steps on
    assert torch.equal(maml.prompt.weight, whole.prompt.weight) and torch.equal(second.prompt, first.prompt)
    assert (second.best_step, second.accuracy) == (first.best_step, first.accuracy)


def test_the_paper_s_budget_ends_by_patience() -> None:
    still = replace(RECIPE, budget="paper", validations=50, meta=replace(RECIPE.meta, lr=1e-12, steps=100, patience=6))
    assert train_meta(learner(), rows(still), pool(), still, None).steps == 12  # 6 validations, one every 2 steps


def mixed(prompts: Mapping[int, Tensor], folder: Path) -> dict[int, TrainedPrompt]:
    words = Verbalizer(ALL_WORDS, net()[1])
    model = PromptedModel(net()[0], PromptTemplate("It was <X>."), words, max_length=40)

    def make(jobs: Any, **options: Any) -> Stack:
        return Stack(model, pool(), jobs, replace(RECIPE.mixed, patience=None), **options)

    runs = {seed: RunFolder.open(folder / str(seed), {}, resume=True) for seed in prompts}
    try:
        return run_stack(mixed_stack(make, prompts, 200, RECIPE, tuple(range(5))), runs, dict.fromkeys(prompts, 1))
    finally:
        for run in runs.values():
            run.close()


def test_seeds_of_mixed_pretraining_stand_in_one_stack_and_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = {seed: SoftPrompt.random(3, 32, seed=seed).weight.detach().double() for seed in (3, 8)}
    both = mixed(prompts, tmp_path / "both")
    assert {done.steps for done in both.values()} == {30}  # 120 reads in batches of 4
    alone = mixed({8: prompts[8]}, tmp_path / "alone")[8]
    torch.testing.assert_close(both[8].prompt, alone.prompt, rtol=1e-9, atol=1e-11)
    plain, calls = Stack._gradient_of, []

    def killed(self: Stack, *given: Any) -> Tensor:
        calls.append(1)
        if len(calls) == 25:
            raise KeyboardInterrupt
        return plain(self, *given)

    monkeypatch.setattr(Stack, "_gradient_of", killed)
    with pytest.raises(KeyboardInterrupt):
        mixed(prompts, tmp_path / "cut")
    resumed = mixed(prompts, tmp_path / "cut")
    assert len(calls) == 25 + 10
    for seed, done in resumed.items():
        assert torch.equal(done.prompt, both[seed].prompt) and done.accuracy == both[seed].accuracy


def test_every_step_of_mixed_pretraining_reads_a_whole_batch() -> None:
    jobs: list[Job] = []

    def take(given: Sequence[Job], **_: Any) -> Stack:
        jobs.extend(given)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mixed_stack(take, {0: torch.zeros(3, 32)}, 103, RECIPE, (0, 1))
    (job,) = jobs
    assert len(job.train) % RECIPE.mixed.batch_size == 0
    assert sorted([*job.train.tolist(), *job.validation.tolist()]) == list(range(103))


def test_budgets() -> None:
    recipe = PromptRecipe()
    assert recipe.steps("meta", 10) * recipe.reads_per_step("meta", 10) == recipe.steps("mixed", 1) * 4 == 40_000
    first = replace(recipe, meta=replace(recipe.meta, order=1))
    assert [passes_per_step(r, "meta", 10) for r in (recipe, first)] == [240, 160]
    assert passes_per_step(recipe, "multitask", 10) == 160
    paper = replace(recipe, budget="paper")
    assert (paper.steps("meta", 10), paper.steps("mixed", 1, 650_000)) == (20_000, 812_500)
    with pytest.raises(InputError, match="reads must be at least 80"):
        replace(recipe, reads=79).steps("meta", 10)
    with pytest.raises(InputError, match="reads is 3; give a whole number of at least 4"):
        replace(recipe, reads=3)
    with pytest.raises(InputError, match=r"length is 1e.*; give a whole number of at least 1"):
        replace(recipe, length=1e21)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="need a grouping"):
        PromptMethod(objective="meta")
    with pytest.raises(InputError, match="leave none to validate on"):
        mixed_stack(lambda *_, **__: None, {0: torch.zeros(3, 32)}, 4, RECIPE, (0, 1))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [PromptRecipe, Meta, Fair, Tuning])
def test_counts_are_whole(kind: Any) -> None:
    usual = kind()
    names = [one.name for one in fields(usual) if one.type in (int, int | None) and one.name != "order"]
    assert len(names) > 1
    for name, value in product(names, (2.5, True, -1, math.nan, 2**31)):
        with pytest.raises(InputError, match=rf"{name} is .*; give a whole number"):
            replace(usual, **{name: value})
