"""Encoders, heads and saved models."""

from metapretrain.models.encoders import ENCODERS, HEADS, STEMS, Encoder, Frozen, build_encoder, build_head, projection
from metapretrain.models.text_encoders import (
    ClassHead,
    CosineHead,
    PairHead,
    TextEncoder,
    build_text_encoder,
    load_text_encoder,
    save_text_encoder,
    share_hidden,
)

__all__ = [
    "ENCODERS",
    "HEADS",
    "STEMS",
    "ClassHead",
    "CosineHead",
    "Encoder",
    "Frozen",
    "PairHead",
    "TextEncoder",
    "build_encoder",
    "build_head",
    "build_text_encoder",
    "load_text_encoder",
    "projection",
    "save_text_encoder",
    "share_hidden",
]
