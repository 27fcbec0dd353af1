"""Initial values of soft prompts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers

from metapretrain.errors import InputError
from metapretrain.prompts import SoftPrompt
from tests.prompts.tiny import model_of, tokenizer_of


def test_random_is_uniform_and_a_function_of_the_seed() -> None:
    weight = SoftPrompt.random(200, 50, spread=0.5).weight.detach()
    assert weight.shape == (200, 50) and weight.abs().max() < 0.5
    assert abs(float(weight.mean())) < 0.01
    assert float(weight.std()) == pytest.approx(0.5 / 3**0.5, rel=0.02)
    assert torch.equal(weight, SoftPrompt.random(200, 50).weight)
    assert not torch.equal(weight, SoftPrompt.random(200, 50, seed=1).weight)


def test_vocabulary_rows_are_different_tokens() -> None:
    model = model_of("t5")
    table = model.get_input_embeddings().weight
    rows = SoftPrompt.from_vocabulary(model, 20, seed=3).weight
    ids = (rows[:, None] == table).all(-1).nonzero()[:, 1]
    assert len(set(ids.tolist())) == 20
    few = SoftPrompt.from_vocabulary(model, 5, among=[7, 8]).weight
    assert {int((row == table).all(-1).nonzero()) for row in few} == {7, 8}
    assert torch.equal(SoftPrompt.from_vocabulary(20, model, seed=3).weight, rows)
    assert torch.equal(SoftPrompt.from_vocabulary(model=model, length=20, seed=3).weight, rows)


def test_embeddings_are_those_that_the_model_sees() -> None:
    """Gemma multiplies those of its table by the root of their size."""
    config = transformers.Gemma3TextConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, head_dim=8
    )
    model = transformers.Gemma3ForCausalLM(config)
    found = SoftPrompt.from_vocabulary(1, model, among=[7]).weight
    assert torch.equal(found, model.get_input_embeddings()(torch.tensor([7])))
    assert not torch.allclose(found, model.get_input_embeddings().weight[[7]])


def test_text_is_repeated_or_cut() -> None:
    model, tokenizer = model_of("bert"), tokenizer_of("bert")
    table, ids = model.get_input_embeddings().weight, tokenizer("the film", add_special_tokens=False)["input_ids"]
    for length in (1, len(ids), 2 * len(ids) + 1):
        expected = table[torch.tensor((ids * 3)[:length])]
        assert torch.equal(SoftPrompt.from_text(model, tokenizer, "the film", length).weight, expected)
    assert SoftPrompt.from_text(model, tokenizer, "the film").length == len(ids)


def test_a_prompt_owns_its_values() -> None:
    given = torch.zeros(2, 3)
    prompt = SoftPrompt(given)
    given += 1
    assert float(prompt().detach().sum()) == 0 and prompt().requires_grad
    model = model_of("gpt2")
    before = model.get_input_embeddings().weight.detach().clone()
    SoftPrompt.from_vocabulary(model, 4).weight.data.zero_()
    assert torch.equal(model.get_input_embeddings().weight, before)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: SoftPrompt(torch.zeros(3)), r"not torch.float32 \(3,\)"),
        (lambda: SoftPrompt(torch.zeros(3, 2, dtype=torch.int64)), "floating point"),
        (lambda: SoftPrompt([[0.0]]), "not list"),  # type: ignore[arg-type]
        (lambda: SoftPrompt(torch.tensor([[0.0], [float("nan")]])), "1 of 2 rows of the prompt hold NaN or infinity"),
        (lambda: SoftPrompt.random(0, 3), "length of a soft prompt"),
        (lambda: SoftPrompt.random(2, 3, spread=float("nan")), "spread of a soft prompt is nan; give a number above 0"),
        (lambda: SoftPrompt.random(2, 3, seed=-1), "seed is -1; give a whole number"),
        (lambda: SoftPrompt.from_adapter(__file__), "not a saved prompt"),
        (lambda: SoftPrompt.from_vocabulary(model_of("gpt2"), 3, among=[100_000]), "token ids in 0"),
        (lambda: SoftPrompt.from_vocabulary(model_of("gpt2"), 3, among=[]), "at least one"),
        (lambda: SoftPrompt.from_text(model_of("bert"), tokenizer_of("bert"), ""), "has no tokens"),
        (lambda: SoftPrompt.from_text(model_of("bert"), tokenizer_of("bert"), None), "None is no text"),  # type: ignore[arg-type]
        (lambda: SoftPrompt.from_vocabulary(model_of("gpt2"), 3, among=[1.5]), "whole numbers"),  # type: ignore[list-item]
        (lambda: SoftPrompt.from_vocabulary(model_of("gpt2"), 3, among=["a"]), "whole numbers"),  # type: ignore[list-item]
        (lambda: SoftPrompt.from_vocabulary(model_of("gpt2"), 3, among=5), "at least one"),  # type: ignore[arg-type]
        (lambda: SoftPrompt.from_vocabulary(torch.nn.Linear(2, 2), 3), "not a Linear"),
        (lambda: SoftPrompt.from_vocabulary(3, torch.nn.Linear(2, 2)), "not a Linear"),
        (lambda: SoftPrompt.from_vocabulary(model_of("t5"), model_of("t5")), "soft prompt is a T5For"),
        (lambda: SoftPrompt.random(model_of("t5"), 3), "length of a soft prompt is a T5For"),
        (lambda: SoftPrompt.random(4, 16, spread=model_of("t5")), "spread of a soft prompt is a T5For"),
        (lambda: SoftPrompt.from_vocabulary(model_of("gpt2"), 3, among=torch.rand(500)), "whole numbers, not a Tensor"),
    ],
)
def test_errors_are_clear(call: Callable[[], SoftPrompt], message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        call()
    assert "\n" not in str(error.value) and len(str(error.value)) < 200
