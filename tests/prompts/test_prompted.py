"""Scores of labels: each kind of model against one row at a time, and a model that never changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from metapretrain.errors import InputError
from metapretrain.prompts import PromptBatch, PromptedModel, PromptTemplate, SoftPrompt, Verbalizer
from tests.prompts.tiny import KINDS, TEXTS, model_of, prompted, tokenizer_of

LONG_WORDS = ("good", "badly", "terribly bad")
LENGTH = 6


def prompts(rows: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, LENGTH, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def by_hand(model: PromptedModel, prompt: Tensor, ids: list[int], answer: int, word: list[int]) -> Tensor:
    """log p(word) of one row without padding, from the whole logits of the model."""
    lm, log_p = model.model, []
    if model.kind == "masked":
        ids = [*ids[:answer], *[ids[answer]] * len(word), *ids[answer + 1 :]]
    for i, token in enumerate(word):
        extra = word[:i] if model.kind == "decoder-only" else []
        embeds = torch.cat([prompt, lm.get_input_embeddings()(torch.tensor([*ids, *extra], dtype=torch.long))])[None]
        if model.kind == "encoder-decoder":
            decoder = torch.tensor([[lm.config.decoder_start_token_id, ids[answer], *word[:i]]])
            logits = lm(inputs_embeds=embeds, decoder_input_ids=decoder).logits[0, -1]
        else:
            logits = lm(inputs_embeds=embeds).logits[0, len(prompt) + answer + i]
        log_p.append(logits.log_softmax(-1)[token])
    return torch.stack(log_p).sum()


def rows_of(batch: PromptBatch) -> list[list[int]]:
    return [ids[mask.bool()].tolist() for ids, mask in zip(batch.input_ids, batch.attention_mask, strict=True)]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("words", [("terrible", "maybe", "great"), LONG_WORDS])
def test_scores_are_those_of_each_row_alone(name: str, words: tuple[str, ...]) -> None:
    model = prompted(name, words=words, several=True)
    batch, each = model.encode(TEXTS), prompts(len(TEXTS))
    expected = [
        [by_hand(model, prompt, ids, int(answer), word) for word in model.verbalizer.tokens]
        for prompt, ids, answer in zip(each, rows_of(batch), batch.answer, strict=True)
    ]
    torch.testing.assert_close(model(each, batch), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-10)


def left_padded(batch: PromptBatch, extra: int) -> PromptBatch:
    rows, width = rows_of(batch), batch.input_ids.shape[1] + extra
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    shift = torch.tensor([width - len(row) for row in rows])
    return replace(batch, input_ids=ids, attention_mask=mask, answer=batch.answer + shift)


@pytest.mark.parametrize("name", KINDS)
def test_padding_on_either_side_changes_nothing(name: str) -> None:
    model = prompted(name)
    batch, each = model.encode(TEXTS, labels=[0, 1, 2, 3, 4]), prompts(len(TEXTS))
    wide = replace(
        batch,
        input_ids=torch.nn.functional.pad(batch.input_ids, (0, 5), value=3),
        attention_mask=torch.nn.functional.pad(batch.attention_mask, (0, 5)),
    )
    scores = model(each, batch)
    for other in (wide, left_padded(batch, 0), left_padded(batch, 3), left_padded(batch, 2).trimmed(multiple=1)):
        torch.testing.assert_close(model(each, other), scores, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", KINDS)
def test_every_prompt_row_is_seen_and_gets_a_gradient(name: str) -> None:
    model = prompted(name)
    batch, each = model.encode(TEXTS, labels=[0, 1, 2, 3, 4]), prompts(len(TEXTS)).requires_grad_()
    model.losses(each, batch).sum().backward()
    assert each.grad is not None
    assert bool((each.grad.abs().amax(-1) > 1e-8).all())


@pytest.mark.parametrize("name", KINDS)
def test_the_model_is_frozen_without_dropout_and_keeps_nothing(name: str) -> None:
    model = prompted(name).train()
    before = {key: value.clone() for key, value in model.model.state_dict().items()}
    batch, prompt = model.encode(TEXTS, labels=[0, 1, 2, 3, 4]), SoftPrompt(prompts(1)[0])
    optimizer = torch.optim.AdamW(prompt.parameters(), lr=0.1)
    first = model.losses(prompt(), batch).detach()
    torch.testing.assert_close(model.losses(prompt(), batch).detach(), first, rtol=0, atol=0)
    for _ in range(3):
        model.losses(prompt(), batch).mean().backward()
        optimizer.step()
    assert model.losses(prompt(), batch).mean() < first.mean()
    assert all(torch.equal(before[key], value) for key, value in model.model.state_dict().items())
    assert all(p.grad is None and not p.requires_grad for p in model.model.parameters())
    assert not any(module._forward_hooks for module in model.model.modules())


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "roberta"])
def test_logits_are_made_at_the_answer_only(name: str) -> None:
    model, seen = prompted(name), []
    head = model.model.get_output_embeddings()
    head.register_forward_hook(lambda _module, inputs, _output: seen.append(tuple(inputs[0].shape)))
    model(prompts(1)[0], model.encode(TEXTS))
    assert seen in ([(len(TEXTS), 1, 16)], [(1, len(TEXTS), 16)])


def test_a_prompt_for_all_a_task_or_a_row() -> None:
    model, batch = prompted("gpt2"), prompted("gpt2").encode(TEXTS[:4], labels=[0, 1, 2, 3])
    tasks, two = batch.take(torch.tensor([[0, 1], [2, 3]])), prompts(2)
    by_row = model(two.repeat_interleave(2, 0), batch)
    torch.testing.assert_close(model(two, tasks), by_row.reshape(2, 2, 5), rtol=0, atol=1e-12)
    torch.testing.assert_close(model(two[0], tasks)[0], by_row[:2], rtol=0, atol=1e-12)
    assert model.losses(two, tasks).shape == (2, 2)


def test_normalised_among_the_labels() -> None:
    every, among = prompted("bert"), prompted("bert", normalise="labels")
    batch, each = every.encode(TEXTS), prompts(len(TEXTS))
    torch.testing.assert_close(among(each, batch), every(each, batch).log_softmax(-1), rtol=0, atol=1e-12)
    torch.testing.assert_close(among(each, batch).exp().sum(-1), torch.ones(5, dtype=torch.float64))


def test_two_sentences_are_told_apart() -> None:
    model = prompted("t5", template=PromptTemplate("{first} <X> {second}"))
    one, other = model.encode(["bad", "great"], ["great", "bad"]), prompts(1)[0]
    scores = model(other, one)
    assert not torch.allclose(scores[0], scores[1])


def test_classify_gives_probabilities_in_the_order_of_the_texts() -> None:
    model, prompt = prompted("gpt2"), prompts(1)[0]
    found = model.classify(prompt, TEXTS, batch_size=2)
    torch.testing.assert_close(found, model(prompt, model.encode(TEXTS)).softmax(-1), rtol=0, atol=1e-10)
    assert not found.requires_grad


def test_a_label_never_seen_still_has_a_score() -> None:
    model, prompt = prompted("bert"), SoftPrompt(prompts(1)[0])
    losses = model.losses(prompt(), model.encode(TEXTS[:2], labels=[4, 4]))
    losses.sum().backward()
    assert prompt.weight.grad is not None and bool(prompt.weight.grad.isfinite().all())
    assert bool(model(prompt(), model.encode(TEXTS)).isfinite().all())


def test_fused_and_plain_attention_agree() -> None:
    words, batch = Verbalizer(["good", "bad"], tokenizer_of("gpt2")), prompted("gpt2").encode(TEXTS)
    models = [model_of("gpt2", attention=kind) for kind in ("sdpa", "eager")]
    found = [PromptedModel(model, PromptTemplate(), words)(prompts(1)[0], batch) for model in models]
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda ids, mask, *rest: (ids.float(), mask, *rest), "input_ids of the batch is torch.float32"),
        (lambda ids, mask, *rest: (ids, mask.bool(), *rest), "attention_mask of the batch is torch.bool"),
        (lambda ids, mask, *rest: (ids, mask[:, :2], *rest), r"torch.int64 \(2, 2\) on cpu; give int64"),
        (lambda *leaves: (*leaves[:3], leaves[3][:1]), r"labels of the batch is torch.int64 \(1,\)"),
        (lambda *leaves: (*leaves[:3], leaves[3].to("meta")), "on meta; give int64"),
        (lambda ids, mask, *rest: (ids[:, :0], mask[:, :0], *rest), "has rows of no tokens"),
        (lambda *leaves: [tensor[:0] for tensor in leaves], r"the batch has no rows: its shape is \(0,\)"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_batches_that_do_not_fit_together_are_refused(kind: str, change: Any, message: str) -> None:
    model = prompted(kind)
    batch = PromptBatch(*change(*model.encode(["a film", "a"], labels=[0, 1]).leaves()))
    with pytest.raises(InputError, match=message):
        model.losses(prompts(1)[0], batch)


def test_errors_are_clear() -> None:
    model = prompted("gpt2")
    batch = model.encode(TEXTS)
    small = model_of("gpt2")
    small.resize_token_embeddings(9)
    other = PromptedModel(small, PromptTemplate(), model.verbalizer)
    cases: list[tuple[Any, str]] = [
        (lambda: model.encode(["a"], labels=[5]), r"5\.\.5, but there are words for 0\.\.4"),
        (lambda: model.encode(["a"], labels=[-1]), "labels lie in -1"),
        (lambda: model.encode(["a"], labels=[0, 1]), "one integer label"),
        (lambda: model.encode(["a"], labels=torch.tensor([0.5])), "one integer label"),
        (lambda: model.encode(["a"], labels=["good"]), r"labels must be integers in 0\.\.4"),  # type: ignore[list-item]
        (lambda: model.classify(prompts(1)[0], ["a"], batch_size=0), "batch_size is .*; give a whole number"),
        (lambda: model.losses(prompts(1)[0], batch), "no labels"),
        (
            lambda: model.losses(prompts(1)[0], replace(batch, labels=batch.answer * 0 - 100)),
            "labels lie in -100..-100",
        ),
        (lambda: model.classify(prompts(1)[0] * torch.nan, ["a"]), "the prompt holds NaN or infinity"),
        (lambda: model(prompts(1)[0].to("meta"), batch), "prompt is on meta and the rows on cpu, but the model on cpu"),
        (lambda: model(torch.zeros(6, 16, dtype=torch.int64), batch), "floating point numbers, not torch.int64"),
        (lambda: other.encode(["a"]), "the model has 9 tokens; give the model's own"),
        (lambda: model(prompts(2), batch), "does not fit rows"),
        (lambda: model(torch.zeros(6, 8), batch), "16 features"),
        (lambda: model.classify(None, ["a"]), r"a prompt is a tensor \(L, D\)"),  # type: ignore[arg-type]
        (lambda: PromptedModel(model.model, "It was <X>.", model.verbalizer), "give a PromptTemplate"),  # type: ignore[arg-type]
        (lambda: model(torch.zeros(100, 16), batch), "more than the model's 128 positions"),
        (lambda: PromptedModel(model_of("bert").bert, PromptTemplate(), model.verbalizer), "AutoModelForMaskedLM"),
        (lambda: prompted("bert", normalise="label"), "did you mean 'labels'"),
        (lambda: prompted("bert", max_length=5).encode(["a"]), "need 6 tokens"),
    ]
    for call, message in cases:
        with pytest.raises(InputError, match=message):
            call()
