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
        group_tasks,
        split_support_query,
        to_taskset,
    )
    from metapretrain.errors import InputError
    from metapretrain.evaluation.episodes import EpisodeResult, evaluate_episodes
    from metapretrain.experiments.saved import load
    from metapretrain.maml import (
        ANIL,
        FOMAML,
        MAML,
        MetaGraph,
        MetaSGD,
        ProtoNet,
        adapt,
        check_meta_gradient,
        functional,
        meta_backward,
        meta_loss,
    )
    from metapretrain.prompts import PromptedModel, PromptMAML, PromptTemplate, SoftPrompt, Verbalizer
    from metapretrain.protonet import ProtoLoss, proto_logits, prototypes
    from metapretrain.scheduling import (
        Choice,
        Exp3,
        Fixed,
        FunctionProbe,
        LoaderProbe,
        Probe,
        Proportional,
        RoundRobin,
        Uniform,
        UtilityScheduler,
    )
    from metapretrain.training.loop import train
    from metapretrain.training.run_folder import RunFolder
    from metapretrain.training.settings import TrainSettings

_HOME = {
    "ANIL": "maml",
    "Batch": "episodes",
    "Choice": "scheduling",
    "Episode": "episodes",
    "EpisodeDataset": "episodes",
    "EpisodeLoader": "episodes",
    "EpisodePlan": "episodes",
    "EpisodeResult": "evaluation.episodes",
    "EpisodeSampler": "episodes",
    "EpisodeSpec": "episodes",
    "Exp3": "scheduling",
    "FOMAML": "maml",
    "Fixed": "scheduling",
    "FunctionProbe": "scheduling",
    "InputError": "errors",
    "LoaderProbe": "scheduling",
    "MAML": "maml",
    "MetaGraph": "maml",
    "MetaSGD": "maml",
    "Probe": "scheduling",
    "PromptMAML": "prompts",
    "PromptTemplate": "prompts",
    "PromptedModel": "prompts",
    "Proportional": "scheduling",
    "ProtoLoss": "protonet",
    "ProtoNet": "maml",
    "RoundRobin": "scheduling",
    "RunFolder": "training.run_folder",
    "ShuffledBatches": "episodes",
    "SoftPrompt": "prompts",
    "TaskStream": "episodes",
    "TrainSettings": "training.settings",
    "Uniform": "scheduling",
    "UtilityScheduler": "scheduling",
    "Verbalizer": "prompts",
    "adapt": "maml",
    "check_meta_gradient": "maml",
    "evaluate_episodes": "evaluation.episodes",
    "from_taskset": "episodes",
    "functional": "maml",
    "group_tasks": "episodes",
    "load": "experiments.saved",
    "meta_backward": "maml",
    "meta_loss": "maml",
    "proto_logits": "protonet",
    "prototypes": "protonet",
    "split_support_query": "episodes",
    "to_taskset": "episodes",
    "train": "training.loop",
}

__all__ = [
    "ANIL",
    "FOMAML",
    "MAML",
    "Batch",
    "Choice",
    "Episode",
    "EpisodeDataset",
    "EpisodeLoader",
    "EpisodePlan",
    "EpisodeResult",
    "EpisodeSampler",
    "EpisodeSpec",
    "Exp3",
    "Fixed",
    "FunctionProbe",
    "InputError",
    "LoaderProbe",
    "MetaGraph",
    "MetaSGD",
    "Probe",
    "PromptMAML",
    "PromptTemplate",
    "PromptedModel",
    "Proportional",
    "ProtoLoss",
    "ProtoNet",
    "RoundRobin",
    "RunFolder",
    "ShuffledBatches",
    "SoftPrompt",
    "TaskStream",
    "TrainSettings",
    "Uniform",
    "UtilityScheduler",
    "Verbalizer",
    "__version__",
    "adapt",
    "check_meta_gradient",
    "evaluate_episodes",
    "from_taskset",
    "functional",
    "group_tasks",
    "load",
    "meta_backward",
    "meta_loss",
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
