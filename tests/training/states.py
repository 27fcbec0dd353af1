"""How tests of checkpoints compare and load states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from metapretrain.training.checkpoint import load_latest, save


def same(a: Any, b: Any) -> bool:
    """Equal in value, type and bits: 0.0 is not -0.0, True is not 1, NaN is NaN, (1,) is not [1]."""
    if isinstance(a, torch.Tensor):
        if not isinstance(b, torch.Tensor) or a.dtype != b.dtype or a.shape != b.shape:
            return False
        left, right = a.detach().cpu().contiguous(), b.contiguous()
        return left.numel() == 0 or torch.equal(left.flatten().view(torch.uint8), right.flatten().view(torch.uint8))
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        pairs = zip(a.items(), b.items(), strict=True) if isinstance(b, dict) and len(a) == len(b) else None
        return pairs is not None and all(same(x, y) for x, y in pairs)
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return repr(a) == repr(b)


def round_trip(folder: Path, state: Any) -> Any:
    save(folder, 3, state)
    found = load_latest(folder)
    assert found is not None
    assert (found.step, found.path) == (3, folder / "step-00000003")
    return found.state


def read(folder: Path) -> tuple[int, Any]:
    found = load_latest(folder)
    assert found is not None
    return found.step, found.state
