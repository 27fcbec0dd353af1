"""Heads against a loop, scikit-learn and their invariances."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from metapretrain.episodes import EpisodeSampler, EpisodeSpec
from metapretrain.errors import InputError
from metapretrain.evaluation.episodes import evaluate_embeddings
from metapretrain.protonet.learner import HEADS, Classifier


def episodes(shots: int, size: int = 6, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Three episodes of four ways: support (3, 4 * shots, D), labels, queries (3, 7, D), not centred."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.stack([torch.randperm(4 * shots, generator=random) % 4 for _ in range(3)])
    means = 2 * torch.randn(3, 4, size, generator=random, dtype=torch.float64) + 3
    support = means.gather(1, labels[..., None].expand(-1, -1, size))
    support = support + torch.randn(support.shape, generator=random, dtype=torch.float64)
    return support, labels, 3 + 2 * torch.randn(3, 7, size, generator=random, dtype=torch.float64)


def head_scores(
    head: str, support: torch.Tensor, labels: torch.Tensor, query: torch.Tensor, ways: int, centre: torch.Tensor
) -> torch.Tensor:
    net = Classifier(torch.nn.Identity(), support.shape[2], 1, head=head, ways=ways).to(support.dtype)
    net.find_centre(centre[None])
    return net.logits((support, labels), (query, torch.zeros(query.shape[:2], dtype=torch.int64)))


def slow(head: str, support: np.ndarray, labels: np.ndarray, query: np.ndarray, centre: np.ndarray) -> np.ndarray:
    """The scores of one episode, row by row."""
    if head == "centred":
        support, query = support - centre, query - centre
    if head != "nearest":
        support, query = (z / np.linalg.norm(z, axis=1, keepdims=True) for z in (support, query))
    if head == "logistic":
        fitted = LogisticRegression(C=1.0, tol=1e-10, max_iter=10_000).fit(support, labels)
        return fitted.decision_function(query)
    means = [support[labels == c].mean(0) for c in range(4)]
    return np.array([[-((z - mean) ** 2).sum() for mean in means] for z in query])


@pytest.mark.parametrize("shots", [1, 5])
@pytest.mark.parametrize("head", HEADS)
def test_each_head_gives_the_scores_of_a_slow_loop_or_of_scikit_learn(head: str, shots: int) -> None:
    support, labels, query = episodes(shots)
    centre = support.mean((0, 1))
    found = head_scores(head, support, labels, query, 4, centre).numpy()
    for b in range(3):
        expected = slow(head, *(part[b].numpy() for part in (support, labels, query)), centre.numpy())
        shift = (found[b] - expected).mean(1, keepdims=True) if head == "logistic" else 0  # logits are free in a shift
        np.testing.assert_allclose(found[b] - shift, expected, atol=1e-5)


@pytest.mark.parametrize("head", HEADS)
def test_the_order_of_support_rows_and_classes_does_not_matter(head: str) -> None:
    support, labels, query = episodes(5)
    centre, order, names = torch.ones(6).double(), torch.randperm(20), torch.tensor([2, 0, 3, 1])
    one = head_scores(head, support, labels, query, 4, centre)
    other = head_scores(head, support[:, order], names[labels[:, order]], query, 4, centre)
    torch.testing.assert_close(one, other[..., names], atol=1e-5, rtol=1e-5)


def test_only_the_scale_free_heads_ignore_lengths() -> None:
    support, labels, query = episodes(5)
    for head in HEADS:
        same = torch.allclose(
            head_scores(head, support, labels, query, 4, torch.zeros(6).double()),
            head_scores(head, 3 * support, labels, query, 4, torch.zeros(6).double()),
        )
        assert same == (head != "nearest")


def test_what_is_missing_is_told() -> None:
    y = torch.arange(80) % 8
    cosine = {"head": "normalised", "distance": "cosine"}
    for words, told in (
        ({"head": "centred"}, "centred needs a centre"),
        ({"head": "svm"}, "unknown head 'svm'"),
        (cosine, "head normalised has a measure of its own: leave distance='cosine' out"),
    ):
        with pytest.raises(InputError, match=told):
            evaluate_embeddings(torch.eye(8)[y], EpisodeSampler(y, EpisodeSpec(5, 1, 2), 4, seed=0), **words)


@pytest.mark.parametrize("head", HEADS)
def test_evaluation_in_batches_is_that_of_single_episodes(head: str) -> None:
    y = torch.arange(80) % 8
    z = 2 * torch.eye(8)[y] + torch.randn(80, 8, generator=torch.Generator().manual_seed(1)) + 1
    spec = EpisodeSpec(ways=(2, 5), shots=(1, 3), queries=4)  # of several shapes
    one, many = (
        evaluate_embeddings(z, EpisodeSampler(y, spec, 40, seed=0), head=head, centre=z.mean(0), batch=batch).values
        for batch in (1, 16)
    )
    assert one == many and 0.4 < np.mean(one) < 1


@pytest.mark.parametrize("head", HEADS)
def test_evaluation_classifies_as_the_head_does(head: str) -> None:
    y = torch.arange(80) % 8
    z = (torch.eye(8)[y] + torch.randn(80, 8, generator=torch.Generator().manual_seed(2))) * (1 + y[:, None]) + 3
    plans, centre = EpisodeSampler(y, EpisodeSpec(5, 2, 4), 40, seed=0), z.mean(0)
    expected = []
    for plan in plans:
        scores = head_scores(head, z[plan.support][None], plan.support_y[None], z[plan.query][None], 5, centre)[0]
        expected.append(float((scores.argmax(1) == plan.query_y).double().mean()))
    found = evaluate_embeddings(z, plans, head=head, centre=centre).values
    assert list(found) == expected and 0.3 < np.mean(expected) < 1
