"""A text model of 60 thousand parameters without any file: for tests, smoke runs and a first look."""

from __future__ import annotations

import string
from typing import Any

import torch

_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_POSITIONS = 256


def tiny_tokenizer() -> Any:
    """A BERT tokenizer whose pieces are pairs of letters and single ASCII characters; nothing is downloaded.

    Example:
        >>> tiny_tokenizer().tokenize("A tiny test.")
        ['a', 'ti', '##ny', 'te', '##st', '.']
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    letters = string.ascii_lowercase
    inside = [*letters, *string.digits, *(a + b for a in letters for b in letters)]
    pieces = [*_SPECIAL, *string.punctuation, *inside, *(f"##{piece}" for piece in inside)]
    tokenizer = Tokenizer(models.WordPiece({piece: row for row, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=_POSITIONS,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        **{f"{name[1:-1].lower()}_token": name for name in _SPECIAL},
    )


def tiny_model(vocabulary: int, *, seed: int = 0, dropout: float | None = None) -> Any:
    """BERT of 2 layers and 32 features with random weights; the global random state is left alone.

    Example:
        >>> tiny_model(100).config.hidden_size
        32
    """
    from transformers import BertConfig, BertModel

    rate = 0.1 if dropout is None else dropout
    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=_POSITIONS,
        hidden_dropout_prob=rate,
        attention_probs_dropout_prob=rate,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return BertModel(config)
