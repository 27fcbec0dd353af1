"""Soft prompts for frozen language models, and their initialisation learned by MAML."""

from metapretrain.prompts.learner import OuterStep, PromptMAML, tune
from metapretrain.prompts.model import PromptedModel
from metapretrain.prompts.soft_prompt import SoftPrompt, read_adapter, write_adapter
from metapretrain.prompts.template import PromptBatch, PromptTemplate, Verbalizer

__all__ = ["OuterStep", "PromptBatch", "PromptMAML", "PromptTemplate", "PromptedModel", "SoftPrompt", "Verbalizer"]
__all__ += ["read_adapter", "tune", "write_adapter"]
