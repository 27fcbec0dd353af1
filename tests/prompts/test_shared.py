"""Rows behind one prompt in one sequence, against a sequence for each row."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from metapretrain.prompts import PromptBatch, PromptedModel
from metapretrain.prompts import model as paths
from metapretrain.prompts.model import NAME
from tests.prompts.tiny import TEXTS, model_of, prompted


def rows_of(model: PromptedModel, tasks: int, rows: int) -> PromptBatch:
    data = model.encode(TEXTS, labels=[0, 1, 2, 3, 4])
    return data.take((torch.arange(tasks * rows) * 3 % len(TEXTS)).reshape(tasks, rows))


def separate(model: PromptedModel, prompts: Tensor, batch: PromptBatch) -> Tensor:
    each = prompts[:, None].expand(-1, batch.shape[1], -1, -1).flatten(0, 1)
    scores = paths.decoder_only(model.model, each, batch.flat(), model.verbalizer)
    return scores.reshape(*batch.shape, -1)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(("length", "rows"), [(5, 3), (5, 1), (0, 3)])
def test_scores_and_derivatives_are_those_of_rows_on_their_own(length: int, rows: int, groups: int) -> None:
    model = prompted("llama")
    if groups > 1:
        model.model = grouped()
    batch = rows_of(model, 2, rows)
    prompts = torch.randn(2, length, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found: dict[str, list[Tensor]] = {}
    ways: dict[str, Any] = {"shared": model, "separate": partial(separate, model)}
    for name, scores in ways.items():
        some = prompts.clone().requires_grad_()
        with sdpa_kernel(SDPBackend.MATH):
            value = scores(some, batch)
            found[name] = [value.detach()]
            if length:
                (gradient,) = torch.autograd.grad(value[..., 1].square().sum(), some, create_graph=True)
                (second,) = torch.autograd.grad(gradient.sin().sum(), some)
                found[name] += [gradient.detach(), second]
    for mine, theirs in zip(found["shared"], found["separate"], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


def test_rows_without_a_token_are_answered_behind_their_prompt() -> None:
    model = prompted("llama")
    batch, prompts = rows_of(model, 2, 3), torch.randn(2, 4, 16, dtype=torch.float64)
    batch.answer[:, 1], batch.attention_mask[:, 1] = -1, 0
    found = model(prompts, batch)
    torch.testing.assert_close(found, separate(model, prompts, batch))
    other = batch.input_ids.clone()
    other[:, 0] += 1
    torch.testing.assert_close(model(prompts, replace(batch, input_ids=other))[:, 1], found[:, 1])


def grouped() -> Any:
    """A model whose heads share their keys."""
    net = model_of("llama")
    for layer in net.model.layers:
        attention = layer.self_attn
        for name in ("k_proj", "v_proj"):
            linear = torch.nn.Linear(16, 8, bias=False, dtype=torch.float64)
            setattr(attention, name, linear)
        attention.num_key_value_groups = 2
    return net.requires_grad_(False)


@pytest.mark.parametrize("name", ["sdpa", "eager"])
def test_the_model_is_left_with_its_own_attention(name: str) -> None:
    model = prompted("llama")
    model.model = model_of("llama", attention=name)
    batch, prompts = rows_of(model, 2, 2), torch.zeros(2, 4, 16, dtype=torch.float64)
    scores = model(prompts, batch)
    assert model.model.config._attn_implementation == name != NAME
    with pytest.raises(RuntimeError):
        paths.shared(model.model, prompts[..., :8], batch, model.verbalizer)
    assert model.model.config._attn_implementation == name
    torch.testing.assert_close(scores, separate(model, prompts, batch))


def test_no_value_is_asked_for_while_it_computes() -> None:
    """On a GPU the host would wait for it; meta tensors have no values at all."""
    model = prompted("llama")
    batch, prompts = rows_of(model, 2, 2).to("meta"), torch.zeros(2, 4, 16, dtype=torch.float64, device="meta")
    model.model.to("meta")
    assert model(prompts, batch).shape == (2, 2, 5)


def test_keys_of_a_group_are_not_copied_for_its_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen, attention = prompted("llama"), set(), paths.scaled_dot_product_attention
    model.model, batch = grouped(), rows_of(model, 2, 3)

    def recorded(query: Tensor, key: Tensor, *given: Any, **options: Any) -> Tensor:
        seen.add((query.shape[1], query.shape[2] % 2, key.shape[1]))  # both heads behind each other
        return attention(query, key, *given, **options)

    monkeypatch.setattr(paths, "scaled_dot_product_attention", recorded)
    model(torch.zeros(2, 5, 16, dtype=torch.float64), batch)
    assert seen == {(1, 0, 1)}
