"""Prompts tuned in one batch end as if each were tuned alone, by torch's AdamW."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from prompts_experiment import predict_rows
from torch import Tensor

from metapretrain.data.made import made_sentiment
from metapretrain.experiments.prompts.data import (
    ALL_WORDS,
    PAIR_WORDS,
    WORDS,
    Pool,
    allowed_words,
    encode_rows,
    side_by_side,
)
from metapretrain.experiments.prompts.recipe import Tuning
from metapretrain.experiments.prompts.tuning import Job, Progress, Stack, tune_model
from metapretrain.models.language_models import load_language_model
from metapretrain.prompts import PromptedModel, PromptTemplate, SoftPrompt, Verbalizer
from metapretrain.training import logs

SETS = ("sst5", "amazon2", "semeval-laptop")
TUNING = Tuning(lr=0.3, batch_size=4, epochs=6, patience=2, warmup=3, weight_decay=0.1)


@cache
def model() -> PromptedModel:
    net, tokenizer = load_language_model("tiny")
    words = Verbalizer(ALL_WORDS, tokenizer)
    return PromptedModel(net.double(), PromptTemplate("It was <X>."), words, max_length=40)


@cache
def pool() -> Pool:
    made = made_sentiment()
    parts = [
        encode_rows(model(), "It was <X>.", made[name].train, words_of(made[name].num_classes, False)) for name in SETS
    ]
    return Pool.of(side_by_side(parts), "cpu")


def words_of(classes: int, pairs: bool) -> tuple[int, ...]:
    return tuple(map(ALL_WORDS.index, PAIR_WORDS if pairs else WORDS[classes]))


def jobs() -> list[Job]:
    """Of three sets, with 10, 7 and 3 rows to tune on and 8, 8 and 5 to validate on."""
    found = []
    for number, (train, held, classes) in enumerate(((10, 8, 5), (7, 8, 2), (3, 5, 3))):
        rows = torch.arange(100 * number, 100 * number + train + held)
        prompt = SoftPrompt.random(3, 32, seed=number).weight.detach().double()
        words = words_of(classes, False)
        found.append(Job(SETS[number], prompt, rows[:train], rows[train:], words, seed=number + 5))
    return found


def run(some: list[Job], tuning: Tuning = TUNING, **options: object) -> dict[str, Progress]:
    return Stack(model(), pool(), some, tuning, **options).run()  # type: ignore[arg-type]


def same(one: Progress, other: Progress) -> None:
    assert (one.step, one.validated.step, one.accuracy, one.history) == (
        other.step,
        other.validated.step,
        other.accuracy,
        other.history,
    )
    for name in ("prompt", "best"):
        torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=1e-9, atol=1e-11)


def old_adamw(prompts: Tensor, mean: Tensor, square: Tensor, gradient: Tensor, lr: list[float], step: int) -> None:
    """One step of AdamW for prompts (R, L, D) with a rate each, as the stack took it by itself."""
    rates = torch.tensor(lr, dtype=torch.float64)[:, None, None]
    prompts.mul_(1 - rates * TUNING.weight_decay)
    mean.lerp_(gradient, 0.1)
    square.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
    prompts.sub_(rates / (1 - 0.9**step) * mean / (square.sqrt() / math.sqrt(1 - 0.999**step) + 1e-8))


def test_updates_are_those_that_the_stack_computed_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    stack, given = Stack(model(), pool(), jobs(), replace(TUNING, patience=None)), []
    plain, rate = Stack._gradient_of, Stack._rate

    def noted(self: Stack, prompts: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        running = [job for job in self.jobs if not self.progress[job.name].done]
        found = plain(self, prompts, *rest)
        given.append((running, prompts, found[0], [rate(self, job) for job in running]))
        return found

    monkeypatch.setattr(Stack, "_gradient_of", noted)
    stack.run()
    prompts = {job.name: job.prompt[None].clone() for job in stack.jobs}
    moments = {name: (torch.zeros_like(prompt), torch.zeros_like(prompt)) for name, prompt in prompts.items()}
    for step, (running, before, gradients, rates) in enumerate(given, start=1):
        for place, job in enumerate(running):
            torch.testing.assert_close(before[place], prompts[job.name][0], rtol=0, atol=1e-9)
            old_adamw(prompts[job.name], *moments[job.name], gradients[place][None], [rates[place]], step)
    assert len({len(running) for running, *_ in given}) == 3
    for name, prompt in prompts.items():
        torch.testing.assert_close(stack.progress[name].prompt.detach(), prompt[0], rtol=0, atol=1e-9)


@pytest.mark.parametrize("normalise", ["vocabulary", "labels"])
def test_each_ends_as_if_tuned_alone(normalise: str) -> None:
    together = run(jobs(), normalise=normalise)
    assert len({state.step for state in together.values()}) > 1  # some stop before others
    for job in jobs():
        same(together[job.name], run([job], normalise=normalise)[job.name])


def test_how_many_go_through_the_model_at_a_time_does_not_matter() -> None:
    together, few = run(jobs()), run(jobs(), rows_per_pass=3)
    for name, state in together.items():
        same(state, few[name])


def test_jobs_that_fill_up_a_shape_change_nothing() -> None:
    """As on a GPU, where few shapes are recorded."""
    stack = Stack(model(), pool(), [*jobs(), *(replace(job, name=f"{job.name} again") for job in jobs()[:2])], TUNING)
    stack.fixed_shapes = True
    done, alone = stack.run(), run(jobs())
    for name, state in done.items():
        same(state, alone[name.removesuffix(" again")])


def reference(job: Job, tuning: Tuning) -> tuple[Tensor, Tensor, list[float]]:
    """The last prompt and the best one, and accuracies, by torch's AdamW, an epoch after the other."""
    prompt = torch.nn.Parameter(job.prompt.clone())
    optimizer = torch.optim.AdamW([prompt], lr=1.0, weight_decay=tuning.weight_decay)
    total, step, accuracies = tuning.epochs * math.ceil(len(job.train) / tuning.batch_size), 0, []
    best: Tensor = prompt
    for epoch in range(tuning.epochs):
        order = job.train[torch.from_numpy(np.random.default_rng([job.seed, epoch]).permutation(len(job.train)))]
        for rows in order.split(tuning.batch_size):
            warm = (step + 1) / tuning.warmup
            decayed = 1 - (step - tuning.warmup) / (total - tuning.warmup)
            optimizer.param_groups[0]["lr"] = tuning.lr * (warm if step < tuning.warmup else decayed)
            optimizer.zero_grad()
            model().losses(prompt, pool().gather(rows)).mean().backward()
            optimizer.step()
            step += 1
        held = pool().gather(job.validation)
        with torch.no_grad():
            scores = model()(prompt, held)[:, list(job.words)]
        labels = torch.tensor([job.words.index(word) for word in held.labels.tolist()])  # type: ignore[union-attr]
        accuracies.append(float((scores.argmax(1) == labels).double().mean()))
        if accuracies[-1] > max(accuracies[:-1], default=-1.0):
            best = prompt.detach().clone()
    return prompt.detach(), best, accuracies


