"""What a text encoder asks of its model, its tokenizer and its length."""

from __future__ import annotations

from typing import Any

from torch import nn

from metapretrain.errors import InputError


def check_model(model: Any, tokenizer: Any) -> None:
    """Refuse what is not an encoder with its own tokenizer.

    Raises:
        InputError: a decoder, or a tokenizer that has no padding, no vocabulary or more tokens than the model.
    """
    from transformers.models.auto import modeling_auto as auto

    config = model.config
    kind = config.model_type
    decodes = kind in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and kind not in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    if config.is_encoder_decoder or getattr(config, "is_decoder", False) or decodes:
        raise InputError(f"{kind} is no encoder; give one of the kinds of BERT, RoBERTa, DistilBERT or MPNet")
    if tokenizer.pad_token_id is None:
        raise InputError(f"the tokenizer of {kind} has no padding token; set tokenizer.pad_token")
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise InputError(f"the tokenizer of {kind} has no vocabulary; save the tokenizer into the model's folder")
    rows = model.get_input_embeddings().num_embeddings
    if len(tokenizer) > rows:
        raise InputError(f"the tokenizer has {len(tokenizer)} tokens, the model {rows}; give the model's own tokenizer")


def longest(model: Any, tokenizer: Any) -> int:
    """Tokens that the model has positions for, at most what its tokenizer was made for."""
    rows = getattr(model.config, "max_position_embeddings", 0) or tokenizer.model_max_length
    table = getattr(getattr(model, "embeddings", None), "position_embeddings", None)
    if isinstance(table, nn.Embedding) and table.padding_idx is not None:
        rows -= table.padding_idx + 1  # RoBERTa and MPNet number tokens from after the padding's position
    return int(min(rows, tokenizer.model_max_length))


def check_length(given: int | None, most: int) -> int:
    """The length that was given, or the most that the model takes.

    Raises:
        InputError: not a whole number from 3 (a word between two special tokens) to `most`.

    Example:
        >>> check_length(None, 512)
        512
    """
    if given is None:
        return most
    if isinstance(given, bool) or not isinstance(given, int) or not 3 <= given <= most:
        raise InputError(f"max_length must be a whole number from 3 to {most}, what this model takes; got {given!r}")
    return given
