"""MAML: learning an initialisation through the inner loop."""

from metapretrain.maml.adapt import ENGINES, EngineChoice, adapt, engine_for
from metapretrain.maml.compiled import CompiledMeta, MetaGraph
from metapretrain.maml.gradient_check import MetaGradientCheck, ParameterCheck, check_meta_gradient
from metapretrain.maml.inner import current_step
from metapretrain.maml.learner import ANIL, FOMAML, MAML, MetaSGD
from metapretrain.maml.meta import meta_backward, meta_loss, meta_outputs
from metapretrain.maml.normalisation import POLICIES, Functional, functional
from metapretrain.protonet.learner import ProtoNet

__all__ = [
    "ANIL",
    "ENGINES",
    "FOMAML",
    "MAML",
    "POLICIES",
    "CompiledMeta",
    "EngineChoice",
    "Functional",
    "MetaGradientCheck",
    "MetaGraph",
    "MetaSGD",
    "ParameterCheck",
    "ProtoNet",
    "adapt",
    "check_meta_gradient",
    "current_step",
    "engine_for",
    "functional",
    "meta_backward",
    "meta_loss",
    "meta_outputs",
]
