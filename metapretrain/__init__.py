"""Meta-learning for pretraining: episodes, prototypes, MAML, prompts, scheduling and the loop that trains with them.

The imports below are the one list of public names. Type checkers read them as they stand; at run time each name is
imported when it is first used, so that ``import metapretrain`` is quick and brings in no framework.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

# isort: off
if TYPE_CHECKING:
    # Errors
    from metapretrain.errors import InputError as InputError  # the error for bad input, with a message of one line

    # Episodes
    from metapretrain.episodes import EpisodeSpec as EpisodeSpec  # ways, shots and queries
    from metapretrain.episodes import EpisodeSampler as EpisodeSampler  # plans episodes from labels
    from metapretrain.episodes import EpisodePlan as EpisodePlan  # the rows of one episode, before data is read
    from metapretrain.episodes import EpisodeDataset as EpisodeDataset  # reads the rows of a plan, for a DataLoader
    from metapretrain.episodes import EpisodeLoader as EpisodeLoader  # reads episodes from data and a sampler
    from metapretrain.episodes import Episode as Episode  # support and query part
    from metapretrain.episodes import Batch as Batch  # inputs x and labels y
    from metapretrain.episodes import stack as stack  # episodes of one shape as one batch of tasks
    from metapretrain.episodes import split_support_query as split_support_query  # a labelled batch in two parts
    from metapretrain.episodes import ShuffledBatches as ShuffledBatches  # ordinary batches of rows, resumable
    from metapretrain.episodes import TaskStream as TaskStream  # batches of several tasks, chosen by a scheduler
    from metapretrain.episodes import group_tasks as group_tasks  # meta tasks by k-means, LDA, at random or by label
    from metapretrain.episodes import to_taskset as to_taskset  # our sampler as a learn2learn task set
    from metapretrain.episodes import from_taskset as from_taskset  # a learn2learn task set as our episodes

    # Prototypes
    from metapretrain.protonet import ProtoLoss as ProtoLoss  # prototypical loss in three modes
    from metapretrain.protonet import prototypes as prototypes  # class means of embeddings
    from metapretrain.protonet import proto_logits as proto_logits  # logits of queries from distances to prototypes
    from metapretrain.protonet.learner import ProtoNet as ProtoNet  # prototypical networks as a few-shot learner

    from metapretrain.protonet.learner import R2D2 as R2D2  # the same with ridge regression in place of class means

    # MAML
    from metapretrain.maml import MAML as MAML  # a learned initialisation, second order
    from metapretrain.maml import FOMAML as FOMAML  # the same, first order
    from metapretrain.maml import ANIL as ANIL  # the inner loop adapts the head alone
    from metapretrain.maml import MetaSGD as MetaSGD  # MAML with learned inner learning rates
    from metapretrain.maml import Reptile as Reptile  # weights move towards the adapted ones
    from metapretrain.maml import MetaGraph as MetaGraph  # a learner's backward recorded as a CUDA graph
    from metapretrain.maml import adapt as adapt  # the inner loop as a function
    from metapretrain.maml import meta_loss as meta_loss  # the loss of each task after the inner loop
    from metapretrain.maml import meta_backward as meta_backward  # its gradient, in chunks of tasks
    from metapretrain.maml import functional as functional  # a module as a function of its parameters
    from metapretrain.maml import check_meta_gradient as check_meta_gradient  # beside central differences

    # Soft prompts for frozen language models
    from metapretrain.prompts import PromptMAML as PromptMAML  # a prompt learned by MAML over meta tasks
    from metapretrain.prompts import PromptedModel as PromptedModel  # a frozen model that scores label words
    from metapretrain.prompts import PromptTemplate as PromptTemplate  # the text around the sentences
    from metapretrain.prompts import SoftPrompt as SoftPrompt  # the learned vectors (L, D); loads in PEFT
    from metapretrain.prompts import Verbalizer as Verbalizer  # labels as words

    # Scheduling: which task to train on next
    from metapretrain.scheduling import UtilityScheduler as UtilityScheduler  # utilities from probes, epsilon-greedy
    from metapretrain.scheduling import Exp3 as Exp3  # a bandit over rewards
    from metapretrain.scheduling import Uniform as Uniform  # every source with the same probability
    from metapretrain.scheduling import Proportional as Proportional  # every source in proportion to its size
    from metapretrain.scheduling import RoundRobin as RoundRobin  # one source after the other
    from metapretrain.scheduling import Fixed as Fixed  # one source for the whole run
    from metapretrain.scheduling import Choice as Choice  # a decision of a scheduler
    from metapretrain.scheduling import Probe as Probe  # a task for schedulers: batches and a loss
    from metapretrain.scheduling import FunctionProbe as FunctionProbe  # a probe from two functions
    from metapretrain.scheduling import LoaderProbe as LoaderProbe  # a probe from a loader and a loss

    # Training, evaluation and saved runs
    from metapretrain.training.settings import TrainSettings as TrainSettings  # the choices of a training phase
    from metapretrain.training.loop import train as train  # the training loop, resumable
    from metapretrain.training.run_folder import RunFolder as RunFolder  # the folder of one run
    from metapretrain.evaluation.episodes import evaluate_episodes as evaluate_episodes  # accuracy with its interval
    from metapretrain.evaluation.episodes import EpisodeResult as EpisodeResult  # mean, interval, values
    from metapretrain.experiments.saved import load as load  # the model of a finished run
    from metapretrain.experiments.push import push_to_hub as push_to_hub  # a finished run on the Hugging Face Hub
# isort: on


def _homes() -> dict[str, str]:
    """The module of each public name, read from the imports above."""
    tree = ast.parse(Path(__file__).read_text(encoding="utf-8"))
    imports = (node for block in tree.body if isinstance(block, ast.If) for node in block.body)
    return {node.names[0].name: node.module or "" for node in imports if isinstance(node, ast.ImportFrom)}


_HOMES = _homes()
__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
