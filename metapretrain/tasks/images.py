"""The three steps of an image experiment: pretrain an encoder, fine-tune a head, score the result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from metapretrain.data.images import ImageSet
from metapretrain.data.normalise import normalize
from metapretrain.episodes import ShuffledBatches, TaskStream
from metapretrain.errors import InputError, one_of
from metapretrain.evaluation.representation import accuracy, embed, evaluation_mode, nearest_prototype
from metapretrain.models import Encoder, Frozen, build_encoder, build_head
from metapretrain.tasks.image_data import ImageData as ImageData
from metapretrain.tasks.image_data import images_of
from metapretrain.tasks.image_objectives import OBJECTIVES, build_objectives
from metapretrain.tasks.machine import Machine as Machine
from metapretrain.tasks.objectives import Objective, Step, Supervised
from metapretrain.tasks.recipes import Phase, Recipe
from metapretrain.training import RunFolder, TrainReport, train

SCHEDULED = "scheduled"  # several of them, one an update: see :mod:`metapretrain.tasks.scheduled_images`


@dataclass(frozen=True)
class Method:
    """A row of the table: an objective, then (but for `supervised`) a head fine-tuned on its encoder."""

    objective: str
    head: str | None = "linear"  # None: the pretraining alone
    frozen: bool = False
    encoder: str | None = None  # in place of the recipe's

    @property
    def pretraining(self) -> str | None:
        """The objective whose encoder this row starts from; rows that name the same one share it."""
        return None if self.objective == "supervised" else self.objective


def new_encoder(data: ImageData, recipe: Recipe, seed: int, name: str | None = None) -> Encoder:
    """Build an encoder with random weights that are a function of `seed`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build_encoder(
            name or recipe.encoder,
            channels=data.train.channels,
            image_size=data.train.image_size,
            stem=recipe.stem,
        )


def views(objective: str) -> int:
    """Encoder passes an image and update.

    Example:
        >>> views("simclr"), views("prl-query")
        (2, 1)
    """
    return 1 if objective == SCHEDULED else OBJECTIVES[objective].kind.views


