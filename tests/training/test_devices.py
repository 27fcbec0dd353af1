"""Precision of forward passes outside the training loop."""

from __future__ import annotations

import pytest
import torch

from metapretrain.devices import PRECISIONS
from metapretrain.training.devices import mixed_precision


@pytest.mark.parametrize("precision", PRECISIONS)
def test_mixed_precision_is_that_of_its_name(precision: str) -> None:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    for device in ("cpu", torch.device("cpu")):
        with mixed_precision(device, precision):
            assert torch.is_autocast_enabled("cpu") == (dtype is not None)
            assert dtype is None or torch.get_autocast_dtype("cpu") == dtype
        assert not torch.is_autocast_enabled("cpu")
