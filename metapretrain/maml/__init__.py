"""MAML: learning an initialisation through the inner loop."""

from metapretrain.maml.adapt import adapt, engine_for
from metapretrain.maml.choice import Choice
from metapretrain.maml.compiled import CompiledMeta
from metapretrain.maml.gradient_check import MetaGradientCheck, ParameterCheck, check_meta_gradient
from metapretrain.maml.graphs import MetaGraph
from metapretrain.maml.learner import MAML
from metapretrain.maml.learners import ANIL, FOMAML, MetaSGD
from metapretrain.maml.meta import meta_backward, meta_loss, meta_outputs
from metapretrain.maml.normalisation import POLICIES, Functional, functional
from metapretrain.maml.problem import ENGINES
from metapretrain.maml.prototypical import ProtoNet
from metapretrain.maml.steps import current_step

__all__ = [
    "ANIL",
    "ENGINES",
    "FOMAML",
    "MAML",
    "POLICIES",
    "Choice",
    "CompiledMeta",
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
