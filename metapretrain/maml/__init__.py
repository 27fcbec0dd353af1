"""MAML: learning an initialisation through the inner loop."""

import importlib
from typing import Any

from metapretrain.maml.adapt import ENGINES, EngineChoice, adapt, engine_for
from metapretrain.maml.compiled import CompiledMeta, MetaGraph
from metapretrain.maml.gradient_check import MetaGradientCheck, ParameterCheck, check_meta_gradient
from metapretrain.maml.inner import current_step
from metapretrain.maml.learner import ANIL, FOMAML, MAML, MetaSGD, Reptile
from metapretrain.maml.meta import fading_weights, meta_backward, meta_loss, meta_outputs
from metapretrain.maml.normalisation import POLICIES, Functional, functional

__all__ = ["ANIL", "ENGINES", "FOMAML", "MAML", "POLICIES", "CompiledMeta", "EngineChoice", "Functional"]
__all__ += ["MetaGradientCheck", "MetaGraph", "MetaSGD", "ParameterCheck", "Reptile", "adapt", "check_meta_gradient"]
__all__ += ["current_step", "engine_for", "fading_weights", "functional", "meta_backward", "meta_loss"]
__all__ += ["meta_outputs"]


def __getattr__(name: str) -> Any:
    """`metapretrain.maml.ProtoNet` is still found here; it is a learner beside MAML, at home in `protonet`."""
    if name == "ProtoNet":
        return importlib.import_module("metapretrain.protonet.learner").ProtoNet
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
