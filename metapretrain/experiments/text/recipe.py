"""What can be chosen in a text experiment: methods, pretrainings and recipes, and the budget that they imply."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from metapretrain.checks import number, whole
from metapretrain.data.texts import TextTask
from metapretrain.errors import InputError, one_of
from metapretrain.experiments.recipe import PhaseTerms, Proto
from metapretrain.experiments.text.streams import POLICIES
from metapretrain.models.text_encoders import COMBINES

STS_HEADS = ("cosine", "mlp")
FAVOURED, OTHERS = 0.98, 0.01  # the paper's weights of the losses
MOST_SORTED = 10_000  # batches that are sorted together


@dataclass(frozen=True)
class TextPretraining:
    """How an encoder is pretrained on the classes of all tasks; scores are rounded half up to classes.

    Args:
        loss: `prototypes`, or `cross-entropy` with a linear head per task: the control.
        joined: a pair is one sequence; else its two embeddings are added (text paper, appendix A.2).
        sts: `cosine`: scores are learned by the cosine of both sentences, encoded apart, and have no prototypes;
            `ordinal`: a score between two classes belongs to both, in proportion.
        query: prototypes from support rows and loss on query rows, by the recipe's `query` options.
        epoch: prototypes over the epoch so far.
        ensemble: losses weighted by 1 / ln(classes), so that chance weighs the same in each task, and weights averaged
            over the updates: our reading of the paper's "weighted ensembling".
    """

    loss: str = "prototypes"
    joined: bool = True
    sts: str | None = None
    query: bool = False
    epoch: bool = False
    ensemble: bool = False


PRETRAININGS = {
    "proto": TextPretraining(),
    "proto-separate": TextPretraining(joined=False),
    "proto-query": TextPretraining(query=True),
    "proto-epoch": TextPretraining(epoch=True),
    "proto-ensemble": TextPretraining(ensemble=True),
    "cross-entropy": TextPretraining(loss="cross-entropy"),
    "proto-cosine": TextPretraining(sts="cosine"),
    "cross-entropy-cosine": TextPretraining(loss="cross-entropy", sts="cosine"),
    "proto-ordinal": TextPretraining(sts="ordinal"),
    "cross-entropy-ordinal": TextPretraining(loss="cross-entropy", sts="ordinal"),
}


@dataclass(frozen=True)
class TextMethod:
    """A method of the table: what the encoder starts from, how pairs are encoded, which heads are trained and how.

    Args:
        pretraining: a name of :data:`PRETRAININGS`, shared by the rows that name it, or None.
        joined: a pair is one sequence, under Dropout and one linear layer; else the heads of appendix A.1.1. With
            the head `cosine` for scores, theirs are encoded apart all the same.
        combine: step 3 of those heads: `mult`, `add` or `concat`.
        sts: head of pair regression where pairs are encoded apart: `mlp` or `cosine`; None: the recipe's.
        shared: pair tasks share the hidden layers of their heads; frozen: only the heads learn.
        favoured: task whose loss has the weight 0.98; the others have 0.01; surgery: PCGrad between the tasks.
        trained: False: the encoder as it is; scores by cosine and by nearest prototypes.
    """

    pretraining: str | None = None
    joined: bool = False
    combine: str = "mult"
    sts: str | None = "mlp"
    shared: bool = False
    frozen: bool = False
    favoured: str | None = None
    surgery: bool = False
    trained: bool = True

    def __post_init__(self) -> None:
        one_of("combination", self.combine, COMBINES)
        if self.pretraining is not None:
            one_of("pretraining", self.pretraining, PRETRAININGS)
        if self.sts is not None:
            one_of("head of STS", self.sts, STS_HEADS)


def one_sequence(method: TextMethod | TextPretraining, kind: str) -> bool:
    """Whether pairs of a task of this kind are one sequence: see `joined` and `sts` of the method."""
    return method.joined and not (method.sts == "cosine" and kind == "pair-regression")


@dataclass(frozen=True)
class TextPhase(PhaseTerms):
    """How one phase of training is done; the terms are those of :class:`metapretrain.training.TrainSettings`.

    `rdrop`: weight of the disagreement of two passes with dropout (R-Drop, Liang et al., 2021).
    """

    lr: float
    optimizer: str = "adamw"
    weight_decay: float = 0.01
    schedule: str = "constant"
    warmup: float = 0.0
    clip: float | None = None
    label_smoothing: float = 0.0
    ema: float | None = None
    rdrop: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rdrop is not None:
            number("rdrop", self.rdrop, above=0)


@dataclass(frozen=True)
class TextRecipe:
    """Choices of a text experiment but the method and the seed.

    Args:
        epochs: the budget, pretraining and fine-tuning together, in epochs of the loading policy.
        updates: the budget in updates, in place of epochs.
        joint, pretrain, finetune, frozen: the phase of rows without pretraining, of pretraining, of what follows it,
            and of heads over a frozen encoder.
        pretrain_share: share of the updates that pretraining gets, in (0, 1).
        batch_size: rows of each task in an update.
        encoder, pooling: see :func:`metapretrain.models.text_encoders.build_text_encoder`.
        max_length: tokens of a sequence at most; dropout: of the encoder; None: as its own configuration says.
        policy: what an epoch is: the `longest` loader or the `shortest` (text paper, section 5.3).
        scheduler: "" for a batch of every task in each update; else one task per update, chosen by this
            :func:`metapretrain.scheduling.parse_schedule`, in as many updates.
        pool: batches that are sorted by length together; `multiple`: widths are rounded up to it.
        balanced: all classes equally frequent in pretraining; `balanced_finetune`: in the other phases.
        sts_head: of the rows that leave it open.
        loss_weights: such as `sst=1,para=0.5`, 1 where not named; not for rows that weight the tasks themselves.
        validation: training rows of each task that no seed trains on.
        proto: of prototypical pretraining; `query`: of its query mode.
        ensemble_ema: decay of the average of weights of `proto-ensemble`.
    """

    epochs: int
    joint: TextPhase
    pretrain: TextPhase
    finetune: TextPhase
    frozen: TextPhase
    pretrain_share: float = 0.5
    batch_size: int = 64
    encoder: str = "minilm"
    pooling: str = "auto"
    max_length: int = 128
    dropout: float | None = None
    policy: str = "longest"
    scheduler: str = ""
    pool: int = 32
    multiple: int = 8
    balanced: bool = False
    balanced_finetune: bool = False
    sts_head: str = "cosine"
    loss_weights: str = ""
    validation: int = 500
    proto: Proto = field(default_factory=Proto)
    query: Proto = field(default_factory=Proto)
    ensemble_ema: float = 0.99
    updates: int | None = None

    def __post_init__(self) -> None:
        lowest = {"epochs": 1, "batch_size": 2, "pool": 1, "multiple": 1, "max_length": 4, "validation": 0}
        for name, least in lowest.items():
            whole(name, getattr(self, name), least)
        whole("pool", self.pool, 1, MOST_SORTED)
        if self.updates is not None:
            whole("updates", self.updates, 1)
        for name in ("pretrain_share", "ensemble_ema"):
            number(name, getattr(self, name), above=0, below=1)
        if self.frozen.rdrop:
            raise InputError("rdrop needs an encoder that learns: set it for joint, pretrain and finetune")
        one_of("policy", self.policy, POLICIES)
        one_of("head of STS", self.sts_head, STS_HEADS)
        one_of("pooling", self.pooling, ("auto", "mean", "cls"))


def ordinal_terms(method: TextMethod | TextPretraining, recipe: TextRecipe) -> dict[str, Any] | None:
    """Distance and temperature of prototypes, if a pretraining, or that of a method, uses the order of scores."""
    plan = method if isinstance(method, TextPretraining) else PRETRAININGS.get(method.pretraining or "")
    if plan is None or plan.sts != "ordinal":
        return None
    return {"distance": recipe.proto.distance, "temperature": recipe.proto.temperature}


def method_phase(recipe: TextRecipe, method: TextMethod) -> TextPhase:
    """The phase in which the heads of a row learn."""
    return recipe.frozen if method.frozen else recipe.joint if method.pretraining is None else recipe.finetune


def updates(recipe: TextRecipe, tasks: Sequence[TextTask], method: TextMethod) -> tuple[int, int]:
    """Return the updates of pretraining and of the phase with heads: their sum is the same for every trained row.

    InputError: the budget is too small for one update of each phase.
    """
    if not method.trained:
        return 0, 0
    size, rows = recipe.batch_size, {task.name: len(task.train) for task in tasks}
    for name, count in rows.items():
        if count < size:
            raise InputError(f"batch_size {size} is more than the {count} training rows of {name}; lower it")
    each = (max if recipe.policy == "longest" else min)(rows.values()) // size  # of an epoch
    total = recipe.epochs * each if recipe.updates is None else recipe.updates
    before = round(recipe.pretrain_share * total) if method.pretraining is not None else 0
    if before >= total or (not before and method.pretraining is not None):
        share = recipe.pretrain_share
        raise InputError(f"{total} updates are too few for pretrain_share {share}: give more, or smaller batches")
    return before, total - before


def loss_weights(
    recipe: TextRecipe, tasks: Sequence[TextTask], method: TextMethod | TextPretraining
) -> dict[str, float]:
    """Return the weight of each task's loss; InputError if the recipe names another task or a wrong value."""
    names = [task.name for task in tasks]
    given = parse_weights(recipe.loss_weights, names)
    if isinstance(method, TextMethod) and method.favoured is not None:
        favoured = one_of("task", method.favoured, names)
        return {name: FAVOURED if name == favoured else OTHERS for name in names}
    start = dict.fromkeys(names, 1.0)
    if isinstance(method, TextPretraining) and method.ensemble and not given:
        inverse = {task.name: 1 / math.log(task.num_classes) for task in tasks}
        mean = sum(inverse.values()) / len(inverse)
        start = {name: value / mean for name, value in inverse.items()}
    return {**start, **given}


def parse_weights(text: str, names: Sequence[str]) -> Mapping[str, float]:
    """Read `sst=0.5,para=2`."""
    found = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = part.partition("=")
        if one_of("task of a loss weight", name.strip(), names) in found:
            raise InputError(f"the loss of {name.strip()} is weighted twice in {text!r}")
        try:
            weight = float(value)
        except ValueError:
            weight = math.nan
        if not 0 <= weight < math.inf:
            raise InputError(f"a loss weight is task=number, 0 or more, such as sst=0.5; got {part!r}")
        found[name.strip()] = weight
    if found and not any({**dict.fromkeys(names, 1.0), **found}.values()):
        raise InputError("all loss weights are 0: nothing to train")
    return found
