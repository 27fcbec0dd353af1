"""Meta-learning for pretraining: episodes, prototypes and the loop that trains with them.

Names are imported when first used: ``import metapretrain`` is quick and brings in no framework.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from metapretrain.episodes import (
        Batch,
        Episode,
        EpisodeDataset,
        EpisodeLoader,
        EpisodePlan,
        EpisodeSampler,
        EpisodeSpec,
        ShuffledBatches,
        TaskStream,
        from_taskset,
        split_support_query,
        to_taskset,
    )
    from metapretrain.errors import InputError
    from metapretrain.evaluation.episodes import EpisodeResult, evaluate_episodes
    from metapretrain.models.saved import load
    from metapretrain.protonet import ProtoLoss, proto_logits, prototypes
    from metapretrain.training.loop import train
    from metapretrain.training.run_folder import RunFolder
    from metapretrain.training.settings import TrainSettings

_HOME = {
    "Batch": "episodes",
    "Episode": "episodes",
    "EpisodeDataset": "episodes",
    "EpisodeLoader": "episodes",
    "EpisodePlan": "episodes",
    "EpisodeResult": "evaluation.episodes",
    "EpisodeSampler": "episodes",
    "EpisodeSpec": "episodes",
    "InputError": "errors",
    "ProtoLoss": "protonet",
    "RunFolder": "training.run_folder",
    "ShuffledBatches": "episodes",
    "TaskStream": "episodes",
    "TrainSettings": "training.settings",
    "evaluate_episodes": "evaluation.episodes",
    "from_taskset": "episodes",
    "load": "models.saved",
    "proto_logits": "protonet",
    "prototypes": "protonet",
    "split_support_query": "episodes",
    "to_taskset": "episodes",
    "train": "training.loop",
}

__all__ = [
    "Batch",
    "Episode",
    "EpisodeDataset",
    "EpisodeLoader",
    "EpisodePlan",
    "EpisodeResult",
    "EpisodeSampler",
    "EpisodeSpec",
    "InputError",
    "ProtoLoss",
    "RunFolder",
    "ShuffledBatches",
    "TaskStream",
    "TrainSettings",
    "__version__",
    "evaluate_episodes",
    "from_taskset",
    "load",
    "proto_logits",
    "prototypes",
    "split_support_query",
    "to_taskset",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
