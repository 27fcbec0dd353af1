"""Precision of forward passes outside the training loop."""

from __future__ import annotations

import pytest
import torch

from metapretrain.checks import PRECISIONS
from metapretrain.training.environment import make_accelerator, mixed_precision


def test_another_device_is_not_that_of_an_earlier_phase() -> None:
    from accelerate import PartialState

    assert make_accelerator("cpu", "fp32").device.type == "cpu"
    PartialState._shared_state["device"] = torch.device("meta")  # as if that had been on another one
    assert make_accelerator("cpu", "fp32").device.type == "cpu"


@pytest.mark.parametrize("precision", PRECISIONS)
def test_mixed_precision_is_that_of_its_name(precision: str) -> None:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    for device in ("cpu", torch.device("cpu")):
        with mixed_precision(device, precision):
            assert torch.is_autocast_enabled("cpu") == (dtype is not None)
            assert dtype is None or torch.get_autocast_dtype("cpu") == dtype
        assert not torch.is_autocast_enabled("cpu")
