"""A frame and encoders that need no file."""

from __future__ import annotations

import pytest

from metapretrain.experiments.schedule.tasks import Frame
from metapretrain.models.language_models import tiny_tokenizer
from metapretrain.models.text_encoders import TextEncoder, build_text_encoder


@pytest.fixture(scope="session")
def frame() -> Frame:
    return Frame(tiny_tokenizer(), max_length=64)


@pytest.fixture
def encoder() -> TextEncoder:
    return build_text_encoder("tiny", dropout=0.0)
