"""Rows and recipes of the prompts benchmark (Huang et al., sections 5 and A)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from metapretrain.checks import number
from metapretrain.errors import InputError, one_of
from metapretrain.prompts import PromptTemplate
from metapretrain.scheduling import parse_schedule

STARTS = ("none", "random", "vocabulary")
GROUPINGS = ("kmeans", "label", "lda", "random")
BUDGETS = ("equal", "paper")


@dataclass(frozen=True)
class PromptMethod:
    """A row: what the prompt starts from and what is tuned on the few examples.

    Args:
        start: of the prompt: "random", "vocabulary" (embeddings of tokens), or "none" (no soft prompt).
        objective: of pretraining: "mixed" (all data as one task), "multitask" (meta tasks, no inner step),
            "meta" (prompt MAML), or None.
        grouping: how meta tasks are made.
        source: data of pretraining: "labelled", or "pseudo" (plain sentences that a classifier labelled).
        tuned: "prompt", "model" (all weights, no soft prompt) or "nothing".

    InputError: an unknown name, or a grouping that the objective has no use for.

    Example:
        >>> PromptMethod(objective="meta", grouping="kmeans", source="pseudo").pretraining
        'metapt-kmeans-pseudo'
    """

    start: str = "random"
    objective: str | None = None
    grouping: str | None = None
    source: str = "labelled"
    tuned: str = "prompt"

    def __post_init__(self) -> None:
        one_of("start", self.start, STARTS)
        one_of("tuned", self.tuned, ("model", "nothing", "prompt"))
        one_of("source", self.source, ("labelled", "pseudo"))
        if self.objective is not None:
            one_of("objective", self.objective, ("meta", "mixed", "multitask"))
        if self.grouping is not None:
            one_of("grouping", self.grouping, GROUPINGS)
        if (self.objective in ("multitask", "meta")) != (self.grouping is not None):
            raise InputError("multitask and meta pretraining need a grouping, the others have none")

    @property
    def pretraining(self) -> str | None:
        """Name of the pretraining that the row starts from."""
        if self.objective is None:
            return None
        words = {"mixed": "ppt", "multitask": "multitask", "meta": "metapt"}
        return "-".join(filter(None, [words[self.objective], self.grouping, "pseudo" * (self.source == "pseudo")]))


LIMIT = 2**31  # of all numbers of a recipe
MOST_TASKS = 10_000  # meta tasks: each has a name and a prompt of its own in memory


@dataclass(frozen=True)
class Tuning:
    """Training of a prompt, or of a model, with AdamW and a linear schedule; InputError if a number is out of range.

    Args:
        batch_size: rows per step; epochs: at most.
        patience: validations without a better accuracy after which it ends; None: never; warmup: steps of warm-up.
        keep_start: the initialisation may be kept, too, if no epoch validates better.
    """

    lr: float = 3e-3
    batch_size: int = 4
    epochs: int = 200
    patience: int | None = 5
    warmup: int = 20
    weight_decay: float = 0.01
    keep_start: bool = False

    def __post_init__(self) -> None:
        at_least_one = {"batch_size": self.batch_size, "epochs": self.epochs}
        if self.patience is not None:
            at_least_one["patience"] = self.patience
        _check(at_least_one, 1)
        _check({"warmup": self.warmup, "weight_decay": self.weight_decay}, 0)
        if not 0 < self.lr < math.inf:
            raise InputError(f"lr must be above 0, got {self.lr}")


@dataclass(frozen=True)
class Meta:
    """Prompt MAML and its meta tasks.

    Args:
        clusters: meta tasks K; shots: rows m of a task's support part, and of its query part.
        lr: outer rate beta; `inner_lr`: alpha.
        inner_clip: norm that each task's inner gradient is scaled down to; None: as it is.
        learned: learn an inner rate for each row of the prompt, with rate `rate_lr`.
        query: whose rows a task's query part is made of: its "own", or "other": those of another task, which changes
            from step to step (ours; with a scheduler, a task that comes twice in a step may meet itself).
        scheduler: "" for all tasks in each step; else as many as there are, each chosen by this schedule:
            :func:`metapretrain.scheduling.parse_schedule`, with tasks `task-0` to `task-(clusters-1)`.
        steps: outer steps at most, and `patience`: validations, with the paper's budget.
    """

    clusters: int = 10
    shots: int = 4
    lr: float = 0.025
    inner_lr: float = 0.08
    inner_steps: int = 1
    inner_clip: float | None = None
    order: int = 2
    reduction: str = "sum"
    weight_decay: float = 0.01
    learned: bool = False
    rate_lr: float = 1e-3
    query: str = "own"
    scheduler: str = ""
    steps: int = 20_000
    patience: int = 6

    def __post_init__(self) -> None:
        names = ("clusters", "shots", "inner_steps", "steps", "patience")
        _check({name: getattr(self, name) for name in names}, 1)
        if self.clusters > MOST_TASKS:
            raise InputError(f"clusters must be at most {MOST_TASKS}, got {self.clusters}")
        if self.order not in (1, 2):
            raise InputError(f"order is 1 or 2, got {self.order}")
        one_of("reduction", self.reduction, ("mean", "sum"))
        one_of("query", self.query, ("own", "other"))
        if self.query == "other" and self.clusters < 2:
            raise InputError("query=other needs clusters of at least 2, got 1")
        if self.scheduler:
            parse_schedule(self.scheduler, [f"task-{task}" for task in range(self.clusters)])
        _check({"weight_decay": self.weight_decay}, 0)
        if self.inner_clip is not None and not 0 < self.inner_clip < math.inf:
            raise InputError(f"inner_clip must be above 0, or none, got {self.inner_clip}")
        if not all(0 < rate < math.inf for rate in (self.lr, self.inner_lr, self.rate_lr)):
            raise InputError(f"rates must be above 0, got {self.lr}, {self.inner_lr} and {self.rate_lr}")


@dataclass(frozen=True)
class PromptRecipe:
    """All choices of the benchmark.

    Args:
        model: for :func:`metapretrain.models.language_models.load_language_model`; `embedder`: for
            :func:`build_text_encoder`, whose sentence embeddings K-means groups.
        template: the hard tail of sentences; `pair_template`: of sentence pairs.
        normalise: "vocabulary" or "labels": what label words compete with; several: label words may be several tokens.
        length: rows of the prompt; `spread`: of random ones; max_length: tokens of a row, without the soft prompt.
        budget: "equal": each pretraining reads `reads` rows, support and query counted; "paper": each its own.
        rows: pretraining rows used at most, of all classes as many as there are; None: all rows as they are.
        pseudo_confidence: least probability of a pseudo label.
        validations: of a pretraining; `held_out`: batches of 2m rows that each meta task is validated on.
        examples, validation: rows of a downstream set to tune and to validate on; `stratified`: by class.
        test_rows: rows of a downstream set reported on, at most.
        meta, mixed: of pretraining; `tune`: of prompts on a downstream set; `full`: of the model.
    """

    model: str = "smollm2"
    embedder: str = "minilm"
    template: str = "It was <X>."
    pair_template: str = "{first} Does it mean that {second} ? Answer: <X>."
    normalise: str = "vocabulary"
    several: bool = False
    length: int = 100
    spread: float = 0.5
    max_length: int = 128
    budget: str = "equal"
    reads: int = 40_000
    rows: int | None = 10_000
    pseudo_confidence: float = 0.5
    validations: int = 20
    held_out: int = 8
    examples: int = 40
    validation: int = 40
    stratified: bool = True
    test_rows: int = 1_000
    meta: Meta = field(default_factory=Meta)
    mixed: Tuning = field(default_factory=lambda: Tuning(epochs=5))
    tune: Tuning = field(default_factory=Tuning)
    full: Tuning = field(default_factory=lambda: Tuning(lr=3e-5))

    def __post_init__(self) -> None:
        one_of("budget", self.budget, BUDGETS)
        one_of("normalise", self.normalise, ("labels", "vocabulary"))
        names = ("length", "max_length", "validations", "held_out", "examples", "validation", "test_rows")
        _check({name: getattr(self, name) for name in names}, 1)
        _check({"reads": self.reads}, self.mixed.batch_size)
        if not 0 < self.spread < math.inf:
            raise InputError(f"spread must be above 0, got {self.spread}")
        if not 0 <= self.pseudo_confidence <= 1:
            raise InputError(f"pseudo_confidence must lie in 0..1, got {self.pseudo_confidence}")
        for what in ("model", "embedder"):
            if not getattr(self, what).strip():
                raise InputError(f"{what} is empty; give the name of a model, or leave it out")
        PromptTemplate(self.template).pieces(pair=False)
        PromptTemplate(self.pair_template).pieces(pair=True)

    def meta_reads(self, tasks: int) -> int:
        """Rows that a step of that many meta tasks reads: m to adapt and m to judge by, of each."""
        return 2 * self.meta.shots * tasks

    def meta_steps(self, tasks: int) -> int:
        """Outer steps at most; InputError if `reads` is less than one step's.

        Example:
            >>> PromptRecipe().meta_steps(10), PromptRecipe().mixed_steps(9_000)
            (500, 10000)
        """
        if self.budget == "paper":
            return self.meta.steps
        if self.reads < (each := self.meta_reads(tasks)):
            raise InputError(f"reads must be at least {each}, the rows of a step, got {self.reads}")
        return self.reads // each

    def mixed_steps(self, rows: int) -> int:
        """Steps at most on all `rows` rows as one task."""
        if self.budget == "equal":
            return self.reads // self.mixed.batch_size
        return self.mixed.epochs * -(-rows // self.mixed.batch_size)


def passes_per_step(recipe: PromptRecipe, objective: str, tasks: int) -> int:
    """Sequences that go through the model in a step, once forward or once backward each.

    Example:
        >>> passes_per_step(PromptRecipe(), "mixed", 1), passes_per_step(PromptRecipe(), "meta", 10)
        (8, 240)
    """
    if objective == "mixed":
        return 2 * recipe.mixed.batch_size
    return tasks * sum(passes_of_loss(recipe, objective))


def passes_of_loss(recipe: PromptRecipe, objective: str) -> tuple[int, int]:
    """Sequences of the outer loss of one meta task, inner steps and all, and of its backward pass.

    Example:
        >>> passes_of_loss(PromptRecipe(), "meta"), passes_of_loss(PromptRecipe(), "multitask")
        ((12, 12), (8, 8))
    """
    m, steps = recipe.meta.shots, recipe.meta.inner_steps
    if objective == "multitask":
        return 2 * m, 2 * m
    return m * (2 * steps + 1), m * (1 + (2 * steps if recipe.meta.order == 2 else 0))


def _check(numbers: Mapping[str, int | float], lowest: int) -> None:
    for name, value in numbers.items():
        number(name, value, least=lowest, below=LIMIT)
