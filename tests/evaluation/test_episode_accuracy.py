"""Accuracy over episodes: against a slow loop, chance, flat memory, and k-shot accuracy of an encoder."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from metapretrain.data.images import ImageSet
from metapretrain.episodes import EpisodePlan, EpisodeSampler, EpisodeSpec
from metapretrain.episodes.dataset import Batch, Episode
from metapretrain.errors import InputError
from metapretrain.evaluation.episodes import EpisodeResult, evaluate_embeddings, evaluate_episodes, few_shot_accuracy
from metapretrain.maml import MAML
from metapretrain.protonet.prototypes import proto_logits, prototypes

CLASSES = 8
Y = torch.arange(160) % CLASSES


def features(spread: float = 0.4, seed: int = 0) -> Tensor:
    return torch.eye(CLASSES, 12)[Y] + spread * torch.randn(160, 12, generator=torch.Generator().manual_seed(seed))


def sampler(episodes: int | None = 50, seed: int = 0, **spec: object) -> EpisodeSampler:
    whole = {"ways": 5, "shots": 2, "queries": 4} | spec
    return EpisodeSampler(Y, EpisodeSpec(**whole), episodes, seed=seed)  # type: ignore[arg-type]


def by_prototypes(distance: str) -> object:
    def predict(episode: Episode) -> Tensor:
        centres, present = prototypes(episode.support.x, episode.support.y, len(episode.classes))
        return proto_logits(episode.query.x, centres, distance, present=present)

    return predict


RANGED = {"ways": (2, 7), "shots": (1, 5), "queries": (1, 6)}


@pytest.mark.parametrize("distance", ["euclidean", "sqeuclidean", "cosine"])
@pytest.mark.parametrize("spec", [{}, RANGED])
def test_batched_is_episode_by_episode(distance: str, spec: dict[str, object]) -> None:
    z = features()
    slow = evaluate_episodes(by_prototypes(distance), TensorDataset(z, Y), sampler(**spec))  # type: ignore[arg-type]
    fast = evaluate_embeddings(z, sampler(**spec), distance=distance, batch=16)
    assert fast.values == pytest.approx(slow.values)
    assert 0.4 < fast.mean < 0.99
    assert fast.mean != evaluate_embeddings(z, sampler(seed=1, **spec), distance=distance).mean


def test_batch_size_changes_nothing() -> None:
    results = [evaluate_embeddings(features(), sampler(**RANGED), batch=batch) for batch in (1, 7, 1000)]
    assert results[0] == results[1] == results[2]


def test_interval_is_student_t_over_episodes() -> None:
    result = evaluate_embeddings(features(), sampler(40))
    low, high = stats.t.interval(0.95, 39, loc=result.mean, scale=stats.sem(result.values))
    assert result.ci95 == pytest.approx((high - low) / 2)
    assert result.n == len(result.values) == 40
    assert str(result).endswith("(40 episodes)")


def test_labels_and_logits_are_both_answers() -> None:
    data = TensorDataset(features(), Y)
    logits = by_prototypes("euclidean")
    by_logits = evaluate_episodes(logits, data, sampler(9))  # type: ignore[arg-type]
    by_labels = evaluate_episodes(lambda e: logits(e).argmax(1), data, sampler(9))  # type: ignore[operator]
    assert by_logits == by_labels


def test_an_untrained_model_scores_one_in_n() -> None:
    network = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 5))
    noise = TensorDataset(torch.randn(160, 12, generator=torch.Generator().manual_seed(3)), Y)
    z = torch.randn(160, 4, generator=torch.Generator().manual_seed(4))
    for result in (
        evaluate_episodes(lambda episode: network(episode.query.x), noise, sampler(800, queries=6)),
        evaluate_episodes(lambda episode: torch.zeros(len(episode.query.y), 5), noise, sampler(800)),
        evaluate_embeddings(z[torch.randperm(160, generator=torch.Generator().manual_seed(5))], sampler(800)),
    ):
        assert abs(result.mean - 0.2) < max(1.6 * result.ci95, 0.02)


def test_shuffled_labels_score_chance() -> None:
    z = features(spread=0.1)
    assert evaluate_embeddings(z, sampler(300)).mean > 0.99
    shuffled = z[torch.randperm(160, generator=torch.Generator().manual_seed(6))]
    result = evaluate_embeddings(shuffled, sampler(300))
    assert abs(result.mean - 0.2) < 0.04


def test_no_graph_is_kept_and_memory_stays_flat() -> None:
    weight = torch.randn(12, 5, requires_grad=True)
    answers: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def predict(episode: Episode) -> Tensor:
        alive.append(sum(answer() is not None for answer in answers))
        logits = (episode.query.x @ weight).tanh()
        assert logits.requires_grad  # a learner that adapts needs gradients here
        answers.append(weakref.ref(logits))
        return logits

    result = evaluate_episodes(predict, TensorDataset(features(), Y), sampler(50))
    assert max(alive) <= 1
    assert all(isinstance(value, float) for value in result.values)
    assert weight.grad is None


def test_memory_of_frozen_embeddings_is_that_of_one_batch() -> None:
    alive: list[int] = []

    def plans() -> Iterator[EpisodePlan]:
        for number, plan in enumerate(sampler(300)):
            if number % 20 == 19:
                alive.append(sum(type(thing) is EpisodePlan for thing in gc.get_objects()))
            yield plan

    assert evaluate_embeddings(features(), plans(), batch=10).n == 300
    assert 1 <= max(alive) <= 21


def test_a_class_without_support_counts_as_wrong() -> None:
    plan = EpisodePlan.of([0, 1, 0, 1], index=0, support_y=[0, 0], query_y=[0, 1], classes=(0, 1))
    assert evaluate_embeddings(torch.tensor([[0.0], [9.0]]), [plan]).values == [0.5]


@pytest.mark.parametrize(
    ("y", "given"),
    [
        (torch.tensor([0, -100]), r"torch.int64 \(2,\), the least -100"),
        (torch.tensor([-1, -1]), r"torch.int64 \(2,\), the least -1"),
        (torch.eye(2).long(), r"torch.int64 \(2, 2\), the least 0"),
    ],
)
def test_queries_without_a_class_index_are_not_counted_as_wrong(y: Tensor, given: str) -> None:
    episode = Episode(Batch(torch.eye(2), torch.arange(2)), Batch(torch.eye(2), y), (0, 1), 0)
    for predict in (lambda one: one.query.x, lambda _: torch.arange(2)):
        with pytest.raises(
            InputError, match=rf"^labels of queries are {given}; give class indices 0..W-1 \(queries,\)"
        ):
            evaluate_episodes(predict, None, [episode])


def with_nan() -> Tensor:
    z = features()
    z[7] = math.nan
    return z


DATA = TensorDataset(features(), Y)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: evaluate_embeddings(with_nan(), sampler()), "1 of 160 rows hold NaN or infinity or .*, first row 7"),
        (lambda: evaluate_embeddings(features()[:50], sampler()), r"embeddings of rows 0\.\.49"),
        (lambda: evaluate_embeddings(features(), sampler(None)), "endless"),
        (lambda: evaluate_episodes(lambda e: e.query.y, DATA, sampler(None)), "endless"),
        (lambda: evaluate_embeddings(features(), []), "one or more"),
        (lambda: evaluate_embeddings(features(), sampler(), distance="cosin"), "did you mean 'cosine'"),
        (lambda: evaluate_embeddings(features(), sampler(), batch=0), "batch is 0; give a whole number of at least 1"),
        (
            lambda: evaluate_embeddings(features(), sampler(), batch=2.5),
            "batch is 2.5; give a whole number of at least 1",
        ),  # type: ignore[arg-type]
        (lambda: evaluate_episodes(lambda e: torch.full((20, 5), math.nan), DATA, sampler()), "NaN"),
        (lambda: evaluate_episodes(lambda e: torch.full((20, 5), math.inf), DATA, sampler()), "infinite"),
        (lambda: evaluate_episodes(lambda e: torch.zeros(3, 5), DATA, sampler()), r"logits \(20, ways\)"),
        (lambda: evaluate_episodes(lambda e: torch.zeros(20), DATA, sampler()), "integer labels"),
        (lambda: evaluate_episodes(lambda e: [0] * 20, DATA, sampler()), "torch tensor.*got list"),
    ],
)
def test_bad_input_is_one_line(call: object, match: str) -> None:
    with pytest.raises(InputError, match=match) as caught:
        call()  # type: ignore[operator]
    assert "\n" not in str(caught.value)


def image_set(labels: Tensor) -> ImageSet:
    images = (features(0.3) * 50 + 100).clamp(0, 255).to(torch.uint8).reshape(160, 3, 2, 2)
    return ImageSet(images, labels, [f"class {c}" for c in range(CLASSES)], "made", "test", {})


def test_few_shot_of_an_encoder_is_the_accuracy_of_its_embeddings() -> None:
    encoder = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(12))
    before = {name: value.clone() for name, value in encoder.state_dict().items()}
    spec = EpisodeSpec(5, 1, 5)

    def encode(x: Tensor) -> Tensor:
        return x.flatten(1).float() / 255

    result = few_shot_accuracy(encode, image_set(Y), spec, episodes=60, seed=3)
    by_hand = evaluate_embeddings(encode(image_set(Y).images), EpisodeSampler(Y, spec, 60, seed=3))
    assert result == by_hand
    assert result.mean > few_shot_accuracy(lambda x: torch.rand(len(x), 3), image_set(Y), spec, 60, 3).mean
    assert result != few_shot_accuracy(encode, image_set(Y), spec, episodes=60, seed=4)
    assert all(torch.equal(value, before[name]) for name, value in encoder.state_dict().items())


def test_few_shot_leaves_unlabelled_images_out() -> None:
    labels = Y.clone()
    labels[Y == 2] = -1
    seen: list[int] = []

    def encode(x: Tensor) -> Tensor:
        seen.append(len(x))
        return x.flatten(1).float()

    few_shot_accuracy(encode, image_set(labels), EpisodeSpec(7, 1, 2), episodes=10)
    assert sum(seen) == 140
    with pytest.raises(InputError):
        few_shot_accuracy(encode, image_set(labels), EpisodeSpec(8, 1, 2), episodes=10)
    with pytest.raises(InputError, match="no labelled image"):
        few_shot_accuracy(encode, image_set(torch.full_like(Y, -1)), EpisodeSpec(5, 1, 2))
    with pytest.raises(InputError, match="episodes is 0; give a whole number of at least 1"):
        few_shot_accuracy(encode, image_set(Y), EpisodeSpec(5, 1, 2), episodes=0)


def test_a_single_episode_has_no_interval() -> None:
    result = EpisodeResult.of([0.5])
    assert math.isnan(result.ci95)
    assert str(result) == "50.00% (1 episode)"


@pytest.mark.parametrize("answer", [None, [0, 1], np.zeros((2, 2)), torch.zeros(2, 0)])
def test_what_is_no_answer_is_refused(answer: Any) -> None:
    sampler = EpisodeSampler([0, 0, 1, 1], EpisodeSpec(2, 1, 1), 3, seed=0)
    with pytest.raises(InputError, match="predict must return"):
        evaluate_episodes(lambda episode: answer, torch.zeros(4, 2), sampler)


def waves(tasks: int, shots: int = 5, queries: int = 7) -> list[Episode]:
    """Sinusoids of several amplitudes and phases, as in Finn et al. (2017), section 5.1."""
    draw = torch.Generator().manual_seed(0)
    episodes = []
    for index in range(tasks):
        amplitude, phase = torch.rand(2, generator=draw).tolist()
        x = 10 * torch.rand(shots + queries, 1, generator=draw) - 5
        y = (0.1 + amplitude) * torch.sin(x - phase)
        episodes.append(Episode(Batch(x[:shots], y[:shots]), Batch(x[shots:], y[shots:]), (), index))
    return episodes


@pytest.mark.parametrize(("metric", "expected"), [("mse", "y2"), ("rmse", "root"), ("mae", "abs"), (None, "y2")])
def test_regression_is_scored_by_name_or_by_a_function(metric: str | None, expected: str) -> None:
    def squares(answer: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return ((answer - y) ** 2).mean()

    episodes = waves(20)
    result = evaluate_episodes(lambda e: torch.zeros_like(e.query.y), None, episodes, metric=metric or squares)
    y = [episode.query.y.double() for episode in episodes]
    values = {
        "y2": [float((one**2).mean()) for one in y],
        "root": [float((one**2).mean().sqrt()) for one in y],
        "abs": [float(one.abs().mean()) for one in y],
    }[expected]
    assert result.values == pytest.approx(values) and result.n == 20
    assert str(result).startswith(f"{metric or 'squares'} {result.mean:.4g} +- {result.ci95:.4g} (20")


def test_a_learner_of_regression_is_scored_one_by_one_and_in_batches() -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(1, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    learner = MAML(net, lr=0.05, steps=3, loss=torch.nn.functional.mse_loss)
    alone = evaluate_episodes(learner, None, waves(8), metric="mse")
    together = evaluate_episodes(learner, None, iter(waves(8)), metric="mse", batch=3)
    assert together.values == pytest.approx(alone.values, rel=1e-4)
    untouched = evaluate_episodes(lambda e: net(e.query.x), None, waves(8), metric="mse")
    assert alone.mean < untouched.mean


@pytest.mark.parametrize(
    ("answer", "metric", "match"),
    [
        (lambda e: e.query.y[:, 0], "mse", r"the targets' shape \(7, 1\) for metric 'mse'; got \(7,\)"),
        (lambda e: [0.0] * 7, "mae", "got list"),
        (lambda e: e.query.y * torch.nan, "mse", "every value must be finite"),
        (lambda e: e.query.y, "msee", "unknown metric 'msee'"),
    ],
)
def test_what_is_no_regression(answer: Any, metric: str, match: str) -> None:
    with pytest.raises(InputError, match=match):
        evaluate_episodes(answer, None, waves(2), metric=metric)
