"""Encoders, heads and saved models."""

from metapretrain.models.encoders import ENCODERS, HEADS, STEMS, Encoder, Frozen, build_encoder, build_head, projection
from metapretrain.models.text_encoders import build_text_encoder, load_text_encoder, save_text_encoder

__all__ = ["ENCODERS", "HEADS", "STEMS", "Encoder", "Frozen", "build_encoder", "build_head", "build_text_encoder"]
__all__ += ["load_text_encoder", "projection", "save_text_encoder"]
