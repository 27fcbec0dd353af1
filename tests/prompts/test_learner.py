"""Prompt-MAML: the stack of prompts against one task after another, differences, training."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from metapretrain.errors import InputError
from metapretrain.prompts import PromptBatch, PromptMAML, PromptTemplate, SoftPrompt, Verbalizer, tune
from metapretrain.training import RunFolder, TrainReport
from tests.prompts.tiny import WORDS, model_of, tokenizer_of

TASKS, ROWS = 3, 2
SOME = ["the film was great", "bad plot", "a film", "It was maybe good", "great", "the plot was bad, bad", "x"]
MODELS = ["gpt2", "llama", "t5", "bert"]


def learner(name: str, **options: Any) -> PromptMAML:
    prompt = SoftPrompt.random(4, 16, seed=1).double()
    verbalizer = Verbalizer(WORDS, tokenizer_of(name))
    return PromptMAML(model_of(name), prompt, PromptTemplate(), verbalizer, **{"inner_lr": 0.5, **options})


def parts(maml: PromptMAML, seed: int = 0) -> tuple[PromptBatch, PromptBatch]:
    generator = torch.Generator().manual_seed(seed)
    data = maml.encode(SOME, labels=[4, 1, 2, 3, 4, 1, 0])
    rows = torch.stack([torch.randperm(len(SOME), generator=generator)[: 2 * ROWS] for _ in range(TASKS)])
    return data.take(rows[:, :ROWS]), data.take(rows[:, ROWS:])


def loop(
    maml: PromptMAML, support: PromptBatch, query: PromptBatch, steps: int, order: int, clip: float = math.inf
) -> tuple[Tensor, Tensor]:
    """Algorithm 1, one task and one row at a time: losses (K,) and the gradient of their sum."""

    def mean_loss(prompt: Tensor, batch: PromptBatch, task: int) -> Tensor:
        rows = [batch.take(torch.tensor([task])).flat().take(torch.tensor([row])) for row in range(batch.shape[1])]
        return torch.stack([maml.prompted.losses(prompt, row.trimmed(multiple=1)) for row in rows]).mean()

    initial = maml.prompt.weight.detach().clone().requires_grad_()
    losses = []
    for task in range(support.shape[0]):
        prompt = initial
        for _ in range(steps):
            (gradient,) = torch.autograd.grad(mean_loss(prompt, support, task), prompt, create_graph=order == 2)
            if gradient.detach().norm() > clip:
                gradient = clip * gradient / gradient.norm()
            prompt = prompt - maml.inner_lr * gradient
        losses.append(mean_loss(prompt, query, task))
    return torch.stack(losses).detach(), torch.autograd.grad(torch.stack(losses).sum(), initial)[0]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("steps", "order"), [(1, 2), (2, 2), (1, 1), (0, 2)])
def test_equals_one_task_after_another(name: str, steps: int, order: int) -> None:
    maml = learner(name, inner_steps=steps, order=order)
    support, query = parts(maml)
    losses = maml.losses(support, query)
    maml.loss(support, query).backward()
    gradient = maml.prompt.weight.grad
    with sdpa_kernel(SDPBackend.MATH):
        expected_losses, expected = loop(maml, support, query, steps, order)
    torch.testing.assert_close(losses.detach(), expected_losses, rtol=0, atol=1e-8)
    torch.testing.assert_close(gradient, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(("steps", "order"), [(1, 2), (2, 2), (2, 1)])
def test_each_task_is_clipped_on_its_own(steps: int, order: int) -> None:
    free = learner("llama")
    support, query = parts(free)
    norms = free.curves(support, query)["inner_gradient_norm"].sort().values
    clip = float((norms[0] + norms[1]) / 2)  # the first step of one task is not clipped
    maml = learner("llama", inner_steps=steps, order=order, inner_clip=clip)
    losses = maml.backward(support, query)
    with sdpa_kernel(SDPBackend.MATH):
        expected_losses, expected = loop(maml, support, query, steps, order, clip)
    torch.testing.assert_close(losses, expected_losses, rtol=0, atol=1e-8)
    torch.testing.assert_close(maml.prompt.weight.grad, expected, rtol=1e-8, atol=1e-8)
    after = maml.curves(support, query)["query_loss_after"]
    torch.testing.assert_close(after, expected_losses, rtol=0, atol=1e-8)
    assert not torch.allclose(losses, learner("llama", inner_steps=steps, order=order).losses(support, query))


def test_second_order_is_the_derivative_of_the_loss() -> None:
    maml = learner("gpt2")
    pair = parts(maml)
    maml.backward(*pair)
    assert maml.prompt.weight.grad is not None
    direction = torch.randn(4, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    start, step, values = maml.prompt.weight.detach().clone(), 1e-5, []
    for sign in (1, -1):
        with torch.no_grad():
            maml.prompt.weight.copy_(start + sign * step * direction)
        values.append(float(maml.loss(*pair).detach()))
    slope = (values[0] - values[1]) / (2 * step)
    assert slope == pytest.approx(float((maml.prompt.weight.grad * direction).sum()), rel=1e-6)
    first = learner("gpt2", order=1)
    first.backward(*pair)
    assert first.prompt.weight.grad is not None
    assert not torch.allclose(first.prompt.weight.grad, maml.prompt.weight.grad, rtol=1e-3)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("chunk", [1, 2, 3, 10])
def test_chunks_and_the_reduction_change_only_what_they_say(chunk: int, reduction: str) -> None:
    whole, chunked = learner("bert"), learner("bert", chunk=chunk, reduction=reduction, checkpoint=True)
    pair = parts(whole)
    losses = whole.backward(*pair)
    torch.testing.assert_close(chunked.losses(*pair).detach(), losses, rtol=0, atol=1e-10)
    torch.testing.assert_close(chunked.backward(*pair), losses, rtol=0, atol=1e-10)
    assert whole.prompt.weight.grad is not None and chunked.prompt.weight.grad is not None
    scale = 1 if reduction == "sum" else TASKS
    torch.testing.assert_close(chunked.prompt.weight.grad * scale, whole.prompt.weight.grad, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(whole.loss(*pair), chunked.loss(*pair) * scale)


def test_a_learned_inner_rate_gets_a_gradient() -> None:
    maml = learner("gpt2", inner_lr=torch.full((4, 1), 0.5, dtype=torch.float64, requires_grad=True))
    pair = parts(maml)
    torch.testing.assert_close(maml.losses(*pair), learner("gpt2").losses(*pair), rtol=0, atol=1e-12)
    maml.backward(*pair)
    assert isinstance(maml.inner_lr, Tensor) and maml.inner_lr.grad is not None
    assert bool(maml.inner_lr.grad.abs().gt(0).all())


def test_curves_are_those_of_the_losses() -> None:
    maml = learner("t5")
    support, query = parts(maml)
    curves = maml.curves(support, query)
    assert maml.prompt.weight.grad is None
    torch.testing.assert_close(curves["query_loss_after"], maml.losses(support, query).detach())
    torch.testing.assert_close(curves["support_loss"], maml.prompted.losses(maml.prompt(), support).mean(1).detach())
    moved = (maml.adapted(support) - maml.prompt()).flatten(1).norm(dim=1) / 0.5
    torch.testing.assert_close(curves["inner_gradient_norm"], moved.detach())
    hits = maml.prompted(maml.adapted(support), query).argmax(-1) == query.labels
    assert curves["accuracy"].tolist() == hits.float().mean(1).tolist()


@pytest.mark.parametrize("name", ["gpt2", "t5", "bert"])
def test_fit_learns_keeps_the_best_and_leaves_the_model_alone(name: str) -> None:
    maml = learner(name, inner_lr=0.1)
    before = {key: value.clone() for key, value in maml.prompted.model.state_dict().items()}
    pair, seen = parts(maml), []

    def keep(step: int, curves: dict[str, Tensor]) -> None:
        seen.append((step, float(curves["accuracy"].mean()), maml.prompt.weight.detach().clone()))

    fitted = maml.fit([pair] * 60, [pair], lr=0.1, every=5, patience=3, log=keep)
    assert all(torch.equal(before[key], value) for key, value in maml.prompted.model.state_dict().items())
    assert all(p.grad is None for p in maml.prompted.model.parameters())
    best = max(seen, key=lambda one: one[1])
    assert (fitted.best.step, fitted.best.value) == best[:2]
    assert torch.equal(maml.prompt.weight, best[2])
    assert fitted.best.history[-1]["query_loss_after"] < fitted.best.history[0]["query_loss_after"]
    assert fitted.steps == min(60, fitted.best.step + 15) or fitted.best.value == 1


def test_fit_stops_after_validations_without_progress() -> None:
    maml = learner("gpt2")
    pair = parts(maml)
    fitted = maml.fit(iter([pair] * 100), [pair], lr=1e-12, every=2, patience=3)
    assert (fitted.steps, fitted.best.step) == (6, 0)


def test_fit_leaves_learned_rates_as_they_were_with_the_best_prompt() -> None:
    rates = torch.full((4, 1), 0.1, dtype=torch.float64, requires_grad=True)
    maml, seen = learner("gpt2", inner_lr=rates), []
    pair = parts(maml)

    def keep(step: int, _curves: dict[str, Tensor]) -> None:
        seen.append((step, rates.detach().clone()))

    fitted = maml.fit([pair] * 20, [pair], lr=1e-12, weight_decay=0.5, rate_lr=0.01, every=5, log=keep)
    assert fitted.best.step < 20 and torch.equal(rates, dict(seen)[fitted.best.step])
    moved = (seen[1][1] - 0.1).abs()
    assert bool((moved > 0.001).all()) and float(moved.max()) <= 0.05 + 1e-9  # 5 steps of AdamW, by their own rate


def test_fit_never_keeps_a_prompt_that_diverged() -> None:
    maml = learner("gpt2")
    support, query = parts(maml)
    start, zeros = maml.prompt.weight.detach().clone(), torch.zeros_like(query.answer)
    held_out = (support, replace(query, labels=zeros))  # the first label is what NaN looks like
    fitted = maml.fit([(support, query)], [held_out], lr=1e29, weight_decay=1e300, most=1, every=1)
    assert math.isnan(fitted.best.history[-1]["query_loss_after"]) and fitted.best.history[-1]["accuracy"] == 0
    assert fitted.best.step == 0 and torch.equal(maml.prompt.weight, start)


@pytest.mark.parametrize("of_the_state", [False, True])
def test_fit_that_was_cut_short_goes_on(tmp_path: Path, of_the_state: bool) -> None:
    class Steps:
        """Pairs from where the state says."""

        def __init__(self) -> None:
            self.at = 0

        def __iter__(self) -> Iterator[Any]:
            while True:
                self.at += 1
                yield pairs[self.at - 1]

        def state_dict(self) -> dict[str, Any]:
            return {"at": self.at}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.at = state["at"]

    def fitted(folder: str, kill_at: int | None = None) -> tuple[PromptMAML, TrainReport]:
        maml = learner("gpt2", inner_lr=torch.full((4, 1), 0.1, dtype=torch.float64, requires_grad=True))

        def log(step: int, _: Any) -> None:
            if step == kill_at:
                raise KeyboardInterrupt

        with RunFolder.open(tmp_path / folder, {}, resume=True) as run:
            steps: Any = Steps() if of_the_state else pairs
            return maml, maml.fit(steps, [parts(maml, 9)], lr=0.5, most=12, every=2, patience=None, run=run, log=log)

    pairs = [parts(learner("gpt2"), seed) for seed in range(12)]
    whole, first = fitted("whole")
    with pytest.raises(KeyboardInterrupt):
        fitted("cut", kill_at=8)
    again, second = fitted("cut")
    assert (second.resumed_from, second.steps) == (6, 12) and second.best.history == first.best.history
    assert torch.equal(again.prompt.weight, whole.prompt.weight)
    assert isinstance(again.inner_lr, Tensor) and isinstance(whole.inner_lr, Tensor)
    assert torch.equal(again.inner_lr, whole.inner_lr)


def test_fit_that_is_cut_short_leaves_the_best_prompt() -> None:
    maml = learner("gpt2")
    pair, start = parts(maml), maml.prompt.weight.detach().clone()

    def steps() -> Iterator[Any]:
        yield from [pair] * 3
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        maml.fit(steps(), [pair], lr=5.0, every=100)
    assert torch.equal(maml.prompt.weight, start)


def test_fit_refuses_to_begin_with_no_numbers() -> None:
    maml = learner("gpt2")
    with torch.no_grad():
        maml.prompt.weight[0, 0] = torch.inf
    with pytest.raises(InputError, match="the prompt holds NaN or infinity; begin with another one"):
        maml.fit([parts(maml)], [parts(maml)])


def test_errors_are_clear() -> None:
    maml = learner("gpt2")
    support, query = parts(maml)
    unlabelled = maml.encode(SOME).take(torch.arange(4).reshape(2, 2))
    none, part = torch.zeros(0, 2, dtype=torch.int64), support.take(torch.arange(2))
    cases: list[tuple[Any, str]] = [
        (lambda: maml.losses(support.flat(), query), "support has rows of shape"),
        (lambda: maml.losses(support, unlabelled), "query has no labels"),
        (lambda: maml.losses(support, None), "query must be a PromptBatch, as encode returns it, not a NoneType"),  # type: ignore[arg-type]
        (lambda: maml.losses(support, query.take(none.reshape(2, 0))), r"query has no rows: its shape is \(2, 0, 2\)"),
        (lambda: maml.backward(support.take(none), query), "support has no rows"),
        (lambda: maml.adapted(support.take(none)), "support has no rows"),
        (lambda: maml.fit([(support, query)], [(support, query)], most=1.5), "most of fit is 1.5; give a whole number"),  # type: ignore[arg-type]
        (lambda: maml.fit(None, [(support, query)]), "steps of fit must hold pairs"),  # type: ignore[arg-type]
        (lambda: maml.fit([support], [(support, query)]), "steps of fit must hold pairs"),  # type: ignore[list-item]
        (lambda: maml.fit([], [(support, query), (part, part)]), r"of as many tasks, not of \[2, 3\]"),
        (lambda: maml.losses(support, query.take(torch.arange(2))), "3 tasks and query 2"),
        (lambda: learner("gpt2", chunk=0), "chunk is .*; give a whole number"),
        (lambda: learner("gpt2", reduction="max"), "unknown reduction"),
        (lambda: learner("gpt2", order=3), "order"),
        (lambda: learner("gpt2", inner_lr=float("nan")), "lr"),
        (lambda: learner("gpt2", inner_lr=torch.zeros(7)), "does not fit"),
        (lambda: learner("gpt2", inner_steps=-1), "steps"),
        (lambda: learner("gpt2", inner_clip="x"), "inner_clip is .*; give a number above 0"),
        (lambda: maml.fit([(support, query)], [(support, query)], lr=-1), "lr of fit is -1; give a number above 0"),
        (lambda: maml.fit([(support, query)], [(support, query)], lr="x"), "lr of fit is 'x'; give a number above 0"),  # type: ignore[arg-type]
        (lambda: maml.fit([(support, query)], [(support, query)], rate_lr=math.nan), "rate_lr of fit"),
        (lambda: maml.fit([(support, query)], [(support, query)], weight_decay=-0.1), "weight_decay of fit"),
        (
            lambda: PromptMAML(maml.prompted.model, torch.zeros(4, 16), PromptTemplate(), maml.prompted.verbalizer),  # type: ignore[arg-type]
            "must be a SoftPrompt, .* not a Tensor",
        ),
        (lambda: learner("gpt2", max_length="x"), "max_length is .*; give a whole number"),
        (lambda: maml.fit([], [(support, query)]), "no steps"),
        (lambda: maml.fit([(support, query)], []), "held-out"),
        (
            lambda: PromptMAML(
                maml.prompted.model, SoftPrompt.random(4, 8), PromptTemplate(), maml.prompted.verbalizer
            ),
            "8 features, but the model's embeddings have 16",
        ),
    ]
    for call, message in cases:
        with pytest.raises(InputError, match=message):
            call()


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_a_prompt_of_ones_own_is_tuned_on_rows(name: str) -> None:
    model = learner(name).prompted
    rows = model.encode(SOME, labels=[4, 1, 2, 3, 4, 1, 0])
    start = SoftPrompt.random(4, 16, seed=1).double()

    def tuned(**options: Any) -> tuple[Tensor, TrainReport]:
        prompt = SoftPrompt(start.weight.detach())
        return prompt().detach(), tune(model, prompt, rows, lr=0.05, batch_size=3, **options)

    before = float(model.losses(start(), rows).mean())
    prompt, report = tuned(epochs=6, patience=None)
    assert report.steps == 18 and report.best is not None
    learned = float(model.losses(prompt, rows).mean())
    assert learned < before if report.best.step else torch.equal(prompt, start())  # the start may classify best
    right = (model.classify(prompt, SOME).argmax(1) == rows.labels).double().mean()
    assert float(right) == pytest.approx(report.best.value)
    assert torch.equal(prompt, tuned(epochs=6, patience=None)[0])
    other, again = tuned(epochs=6, patience=None, seed=1)
    assert again.best is not None
    if report.best.step or again.best.step:
        assert not torch.equal(prompt, other)
    judged = model.encode(["great", "bad"], labels=[4, 1])
    assert tuned(epochs=2, held_out=judged)[1].steps == 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": None}, "rows must be a PromptBatch"),
        ({"rows": "unlabelled"}, "rows of tune must be labelled rows"),
        ({"held_out": "tasks"}, "held_out of tune must be labelled rows"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"epochs": 1.5}, "epochs is 1.5"),
        ({"lr": 0}, "lr of fit is 0"),
    ],
)
def test_what_cannot_be_tuned_is_told(options: dict[str, Any], message: str) -> None:
    model = learner("bert").prompted
    labelled = model.encode(["great", "bad"], labels=[4, 1])
    kinds = {"unlabelled": model.encode(["great"]), "tasks": labelled.take(torch.tensor([[0], [1]]))}
    given = {name: kinds.get(value, value) if isinstance(value, str) else value for name, value in options.items()}
    with pytest.raises(InputError, match=message):
        tune(model, SoftPrompt.random(4, 16).double(), **{"rows": labelled, **given})
