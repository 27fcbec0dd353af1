"""The two phases of a text experiment, pretraining and heads, and the embeddings that both are scored by."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from metapretrain.data.texts import TextTask
from metapretrain.data.tokens import Tokens, padded_width
from metapretrain.evaluation.metrics import nearest_prototype_scores, score_task, with_overall
from metapretrain.evaluation.representation import check_embeddings, evaluation_mode
from metapretrain.experiments.base import Machine
from metapretrain.experiments.scheduling import choices_of, probing, row_probe
from metapretrain.experiments.text.data import TextData, width_limit
from metapretrain.experiments.text.objectives import (
    Classes,
    Labels,
    Prototypes,
    TextObjective,
    TextRows,
    TextStep,
    added,
    build_heads,
    predict,
)
from metapretrain.experiments.text.recipe import (
    PRETRAININGS,
    Pretraining,
    TextMethod,
    TextPhase,
    TextRecipe,
    loss_weights,
    updates,
)
from metapretrain.experiments.text.streams import TextStream
from metapretrain.models.text_encoders import ClassHead, TextEncoder, build_text_encoder
from metapretrain.protonet import ProtoLoss
from metapretrain.scheduling import BlockScheduler, Probe, build_scheduler, parse_schedule
from metapretrain.training import RunFolder, train

EMBED_ROWS = 256  # rows that are embedded at once

Embedded = dict[str, list[Tensor]]  # task to (N, D), one or two


@torch.no_grad()
def embed_tokens(
    encoder: TextEncoder, tokens: Tokens, device: str | torch.device, limit: int, batch_size: int = EMBED_ROWS
) -> list[Tensor]:
    """Return the embeddings float32 (N, D) of all rows, two for pairs that are encoded separately; no dropout.

    Rows are taken in the order of their lengths, so that batches have little padding. A compiled encoder runs as it is:
    their widths are many.
    """
    encoder.to(device)
    found = []
    with torch.compiler.set_stance("force_eager"), evaluation_mode(encoder.__call__):
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
    encoder: TextEncoder, data: TextData, recipe: TextRecipe, split: str, joined: bool, machine: Machine
) -> Embedded:
    """Embed a split (`train`, `validation`, `dev` or `test`) of every task that has it."""
    found = {}
    for task in data.tasks:
        rows = getattr(task, split)
        if rows is not None and len(rows):
            tokens = data.tokens(rows, f"{task.name} {split}", encoder, recipe, joined)
            found[task.name] = embed_tokens(encoder, tokens, machine.device, width_limit(encoder, recipe))
    return found


@torch.no_grad()
def predictions(tasks: Sequence[TextTask], heads: nn.ModuleDict, z: Embedded) -> dict[str, Tensor]:
    """Return each embedded task's predictions (N,) on the CPU: classes, or scores."""
    found = {}
    for task in tasks:
        if task.name in z:
            head = heads[task.name].to(z[task.name][0].device)
            with evaluation_mode(head.__call__):
                found[task.name] = predict(task, head, z[task.name]).cpu()
    return found


def score(tasks: Sequence[TextTask], split: str, predicted: Mapping[str, Tensor]) -> dict[str, float]:
    """Score predictions for a split of the tasks, with their mean; tasks without predictions are left out."""
    found: dict[str, float] = {}
    for task in tasks:
        if task.name in predicted:
            found |= score_task(replace(task, dev=getattr(task, split)), predicted[task.name])
    return with_overall(found) if found else {}


def prototype_scores(tasks: Sequence[TextTask], z_train: Embedded, z: Embedded) -> dict[str, float]:
    """Score nearest training prototypes on the dev parts, `z` being their embeddings; no head is involved."""
    found: dict[str, float] = {}
    for task in tasks:
        found |= nearest_prototype_scores(task, added(z_train[task.name]), added(z[task.name]))
    return with_overall(found, ("nearest_prototype_",))


PROTOTYPE_ROWS = 2000  # training rows of a task whose means are the prototypes while training goes on
SECOND_PHASE = 1 << 48  # added to the stream's seed after pretraining: its batches are others


@dataclass(frozen=True)
class Fitted:
    """What training did: updates, how fast in tokens (padding left out), and the share of padding.

    `batches` of each task that it trained on; `schedule` tells what a scheduler chose and spent, if there was one.
    """

    updates: int
    tokens_per_s: float
    padding_share: float
    batches: Mapping[str, int] = field(default_factory=dict)
    schedule: Mapping[str, Any] | None = None


