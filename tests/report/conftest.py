"""Hand-made folders of runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report_stl10 import LAYOUT

from metapretrain.evaluation.predictions import write_predictions
from metapretrain.report.layout import save_layout

MakeRun = Callable[..., Path]
IMAGES = 400


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Write one run's folder below tmp_path/"runs"; returns it."""

    def make(
        method: str,
        seed: int,
        right: int | None = 300,
        /,
        *,
        group: str = "stl10-paper",
        predictions: bool = True,
        **changes: Any,
    ) -> Path:
        dataset, recipe = group.split("-")
        folder = tmp_path / "runs" / group / f"{method}-s{seed}"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        save_layout(replace(LAYOUT, published_counts={"test": IMAGES}), folder.parent)
        result: dict[str, Any] = {
            "schema": 1,
            "benchmark": "stl10",
            "dataset": dataset,
            "recipe": recipe,
            "method": method,
            "seed": seed,
            "status": "complete",
            "metrics": {"train_accuracy": 0.99, "nearest_prototype_accuracy": 0.7, "knn_accuracy": 0.65},
            "counts": {"train": 5000, "validation": 0, "test": IMAGES},
            "budget": {"encoder_passes": 150000, "updates": 1170, "pretrain_updates": 900},
            "wall_s": 60.0 + seed,
            "device": "NVIDIA H100",
        }
        if right is not None:
            result["metrics"]["test_accuracy"] = right / IMAGES
            if predictions:
                y = np.arange(IMAGES) % 10
                wrong = np.random.default_rng(seed + 1000).permutation(IMAGES)[right:]
                predicted = y.copy()
                predicted[wrong] = (y[wrong] + 1) % 10
                write_predictions(folder / "predictions.csv", y, predicted)
        for part in ("metrics", "counts", "budget"):
            result[part] = result[part] | changes.pop(part, {})
        (folder / "result.json").write_text(json.dumps(result | changes))
        return folder

    return make
