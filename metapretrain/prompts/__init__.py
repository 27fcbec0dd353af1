"""Soft prompts for frozen language models, and their initialisation learned by MAML."""

from metapretrain.prompts.adapter import read_adapter, write_adapter
from metapretrain.prompts.batch import PromptBatch
from metapretrain.prompts.fitting import Fitted
from metapretrain.prompts.learner import PromptMAML
from metapretrain.prompts.outer_step import OuterStep
from metapretrain.prompts.prompted import PromptedModel
from metapretrain.prompts.soft_prompt import SoftPrompt
from metapretrain.prompts.template import PromptTemplate
from metapretrain.prompts.verbalizer import Verbalizer

__all__ = [
    "Fitted",
    "OuterStep",
    "PromptBatch",
    "PromptMAML",
    "PromptTemplate",
    "PromptedModel",
    "SoftPrompt",
    "Verbalizer",
    "read_adapter",
    "write_adapter",
]
