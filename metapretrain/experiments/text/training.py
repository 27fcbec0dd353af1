"""The two phases of a text experiment, pretraining and heads, and the embeddings that both are scored by."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from metapretrain.data.texts import TextTask
from metapretrain.data.tokens import Tokens, padded_width
from metapretrain.draws import seeded, torch_generator
from metapretrain.evaluation.metrics import PROTOTYPE, score_task, with_overall
from metapretrain.evaluation.representation import check_embeddings
from metapretrain.experiments.base import Context, Machine, Training
from metapretrain.experiments.recipe import choices_of, row_probes
from metapretrain.experiments.text.data import TextData, width_limit
from metapretrain.experiments.text.objectives import (
    TextClasses,
    TextLabels,
    TextObjective,
    TextOrdinal,
    TextPrototypes,
    TextRows,
    TextStep,
    added,
    build_heads,
    head_predictions,
    prototype_outputs,
    task_prototypes,
)
from metapretrain.experiments.text.recipe import (
    TextMethod,
    TextPhase,
    TextRecipe,
    loss_weights,
    method_phase,
    one_sequence,
    ordinal_terms,
    updates,
)
from metapretrain.experiments.text.streams import TextStream
from metapretrain.models.text_encoders import ClassHead, CosineHead, TextEncoder, build_text_encoder
from metapretrain.nests import evaluation_mode
from metapretrain.protonet import ProtoLoss
from metapretrain.scheduling import BlockScheduler, build_scheduler, parse_schedule
from metapretrain.training import TrainReport

EMBED_ROWS = 256  # rows that are embedded at once

Embedded = dict[str, list[Tensor]]  # task to (N, D), one or two
TextContext = Context[TextRecipe, TextData, Any]


@torch.no_grad()
def embed_tokens(
    encoder: TextEncoder, tokens: Tokens, device: str | torch.device, limit: int, batch_size: int = EMBED_ROWS
) -> list[Tensor]:
    """Return the embeddings float32 (N, D) of all rows, two for pairs that are encoded separately; no dropout.

    Rows are taken in the order of their lengths, for little padding. A compiled encoder runs as it is: widths are many.
    """
    encoder.to(device)
    found = []
    with torch.compiler.set_stance("force_eager"), evaluation_mode(encoder):
        for part in filter(None, (tokens, tokens.second)):
            here, z = part.to(device), torch.zeros(len(part), encoder.features, device=device)
            for rows in part.lengths.argsort(stable=True).split(batch_size):
                longest = int(part.lengths[rows].max())
                width = max(longest, min(padded_width(part.lengths[rows]), limit))
                z[rows.to(device)] = encoder(here.gather(rows.to(device), width)).float()
            if len(z):
                check_embeddings(z)
            found.append(z)
    return found


def embed(
    encoder: TextEncoder, data: TextData, recipe: TextRecipe, split: str, method: Any, machine: Machine
) -> Embedded:
    """Embed a split (`train`, `validation`, `dev` or `test`) of every task that has it."""
    found = {}
    for task in data.tasks:
        rows = getattr(task, split)
        if rows is not None and len(rows):
            joined = one_sequence(method, task.kind)
            tokens = data.tokens(rows, f"{task.name} {split}", encoder, recipe, joined)
            found[task.name] = embed_tokens(encoder, tokens, machine.device, width_limit(encoder, recipe))
    return found


@torch.no_grad()
def predictions(tasks: Sequence[TextTask], heads: nn.ModuleDict, z: Embedded) -> dict[str, Tensor]:
    """Return each embedded task's predictions (N,) on the CPU: classes, or scores."""
    found = {}
    for task in (task for task in tasks if task.name in z):
        head = heads[task.name].to(z[task.name][0].device)
        with evaluation_mode(head):
            found[task.name] = head_predictions(task, head, z[task.name]).cpu()
    return found


def score(tasks: Sequence[TextTask], split: str, predicted: Mapping[str, Tensor]) -> dict[str, float]:
    """Score predictions for a split of the tasks, with their mean; tasks without predictions are left out."""
    found: dict[str, float] = {}
    for task in (task for task in tasks if task.name in predicted):
        found |= score_task(replace(task, dev=getattr(task, split)), predicted[task.name])
    return with_overall(found) if found else {}


def prototype_scores(
    tasks: Sequence[TextTask], z_train: Embedded, z: Embedded, context: TextContext
) -> dict[str, float]:
    """Score training prototypes on the dev parts, `z` being their embeddings; no head is involved.

    Predictions are by :func:`prototype_outputs`, as those of the saved model.
    """
    ordinal, found = ordinal_terms(context.method, context.recipe), dict[str, float]()
    for task in tasks:
        centres = task_prototypes(task, added(z_train[task.name]), ordinal is not None)
        outputs = prototype_outputs(task, added(z[task.name]), centres, ordinal)
        found |= score_task(task, outputs if task.regression else outputs.argmax(1), prefix=PROTOTYPE)
    return with_overall(found, (PROTOTYPE,))


