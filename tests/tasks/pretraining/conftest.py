"""A frame and encoders that need no file."""

from __future__ import annotations

import pytest

from metapretrain.models.text_encoders import TextEncoder, build_text_encoder
from metapretrain.models.tiny_text import tiny_tokenizer
from metapretrain.tasks.pretraining import Frame


@pytest.fixture(scope="session")
def frame() -> Frame:
    return Frame(tiny_tokenizer(), max_length=64)


@pytest.fixture
def encoder() -> TextEncoder:
    return build_text_encoder("tiny", dropout=0.0)
