"""One image encoder pretrained by several objectives, one an update: a scheduler chooses which is next."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from metapretrain.episodes import ShuffledBatches, TaskStream
from metapretrain.errors import InputError
from metapretrain.models import Encoder, build_head, projection
from metapretrain.protonet import ProtoLoss
from metapretrain.scheduling import Probe
from metapretrain.tasks.images import (
    SCHEDULED,
    ImageData,
    Method,
    by_prototypes,
    fit,
    images_of,
    new_encoder,
    updates,
)
from metapretrain.tasks.machine import Machine
from metapretrain.tasks.objectives import PRL, Objective, SimCLR, Step, Supervised
from metapretrain.tasks.recipes import Recipe
from metapretrain.tasks.schedules import build_scheduler, choices_of, parse_schedule, probing, row_probe, spent
from metapretrain.training import RunFolder, TrainReport

SOURCES = ("supervised", "prl", "simclr")


def check_scheduled(recipe: Recipe, machine: Machine) -> None:
    """Refuse what :func:`pretrain_scheduled` cannot run.

    Raises:
        InputError: no schedule or a bad one, several processes, or a batch that SimCLR cannot have half of.
    """
    if not recipe.scheduler:
        raise InputError("a scheduled row needs a schedule: give --schedule, such as --schedule round-robin")
    parse_schedule(recipe.scheduler, SOURCES)
    if machine.world > 1:
        raise InputError("a scheduled row runs in one process; run rows side by side with --jobs-per-device")
    if recipe.batch_size % 2 or recipe.batch_size < 4:
        raise InputError(
            f"batch_size must be even and at least 4, since SimCLR has half of it in two views, got {recipe.batch_size}"
        )


def pretrain_scheduled(
    data: ImageData, recipe: Recipe, seed: int, machine: Machine, *, run: RunFolder | None = None
) -> tuple[Encoder, TrainReport, dict[str, Any]]:
    """Pretrain an encoder by cross entropy, prototypes (standard mode) and SimCLR, one of them an update.

    Every update passes `batch_size` images through the encoder, so the budget does not depend on what is chosen:
    SimCLR gets half a batch, in two views. The optimiser is the recipe's for PRL, the augmentation each objective's
    own. The scheduler's targets are the three objectives themselves; its probes draw training images.

    Returns:
        the encoder, what training did, and `{"schedule": ...}` for the result.

    Raises:
        InputError: see :func:`check_scheduled`.
    """
    check_scheduled(recipe, machine)
    encoder = new_encoder(data, recipe, seed)
    step = Step(encoder, _objectives(encoder, data, recipe, seed, machine))
    sizes = {name: recipe.batch_size // 2 if name == "simclr" else recipe.batch_size for name in SOURCES}

    def loss_of(name: str) -> Callable[[Tensor], Tensor]:
        def loss(rows: Tensor) -> Tensor:
            with probing(machine.device, machine.precision):
                found: Tensor = step({name: rows.to(machine.device)})[name]
                return found.float()

        return loss

    rows = len(data.train)
    probes: dict[str, Probe] = {name: row_probe(rows, size, loss_of(name)) for name, size in sizes.items()}
    schedule = parse_schedule(recipe.scheduler, SOURCES)
    scheduler = build_scheduler(schedule, dict.fromkeys(SOURCES, rows), probes, step, seed=seed)
    loaders = {
        name: ShuffledBatches(
            rows, size, seed=seed, labels=data.train.labels if recipe.balanced and name != "simclr" else None
        )
        for name, size in sizes.items()
    }
    count, _ = updates(recipe, data, Method(SCHEDULED))
    stream = TaskStream(loaders, scheduler, seed=seed, steps=count)
    scores = by_prototypes(encoder, data) if len(data.validation) else None

    def evaluate(number: int) -> Mapping[str, float]:
        return {**(scores(number) if scores else {}), **choices_of(stream)}

    report = fit(step, stream, recipe.prl, count, seed, machine, run, evaluate, f"scheduled seed {seed}")
    return encoder, report, {"schedule": {"name": recipe.scheduler, **spent(scheduler)}}


def _objectives(
    encoder: Encoder, data: ImageData, recipe: Recipe, seed: int, machine: Machine
) -> dict[str, Objective]:
    classes = len(data.train.classes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed + 1)
        head, projected = build_head("linear", encoder.features, classes), projection(encoder.features)
    smoothing = recipe.prl.label_smoothing
    proto = ProtoLoss(num_classes=classes, seed=seed, label_smoothing=smoothing, **asdict(recipe.proto))
    labelled = images_of(data, recipe.supervised, machine)
    return {
        "supervised": Supervised(labelled, head, recipe.supervised.label_smoothing),
        "prl": PRL(images_of(data, recipe.prl, machine), proto),
        "simclr": SimCLR(images_of(data, recipe.simclr, machine), projected, recipe.simclr_temperature),
    }
