"""Small text models with random weights, one of each kind, and their tokenizers; nothing is read or downloaded."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from metapretrain.models.language_models import tiny_tokenizer
from metapretrain.models.text_encoders import TextEncoder

KINDS = ("bert", "distilbert", "mpnet", "roberta")
_SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


def byte_tokenizer(positions: int = 64) -> Any:
    """RoBERTa's form: bytes, padding with id 1, two separators inside a pair, no token types."""
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    pieces = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({piece: row for row, piece in enumerate(pieces)}, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=positions,
        model_input_names=["input_ids", "attention_mask"],
        bos_token="<s>",
        cls_token="<s>",
        eos_token="</s>",
        sep_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        mask_token="<mask>",
    )


def small_encoder(kind: str, pooling: str = "mean", attention: str | None = None) -> TextEncoder:
    """An encoder of `kind` with weights large enough that each token shows in the result."""
    tokenizer = byte_tokenizer() if kind in ("roberta", "mpnet") else tiny_tokenizer()
    tokenizer.model_max_length = 64
    size = len(tokenizer)
    config: Any
    if kind == "bert":
        config = transformers.BertConfig(vocab_size=size, max_position_embeddings=64, **_SIZES)
    elif kind == "distilbert":
        tokenizer.model_input_names = ["input_ids", "attention_mask"]
        config = transformers.DistilBertConfig(
            vocab_size=size, max_position_embeddings=64, dim=32, n_layers=2, n_heads=2, hidden_dim=64
        )
    elif kind == "mpnet":
        config = transformers.MPNetConfig(vocab_size=size, max_position_embeddings=66, **_SIZES)
    else:
        config = transformers.RobertaConfig(vocab_size=size, max_position_embeddings=66, type_vocab_size=1, **_SIZES)
    config.initializer_range = 0.2
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModel.from_config(config, **({"attn_implementation": attention} if attention else {}))
    return TextEncoder(model, tokenizer, pooling)
