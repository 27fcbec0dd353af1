"""Scores of an image experiment, by hand and where some are not defined."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from metapretrain.experiments.images import experiment as module
from metapretrain.experiments.images.data import ImageData
from metapretrain.experiments.images.experiment import score
from metapretrain.experiments.images.recipe import ImageRecipe
from metapretrain.models import Encoder
from tests.experiments.conftest import make_images


class Plane(nn.Module):
    """Two features of an image: its first two pixels, as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, 0, 0, :2] * self.scale


def test_score_by_hand() -> None:
    def part(points: list[tuple[int, int]], labels: list[int]) -> Any:
        images = torch.zeros(len(points), 1, 2, 2, dtype=torch.uint8)
        images[:, 0, 0] = torch.tensor(points, dtype=torch.uint8)
        return dataclasses.replace(make_images(0, classes=2), images=images, labels=torch.tensor(labels))

    # prototypes: class 0 at (10, 0), class 1 at (100, 0)
    train = part([(0, 0), (20, 0), (60, 0), (140, 0)], [0, 0, 1, 1])
    held = part([(50, 0), (60, 0)], [0, 0])
    test = part([(50, 9), (60, 9), (120, 9), (20, 9)], [0, 1, 1, 1])
    data = ImageData(train, held, test, (0.0,), (1 / 255,))  # features are pixel values
    head = nn.Linear(2, 2)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[-1.0, 0.0], [1.0, 0.0]]))
        head.bias.copy_(torch.tensor([65.0, -65.0]))  # class 1 from x = 65 on
    scores = score(Plane(), head, data)
    assert scores.prototypes.tolist() == pytest.approx(torch.tensor([[10.0, 0.0], [100.0, 0.0]]), abs=1e-4)
    m = scores.metrics
    assert m["train_accuracy"] == 0.75 and m["validation_accuracy"] == 1.0 and m["test_accuracy"] == 0.5
    assert scores.test_predictions.tolist() == [0, 0, 1, 0]
    assert m["nearest_prototype_accuracy"] == 0.75  # 55 is the border: 50 -> 0, 60 -> 1, 120 -> 1, 20 -> 0
    assert m["validation_nearest_prototype_accuracy"] == 0.5
    # silhouette of (0, 20 | 60, 140): a is 20, 20, 80, 80; b is 100, 80, 50, 130
    assert m["silhouette_train"] == pytest.approx((80 / 100 + 60 / 80 + (50 - 80) / 80 + 50 / 130) / 4, abs=1e-5)
    assert "silhouette_test" in m and 0 <= m["knn_accuracy"] <= 1
    headless = score(Plane(), None, data)
    assert headless.test_predictions.tolist() == [0, 1, 1, 0]
    assert "test_accuracy" not in headless.metrics


def test_scores_that_are_not_defined_are_left_out(data: ImageData) -> None:
    one_each = dataclasses.replace(data, test=data.test.subset([0, 1, 2]))  # no class of two images
    metrics = score(Plane(), nn.Linear(2, 3), one_each).metrics
    assert "silhouette_test" not in metrics and "silhouette_train" in metrics and "test_accuracy" in metrics


def test_scoring_leaves_the_mode_and_takes_no_augmentation(data: ImageData, recipe: ImageRecipe) -> None:
    encoder: Encoder = module.new_encoder(data, recipe, 0).train()
    before = {name: value.clone() for name, value in encoder.state_dict().items()}
    first, again = (score(encoder, None, data).metrics for _ in range(2))
    assert first == again and encoder.training
    assert all(torch.equal(value, before[name]) for name, value in encoder.state_dict().items())