PROTOTYPE_ROWS = 2000  # training rows of a task whose means are the prototypes while training goes on
SECOND_PHASE = 1 << 48  # added to the stream's seed after pretraining: its batches are others


@dataclass(frozen=True)
class TextReport:
    """What training did: updates, tokens per second and share of padding, and batches of each task.

    `schedule` tells what a scheduler chose and spent, if there was one.
    """

    updates: int = 0
    tokens_per_s: float = 0.0
    padding_share: float = 0.0
    batches: Mapping[str, int] = field(default_factory=dict)
    schedule: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, report: TrainReport, stream: TextStream, scheduler: str) -> TextReport:
        """Say it of a training that ended; `scheduler` as the recipe names it."""
        policy: Any = stream.policy
        schedule = {"name": scheduler, **policy.spent()} if scheduler else None
        speed = report.updates_per_second * stream.tokens_given / report.steps
        return cls(report.steps, speed, stream.padding_share, report.batches, schedule)


def new_encoder(recipe: TextRecipe, seed: int) -> TextEncoder:
    """Build the recipe's encoder; only one without pretrained weights depends on the seed."""
    options: dict[str, Any] = {"pooling": recipe.pooling, "seed": seed, "dropout": recipe.dropout}
    return build_text_encoder(recipe.encoder, **options, modules=False)


def pretraining(context: TextContext) -> tuple[TextEncoder, Training]:
    """Build a new encoder and what pretrains it on the classes of all tasks, as `context.method` says."""
    plan, data, recipe, seed = context.method, context.data, context.recipe, context.seed
    encoder = new_encoder(recipe, seed)
    objectives: dict[str, TextObjective] = {}
    with seeded(seed + 1):
        for task in data.tasks:
            joined = one_sequence(plan, task.kind)
            tokens = data.tokens(task.train, f"{task.name} train", encoder, recipe, joined)
            texts = TextRows(task, tokens, ordinal=plan.sts == "ordinal")
            objectives[task.name] = _pretraining_objective(context, texts, task, encoder)
    step = TextStep(encoder, objectives, loss_weights(recipe, data.tasks, plan), rdrop=recipe.pretrain.rdrop)
    evaluate = _watch(context, step, _by_prototypes(context, encoder))
    name = context.name.removeprefix("pretrain-")
    count, _ = updates(recipe, data.tasks, TextMethod(pretraining=name))
    phase = replace(recipe.pretrain, ema=recipe.ensemble_ema) if plan.ensemble else recipe.pretrain
    return encoder, _training(context, step, phase, count, recipe.balanced, evaluate, name)


def _pretraining_objective(
    context: TextContext, texts: TextRows, task: TextTask, encoder: TextEncoder
) -> TextObjective:
    plan, recipe = context.method, context.recipe
    smoothing = recipe.pretrain.label_smoothing
    if plan.sts == "cosine" and task.kind == "pair-regression":
        return TextLabels(texts, CosineHead(task.low, task.high))
    if plan.loss == "cross-entropy":
        return TextClasses(texts, ClassHead(encoder.features, task.num_classes, dropout=0.0), smoothing)
    options = asdict(recipe.query if plan.query else recipe.proto) | {"label_smoothing": smoothing}
    options |= {"num_classes": task.num_classes, "gather": context.machine.world > 1, "seed": context.seed}
    if plan.epoch:
        options["memory"] = "epoch"
    kind = TextOrdinal if texts.classes.ndim > 1 else TextPrototypes
    return kind(texts, ProtoLoss("query" if plan.query else "standard", **options))


def finetuning(context: TextContext, encoder: TextEncoder) -> tuple[nn.ModuleDict, Training]:
    """Build new heads for `encoder`, and what trains them; the encoder learns too unless `method.frozen`.

    A frozen encoder embeds every row once, without dropout; the heads are trained on these embeddings.
    """
    method, data, recipe, seed, machine = context.method, context.data, context.recipe, context.seed, context.machine
    phase = method_phase(recipe, method)
    with seeded(seed + 2):
        heads = build_heads(data.tasks, method, recipe.sts_head, encoder.features)
    encoder.requires_grad_(not method.frozen)
    known = embed(encoder, data, recipe, "train", method, machine) if method.frozen else {}
    objectives = {}
    for task in data.tasks:
        joined = one_sequence(method, task.kind)
        tokens = data.tokens(task.train, f"{task.name} train", encoder, recipe, joined)
        texts = TextRows(task, tokens, known.get(task.name))
        objectives[task.name] = TextLabels(texts, heads[task.name], phase.label_smoothing)
    step = TextStep(encoder, objectives, loss_weights(recipe, data.tasks, method), method.surgery, phase.rdrop)

    def scores() -> dict[str, float]:
        z = embed(encoder, data, recipe, "validation", method, machine)
        return score(data.tasks, "validation", predictions(data.tasks, heads, z))

    evaluate = _watch(context, step, scores)
    _, count = updates(recipe, data.tasks, method)
    own = seed + (SECOND_PHASE if method.pretraining is not None else 0)
    return heads, _training(context, step, phase, count, recipe.balanced_finetune, evaluate, "heads", own)


