"""Meta-learning for pretraining: episodes, prototypes and the loop that trains with them.

Names are imported when first used: ``import metapretrain`` is quick and brings in no framework.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from metapretrain.errors import InputError

_HOME = {
    "InputError": "errors",
}

__all__ = [
    "InputError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
