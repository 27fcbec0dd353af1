"""The three steps of an image experiment: pretrain an encoder, fine-tune a head, score the result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from metapretrain.data.augment import make_augmentation
from metapretrain.data.images import ImageSet
from metapretrain.data.normalise import normalize
from metapretrain.data.splits import validation_split
from metapretrain.episodes import ShuffledBatches, TaskStream
from metapretrain.errors import InputError, one_of
from metapretrain.evaluation.representation import accuracy, embed, evaluation_mode, nearest_prototype
from metapretrain.models import Encoder, Frozen, build_encoder, build_head, projection
from metapretrain.protonet import ProtoLoss, check_labels
from metapretrain.tasks.machine import Machine as Machine
from metapretrain.tasks.objectives import PRL, Images, Objective, SimCLR, Step, Supervised
from metapretrain.tasks.recipes import Phase, Recipe
from metapretrain.training import RunFolder, TrainReport, train

OBJECTIVES: dict[str, type[Objective]] = {
    "supervised": Supervised,
    "prl-standard": PRL,
    "prl-query": PRL,
    "simclr": SimCLR,
}
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


@dataclass(frozen=True)
class ImageData:
    """Training, validation and test part with the normalisation of the training part."""

    train: ImageSet
    validation: ImageSet
    test: ImageSet
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(cls, train: ImageSet, test: ImageSet, validation: int) -> ImageData:
        """Hold `validation` images of the training set back, the same ones for every seed.

        Raises:
            InputError: no images, unlabelled rows, another image size in the test set, or nothing left to train on.
        """
        train.require_labels()
        test.require_labels()
        if train.images.shape[1:] != test.images.shape[1:] or train.classes != test.classes:
            raise InputError(
                f"training images {tuple(train.images.shape[1:])} with {len(train.classes)} classes, but test images "
                f"{tuple(test.images.shape[1:])} with {len(test.classes)}: they must agree"
            )
        if not 0 <= validation < len(train):
            raise InputError(
                f"{validation} validation images of {len(train)} training images leave none to train on; lower the "
                "recipe's validation, such as validation=10"
            )
        rows, held = validation_split(train.labels, validation)
        part = train.subset(rows)
        return cls(part, train.subset(held), test, *part.statistics())

    @property
    def counts(self) -> dict[str, int]:
        """Images in each part."""
        return {"train": len(self.train), "validation": len(self.validation), "test": len(self.test)}

    def describe(self, encoder: str, stem: str, head: str | None) -> dict[str, Any]:
        """Return what a saved model needs to be built again."""
        return {
            "encoder": encoder, "stem": stem, "head": head, "classes": list(self.train.classes),
            "channels": self.train.channels, "image_size": self.train.image_size, "mean": list(self.mean),
            "std": list(self.std),
        }  # fmt: skip


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
    return 1 if objective == SCHEDULED else OBJECTIVES[objective].views


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
    """Pretrain an encoder by `prl-standard`, `prl-query` or `simclr`.

    Raises:
        InputError: unknown objective, or a batch that the objective cannot use.
    """
    one_of("pretraining objective", objective, OBJECTIVES.keys() - {"supervised"})
    phase = recipe.simclr if objective == "simclr" else recipe.prl
    images = images_of(data, phase, machine)
    encoder = new_encoder(data, recipe, seed)
    task: Objective
    if objective == "simclr":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed + 1)
            task = SimCLR(images, projection(encoder.features), recipe.simclr_temperature)
    else:
        mode = objective.removeprefix("prl-")
        proto = ProtoLoss(
            mode, num_classes=len(data.train.classes), gather=machine.world > 1, seed=seed,
            label_smoothing=phase.label_smoothing, **asdict(recipe.proto),
        )  # fmt: skip
        task = PRL(images, proto)
    evaluate = by_prototypes(encoder, data) if len(data.validation) else None
    steps, _ = updates(recipe, data, Method(objective))
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


def images_of(data: ImageData, phase: Phase, machine: Machine) -> Images:
    """Return the training images, augmented as the phase says."""
    train = data.train
    changes: dict[str, bool] = {"channels_last": machine.device != "cpu"}
    if train.channels == 1:  # digits are not mirrored
        changes["flip"] = False
    augment = make_augmentation(
        phase.augment, train.image_size, train.channels, data.mean, data.std, **changes
    )
    return Images(train, augment, resident=_fits(train, machine))


def _fits(images: ImageSet, machine: Machine) -> bool:
    if machine.device == "cpu" or not torch.cuda.is_available():
        return True
    free, _ = torch.cuda.mem_get_info()
    return images.images.numel() < free / 2


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
    if name.startswith("prl"):
        check_labels(data.train.labels[next(iter(rows))], mode=name.removeprefix("prl-"))
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
        cuda_graph=machine.cuda_graph if resident else False,
        log_every=max(1, min(50, steps // 20)), evaluate_every=max(1, steps // 10),
    )  # fmt: skip
    if machine.device != "cpu":
        step.model.to(memory_format=torch.channels_last)
    return train(step, stream, settings, run=run, evaluate=evaluate, title=title)