def _by_prototypes(context: TextContext, encoder: TextEncoder) -> Callable[[], dict[str, float]]:
    data, recipe, device = context.data, context.recipe, context.machine.device
    tasks = [replace(task, train=task.train.subset(range(min(PROTOTYPE_ROWS, len(task.train))))) for task in data.tasks]
    tasks = [replace(task, dev=task.validation) for task in tasks if len(task.validation)]

    def scores() -> dict[str, float]:
        parts: list[Embedded] = [{}, {}]
        for task in tasks:
            for found, rows, key in zip(parts, (task.train, task.dev), ("some train", "validation"), strict=True):
                joined = one_sequence(context.method, task.kind)
                tokens = data.tokens(rows, f"{task.name} {key}", encoder, recipe, joined)
                found[task.name] = embed_tokens(encoder, tokens, device, width_limit(encoder, recipe))
        return prototype_scores(tasks, parts[0], parts[1], context)

    return scores


def _watch(
    context: TextContext, step: TextStep, scores: Callable[[], dict[str, float]]
) -> Callable[[int], Mapping[str, float]] | None:
    """What is logged at evaluation steps: scores on the validation parts, and the conflict of the tasks' gradients."""
    tasks, size, device = context.data.tasks, 2 * context.recipe.batch_size, context.machine.device
    if not any(len(task.validation) for task in tasks):
        return None
    rows = {task.name: torch.randperm(len(task.train), generator=torch_generator(0))[:size] for task in tasks}
    width = max(int(step.texts[name].tokens.widths[chosen].max()) for name, chosen in rows.items())
    learns = any(parameter.requires_grad for parameter in step.model.parameters())

    def evaluate(_: int) -> Mapping[str, float]:
        batches = {name: {"rows": some.to(device), "width": torch.empty(width, 0)} for name, some in rows.items()}
        return {**scores(), **(step.conflict(batches) if learns and len(batches) > 1 else {})}

    return evaluate


def _training(
    context: TextContext,
    step: TextStep,
    phase: TextPhase,
    count: int,
    balanced: bool,
    evaluate: Callable[[int], Mapping[str, float]] | None,
    title: str,
    seed: int | None = None,
) -> Training:
    data, recipe, machine = context.data, context.recipe, context.machine
    seed = context.seed if seed is None else seed
    encoder: TextEncoder = step.model  # type: ignore[assignment]
    tokens = {name: texts.tokens for name, texts in step.texts.items()}
    scheduler = _scheduler(step, data, recipe, seed, machine) if recipe.scheduler else None
    labels = {task.name: task.class_labels(task.train) for task in data.tasks} if balanced else None
    sizes: dict[str, Any] = {"pool": recipe.pool, "multiple": recipe.multiple, "limit": width_limit(encoder, recipe)}
    sizes |= {"rank": machine.rank, "world_size": machine.world}
    policy = scheduler or recipe.policy
    stream = TextStream(tokens, recipe.batch_size, policy, seed=seed, steps=count, labels=labels, **sizes)
    how = machine.settings(count, seed % 2**32, compile=machine.compile and not step.surgery)  # which goes back twice
    settings = phase.settings(count, **how if encoder.recordable else {**how, "cuda_graph": False})

    def evaluate_and_tell(number: int) -> Mapping[str, float]:
        return {**(evaluate(number) if evaluate else {}), **choices_of(stream)}

    watch = evaluate if scheduler is None else evaluate_and_tell
    return Training(step, stream, settings, watch, f"{title} seed {context.seed}")


def _scheduler(step: TextStep, data: TextData, recipe: TextRecipe, seed: int, machine: Machine) -> BlockScheduler:
    """The recipe's scheduler over the tasks; its probes draw training rows of their own, and are its targets too."""
    texts, sizes = step.texts, {task.name: len(task.train) for task in data.tasks}

    def loss(name: str, rows: Tensor) -> Tensor:
        width = padded_width(texts[name].tokens.widths[rows], 1)
        batch = {name: {"rows": rows.to(texts[name].labels.device), "width": torch.empty(width, 0)}}
        return step.losses(batch, step.encode(batch))[name]

    probes = row_probes({name: (size, recipe.batch_size) for name, size in sizes.items()}, loss, machine)
    return build_scheduler(parse_schedule(recipe.scheduler, sizes), sizes, probes, step, seed=seed)
