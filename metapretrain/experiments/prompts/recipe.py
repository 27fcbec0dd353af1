"""Rows and recipes of the prompts benchmark (Huang et al., sections 5 and A)."""

from dataclasses import dataclass, field

from metapretrain.checks import number, whole
from metapretrain.errors import InputError, one_of
from metapretrain.prompts import PromptTemplate
from metapretrain.scheduling import parse_schedule

SENTIMENT = ("terrible", "bad", "maybe", "good", "great")
WORDS = {2: ("bad", "good"), 3: ("bad", "maybe", "good"), 5: SENTIMENT}
STARTS = ("none", "random", "vocabulary")
GROUPINGS = ("kmeans", "label", "lda", "random")
BUDGETS = ("equal", "fair", "paper")
OBJECTIVES = {"mixed": "ppt", "multitask": "multitask", "meta": "metapt", "reptile": "reptile"}


@dataclass(frozen=True)
class PromptMethod:
    """A row: what the prompt starts from and what is tuned on few examples; InputError: an unknown name or grouping.

    Args:
        start: of the prompt: "random", "vocabulary" (embeddings of tokens), or "none" (no soft prompt).
        objective: of pretraining: "mixed" (all data as one task), "multitask" (meta tasks, no inner step),
            "meta" (prompt MAML), "reptile" (updates on one task after the other, each time a part of the way), or None.
        grouping: how meta tasks are made, for objectives that have some.
        labels: how many labels tasks have in turn, such as (2, 3, 5); empty: the five of the data.
        source: data of pretraining: "labelled", or "pseudo" (plain sentences that a classifier labelled).
        tuned: "prompt", "model" (all weights, no soft prompt) or "nothing".
    """

    start: str = "random"
    objective: str | None = None
    grouping: str | None = None
    source: str = "labelled"
    tuned: str = "prompt"
    labels: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        one_of("start", self.start, STARTS)
        one_of("tuned", self.tuned, ("model", "nothing", "prompt"))
        one_of("source", self.source, ("labelled", "pseudo"))
        if self.objective is not None:
            one_of("objective", self.objective, sorted(OBJECTIVES))
        if self.grouping is not None:
            one_of("grouping", self.grouping, GROUPINGS)
        if (self.objective in ("multitask", "meta", "reptile")) != (self.grouping is not None):
            raise InputError("multitask, meta and reptile pretraining need a grouping, the others have none")
        if not {*self.labels} <= {*WORDS} or (self.labels and self.objective is None):
            raise InputError(f"labels of pretraining are some of {', '.join(map(str, WORDS))}; got {self.labels}")

    @property
    def only_fair(self) -> bool:
        """Whether the row is one of budget "fair" alone."""
        return self.objective == "reptile" or bool(self.labels)

    @property
    def pretraining(self) -> str | None:
        """Name of the pretraining that the row starts from."""
        if self.objective is None:
            return None
        parts = [OBJECTIVES[self.objective], self.grouping, "pseudo" * (self.source == "pseudo")]
        return "-".join(filter(None, [*parts, "".join(map(str, self.labels))]))


MOST = 2**31 - 1  # of all counts of a recipe
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
        for name in ("batch_size", "epochs", *["patience"] * (self.patience is not None)):
            whole(name, getattr(self, name), 1, MOST)
        whole("warmup", self.warmup, 0, MOST)
        number("weight_decay", self.weight_decay, least=0)
        number("lr", self.lr, above=0)


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
        for name in ("shots", "inner_steps", "steps", "patience"):
            whole(name, getattr(self, name), 1, MOST)
        whole("clusters", self.clusters, 1, MOST_TASKS)
        if self.order not in (1, 2):
            raise InputError(f"order is 1 or 2, got {self.order}")
        one_of("reduction", self.reduction, ("mean", "sum"))
        one_of("query", self.query, ("own", "other"))
        if self.query == "other" and self.clusters < 2:
            raise InputError("query=other needs clusters of at least 2, got 1")
        if self.scheduler:
            parse_schedule(self.scheduler, [f"task-{task}" for task in range(self.clusters)])
        number("weight_decay", self.weight_decay, least=0)
        for name in ("lr", "inner_lr", "rate_lr", *["inner_clip"] * (self.inner_clip is not None)):
            number(name, getattr(self, name), above=0)


@dataclass(frozen=True)
class Fair:
    """Terms of budget "fair", equal for all pretraining: start, passes, decay of the rate, rows to choose by.

    Args:
        start: of pretrained prompts; tasks: meta tasks per update, 2m rows of each.
        updates: of Reptile on one task, as in downstream tuning; `rate`: the part of their way that is kept; it decays.
    """

    start: str = "vocabulary"
    tasks: int = 1
    updates: int = 10
    rate: float = 1.0

    def __post_init__(self) -> None:
        one_of("start", self.start, ("random", "vocabulary"))
        whole("tasks", self.tasks, 1, MOST)
        whole("updates", self.updates, 1, MOST)
        number("rate", self.rate, above=0)


