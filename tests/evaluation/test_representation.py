"""Scores of a representation against scikit-learn, slow loops and chance."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import silhouette_score
from sklearn.neighbors import KNeighborsClassifier, NearestCentroid
from torch import Tensor, nn

from metapretrain.errors import InputError
from metapretrain.evaluation.intervals import proportion_interval
from metapretrain.evaluation.representation import (
    accuracy,
    embed,
    knn_leave_one_out,
    knn_predict,
    nearest_prototype,
    silhouette,
    subsample,
)


def blobs(n: int, classes: int = 4, spread: float = 0.8, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(classes, (n,), generator=generator)
    return torch.eye(classes, 6)[y] * 2 + spread * torch.randn(n, 6, generator=generator), y


def test_embed_equals_one_call_and_leaves_no_graph() -> None:
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(12, 5))
    images = torch.randn(7, 3, 2, 2)
    z = embed(encoder, images, batch_size=3)
    torch.testing.assert_close(z, encoder(images).detach())
    assert z.dtype == torch.float32
    assert not z.requires_grad
    assert not z.is_inference()


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.frozen = nn.BatchNorm1d(3).eval()

    def encode(self, x: Tensor) -> Tensor:
        assert not self.norm.training
        return self.norm(x)


def test_embed_is_in_evaluation_mode_and_restores_each_module() -> None:
    encoder = Encoder()
    before = {name: value.clone() for name, value in encoder.state_dict().items()}
    embed(encoder.encode, torch.randn(8, 3) + 5)
    assert all(torch.equal(value, before[name]) for name, value in encoder.state_dict().items())
    assert (encoder.training, encoder.norm.training, encoder.frozen.training) == (True, True, False)


def test_mode_is_restored_after_an_error() -> None:
    encoder = nn.Linear(3, 2)
    with pytest.raises(RuntimeError):
        embed(encoder, torch.randn(4, 5))
    assert encoder.training


def test_nearest_prototype_is_nearest_centroid() -> None:
    z, y = blobs(200)
    test, _ = blobs(100, seed=1)
    reference = NearestCentroid().fit(z.numpy(), y.numpy()).predict(test.numpy())
    assert nearest_prototype(z, y, test).tolist() == reference.tolist()


def test_nearest_prototype_does_not_depend_on_scale_rotation_or_names() -> None:
    z, y = blobs(200)
    test, _ = blobs(100, seed=1)
    predicted = nearest_prototype(z, y, test)
    rotation = torch.linalg.qr(torch.randn(6, 6, generator=torch.Generator().manual_seed(2))).Q
    moved = nearest_prototype(z @ rotation * 3 + 1, y, test @ rotation * 3 + 1)
    assert (moved == predicted).float().mean() > 0.99
    assert torch.equal(nearest_prototype(z, 10 * y + 7, test), 10 * predicted + 7)


def test_knn_is_scikit_learns() -> None:
    z, y = blobs(150)
    test, _ = blobs(60, seed=1)
    unit = (z / z.norm(dim=1, keepdim=True)).numpy()
    reference = KNeighborsClassifier(20).fit(unit, y.numpy()).predict((test / test.norm(dim=1, keepdim=True)).numpy())
    assert (knn_predict(z, y, test).numpy() == reference).mean() > 0.98  # rounding may swap a tie


def test_leave_one_out_is_a_slow_loop() -> None:
    z, y = blobs(60, spread=1.5)
    right = 0
    for row in range(60):
        others = [other for other in range(60) if other != row]
        right += int(knn_predict(z[others], y[others], z[row : row + 1], k=1)[0]) == int(y[row])
    assert 20 < right < 55  # counting a row as its own neighbour would give 60
    assert knn_leave_one_out(z, y, k=1) == pytest.approx(right / 60)


def test_silhouette_is_scikit_learns_and_subsampled() -> None:
    z, y = blobs(300)
    assert silhouette(z, y) == pytest.approx(silhouette_score(z.numpy(), y.numpy()), abs=1e-6)
    part = subsample(300, 100)
    assert silhouette(z, y, max_points=100) == silhouette(z[part], y[part])


def test_subsample_is_sorted_without_repeats_and_fixed() -> None:
    rows = subsample(1000, 50, seed=3)
    assert rows.tolist() == sorted(set(rows.tolist()))
    assert len(rows) == 50
    assert torch.equal(rows, subsample(1000, 50, seed=3))
    assert not torch.equal(rows, subsample(1000, 50, seed=4))
    assert subsample(3, 50).tolist() == [0, 1, 2]


@pytest.mark.parametrize("predict", [nearest_prototype, knn_predict])
def test_random_embeddings_score_chance(predict: object) -> None:
    generator = torch.Generator().manual_seed(0)
    z, y = torch.randn(2000, 16, generator=generator), torch.arange(2000) % 10
    predicted = predict(z[:1000], y[:1000], z[1000:])  # type: ignore[operator]
    interval = proportion_interval(int((predicted == y[1000:]).sum()), 1000)
    assert interval.low <= 0.1 <= interval.high


def test_shuffled_labels_score_chance() -> None:
    z, y = blobs(2000)
    assert accuracy(nearest_prototype(z[:1000], y[:1000], z[1000:]), y[1000:]) > 0.8
    shuffled = y[torch.randperm(2000, generator=torch.Generator().manual_seed(0))]
    right = int((nearest_prototype(z[:1000], shuffled[:1000], z[1000:]) == shuffled[1000:]).sum())
    interval = proportion_interval(right, 1000)
    assert interval.low <= 0.25 <= interval.high


def with_nan() -> Tensor:
    z = torch.zeros(4, 2)
    z[2, 1] = math.nan
    return z


LABELS = torch.tensor([0, 0, 1, 1])


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: embed(nn.Identity(), with_nan()), "1 of 4 rows hold NaN or infinity or .*, first row 2"),
        (lambda: embed(nn.Identity(), torch.zeros(0, 2)), "got 0"),
        (lambda: embed(nn.Identity(), torch.zeros(4, 2), batch_size=0), "batch size of 1 or more"),
        (lambda: embed(nn.Identity(), torch.zeros(4, 2, 2)), r"\(batch, dimension\)"),
        (lambda: nearest_prototype(with_nan(), LABELS, torch.zeros(1, 2)), "training embeddings.*NaN"),
        (lambda: nearest_prototype(torch.zeros(4, 2), LABELS, with_nan()), "test embeddings.*NaN"),
        (lambda: nearest_prototype(torch.zeros(4, 2), LABELS[:3], torch.zeros(1, 2)), "integer labels"),
        (lambda: nearest_prototype(torch.zeros(4, 2), LABELS.float(), torch.zeros(1, 2)), "integer labels"),
        (lambda: nearest_prototype(torch.zeros(4, 2), [0, 0, 1, 1], torch.zeros(1, 2)), "in a tensor; got a list"),
        (
            lambda: nearest_prototype(torch.zeros(4, 2), -torch.arange(4), torch.zeros(1, 2)),
            "3 of 4 labels are negative",
        ),
        (lambda: silhouette(torch.eye(3), torch.tensor([0, 1, -1])), "1 of 3 labels are negative"),
        (lambda: knn_predict(torch.eye(3), torch.tensor([0, 1, -1]), torch.eye(3)), "1 of 3 labels are negative"),
        (lambda: knn_leave_one_out(torch.eye(3), torch.tensor([0, 1, -1]), 1), "1 of 3 labels are negative"),
        (lambda: nearest_prototype(torch.zeros(4, 2), LABELS, torch.zeros(1, 3)), "2 in training, 3 in test"),
        (lambda: knn_predict(torch.zeros(4, 2), LABELS, torch.zeros(1, 2), k=0), "k is 0; give a whole number"),
        (lambda: knn_predict(torch.zeros(4, 2), LABELS, torch.zeros(1, 2), k=1.5), "k is 1.5; give a whole number"),
        (lambda: silhouette(torch.randn(4, 2), torch.zeros(4, dtype=torch.int64)), "2 or more classes"),
        (lambda: accuracy(LABELS, LABELS[:2]), r"\(4,\) predictions"),
        (lambda: accuracy(LABELS, LABELS * 0 - 100), "no label below 0, which marks rows without one"),
        (lambda: knn_leave_one_out(torch.zeros(1, 2), LABELS[:1]), "2 rows or more"),
    ],
)
def test_bad_input_is_one_line(call: object, match: str) -> None:
    with pytest.raises(InputError, match=match) as caught:
        call()  # type: ignore[operator]
    assert "\n" not in str(caught.value)


def test_half_precision_encoders_are_scored_in_float32() -> None:
    z = embed(lambda x: x.half(), torch.rand(5, 3))
    assert z.dtype == torch.float32
    assert np.isfinite(z.numpy()).all()


@pytest.mark.parametrize(
    ("encode", "got"),
    [
        (lambda x: x.flatten(1)[:1], "shape (1, 4)"),
        (lambda x: torch.cat([x.flatten(1)] * 2), "shape (6, 4)"),
        (lambda x: x.numpy(), "ndarray"),
    ],
)
def test_an_encoder_that_gives_another_number_of_rows_is_refused(encode: Any, got: str) -> None:
    """One row for a batch was once spread over it, and the rest of the features was left as memory had it."""
    with pytest.raises(InputError, match=re.escape(f"for a batch of 3; got {got}")):
        embed(encode, torch.zeros(5, 1, 2, 2), batch_size=3)
