"""Encoders, heads and saved models."""

from metapretrain.models.encoders import ENCODERS, STEMS, Encoder, Frozen, build_encoder
from metapretrain.models.heads import HEADS, build_head, projection

__all__ = ["ENCODERS", "HEADS", "STEMS", "Encoder", "Frozen", "build_encoder", "build_head", "projection"]
