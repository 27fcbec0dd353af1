"""Tiny random language models of each kind, with tokenizers trained on a few sentences."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
)

from metapretrain.prompts import PromptedModel, PromptTemplate, Verbalizer

WORDS = ("terrible", "bad", "maybe", "good", "great")
CORPUS = ["It was terrible. a x", "It was bad, the film", "It was maybe good", "It was great. A plot!"] * 20
TEXTS = ["the film was great", "bad plot", "", "Ça n'était pas bon: 退屈な映画 🎬", "the film " * 200]
DECODERS, MASKED = dict.fromkeys(("gpt2", "llama"), "decoder-only"), dict.fromkeys(("bert", "roberta"), "masked")
KINDS = {**DECODERS, "t5": "encoder-decoder", **MASKED}


def byte_level(special: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options: dict[str, Any] = {"special_tokens": special, "initial_alphabet": alphabet, "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=360, **options)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def surround(tokenizer: Tokenizer, before: str, after: str) -> None:
    ids = [(token, tokenizer.token_to_id(token)) for token in (before, after) if token]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{before} $A {after}".strip(), special_tokens=ids)


@cache
def tokenizer_of(name: str) -> Any:
    if name == "gpt2":
        return PreTrainedTokenizerFast(tokenizer_object=byte_level(["<|end|>"]), eos_token="<|end|>")
    if name == "llama":
        tokenizer = byte_level(["<s>", "</s>"])
        surround(tokenizer, "<s>", "")
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    if name == "roberta":
        tokenizer = byte_level(["<s>", "<pad>", "</s>", "<mask>"])
        surround(tokenizer, "<s>", "</s>")
        names = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "mask_token": "<mask>"}
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    if name == "t5":
        special = ["<pad>", "</s>", "<unk>", "<extra_id_0>"]
        whole = [f"▁{word}" for word in (*WORDS, "It", "was", "the", "film", "a", "x")]
        letters = sorted({letter for word in whole for letter in word} | set("abcdefghijklmnopqrstuvwxyz.,"))
        pieces = [(token, 0.0) for token in special] + [(token, -2.0) for token in whole]
        tokenizer = Tokenizer(models.Unigram([*pieces, *((letter, -5.0) for letter in letters)], unk_id=2))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        surround(tokenizer, "", "</s>")
        names = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, extra_special_tokens=["<extra_id_0>"], **names)
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    surround(tokenizer, "[CLS]", "[SEP]")
    names = {f"{name.lower()}_token": f"[{name}]" for name in ("PAD", "UNK", "CLS", "SEP", "MASK")}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def model_of(name: str, *, dtype: torch.dtype = torch.float64, attention: str = "sdpa") -> Any:
    """A random model with dropout, which only training mode would switch on."""
    vocab = len(tokenizer_of(name))
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    common: dict[str, Any] = {"vocab_size": vocab, "initializer_range": 0.3}
    torch.manual_seed(0)
    if name == "gpt2":
        config: Any = GPT2Config(**common, n_positions=128, n_embd=16, n_layer=2, n_head=2)
        kind: Any = GPT2LMHeadModel
    elif name == "llama":
        config = LlamaConfig(**common, **sizes, max_position_embeddings=128)
        kind = LlamaForCausalLM
    elif name == "t5":
        config = T5Config(vocab_size=vocab, d_model=16, d_kv=8, d_ff=32, num_layers=2)
        config.decoder_start_token_id = 0
        kind = T5ForConditionalGeneration
    elif name == "bert":
        config = BertConfig(**common, **sizes, max_position_embeddings=128)
        kind = BertForMaskedLM
    else:
        config = RobertaConfig(**common, **sizes, max_position_embeddings=130, pad_token_id=1)
        kind = RobertaForMaskedLM
    config._attn_implementation = attention
    model = kind(config)
    if name == "llama":  # transformers' norms round to float32, whatever the model's type
        for layer in model.model.layers:
            layer.input_layernorm, layer.post_attention_layernorm = (torch.nn.RMSNorm(16, eps=1e-6) for _ in range(2))
        model.model.norm = torch.nn.RMSNorm(16, eps=1e-6)
    return model.to(dtype)


def prompted(name: str, *, words: tuple[str, ...] = WORDS, several: bool = False, **options: Any) -> PromptedModel:
    """A prompted model of that name in float64, with rows of at most 40 tokens."""
    verbalizer = Verbalizer(words, tokenizer_of(name), several=several)
    template = options.pop("template", PromptTemplate("It was <X>."))
    return PromptedModel(model_of(name), template, verbalizer, **{"max_length": 40, **options})
