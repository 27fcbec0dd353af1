"""One image encoder pretrained by several objectives, one an update: a scheduler chooses which is next."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from metapretrain.episodes import ShuffledBatches, TaskStream
from metapretrain.errors import InputError
from metapretrain.models import Encoder
from metapretrain.scheduling import Probe
from metapretrain.tasks.image_data import ImageData
from metapretrain.tasks.image_objectives import build_objectives, sources
from metapretrain.tasks.images import SCHEDULED, Method, by_prototypes, fit, new_encoder, updates, views
from metapretrain.tasks.machine import Machine
from metapretrain.tasks.objectives import Step
from metapretrain.tasks.recipes import Recipe
from metapretrain.tasks.schedules import build_scheduler, choices_of, parse_schedule, probing, row_probe, spent
from metapretrain.training import RunFolder, TrainReport


def check_scheduled(recipe: Recipe, machine: Machine) -> None:
    """Refuse what :func:`pretrain_scheduled` cannot run.

    Raises:
        InputError: no schedule or a bad one, several processes, or a batch that views cannot part.
    """
    if not recipe.scheduler:
        raise InputError("a scheduled row needs a schedule: give --schedule, such as --schedule round-robin")
    parse_schedule(recipe.scheduler, sources())
    if machine.world > 1:
        raise InputError("a scheduled row runs in one process; run rows side by side with --jobs-per-device")
    for objective in sources().values():
        passes = views(objective)
        if recipe.batch_size % passes or recipe.batch_size < 2 * passes:
            raise InputError(
                f"batch_size must be a multiple of {passes} and at least {2 * passes}, since {objective} has "
                f"1/{passes} of it in {passes} views, got {recipe.batch_size}"
            )


def pretrain_scheduled(
    data: ImageData, recipe: Recipe, seed: int, machine: Machine, *, run: RunFolder | None = None
) -> tuple[Encoder, TrainReport, dict[str, Any]]:
    """Pretrain an encoder by cross entropy, prototypes (standard mode) and SimCLR, one of them an update.

    They are the :func:`metapretrain.tasks.image_objectives.sources`.
    Every update passes `batch_size` images through the encoder, so the budget does not depend on what is chosen:
    SimCLR gets half a batch, in two views. The optimiser is the recipe's for PRL, the augmentation each objective's
    own. The scheduler's targets are the objectives themselves; its probes draw training images.

    Returns:
        the encoder, what training did, and `{"schedule": ...}` for the result.

    Raises:
        InputError: see :func:`check_scheduled`.
    """
    check_scheduled(recipe, machine)
    encoder = new_encoder(data, recipe, seed)
    names = sources()
    built = build_objectives(names.values(), encoder, data, recipe, seed, machine)
    objectives = {name: built[objective] for name, objective in names.items()}
    step = Step(encoder, objectives)
    sizes = {name: recipe.batch_size // objective.views for name, objective in objectives.items()}

    def loss_of(name: str) -> Callable[[Tensor], Tensor]:
        def loss(rows: Tensor) -> Tensor:
            with probing(machine.device, machine.precision):
                found: Tensor = step({name: rows.to(machine.device)})[name]
                return found.float()

        return loss

    rows = len(data.train)
    probes: dict[str, Probe] = {name: row_probe(rows, size, loss_of(name)) for name, size in sizes.items()}
    schedule = parse_schedule(recipe.scheduler, names)
    scheduler = build_scheduler(schedule, dict.fromkeys(names, rows), probes, step, seed=seed)
    loaders = {
        name: ShuffledBatches(
            rows, size, seed=seed, labels=data.train.labels if recipe.balanced and objectives[name].labelled else None
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