@dataclass(frozen=True)
class PromptRecipe:
    """All choices of the benchmark.

    Args:
        model: for :func:`metapretrain.models.language_models.load_language_model`; `embedder`: for
            :func:`build_text_encoder`, whose sentence embeddings K-means groups.
        template: the hard tail of sentences; `pair_template`: of sentence pairs.
        normalise: "vocabulary" or "labels": what label words compete with; several: label words may be several tokens.
        length: rows of the prompt; `spread`: of random ones; max_length: tokens of a row, without the soft prompt.
        budget: "equal": each pretraining reads `reads` rows, support and query counted; "paper": each its own; "fair":
            each takes 2 x `reads` sequences through the model, forward or backward, by the terms of `fair`.
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
    fair: Fair = field(default_factory=Fair)
    mixed: Tuning = field(default_factory=lambda: Tuning(epochs=5))
    tune: Tuning = field(default_factory=Tuning)
    full: Tuning = field(default_factory=lambda: Tuning(lr=3e-5))

    def __post_init__(self) -> None:
        one_of("budget", self.budget, BUDGETS)
        one_of("normalise", self.normalise, ("labels", "vocabulary"))
        names = ("length", "max_length", "validations", "held_out", "examples", "validation", "test_rows")
        for name in (*names, *["rows"] * (self.rows is not None)):
            whole(name, getattr(self, name), 1, MOST)
        whole("reads", self.reads, self.mixed.batch_size, MOST)
        if self.budget != "fair" and self.fair != Fair():
            raise InputError(f"fair.start and others need budget fair; here it is {self.budget}")
        if self.budget == "fair" and (self.meta.scheduler or self.meta.learned or self.meta.query == "other"):
            raise InputError("budget fair takes no schedule, meta.learned or meta.query=other; budget equal does")
        number("spread", self.spread, above=0)
        number("pseudo_confidence", self.pseudo_confidence, least=0, most=1)
        for what in ("model", "embedder"):
            if not getattr(self, what).strip():
                raise InputError(f"{what} is empty; give the name of a model, or leave it out")
        PromptTemplate(self.template).pieces(pair=False)
        PromptTemplate(self.pair_template).pieces(pair=True)

    def tasks_per_step(self, objective: str, tasks: int) -> int:
        """Meta tasks of an update: all, or with budget "fair" those whose turn it is."""
        return tasks if self.budget != "fair" else 1 if objective == "reptile" else self.fair.tasks

    def reads_per_step(self, objective: str, tasks: int) -> int:
        """Rows of an update: a batch of all data, or m to adapt and m to judge by of each of its meta tasks."""
        if objective == "mixed":
            return self.mixed.batch_size
        return 2 * self.meta.shots * self.tasks_per_step(objective, tasks)

    def steps(self, objective: str, tasks: int, rows: int = 0) -> int:
        """Updates at most, for Reptile whole rounds; InputError if `reads` is less than one's.

        Example:
            >>> PromptRecipe().steps("meta", 10), PromptRecipe().steps("mixed", 1)
            (500, 10000)
            >>> fair = PromptRecipe(budget="fair", reads=16_000, meta=Meta(shots=2))
            >>> [fair.steps(objective, 10) for objective in ("mixed", "multitask", "reptile", "meta")]
            [4000, 4000, 4000, 2666]
        """
        if self.budget == "paper":
            mixed = self.mixed.epochs * -(-rows // self.mixed.batch_size)
            return mixed if objective == "mixed" else self.meta.steps
        each = self.reads_per_step(objective, tasks)
        if self.budget == "fair":  # half of the passes, as a row of PPT goes through the model forward and backward
            each = -(-passes_per_step(self, objective, tasks) // 2)
        together = self.fair.updates if objective == "reptile" else 1
        if not (rounds := self.reads // (each * together)):
            raise InputError(f"reads must be at least {each * together}, the rows of a step, got {self.reads}")
        return rounds * together


def passes_per_step(recipe: PromptRecipe, objective: str, tasks: int) -> int:
    """Sequences that go through the model in a step, once forward or once backward each."""
    if objective == "mixed":
        return 2 * recipe.mixed.batch_size
    return recipe.tasks_per_step(objective, tasks) * sum(passes_of_loss(recipe, objective))


def passes_of_loss(recipe: PromptRecipe, objective: str) -> tuple[int, int]:
    """Sequences of the outer loss of one meta task, inner steps and all, and of its backward pass."""
    m, steps = recipe.meta.shots, recipe.meta.inner_steps
    if objective != "meta":
        return 2 * m, 2 * m
    return m * (2 * steps + 1), m * (1 + (2 * steps if recipe.meta.order == 2 else 0))
