"""Templates: where the answer goes, what truncation leaves alone, sentences of every kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from metapretrain.errors import InputError
from metapretrain.prompts import PromptTemplate
from metapretrain.prompts.template import _shortened
from tests.prompts.tiny import KINDS, TEXTS, tokenizer_of

TAIL = PromptTemplate("It was <X>.")


def tokens(name: str, template: PromptTemplate, *texts: list[str], max_length: int = 40) -> list[list[str]]:
    batch = template.encode(tokenizer_of(name), KINDS[name], *texts, max_length=max_length)
    rows = zip(batch.input_ids.tolist(), batch.attention_mask.tolist(), strict=True)
    return [tokenizer_of(name).convert_ids_to_tokens([i for i, real in zip(*row, strict=True) if real]) for row in rows]


@pytest.mark.parametrize("name", KINDS)
def test_ids_are_those_of_the_whole_text(name: str) -> None:
    tokenizer = tokenizer_of(name)
    found = TAIL.encode(tokenizer, KINDS[name], ["the film was great"]).input_ids[0].tolist()
    whole = tokenizer("the film was great It was")["input_ids"]
    marker = {"decoder-only": None, "encoder-decoder": "<extra_id_0>", "masked": tokenizer.mask_token}[KINDS[name]]
    if marker is None:
        assert found == whole
    else:
        end = len(whole) - 1
        assert found[:end] == whole[:end] and found[-1] == whole[-1]
        assert tokenizer.convert_ids_to_tokens(found[end:-1]) == [marker, "."]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("max_length", [8, 17, 40])
def test_truncation_leaves_the_tail(name: str, max_length: int) -> None:
    ends = {row[-1] for row in tokens(name, TAIL, TEXTS, max_length=40)}
    rows = tokens(name, TAIL, TEXTS, max_length=max_length)
    assert max(map(len, rows)) == max_length
    hard = tokens(name, TAIL, [""])[0]
    skip = 0 if name in ("gpt2", "t5") else 1
    for row in rows:
        assert row[-len(hard) + skip :] == hard[skip:]
        assert row[-1] in ends


@pytest.mark.parametrize("name", KINDS)
def test_answer_is_the_place_of_the_marker(name: str) -> None:
    batch = TAIL.encode(tokenizer_of(name), KINDS[name], TEXTS, max_length=40)
    at = batch.input_ids.gather(1, batch.answer[:, None])[:, 0].tolist()
    found = set(tokenizer_of(name).convert_ids_to_tokens(at))
    assert found == {{"decoder-only": "Ġwas", "masked": tokenizer_of(name).mask_token}.get(KINDS[name], "<extra_id_0>")}
    if KINDS[name] == "decoder-only":
        assert torch.equal(batch.answer, batch.attention_mask.sum(1) - 1)
    assert batch.truncated == sum(len(row) == 40 for row in tokens(name, TAIL, TEXTS))


def test_text_that_looks_like_the_answer_is_text() -> None:
    plain = TAIL.encode(tokenizer_of("bert"), "masked", ["[MASK] great [SEP]"])
    ids = plain.input_ids[0].tolist()
    assert ids.count(tokenizer_of("bert").mask_token_id) == 1
    assert ids.count(tokenizer_of("bert").sep_token_id) == 1


def test_two_sentences_and_the_longer_is_cut() -> None:
    template = PromptTemplate("{first}, <X>. {second}")
    assert tokens("bert", template, ["great plot"], ["bad film"]) == [
        ["[CLS]", "great", "plot", ",", "[MASK]", ".", "bad", "film", "[SEP]"]
    ]
    rows = tokens("bert", template, ["the " * 50], ["bad film"], max_length=10)
    assert rows == [["[CLS]", "the", "the", "the", ",", "[MASK]", ".", "bad", "film", "[SEP]"]]
    assert tokens("gpt2", TAIL, ["bad"], ["great"])[0] == ["bad", "Ġgreat", "Ġ", "It", "Ġwas"]


@pytest.mark.parametrize("lengths", [(9, 3), (3, 9), (9, 9), (2, 2), (0, 9), (9, 0), (4, 5)])
@pytest.mark.parametrize("room", [2, 7, 8, 20])
def test_cut_rows_fill_the_room(lengths: tuple[int, int], room: int) -> None:
    found = _shortened(list(lengths), room)
    assert sum(found) == min(sum(lengths), room)
    cut = [kept < length for kept, length in zip(found, lengths, strict=True)]
    assert not any(cut) or max(found) - min(f for f, c in zip(found, cut, strict=True) if c) <= 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("It was.", "must hold <X> once"),
        ("<X> or <X>", "must hold <X> once"),
        (None, "must hold <X> once"),
        ("{third} <X>", r"slots \{third\}; allowed"),
        ("{first} {first} <X>", "each once"),
        ("{second} <X>", "each once"),
    ],
)
def test_bad_templates(text: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        PromptTemplate(text)


def test_errors_are_clear() -> None:
    gpt2, bert = tokenizer_of("gpt2"), tokenizer_of("bert")
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: TAIL.encode(gpt2, "masked", ["a"]), "needs a mask token"),
        (lambda: TAIL.encode(bert, "encoder-decoder", ["a"]), "needs the sentinel token <extra_id_0>"),
        (lambda: TAIL.encode(bert, "mask", ["a"]), "did you mean 'masked'"),
        (lambda: TAIL.encode(bert, "masked", []), "at least one row"),
        (lambda: TAIL.encode(bert, "masked", "a film"), "list of strings"),
        (lambda: TAIL.encode(bert, "masked", None), "first must be a list of strings"),  # type: ignore[arg-type]
        (lambda: TAIL.encode(bert, "masked", iter("ab")), "first must be a list of strings"),  # type: ignore[arg-type]
        (lambda: TAIL.encode(bert, "masked", ["a \ud83d"]), "is no text that can be tokenised"),
        (lambda: TAIL.encode("bert", "masked", ["a"]), "give a tokenizer of transformers, not a str"),
        (lambda: TAIL.encode(bert, "masked", ["a"], max_length="9"), "max_length is .*; give a whole number"),  # type: ignore[arg-type]
        (lambda: TAIL.encode(bert, "masked", ["a"]).trimmed(0), "multiple is 0; give a whole number of at least 1"),
        (lambda: TAIL.encode(bert, "masked", ["a"], ["a", "b"]), "not 1 and 2"),
        (lambda: TAIL.encode(bert, "masked", ["a"], max_length=6), "special tokens need 6 tokens"),
        (lambda: PromptTemplate("{first} <X> {second}").encode(gpt2, "decoder-only", ["a"], ["b"]), "cannot see it"),
        (lambda: PromptTemplate("{first} <X> {second}").encode(bert, "masked", ["a"]), "one sentence were given"),
        (lambda: PromptTemplate("{first} <X>").encode(bert, "masked", ["a"], ["b"]), r"no \{second\}"),
    ]
    for call, message in cases:
        with pytest.raises(InputError, match=message):
            call()
