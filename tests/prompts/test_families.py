"""Families of transformers under a soft prompt: answers as each row alone has them, or one line that refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.auto import modeling_auto as auto

from metapretrain.errors import InputError
from metapretrain.prompts import PromptBatch, PromptedModel, PromptTemplate, Verbalizer
from tests.prompts.tiny import tokenizer_of

NAMES = {
    "causal": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "seq2seq": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "masked": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
}
SIZES = {
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "embedding_size", "word_embed_proj_dim"), 32
    ),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_decoder_layers", "num_attention_heads", "num_heads", "n_head", "n_heads"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "num_key_value_heads"), 2),
    **dict.fromkeys(("intermediate_size", "d_ff", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_inner"), 48),
    **dict.fromkeys(("hidden_dim", "moe_intermediate_size", "shared_expert_intermediate_size"), 48),
    **dict.fromkeys(("num_experts", "num_local_experts"), 4),
    "num_experts_per_tok": 2,
    "vocab_size": 400,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "d_kv": 16,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "initializer_range": 0.2,
}
RIGHT = {  # families whose answers must be given
    "causal": ("bloom", "gemma2", "gpt2", "gpt_neox", "llama", "mamba", "mistral", "opt", "phi", "qwen2", "qwen3_moe"),
    "seq2seq": ("bart", "longt5", "mt5", "nllb-moe", "pegasus", "switch_transformers", "t5"),
    "masked": ("albert", "bert", "deberta-v2", "distilbert", "electra", "mpnet", "roberta"),
}
WRONG = {  # those that see padding, that take no embeddings, or whose answers are no next words
    "causal": ("bert", "electra", "roberta", "xlm", "xlnet"),
    "seq2seq": ("fsmt",),
    "masked": ("convbert", "fnet", "ibert", "mobilebert"),
}
PROMPT, SPREAD = 3, 0.5


def family(head: str, kind: str, **options: Any) -> Any:
    """A small random model of a family."""
    config_class = type(transformers.AutoConfig.for_model(kind))
    usual = config_class()
    sizes = {name: size for name, size in SIZES.items() if getattr(usual, name, None) is not None or name[-3:] == "_id"}
    if kind == "xlnet":
        del sizes["max_position_embeddings"]
    config = config_class(**{**sizes, **options})
    if head == "seq2seq":
        config.decoder_start_token_id = 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return getattr(transformers, NAMES[head][kind])(config)


def prompted(model: Any) -> PromptedModel:
    return PromptedModel(model, PromptTemplate("It was <X>."), Verbalizer(("good", "bad"), tokenizer_of("bert")))


@torch.no_grad()
def alone(model: PromptedModel, prompt: Tensor, ids: Tensor) -> Tensor:
    """Log-probabilities of the words behind, or at, the last of some tokens: the model's own pass over one row."""
    net = model.model
    given: dict[str, Any] = {"inputs_embeds": torch.cat([prompt, net.get_input_embeddings()(ids)])[None]}
    if model.kind == "encoder-decoder":
        given["decoder_input_ids"] = torch.tensor([[net.config.decoder_start_token_id, int(ids[-1])]])
    logits = net(**given).logits[0, -1]
    return logits.log_softmax(-1)[[tokens[0] for tokens in model.verbalizer.tokens]]


def rows(seed: int) -> PromptBatch:
    """16 rows of 1 to 46 tokens: more than the experts of Switch and NLLB take of one expert."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.arange(1, 49, 3)
    ids = torch.randint(3, 200, (len(lengths), 46), generator=generator)
    return PromptBatch(ids, (torch.arange(46) < lengths[:, None]).long(), lengths - 1)


@pytest.mark.parametrize(("head", "kind"), [(head, kind) for head, kinds in RIGHT.items() for kind in kinds])
def test_answers_of_a_padded_batch_are_those_of_each_row_alone(head: str, kind: str) -> None:
    model, batch = prompted(family(head, kind)), rows(1)
    prompt = torch.randn(PROMPT, model.features, generator=torch.Generator().manual_seed(2)) * SPREAD
    own = [ids[mask.bool()] for ids, mask in zip(batch.input_ids, batch.attention_mask, strict=True)]
    wanted = torch.stack([alone(model, prompt, ids) for ids in own])
    with torch.no_grad():
        found = model(prompt, batch)
        part = model(prompt, batch.take(torch.tensor([3, 0])))
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-4)
    torch.testing.assert_close(part, found[[3, 0]], rtol=0, atol=2e-4)


@pytest.mark.parametrize(("head", "kind"), [(head, kind) for head, kinds in WRONG.items() for kind in kinds])
def test_a_family_whose_answers_would_be_wrong_is_refused_in_one_line(head: str, kind: str) -> None:
    with pytest.raises(InputError) as error:
        prompted(family(head, kind))
    said = str(error.value)
    assert NAMES[head][kind] in said and "\n" not in said and len(said) < 400


def test_a_bert_as_decoder_answers_if_it_is_one() -> None:
    with pytest.raises(InputError, match=r"BertLMHeadModel .* padding .*is_decoder=True, or with AutoModel"):
        prompted(family("causal", "bert"))
    assert prompted(family("causal", "bert", is_decoder=True)).kind == "decoder-only"


def test_a_model_that_does_not_say_how_its_decoder_begins_is_told() -> None:
    model = family("seq2seq", "t5")
    model.config.decoder_start_token_id = model.generation_config.decoder_start_token_id = None
    with pytest.raises(InputError, match="lacks decoder_start_token_id"):
        prompted(model)
    model.generation_config.decoder_start_token_id = 0
    assert prompted(model).kind == "encoder-decoder"


@pytest.mark.slow
@pytest.mark.parametrize("head", NAMES)
def test_every_family_is_right_or_refused(head: str) -> None:
    """All of transformers: those that the sizes above fit, which are most."""
    tried = []
    for kind in NAMES[head]:
        try:
            with torch.device("meta"):
                size = sum(p.numel() for p in family(head, kind).parameters())
            if size > 3_000_000:
                continue
            net = family(head, kind)
        except Exception:
            continue
        try:
            model = prompted(net)
        except InputError:
            continue
        prompt, batch = torch.randn(PROMPT, model.features) * SPREAD, rows(3).take(torch.tensor([1, 4, 9]))
        own = [ids[mask.bool()] for ids, mask in zip(batch.input_ids, batch.attention_mask, strict=True)]
        with torch.no_grad():
            found = model(prompt, batch)
        torch.testing.assert_close(found, torch.stack([alone(model, prompt, ids) for ids in own]), rtol=0, atol=1e-3)
        tried.append(kind)
    assert len(tried) > 10
