"""Pooled embeddings: padding never shows, nothing waits for the device, mixed precision, pairs, bad input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from metapretrain.errors import InputError
from metapretrain.models.hub import mask_form
from metapretrain.models.text_encoders import POOLINGS, TextEncoder, build_text_encoder
from tests.models.text_models import KINDS, byte_tokenizer, small_encoder

TEXTS = ["a b", "A much longer sentence, with punctuation!", "one", "some words more"]
PAIRS = [("a b", "one"), ("A much longer sentence", "some words more"), ("", "x")]


def batch(encoder: TextEncoder, texts: list[Any]) -> dict[str, Tensor]:
    columns = [texts] if isinstance(texts[0], str) else [list(column) for column in zip(*texts, strict=True)]
    return dict(encoder.tokenizer(*columns, padding=True, return_tensors="pt"))


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_padded_batch_gives_what_each_row_gives_alone(kind: str, pooling: str) -> None:
    encoder = small_encoder(kind, pooling).eval()
    for texts in (TEXTS, PAIRS):
        z = encoder(batch(encoder, texts))
        assert z.shape == (len(texts), encoder.features)
        alone = torch.cat([encoder(batch(encoder, [text])) for text in texts])
        torch.testing.assert_close(z, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_s_own_mask_gives_the_same(kind: str) -> None:
    encoder = small_encoder(kind).eval()
    tokens = batch(encoder, TEXTS)
    states = encoder.model(**tokens)[0]
    rows = [row[: int(n)].mean(0) for row, n in zip(states, tokens["attention_mask"].sum(1), strict=True)]
    torch.testing.assert_close(encoder(tokens), torch.stack(rows), rtol=1e-4, atol=1e-5)
    encoder.pooling = "cls"
    torch.testing.assert_close(encoder(tokens), states[:, 0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_gets_no_gradient_and_every_weight_some(kind: str) -> None:
    encoder = small_encoder(kind).eval()
    tokens = batch(encoder, TEXTS)
    wide = {name: torch.nn.functional.pad(value, (0, 3)) for name, value in tokens.items()}
    unseen = encoder.tokenizer.convert_tokens_to_ids("z")
    wide["input_ids"][:, -3:] = unseen  # whatever stands in the padding
    encoder(wide).square().sum().backward()
    gradient = encoder.model.get_input_embeddings().weight.grad
    assert not gradient[unseen].any() and gradient[encoder.tokenizer.convert_tokens_to_ids("a")].any()
    assert [name for name, p in encoder.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_forward_pass_never_asks_for_a_value(kind: str, attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if (kind, attention) == ("mpnet", "sdpa"):
        pytest.skip("transformers has no such attention for MPNet")
    encoder = small_encoder(kind, attention=attention)
    if kind == "distilbert" and transformers.__version__.startswith("4."):
        assert not encoder.recordable
        pytest.skip("DistilBERT takes a ready made mask from transformers 5 on")
    assert encoder.recordable
    tokens = batch(encoder, TEXTS)

    def wait(*given: Any) -> Any:
        raise AssertionError("the host waits for the device")

    with monkeypatch.context() as patch:
        for name in ("__bool__", "__int__", "__float__", "__index__", "item", "tolist", "cpu", "numpy", "nonzero"):
            patch.setattr(Tensor, name, wait)
        z = encoder(tokens)
        z.sum().backward()
        if (kind, attention) == ("bert", "sdpa"):
            encoder.form = 2
            with pytest.raises(AssertionError, match="waits"):
                encoder(tokens)
    assert z.isfinite().all()


def test_models_that_ready_made_masks_would_break_keep_their_own(caplog: pytest.LogCaptureFixture) -> None:
    sizes: dict[str, Any] = {"vocab_size": 2000, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    windowed = transformers.ModernBertConfig(intermediate_size=64, pad_token_id=0, **sizes)
    assert mask_form(transformers.ModernBertModel(windowed)) == 2  # a mask of all tokens would undo the windows
    assert "padding changes" not in caplog.text
    mixed = transformers.ConvBertConfig(intermediate_size=64, **sizes)
    assert mask_form(transformers.ConvBertModel(mixed)) == 2
    assert "padding changes the states of ConvBertModel" in caplog.text


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_close_and_returns_float32(kind: str) -> None:
    encoder = small_encoder(kind).eval()
    tokens = batch(encoder, TEXTS)
    z = encoder(tokens)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = encoder(tokens)
    assert mixed.dtype is torch.float32 and mixed.isfinite().all()
    assert torch.nn.functional.cosine_similarity(z, mixed).min() > 0.99
    assert not torch.equal(z, mixed)


def test_encode_keeps_the_order_the_mode_and_the_limit() -> None:
    encoder = build_text_encoder("tiny", max_length=16)
    encoder.train()
    texts = [f"{'word ' * (n % 7)}{n}" for n in range(20)]
    z = encoder.encode(texts, batch_size=3)
    assert encoder.training and not z.requires_grad
    alone = torch.cat([encoder.encode([text]) for text in texts])
    torch.testing.assert_close(z, alone, rtol=1e-4, atol=1e-5)
    start = "ab " * 14
    assert torch.equal(encoder.encode([start + "this is cut"]), encoder.encode([start + "that as well"]))
    joined = encoder.encode([("a text", "another")])
    assert not torch.allclose(joined, encoder.encode([("another", "a text")]))


def test_token_types_reach_models_that_have_them_and_only_those() -> None:
    bert = small_encoder("bert").eval()
    tokens = batch(bert, PAIRS)
    assert tokens["token_type_ids"].any()
    without = bert({name: value for name, value in tokens.items() if name != "token_type_ids"})
    assert not torch.allclose(bert(tokens), without)
    for kind in ("roberta", "distilbert", "mpnet"):
        encoder = small_encoder(kind).eval()
        tokens = batch(encoder, PAIRS)
        typed = tokens | {"token_type_ids": torch.ones_like(tokens["input_ids"])}
        assert torch.equal(encoder(tokens), encoder(typed))


@pytest.mark.parametrize("kind", KINDS)
def test_the_longest_text_that_a_model_takes_is_known(kind: str) -> None:
    encoder = small_encoder(kind)
    assert encoder.max_length == 64
    assert encoder.encode(["x y z " * 50]).isfinite().all()
    model, tokenizer = encoder.model, encoder.tokenizer
    tokenizer.model_max_length = int(1e30)  # as tokenizers that do not say
    assert TextEncoder(model, tokenizer).max_length == 64


def test_seed_makes_the_weights_and_leaves_the_global_state_alone() -> None:
    state = torch.random.get_rng_state()
    first, again, other = (build_text_encoder("tiny", seed=seed).encode(["text"]) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.allclose(first, other)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_dropout_is_the_model_s_own_or_the_one_given() -> None:
    assert {m.p for m in build_text_encoder("tiny").modules() if isinstance(m, torch.nn.Dropout)} == {0.1}
    encoder = build_text_encoder("tiny", dropout=0.0).train()
    tokens = batch(encoder, TEXTS)
    assert torch.equal(encoder(tokens), encoder(tokens))


def test_models_that_are_no_encoders_are_refused() -> None:
    tokenizer = byte_tokenizer()
    config = transformers.GPT2Config(vocab_size=300, n_embd=16, n_layer=1, n_head=2)
    with pytest.raises(InputError, match="gpt2 is no encoder; give one of the kinds of BERT"):
        TextEncoder(transformers.GPT2Model(config), tokenizer)
    small = transformers.BertConfig(vocab_size=100, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
    with pytest.raises(InputError, match="the tokenizer has 261 tokens, the model 100"):
        TextEncoder(transformers.BertModel(small), tokenizer)
    tokenizer.pad_token = None
    with pytest.raises(InputError, match="no padding token"):
        TextEncoder(small_encoder("roberta").model, tokenizer)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"pooling": "maen"}, "unknown pooling 'maen'; did you mean 'mean'? allowed: auto, cls, mean"),
        ({"dropout": 1.5}, "dropout is 1.5; give a number of at least 0 and below 1"),
        ({"max_length": 257}, "max_length is 257; give a whole number from 3 to 256"),
        ({"max_length": 2}, "max_length is 2"),
    ],
)
def test_bad_settings_are_one_line(change: dict[str, Any], part: str) -> None:
    with pytest.raises(InputError) as error:
        build_text_encoder("tiny", **change)
    assert part in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("texts", ["a text", [], None, ["a", ("b", "c")], [("a", "b"), ("c",)], [None], ["a \ud83d"]])
def test_what_is_no_list_of_texts_is_refused(texts: Any) -> None:
    with pytest.raises(InputError, match="texts must be"):
        build_text_encoder("tiny").encode(texts)
    with pytest.raises(InputError, match=r"batch_size is .*; give a whole number"):
        build_text_encoder("tiny").encode(["a"], batch_size=0)


def test_texts_are_read_by_position_whatever_their_index() -> None:
    class Column(list[Any]):
        """As a pandas Series whose index names no position."""

        def __getitem__(self, name: Any) -> Any:
            raise KeyError(name)

    encoder = build_text_encoder("tiny").eval()
    for texts in (["a", "quite long text", "b c"], [("a", "b"), ("c", "longer text d")]):
        assert torch.equal(encoder.encode(Column(texts)), encoder.encode(texts))