def updates(recipe: Recipe, data: ImageData, method: Method) -> tuple[int, int]:
    """Return the updates of pretraining and of the phase with a head, for exactly the same encoder passes a row.

    A row may pass `epochs * training images` images through the encoder. An update passes a batch, and SimCLR's two
    views of it, so its pretraining has half as many updates.

    Raises:
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
        raise InputError(
            f"{recipe.epochs} epochs of {len(data.train)} images at batch_size {recipe.batch_size} are too few for "
            f"pretrain_share {recipe.pretrain_share}: give more epochs or smaller batches"
        )
    return before, total


def pretrain(
    objective: str, data: ImageData, recipe: Recipe, seed: int, machine: Machine, *, run: RunFolder | None = None
) -> tuple[Encoder, TrainReport]:
    """Pretrain an encoder by an objective of :data:`metapretrain.tasks.image_objectives.OBJECTIVES`.

    Raises:
        InputError: unknown objective, or a batch that the objective cannot use.
    """
    one_of("pretraining objective", objective, OBJECTIVES.keys() - {"supervised"})
    encoder = new_encoder(data, recipe, seed)
    task = build_objectives([objective], encoder, data, recipe, seed, machine)[objective]
    evaluate = by_prototypes(encoder, data) if len(data.validation) else None
    steps, _ = updates(recipe, data, Method(objective))
    phase = OBJECTIVES[objective].phase(recipe)
    report = _fit(encoder, objective, task, phase, steps, data, recipe, seed, machine, run, evaluate)
    return encoder, report


def finetune(
    encoder: Encoder,
    method: Method,
    data: ImageData,
    recipe: Recipe,
    seed: int,
    machine: Machine,
    *,
    run: RunFolder | None = None,
) -> tuple[nn.Module, TrainReport]:
    """Train a new head on `encoder`, which learns too unless `method.frozen`; supervised rows start here.

    Returns:
        the head, and what training did; the encoder is changed in place.
    """
    supervised = method.pretraining is None
    phase = recipe.supervised if supervised else recipe.frozen if method.frozen else recipe.unfrozen
    if method.head is None:
        raise InputError(f"fine-tuning {method.objective} needs a head")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed + 2)
        head = build_head(method.head, encoder.features, len(data.train.classes))
    task = Supervised(images_of(data, phase, machine), head, phase.label_smoothing)
    model = Frozen(encoder) if method.frozen else encoder

    def evaluate(step: int) -> Mapping[str, float]:
        predict = classify(encoder, head, data)
        return {"accuracy": accuracy(predict(data.validation), data.validation.labels)}

    _, steps = updates(recipe, data, method)
    held = evaluate if len(data.validation) else None
    report = _fit(model, "supervised", task, phase, steps, data, recipe, seed, machine, run, held)
    return head, report


def encode(encoder: nn.Module, data: ImageData) -> Callable[[ImageSet], Tensor]:
    """Return a function from an image set to its features float32 (N, D), in evaluation mode, not augmented."""
    def features(images: ImageSet) -> Tensor:
        device = next(encoder.parameters()).device  # training may have moved it
        with torch.compiler.set_stance("force_eager"), evaluation_mode(encoder.__call__):
            return embed(
                lambda x: encoder(normalize(x.to(device), data.mean, data.std)), images.images, device=device
            )

    return features


def classify(encoder: nn.Module, head: nn.Module, data: ImageData) -> Callable[[ImageSet], Tensor]:
    """Return a function from an image set to predicted classes int64 (N,)."""
    features = encode(encoder, data)

    def predict(images: ImageSet) -> Tensor:
        with torch.inference_mode():
            predicted: Tensor = head(features(images)).argmax(1)
        return predicted

    return predict


def by_prototypes(encoder: Encoder, data: ImageData) -> Callable[[int], Mapping[str, float]]:
    """Return a function that scores nearest training prototypes on the validation part."""
    features = encode(encoder, data)

    def evaluate(step: int) -> Mapping[str, float]:
        z, labels = features(data.train), data.train.labels
        predicted = nearest_prototype(z, labels.to(z.device), features(data.validation))
        return {"nearest_prototype_accuracy": accuracy(predicted, data.validation.labels)}

    return evaluate


def _fit(
    model: nn.Module, name: str, task: Objective, phase: Phase, steps: int, data: ImageData, recipe: Recipe, seed: int,
    machine: Machine, run: RunFolder | None, evaluate: Callable[[int], Mapping[str, float]] | None,
) -> TrainReport:  # fmt: skip
    batch = recipe.batch_size // machine.world
    if batch < 2 or recipe.batch_size % machine.world:
        raise InputError(
            f"batch_size {recipe.batch_size} must give each of {machine.world} process(es) the same number of images, "
            "2 or more"
        )
    rows = ShuffledBatches(
        len(data.train), batch, seed=seed, rank=machine.rank, world_size=machine.world,
        labels=data.train.labels if recipe.balanced else None,
    )  # fmt: skip
    task.check_batch(next(iter(rows)))
    stream = TaskStream({name: rows}, "longest", seed=seed, steps=steps)
    return fit(Step(model, {name: task}), stream, phase, steps, seed, machine, run, evaluate, f"{name} seed {seed}")


def fit(
    step: Step, stream: TaskStream, phase: Phase, steps: int, seed: int, machine: Machine, run: RunFolder | None,
    evaluate: Callable[[int], Mapping[str, float]] | None, title: str,
) -> TrainReport:  # fmt: skip
    """Train a step of image objectives on a stream of rows."""
    resident = all(step.objective(name).images.resident for name in step.objectives)
    settings = phase.settings(
        steps, precision=machine.precision, device=machine.device, seed=seed, compile=machine.compile,
        cuda_graph=machine.cuda_graph if resident else False, local_batchnorm=machine.local_batchnorm,
        log_every=max(1, min(50, steps // 20)), evaluate_every=max(1, steps // 10),
    )  # fmt: skip
    if machine.device != "cpu":
        step.model.to(memory_format=torch.channels_last)
    return train(step, stream, settings, run=run, evaluate=evaluate, title=title)
