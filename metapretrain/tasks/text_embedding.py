"""Embeddings of whole splits, predictions of heads on them, and their scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from metapretrain.data.texts import TextTask
from metapretrain.data.tokens import Tokens, padded_width
from metapretrain.evaluation.representation import check_embeddings, evaluation_mode
from metapretrain.evaluation.text_scores import nearest_prototype_scores, score_task, with_overall
from metapretrain.models.text_encoders import TextEncoder
from metapretrain.tasks.machine import Machine
from metapretrain.tasks.text_data import TextData, width_limit
from metapretrain.tasks.text_methods import TextRecipe
from metapretrain.tasks.text_objectives import added, predict

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