def test_tuning_is_that_of_a_plain_loop() -> None:
    patient = replace(TUNING, patience=None)
    for job in jobs():
        state = run([job], patient)[job.name]
        prompt, best, accuracies = reference(job, patient)
        torch.testing.assert_close(state.prompt, prompt, rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(state.best, best, rtol=1e-7, atol=1e-9)
        assert [accuracy for _, accuracy in state.history[1:]] == accuracies


def test_it_stops_after_validations_without_a_better_one() -> None:
    state = run(jobs()[:1], replace(TUNING, epochs=50, lr=1e-9))["sst5"]
    assert (state.validated.step, state.step) == (3, 9)  # the first epoch is the best; patience is 2
    kept = run(jobs()[:1], replace(TUNING, epochs=50, lr=1e-9, keep_start=True))["sst5"]
    assert (kept.validated.step, kept.step) == (0, 6)
    assert torch.equal(kept.best, jobs()[0].prompt)


def test_without_a_terminal_it_tells_how_far_it_is(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "TOLD_SECONDS", 0.0)
    with caplog.at_level("INFO", "metapretrain"):
        run(jobs())
    assert any(f"{len(jobs())} prompts: " in line and "updates, about" in line for line in caplog.messages)


def test_given_steps_and_validations() -> None:
    state = run(jobs()[:1], replace(TUNING, patience=None), steps=10, every=4)["sst5"]
    assert [step for step, _ in state.history] == [0, 4, 8, 10]


def test_a_run_that_goes_on_ends_the_same() -> None:
    whole, kept, stack = run(jobs()), {}, Stack(model(), pool(), jobs(), TUNING)

    class Cut(Exception):
        pass

    def cut(job: Job, state: Progress) -> None:
        kept[job.name] = copy.deepcopy(stack.state_of(job.name))
        if len(state.history) == 3:
            raise Cut

    with pytest.raises(Cut):
        stack.run(cut)
    again = Stack(model(), pool(), jobs(), TUNING)
    for name, state in kept.items():
        again.load_state_of(name, state)
    for name, progress in again.run().items():
        same(progress, whole[name])


def test_a_prompt_that_diverged_is_never_the_best_nor_harms_others(caplog: pytest.LogCaptureFixture) -> None:
    first, *rest = jobs()
    lost = replace(first, prompt=torch.full_like(first.prompt, 1e308))  # too much for the first layer
    found, alone = run([lost, *rest]), run(rest)
    assert not found["sst5"].prompt.isfinite().all() and torch.equal(found["sst5"].best, lost.prompt)
    assert (found["sst5"].accuracy, found["sst5"].validated.step, found["sst5"].step) == (0, 0, 3)
    assert "prompt sst5 diverged by step 3: that of step 0 is kept; lower its lr" in caplog.messages
    for job in rest:
        same(found[job.name], alone[job.name])


def test_a_rate_that_is_too_high_keeps_the_start(caplog: pytest.LogCaptureFixture) -> None:
    starts = {job.name: job.prompt for job in jobs()}
    for name, state in run(jobs(), replace(TUNING, lr=1e200, warmup=0)).items():
        assert torch.equal(state.best, starts[name]) and state.validated.step == 0
        assert state.accuracy == state.history[0][1] > 0
        assert f"prompt {name} diverged by step {state.step}: that of step 0 is kept" in caplog.text


def test_full_tuning_leaves_the_model_as_it_was() -> None:
    job = replace(jobs()[0], prompt=torch.zeros(0, 32, dtype=torch.float64))
    before = {name: value.clone() for name, value in model().model.state_dict().items()}
    tuned, state = tune_model(model(), pool(), job, replace(TUNING, lr=1e-2, epochs=3))
    assert all(torch.equal(value, before[name]) for name, value in model().model.state_dict().items())
    assert any(not torch.equal(value, before[name]) for name, value in tuned.model.state_dict().items())
    assert not any(parameter.requires_grad for parameter in model().model.parameters())
    rows = predict_rows(
        tuned, job.prompt, pool(), job.validation, job.words, device="cpu", precision="fp32", batch_size=3
    )
    labels = pool().batch.labels[job.validation]  # type: ignore[index]
    assert float((torch.tensor(job.words)[rows] == labels).double().mean()) == state.accuracy


def test_a_model_that_diverged_is_given_back_as_it_began(caplog: pytest.LogCaptureFixture) -> None:
    job = replace(jobs()[0], prompt=torch.zeros(0, 32, dtype=torch.float64))
    tuned, state = tune_model(model(), pool(), job, replace(TUNING, lr=1e29, weight_decay=2e9, warmup=0, epochs=3))
    assert state.history == [(3, 0.0)] and state.validated.step == 0
    assert "the model of sst5 diverged by step 3: that of step 0 is kept; lower its lr" in caplog.messages
    for name, value in model().model.state_dict().items():
        assert torch.equal(tuned.model.state_dict()[name], value.float())
    _, same_start = tune_model(model(), pool(), job, replace(TUNING, lr=1e-30, epochs=1))
    assert state.accuracy == same_start.accuracy


def test_words_of_other_sets_are_never_predicted() -> None:
    assert allowed_words([words_of(2, False), words_of(2, True)], len(ALL_WORDS), "cpu").sum(1).tolist() == [2, 2]
    rows = predict_rows(
        model(), jobs()[1].prompt, pool(), jobs()[1].train, jobs()[1].words, device="cpu", precision="fp32"
    )
    assert set(rows.tolist()) <= {0, 1}
