"""Two processes train texts as one does: every kind of row ends with the weights of one process."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from metapretrain.checks import leave_ranks
from metapretrain.data.made import made_tasks
from metapretrain.errors import InputError
from metapretrain.experiments.base import Context, Machine
from metapretrain.experiments.command import machine_of
from metapretrain.experiments.recipe import Proto
from metapretrain.experiments.text.data import TextData
from metapretrain.experiments.text.experiment import TextExperiment
from metapretrain.experiments.text.recipe import PRETRAININGS, TextMethod, TextPhase, TextRecipe
from metapretrain.experiments.text.training import finetuning, new_encoder, pretraining
from metapretrain.training import train

PHASE = TextPhase(lr=0.05, optimizer="sgd", clip=1.0)
RECIPE = TextRecipe(
    2,
    PHASE,
    PHASE,
    PHASE,
    PHASE,
    batch_size=12,
    encoder="tiny",
    pool=2,
    dropout=0.0,
    multiple=16,
    query=Proto(query_fraction=0.34),
)
TASKS = made_tasks(rows=24)
QUIET = [replace(task, validation=task.validation.subset([])) for task in TASKS]  # nothing to score
SCHEDULED = replace(RECIPE, scheduler="proportional", balanced_finetune=True)
ROWS = {
    "joint": (TextMethod(shared=True), QUIET, RECIPE),
    "frozen": (TextMethod(frozen=True), QUIET, RECIPE),
    "pcgrad": (TextMethod(joined=True, surgery=True), [QUIET[0], QUIET[2]], RECIPE),  # two: their order is all the same
    "scheduled": (TextMethod(sts="cosine"), QUIET, SCHEDULED),
}


def trained(machine: Machine) -> dict[str, Tensor]:
    """The weights that every pretraining and some rows end with."""
    ends: dict[str, list[nn.Module]] = {}
    for name in PRETRAININGS:
        data = TextData(tuple(TASKS if name == "proto" else QUIET))
        context = Context(f"pretrain-{name}", PRETRAININGS[name], 0, RECIPE, data, machine, shared=True)
        encoder, training = pretraining(context)
        train(**vars(training))
        ends[name] = [encoder]
    for name, (method, tasks, recipe) in ROWS.items():
        encoder = new_encoder(recipe, 0)
        heads, training = finetuning(Context(name, method, 0, recipe, TextData(tuple(tasks)), machine), encoder)
        train(**vars(training))
        ends[name] = [encoder, heads]
    return {
        f"{name} {number}.{key}": value.clone()
        for name, modules in ends.items()
        for number, module in enumerate(modules)
        for key, value in module.state_dict().items()
    }


def no_dropout(x: Tensor, *_: Any, **__: Any) -> Tensor:
    """The ranks draw different numbers."""
    return x


def test_two_ranks_end_with_the_weights_of_one_process(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ranks: Callable[[int], list[dict[str, str]]],
    forked: Callable[..., None],
) -> None:
    forked(__file__, [[str(tmp_path / rank)] for rank in "01"], ranks(2), tmp_path)
    monkeypatch.setattr(torch.nn.functional, "dropout", no_dropout)
    one = trained(Machine())
    for rank in ("0", "1"):
        two = load_file(tmp_path / rank)
        assert one.keys() == two.keys()
        for name, value in one.items():
            gap = (two[name] - value).abs().max().item()
            assert gap < 5e-6, f"{name} of rank {rank}: {gap:.1e}"


@pytest.mark.parametrize(
    ("recipe", "world", "line"),
    [
        (RECIPE, 5, "batch_size 12 must be a multiple of the 5 processes"),
        (replace(RECIPE, scheduler="utility"), 2, r"the probes of utility run in one process; .* --jobs-per-device"),
        (replace(RECIPE, scheduler="exp3"), 2, "the probes of exp3 run in one process"),
    ],
)
def test_what_ranks_cannot_share_is_refused_before_training(
    recipe: TextRecipe, world: int, line: str, tmp_path: Path
) -> None:
    experiment = TextExperiment("text", "made", "x", recipe, TextData(tuple(QUIET)), Machine(world=world), tmp_path)
    with pytest.raises(InputError, match=line):
        experiment.check({"unfrozen": TextMethod()}, [0])


if __name__ == "__main__":
    torch.nn.functional.dropout = no_dropout  # type: ignore[assignment]
    save_file(trained(machine_of(Namespace(device="cpu", precision="fp32"))), sys.argv[1])
    leave_ranks()
