"""What a row of the prompts benchmark is judged by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from metapretrain.data.sentence_sets import SentenceData
from metapretrain.evaluation.metrics import accuracy, macro_f1
from metapretrain.tasks.prompt_data import majority_class
from metapretrain.tasks.prompt_stack import Progress


@dataclass(frozen=True)
class Tuned:
    """How a prompt, or a model, ended on one set, and the classes of the test rows (N,), None while tuning."""

    progress: Progress
    predicted: Tensor | None
    seconds: float


def metrics_of(sets: Sequence[SentenceData], tuned: Mapping[str, Tuned]) -> dict[str, float]:
    """Accuracy and macro-F1 of each set and their means; where something was tuned, validation accuracy too."""
    found: dict[str, float] = {}
    for one in sets:
        outcome = tuned[one.name]
        if outcome.predicted is not None:
            found |= _scores(one, outcome.predicted)
        if outcome.progress.history:
            found[f"validation_{one.name}_accuracy"] = outcome.progress.accuracy
    return found | _means(found, sets, ("", "validation_"))


def majorities(sets: Sequence[SentenceData]) -> dict[str, float]:
    """The same on the test rows for the most frequent class of each training part."""
    found: dict[str, float] = {}
    for one in sets:
        constant = torch.full((len(one.test),), majority_class(one))
        found |= {f"majority_{name}": value for name, value in _scores(one, constant).items()}
    return found | _means(found, sets, ("majority_",))


def _scores(one: SentenceData, predicted: Tensor) -> dict[str, float]:
    labels = one.test.require_labels().numpy()
    return {
        f"{one.name}_accuracy": float(accuracy(labels, predicted.numpy())),
        f"{one.name}_f1": float(macro_f1(labels, predicted.numpy(), one.num_classes)),
    }


def _means(scores: Mapping[str, float], sets: Sequence[SentenceData], prefixes: Sequence[str]) -> dict[str, float]:
    found = {}
    for prefix in prefixes:
        for metric in ("accuracy", "f1"):
            values = [scores.get(f"{prefix}{one.name}_{metric}") for one in sets]
            known = [value for value in values if value is not None]
            if len(known) == len(sets):
                found[f"{prefix}mean_{metric}"] = sum(known) / len(known)
    return found
