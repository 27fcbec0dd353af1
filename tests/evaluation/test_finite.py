"""Classes are never read off outputs that are NaN or infinite, wherever a benchmark reads them."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import prompts_experiment as prompts
import pytest
import torch
from entity_tasks import LabelTask
from torch import Tensor, nn

from metapretrain.data.images import load_digits_images
from metapretrain.episodes import EpisodeSampler, EpisodeSpec
from metapretrain.errors import InputError
from metapretrain.evaluation.episodes import evaluate_embeddings, evaluate_episodes
from metapretrain.evaluation.representation import knn_predict, nearest_prototype, silhouette
from metapretrain.experiments.images.experiment import score as score_images
from metapretrain.experiments.schedule.tasks.base import ClassTask
from metapretrain.experiments.schedule.tasks.tokens import MaskedLM
from metapretrain.experiments.text.objectives import head_predictions
from metapretrain.protonet.learner import HEADS

REFUSED = pytest.raises(InputError, match=r"outputs of \d+ of \d+ inputs are NaN or infinite")
LARGE = pytest.raises(InputError, match=r"60 of 60 rows hold NaN or infinity or more than 1e\+17")
BAD = [math.nan, math.inf, -math.inf]


class Constant(nn.Module):
    """A head whose outputs are all one value."""

    def __init__(self, *shape: int, value: float) -> None:
        super().__init__()
        self.shape, self.value = shape, value

    def forward(self, z: Tensor, *_: Tensor) -> Tensor:
        return z.new_full((len(z), *self.shape), self.value)


@pytest.mark.parametrize("bad", BAD)
def test_logits_of_episodes(bad: float) -> None:
    rows, y = torch.eye(6).repeat(10, 1), torch.arange(60) % 6
    sampler = EpisodeSampler(y, EpisodeSpec(ways=5, shots=1, queries=4), episodes=2, seed=0)
    data = torch.utils.data.TensorDataset(rows, y)
    with REFUSED:
        evaluate_episodes(lambda episode: Constant(5, value=bad)(episode.query.x), data, sampler)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_distances_of_embeddings_that_overflow(dtype: torch.dtype) -> None:
    y = torch.arange(60) % 6
    sampler = EpisodeSampler(y, EpisodeSpec(ways=5, shots=1, queries=4), episodes=2, seed=0)
    z = (torch.eye(6)[y] * 1e20).to(dtype)
    for head in HEADS:
        with LARGE:
            evaluate_embeddings(z, sampler, head=head, centre=z[0])
    for score in (lambda: nearest_prototype(z, y, z), lambda: knn_predict(z, y, z), lambda: silhouette(z, y)):
        with LARGE:
            score()
    assert nearest_prototype(z * 1e-4, y, z * 1e-4).equal(y)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize(("kind", "shape"), [("classification", (3,)), ("pair-classification", ()), ("regression", ())])
def test_heads_of_texts(kind: str, shape: tuple[int, ...], bad: float) -> None:
    task: Any = SimpleNamespace(kind=kind, regression=kind == "regression")
    with REFUSED:
        head_predictions(task, Constant(*shape, value=bad), (torch.zeros(4, 2),))


@pytest.mark.parametrize("bad", BAD)
def test_heads_of_images(bad: float) -> None:
    encoder: Any = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
    digits = load_digits_images("test")
    data: Any = SimpleNamespace(train=digits, validation=digits, test=digits, mean=(0.5,), std=(0.5,))
    with REFUSED:
        score_images(encoder, Constant(10, value=bad), data)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("task", [ClassTask, LabelTask, MaskedLM])
def test_tasks_of_schedules(task: Any, bad: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "__abstractmethods__", frozenset())
    one, labels = object.__new__(task), torch.zeros(2, 4, dtype=torch.long)
    if task is not LabelTask:
        shape = (2, 5) if task is ClassTask else (2, 4, 5)
        monkeypatch.setattr(task, "logits", lambda *_: torch.full(shape, bad))
    with REFUSED:
        one.outcome(None, lambda states: torch.full((2, 4, 5), bad), torch.zeros(2, 4, 3), {"labels": labels})


@pytest.mark.parametrize("bad", BAD)
def test_label_words_of_prompts(bad: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "word_scores", lambda *_: torch.full((1, 3, 7), bad))
    pool: Any = SimpleNamespace(lengths=torch.ones(3), gather=lambda rows: rows)
    model: Any = SimpleNamespace(verbalizer=range(7))
    with REFUSED:
        prompts.predict_rows(model, torch.zeros(1, 2), pool, torch.arange(3), [2, 5], device="cpu", precision="fp32")
