"""Encoders, heads and saved models."""

from metapretrain.models.encoders import STEMS, Encoder, Frozen, build_encoder
from metapretrain.models.heads import HEADS, build_head, projection

__all__ = ["HEADS", "STEMS", "Encoder", "Frozen", "build_encoder", "build_head", "projection"]
