"""A saved pretraining predicts by its prototypes: of added embeddings, and scores from the range's lowest on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from metapretrain.data.made import made_tasks
from metapretrain.data.texts import TextSet
from metapretrain.experiments.base import Machine
from metapretrain.experiments.saved import load_text_model
from metapretrain.experiments.text.data import TextData
from metapretrain.experiments.text.experiment import TextExperiment
from metapretrain.experiments.text.recipe import PRETRAININGS, TextPhase, TextRecipe

PHASE = TextPhase(lr=3e-3)
RECIPE = TextRecipe(2, PHASE, PHASE, PHASE, PHASE, batch_size=8, encoder="tiny")


def test_a_pretraining_predicts_the_class_or_the_score_of_the_nearest_prototype(tmp_path: Path) -> None:
    def raised(rows: TextSet) -> TextSet:
        return rows if rows.labels is None else replace(rows, labels=rows.labels + 1)

    *others, sts = made_tasks(rows=24)
    splits = {split: raised(getattr(sts, split)) for split in ("train", "validation", "dev")}
    tasks = (*others, replace(sts, **splits, low=1.0, high=6.0))  # type: ignore[arg-type]
    experiment = TextExperiment("text", "made", "short", RECIPE, TextData(tasks), Machine(), tmp_path, figures=None)
    plan = PRETRAININGS["proto-separate"]
    experiment.run([experiment.context("pretrain-proto-separate", plan, 0, shared=True)])
    model = load_text_model(experiment.path("pretrain-proto-separate", 0))
    for task in tasks:
        z, z_dev = (
            sum(model.encode(column) for column in (rows.first, rows.second) if column is not None)
            for rows in (task.train, task.dev)
        )
        assert isinstance(z, torch.Tensor) and isinstance(z_dev, torch.Tensor)
        classes = task.class_labels(task.train)
        centres = torch.stack([z[classes == label].mean(0) for label in range(task.num_classes)])
        nearest = torch.cdist(z_dev, centres).argmin(1)
        wanted = nearest + 1.0 if task.name == "sts" else nearest
        assert torch.equal(model.predict(task.name, task.dev), wanted)