def new_encoder(recipe: TextRecipe, seed: int) -> TextEncoder:
    """Build the recipe's encoder; only one without pretrained weights depends on the seed."""
    return build_text_encoder(recipe.encoder, pooling=recipe.pooling, seed=seed, dropout=recipe.dropout)


def pretrain(
    name: str, data: TextData, recipe: TextRecipe, seed: int, machine: Machine, *, run: RunFolder | None = None
) -> tuple[TextEncoder, Fitted]:
    """Pretrain an encoder on the classes of all tasks; `name` is one of :data:`PRETRAININGS`."""
    plan, encoder = PRETRAININGS[name], new_encoder(recipe, seed)
    objectives: dict[str, TextObjective] = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed + 1)
        for task in data.tasks:
            texts = TextRows(task, data.tokens(task.train, f"{task.name} train", encoder, recipe, plan.joined))
            objectives[task.name] = _pretraining_objective(plan, texts, task, encoder, recipe, seed, machine)
    step = TextStep(encoder, objectives, loss_weights(recipe, data.tasks, plan))
    evaluate = _watch(step, data, recipe, plan.joined, machine, _by_prototypes(encoder, data, recipe, plan, machine))
    count, _ = updates(recipe, data.tasks, TextMethod(pretraining=name))
    ema = recipe.ensemble_ema if plan.ensemble else None
    fitted = _fit(
        step,
        data,
        recipe,
        recipe.pretrain,
        count,
        recipe.balanced,
        seed,
        machine,
        run,
        evaluate,
        f"{name} seed {seed}",
        ema,
    )
    return encoder, fitted


def _pretraining_objective(
    plan: Pretraining,
    texts: TextRows,
    task: TextTask,
    encoder: TextEncoder,
    recipe: TextRecipe,
    seed: int,
    machine: Machine,
) -> TextObjective:
    smoothing = recipe.pretrain.label_smoothing
    if plan.loss == "cross-entropy":
        return Classes(texts, ClassHead(encoder.features, task.num_classes, dropout=0.0), smoothing)
    options = asdict(recipe.query if plan.query else recipe.proto)
    if plan.epoch:
        options["memory"] = "epoch"
    mode = "query" if plan.query else "standard"
    proto = ProtoLoss(
        mode, num_classes=task.num_classes, gather=machine.world > 1, label_smoothing=smoothing, seed=seed, **options
    )
    return Prototypes(texts, proto)


def finetune(
    encoder: TextEncoder,
    method: TextMethod,
    data: TextData,
    recipe: TextRecipe,
    seed: int,
    machine: Machine,
    *,
    run: RunFolder | None = None,
) -> tuple[nn.ModuleDict, Fitted]:
    """Train new heads on `encoder`, which learns too unless `method.frozen`; it is changed in place.

    A frozen encoder embeds every row once, without dropout; the heads are trained on these embeddings.
    """
    phase = recipe.frozen if method.frozen else recipe.joint if method.pretraining is None else recipe.finetune
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed + 2)
        heads = build_heads(data.tasks, method, recipe.sts_head, encoder.features)
    encoder.requires_grad_(not method.frozen)
    known = embed(encoder, data, recipe, "train", method.joined, machine) if method.frozen else {}
    objectives = {
        task.name: Labels(
            TextRows(
                task,
                data.tokens(task.train, f"{task.name} train", encoder, recipe, method.joined),
                known.get(task.name),
            ),
            heads[task.name],
            phase.label_smoothing,
        )
        for task in data.tasks
    }
    step = TextStep(encoder, objectives, loss_weights(recipe, data.tasks, method), method.surgery)

    def scores() -> dict[str, float]:
        z = embed(encoder, data, recipe, "validation", method.joined, machine)
        return score(data.tasks, "validation", predictions(data.tasks, heads, z))

    evaluate = _watch(step, data, recipe, method.joined, machine, scores)
    _, count = updates(recipe, data.tasks, method)
    own = seed + (SECOND_PHASE if method.pretraining is not None else 0)
    fitted = _fit(
        step,
        data,
        recipe,
        phase,
        count,
        recipe.balanced_finetune,
        own,
        machine,
        run,
        evaluate,
        f"heads seed {seed}",
        None,
    )
    return heads, fitted


