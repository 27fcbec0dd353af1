"""The steps of an image experiment: pretrain an encoder, by one objective or several, and fine-tune a head."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from metapretrain.checks import decisive
from metapretrain.data.images import ImageSet, normalize
from metapretrain.draws import seeded
from metapretrain.episodes import ShuffledBatches, TaskStream
from metapretrain.errors import InputError, one_of
from metapretrain.evaluation.representation import accuracy, embed, nearest_prototype
from metapretrain.experiments.base import Context, Machine, Training
from metapretrain.experiments.images.data import ImageData, images_of
from metapretrain.experiments.images.objectives import (
    OBJECTIVES,
    ImageStep,
    Objective,
    Supervised,
    build_objectives,
    proto_loss,
    sources,
)
from metapretrain.experiments.images.recipe import ImagePhase, ImageRecipe
from metapretrain.experiments.recipe import choices_of, row_probes
from metapretrain.models import Encoder, Frozen, build_encoder, build_head
from metapretrain.nests import evaluation_mode
from metapretrain.scheduling import build_scheduler, parse_schedule

SCHEDULED = "scheduled"  # several of them, one an update: see :mod:`metapretrain.experiments.images.training`


@dataclass(frozen=True)
class ImageMethod:
    """A method of the table: an objective, then (but for `supervised`) a head fine-tuned on its encoder.

    `joint`: the prototypical loss, leave-one-out, is added to the cross entropy of a head.
    """

    objective: str
    head: str | None = "linear"  # None: the pretraining alone
    frozen: bool = False
    encoder: str | None = None  # in place of the recipe's
    joint: bool = False

    @property
    def pretraining(self) -> str | None:
        """The objective whose encoder this row starts from; rows that name the same one share it."""
        return None if self.objective == "supervised" else self.objective


ImageContext = Context[ImageRecipe, ImageData, ImageMethod]


def new_encoder(data: ImageData, recipe: ImageRecipe, seed: int, name: str | None = None) -> Encoder:
    """Build an encoder with random weights that are a function of `seed`."""
    with seeded(seed):
        return build_encoder(
            name or recipe.encoder, channels=data.train.channels, image_size=data.train.image_size, stem=recipe.stem
        )


def views(objective: str) -> int:
    """Encoder passes per image and update."""
    return 1 if objective == SCHEDULED else OBJECTIVES[objective].kind.views


def updates(recipe: ImageRecipe, data: ImageData, method: ImageMethod) -> tuple[int, int]:
    """Return the updates of pretraining and of the phase with a head, for exactly the same encoder passes per row.

    A row may pass `epochs * training images` images through the encoder. An update passes a batch, and SimCLR's two
    views of it, so its pretraining has half as many updates.
    InputError: a batch is larger than the data, or the budget too small for one update of each phase.
    """
    if recipe.batch_size > len(data.train):
        raise InputError(f"batch_size {recipe.batch_size} is more than the {len(data.train)} training images; lower it")
    total = recipe.epochs * len(data.train) // recipe.batch_size
    before = 0
    if method.pretraining is not None:
        passes = views(method.pretraining)
        before = round(recipe.pretrain_share * total) // passes
        total -= before * passes
    if total < 1 or (before < 1 and method.pretraining is not None):
        told = f"{recipe.epochs} epochs of {len(data.train)} images at batch_size {recipe.batch_size} are too"
        raise InputError(f"{told} few for pretrain_share {recipe.pretrain_share}: give more epochs or smaller batches")
    return before, total


def pretraining(context: ImageContext) -> tuple[Encoder, Training]:
    """Build a new encoder and what pretrains it: an objective of `OBJECTIVES`, or several by a scheduler."""
    objective, data, recipe = context.method.objective, context.data, context.recipe
    if objective == SCHEDULED:
        return _scheduled(context)
    one_of("pretraining objective", objective, OBJECTIVES.keys() - {"supervised"})
    encoder = new_encoder(data, recipe, context.seed)
    task = build_objectives([objective], encoder, data, recipe, context.seed, context.machine)[objective]
    evaluate = by_prototypes(encoder, data) if len(data.validation) else None
    steps, _ = updates(recipe, data, context.method)
    step, stream = ImageStep(encoder, {objective: task}), _stream(context, objective, task, steps)
    phase = getattr(recipe, OBJECTIVES[objective].phase)
    return encoder, _training(context, step, stream, phase, steps, evaluate)


def finetuning(context: ImageContext, encoder: Encoder) -> tuple[nn.Module, Training]:
    """Build a new head for `encoder`, and what trains it; the encoder learns too unless `method.frozen`."""
    method, data, recipe = context.method, context.data, context.recipe
    supervised = method.pretraining is None
    phase = recipe.supervised if supervised else recipe.frozen if method.frozen else recipe.unfrozen
    if method.head is None:
        raise InputError(f"fine-tuning {method.objective} needs a head")
    classes, gather = len(data.train.classes), context.machine.world > 1
    with seeded(context.seed + 2):
        head = build_head(method.head, encoder.features, classes)
    proto = proto_loss("leave-one-out", classes, recipe, phase, context.seed, gather) if method.joint else None
    images = images_of(data, phase, context.machine)
    task = Supervised(images, head, phase.label_smoothing, proto, recipe.joint_weight)
    model = Frozen(encoder) if method.frozen else encoder

    def evaluate(step: int) -> Mapping[str, float]:
        with evaluation_mode(head), torch.inference_mode():
            predicted = decisive(head(encode(encoder, data)(data.validation))).argmax(1)
        return {"accuracy": accuracy(predicted, data.validation.labels)}

    _, steps = updates(recipe, data, method)
    held = evaluate if len(data.validation) else None
    step, stream = ImageStep(model, {"supervised": task}), _stream(context, "supervised", task, steps)
    return head, _training(context, step, stream, phase, steps, held)


def encode(encoder: nn.Module, data: ImageData) -> Callable[[ImageSet], Tensor]:
    """Return a function from an image set to its features float32 (N, D), in evaluation mode, not augmented."""

    def features(images: ImageSet) -> Tensor:
        device = next(encoder.parameters()).device  # training may have moved it
        with torch.compiler.set_stance("force_eager"), evaluation_mode(encoder):
            return embed(lambda x: encoder(normalize(x.to(device), data.mean, data.std)), images.images, device=device)

    return features


def by_prototypes(encoder: Encoder, data: ImageData) -> Callable[[int], Mapping[str, float]]:
    """Return a function that scores nearest training prototypes on the validation part."""
    features = encode(encoder, data)

    def evaluate(step: int) -> Mapping[str, float]:
        z, labels = features(data.train), data.train.labels
        predicted = nearest_prototype(z, labels.to(z.device), features(data.validation))
        return {"nearest_prototype_accuracy": accuracy(predicted, data.validation.labels)}

    return evaluate


def _stream(context: ImageContext, name: str, task: Objective, steps: int) -> TaskStream:
    """The batches of one objective."""
    recipe, data, machine = context.recipe, context.data, context.machine
    batch = recipe.batch_size // machine.world
    if batch < 2 or recipe.batch_size % machine.world:
        wanted = f"give each of {machine.world} process(es) the same number of images, 2 or more"
        raise InputError(f"batch_size {recipe.batch_size} must {wanted}")
    seen = data.seen(task.labelled)
    if batch > len(seen):
        raise InputError(f"batch_size {recipe.batch_size} is more than the {len(seen)} images of {name}; lower it")
    labels = seen.labels if recipe.balanced and seen is data.train else None
    ranks: dict[str, Any] = {"rank": machine.rank, "world_size": machine.world}
    rows = ShuffledBatches(len(seen), batch, seed=context.seed, labels=labels, **ranks)
    task.check_batch(next(iter(rows)))
    return TaskStream({name: rows}, "longest", seed=context.seed, steps=steps)


def _training(
    context: ImageContext,
    step: ImageStep,
    stream: TaskStream,
    phase: ImagePhase,
    steps: int,
    evaluate: Callable[[int], Mapping[str, float]] | None,
) -> Training:
    machine = context.machine
    resident = all(step.objective(name).images.resident for name in step.objectives)
    how = machine.settings(steps, context.seed, compile=machine.compile, local_batchnorm=machine.local_batchnorm)
    settings = phase.settings(steps, **how if resident else {**how, "cuda_graph": False})
    if machine.device != "cpu":
        step.model.to(memory_format=torch.channels_last)
    return Training(step, stream, settings, evaluate, f"{context.name} seed {context.seed}")


def check_scheduled(recipe: ImageRecipe, machine: Machine) -> None:
    """Refuse no schedule or a bad one, several processes, and a batch that views cannot part."""
    if not recipe.scheduler:
        raise InputError("a scheduled row needs a schedule: give --schedule, such as --schedule round-robin")
    parse_schedule(recipe.scheduler, sources())
    if machine.world > 1:
        raise InputError("a scheduled row runs in one process; run rows side by side with --jobs-per-device")
    for objective in sources().values():
        passes = views(objective)
        if recipe.batch_size % passes or recipe.batch_size < 2 * passes:
            told = f"batch_size must be a multiple of {passes} and at least {2 * passes}, since"
            raise InputError(f"{told} {objective} has 1/{passes} of it in {passes} views, got {recipe.batch_size}")


def _scheduled(context: ImageContext) -> tuple[Encoder, Training]:
    """Pretraining by cross entropy, prototypes (standard mode) and SimCLR (:func:`sources`), one of them an update.

    Every update passes `batch_size` images through the encoder, so the budget does not depend on what is chosen:
    SimCLR gets half a batch, in two views. The optimiser is the recipe's for PRL, the augmentation each objective's
    own. The scheduler's targets are the objectives themselves; its probes draw training images.
    """
    data, recipe, seed, machine = context.data, context.recipe, context.seed, context.machine
    check_scheduled(recipe, machine)
    encoder = new_encoder(data, recipe, seed)
    names = sources()
    built = build_objectives(names.values(), encoder, data, recipe, seed, machine)
    objectives = {name: built[objective] for name, objective in names.items()}
    step = ImageStep(encoder, objectives)
    sizes = {name: recipe.batch_size // objective.views for name, objective in objectives.items()}

    drawn = {name: (len(data.seen(objectives[name].labelled)), size) for name, size in sizes.items()}
    probes = row_probes(drawn, lambda name, some: step({name: some.to(machine.device)})[name], machine)
    schedule = parse_schedule(recipe.scheduler, names)
    scheduler = build_scheduler(schedule, {name: rows for name, (rows, _) in drawn.items()}, probes, step, seed=seed)
    labels = {name: data.train.labels for name, one in objectives.items() if recipe.balanced and one.labelled}
    loaders = {name: ShuffledBatches(*size, seed=seed, labels=labels.get(name)) for name, size in drawn.items()}
    count, _ = updates(recipe, data, ImageMethod(SCHEDULED))
    stream = TaskStream(loaders, scheduler, seed=seed, steps=count)
    scores = by_prototypes(encoder, data) if len(data.validation) else None

    def evaluate(number: int) -> Mapping[str, float]:
        return {**(scores(number) if scores else {}), **choices_of(stream)}

    return encoder, _training(context, step, stream, recipe.prl, count, evaluate)
