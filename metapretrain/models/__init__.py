"""Encoders, heads and saved models."""

from metapretrain.models.encoders import ENCODERS, STEMS, Encoder, Frozen, build_encoder
from metapretrain.models.heads import HEADS, build_head, projection
from metapretrain.models.text_encoders import TextEncoder, build_text_encoder, load_text_encoder, save_text_encoder
from metapretrain.models.text_heads import ClassHead, CosineHead, PairHead, share_hidden

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
