"""An outer step gives what PromptMAML.backward gives, however often it is called and whatever is learned."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from metapretrain.errors import InputError
from metapretrain.prompts import OuterStep, PromptMAML
from tests.prompts.test_learner import learner, parts

OPTIONS: list[dict[str, Any]] = [
    {},
    {"order": 1},
    {"inner_steps": 2},
    {"chunk": 2},
    {"reduction": "mean"},
    {"inner_clip": 0.01},
    {"checkpoint": True},
]


def gradients(maml: PromptMAML) -> list[Tensor | None]:
    rates = maml.inner_lr
    return [maml.prompt.weight.grad, *([rates.grad] if isinstance(rates, Tensor) else [])]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("learned", [False, True])
def test_several_calls_add_up_as_backward_does(options: dict[str, Any], learned: bool) -> None:
    rates = {"inner_lr": nn.Parameter(torch.full((4, 16), 0.5, dtype=torch.float64))} if learned else {}
    maml = learner("llama", **options, **rates)
    expected = []
    for seed in range(2):
        expected.append(maml.backward(*parts(maml, seed)))
    wanted = gradients(maml)
    maml.zero_grad()
    step = OuterStep(maml)
    found = [step(*parts(maml, seed)) for seed in range(2)]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert all(gradient is not None and gradient.abs().sum() > 0 for gradient in wanted)
    torch.testing.assert_close(gradients(maml), wanted, rtol=1e-12, atol=1e-14)


def test_what_takes_no_gradient_gets_none() -> None:
    maml = learner("llama", inner_lr=nn.Parameter(torch.tensor(0.5, dtype=torch.float64)))
    maml.prompt.weight.requires_grad_(False)
    OuterStep(maml)(*parts(maml))
    prompt, rates = gradients(maml)
    assert prompt is None and rates is not None and rates != 0


def test_a_frozen_prompt_stays_where_it_is_in_fit() -> None:
    rates = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
    maml = learner("llama", inner_lr=rates)
    kept = maml.prompt.weight.requires_grad_(False).clone()
    maml.fit([parts(maml)] * 3, [parts(maml, 1)], every=3, rate_lr=0.1)
    assert torch.equal(maml.prompt.weight, kept)


def test_the_context_is_entered_for_each_call_and_gradients_survive_its_error() -> None:
    maml, entered = learner("llama"), list[int]()

    @contextmanager
    def context() -> Iterator[None]:
        entered.append(1)
        if len(entered) == 2:
            raise RuntimeError("no")
        yield

    step = OuterStep(maml, context)
    step(*parts(maml))
    kept = maml.prompt.weight.grad
    with pytest.raises(RuntimeError, match="no"):
        step(*parts(maml))
    assert maml.prompt.weight.grad is kept and len(entered) == 2


def test_refuses_what_it_cannot_learn() -> None:
    with pytest.raises(InputError, match="PromptMAML, not of a int"):
        OuterStep(3)  # type: ignore[arg-type]
    base = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
    maml = learner("llama", inner_lr=base * 2)
    for refused in (lambda: OuterStep(maml), lambda: maml.fit([parts(maml)], [parts(maml)])):
        with pytest.raises(InputError, match="further computations"):
            refused()
    frozen = learner("llama")
    frozen.prompt.weight.requires_grad_(False)
    with pytest.raises(InputError, match="nothing is learned"):
        OuterStep(frozen)
    maml = learner("llama")
    support, query = parts(maml)
    for pair, what in (((replace(support, labels=None), query), "support"), ((support, query.flat()), "query")):
        with pytest.raises(InputError, match=f"{what} has .*labelled rows"):
            OuterStep(maml)(*pair)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_recorded_it_gives_the_same() -> None:
    maml = learner("llama").to("cuda")
    step = OuterStep(maml)
    for seed in range(6):  # recorded at the third
        pair = [part.to("cuda") for part in parts(maml, seed)]
        maml.zero_grad()
        expected = maml.backward(*pair)
        wanted = gradients(maml)
        maml.zero_grad()
        torch.testing.assert_close(step(*pair), expected, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(gradients(maml), wanted, rtol=1e-10, atol=1e-12)
    assert len(step.recorder.graphs) == 1