def _by_prototypes(
    encoder: TextEncoder, data: TextData, recipe: TextRecipe, plan: Pretraining, machine: Machine
) -> Callable[[], dict[str, float]]:
    tasks = [replace(task, train=task.train.subset(range(min(PROTOTYPE_ROWS, len(task.train))))) for task in data.tasks]
    tasks = [replace(task, dev=task.validation) for task in tasks if len(task.validation)]

    def scores() -> dict[str, float]:
        parts: list[Embedded] = [{}, {}]
        for task in tasks:
            for found, rows, key in zip(parts, (task.train, task.dev), ("some train", "validation"), strict=True):
                tokens = data.tokens(rows, f"{task.name} {key}", encoder, recipe, plan.joined)
                found[task.name] = embed_tokens(encoder, tokens, machine.device, width_limit(encoder, recipe))
        return prototype_scores(tasks, *parts)

    return scores


def _watch(
    step: TextStep,
    data: TextData,
    recipe: TextRecipe,
    joined: bool,
    machine: Machine,
    scores: Callable[[], dict[str, float]],
) -> Callable[[int], Mapping[str, float]] | None:
    """What is logged at evaluation steps: scores on the validation parts, and the conflict of the tasks' gradients."""
    if not any(len(task.validation) for task in data.tasks):
        return None
    rows = {
        task.name: torch.randperm(len(task.train), generator=torch.Generator().manual_seed(0))[: 2 * recipe.batch_size]
        for task in data.tasks
    }
    width = max(int(step.texts[name].tokens.widths[chosen].max()) for name, chosen in rows.items())
    learns = any(parameter.requires_grad for parameter in step.model.parameters())

    def evaluate(_: int) -> Mapping[str, float]:
        batches = {
            name: {"rows": chosen.to(machine.device), "width": torch.empty(width, 0)} for name, chosen in rows.items()
        }
        return {**scores(), **(step.conflict(batches) if learns and len(batches) > 1 else {})}

    return evaluate


def _fit(
    step: TextStep,
    data: TextData,
    recipe: TextRecipe,
    phase: TextPhase,
    count: int,
    balanced: bool,
    seed: int,
    machine: Machine,
    run: RunFolder | None,
    evaluate: Callable[[int], Mapping[str, float]] | None,
    title: str,
    ema: float | None,
) -> Fitted:
    encoder: TextEncoder = step.model  # type: ignore[assignment]
    tokens = {name: texts.tokens for name, texts in step.texts.items()}
    scheduler = _scheduler(step, data, recipe, seed, machine) if recipe.scheduler else None
    stream = TextStream(
        tokens,
        recipe.batch_size,
        scheduler or recipe.policy,
        seed=seed,
        steps=count,
        pool=recipe.pool,
        multiple=recipe.multiple,
        limit=width_limit(encoder, recipe),
        labels={task.name: task.class_labels(task.train) for task in data.tasks} if balanced else None,
        rank=machine.rank,
        world_size=machine.world,
    )
    settings = phase.settings(
        count,
        ema=ema,
        precision=machine.precision,
        device=machine.device,
        seed=seed % 2**32,
        compile=machine.compile and not step.surgery,  # which goes back twice
        cuda_graph=machine.cuda_graph if encoder.recordable else False,
        log_every=max(1, min(50, count // 20)),
        evaluate_every=max(1, count // 10),
    )

    def evaluate_and_tell(number: int) -> Mapping[str, float]:
        return {**(evaluate(number) if evaluate else {}), **choices_of(stream)}

    watch = evaluate if scheduler is None else evaluate_and_tell
    report = train(step, stream, settings, run=run, evaluate=watch, title=title)
    return Fitted(
        report.steps,
        report.updates_per_second * stream.tokens_given / report.steps,
        stream.padding_share,
        report.batches,
        None if scheduler is None else {"name": recipe.scheduler, **scheduler.spent()},
    )


def _scheduler(step: TextStep, data: TextData, recipe: TextRecipe, seed: int, machine: Machine) -> BlockScheduler:
    """The recipe's scheduler over the tasks; its probes draw training rows of their own, and are its targets too."""
    texts = step.texts

    def loss_of(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
        def loss(rows: torch.Tensor) -> torch.Tensor:
            width = padded_width(texts[name].tokens.widths[rows], 1)
            batch = {name: {"rows": rows.to(texts[name].labels.device), "width": torch.empty(width, 0)}}
            with probing(machine.device, machine.precision):
                return step.losses(batch, step.encode(batch))[name].float()

        return loss

    sizes = {task.name: len(task.train) for task in data.tasks}
    probes: dict[str, Probe] = {name: row_probe(size, recipe.batch_size, loss_of(name)) for name, size in sizes.items()}
    schedule = parse_schedule(recipe.scheduler, sizes)
    return build_scheduler(schedule, sizes, probes, step, seed=seed)
