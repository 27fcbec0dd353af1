"""ProtoNet as a learner: nearest class mean, of one task or many."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from metapretrain import ProtoNet
from metapretrain.errors import InputError
from metapretrain.protonet.learner import HEADS, R2D2, Classifier, EmbeddingLearner
from tests.maml.nets import TASKS, WAYS
from tests.maml.test_learners import Y, encoder, rows


def test_protonet_is_nearest_class_mean_and_takes_one_task_or_many() -> None:
    net = ProtoNet(encoder().double())
    support, query = (rows(6), Y), (rows(6, seed=1), Y)
    logits = net.logits(support, query)
    for t in range(TASKS):
        z, q = net.module(support[0][t]), net.module(query[0][t])
        for way in range(WAYS):
            centre = z[Y[t] == way].mean(0)
            torch.testing.assert_close(logits[t, :, way], -((q - centre) ** 2).sum(1).detach())
        learner = net.clone()
        learner.adapt(support[0][t], Y[t])
        torch.testing.assert_close(learner(query[0][t]), logits[t])
    expected = torch.stack([F.cross_entropy(logits[t], Y[t]) for t in range(TASKS)])
    torch.testing.assert_close(net.backward(support, query), expected)
    assert all(p.grad is not None for p in net.parameters())
    torch.testing.assert_close(ProtoNet(net.module, ways=WAYS).logits(support, query), logits)
    cosine = ProtoNet(net.module, distance="cosine", temperature=0.5).logits(support, query)
    assert cosine.abs().max() <= 2


@pytest.mark.parametrize("learner", [ProtoNet, R2D2])
@pytest.mark.parametrize("ways", [None, 3])
def test_a_class_without_support_is_refused(learner: Any, ways: int | None) -> None:
    with pytest.raises(InputError, match=r"a class of 0\.\.2 has no support example"):
        learner(nn.Identity(), ways=ways).losses((rows(6), Y * 2 % 4), (rows(6), Y * 0))
    told = "labels are 0 to 1; give whole numbers 0..0" if ways is None else "a class of 0..2 has no support example"
    with pytest.raises(InputError, match=told):
        learner(nn.Identity(), ways=ways).losses((rows(6), Y * 0), (rows(6), Y.clamp(max=1)))
    with pytest.raises(InputError, match="is not adapted yet"):
        ProtoNet(nn.Identity())(torch.ones(2, 2))


@pytest.mark.parametrize("learner", [ProtoNet, R2D2])
@pytest.mark.parametrize(("given", "ways"), [([0, 1, -1], None), ([0, 1, -100], 2), ([0, 1, 2], 2)])
def test_labels_outside_the_ways_are_refused(learner: Any, given: list[int], ways: int | None) -> None:
    net, x, y = learner(nn.Linear(4, 3), ways=ways), torch.randn(3, 4), torch.tensor(given)
    right = torch.tensor([0, 1, 0])
    for support, query in ((y, right), (right, y)):
        with pytest.raises(InputError, match=rf"labels are {min(given)} to {max(given)}; give whole numbers 0\.\."):
            net.losses((x[None], support[None]), (x[None], query[None]))
    with pytest.raises(InputError, match="give whole numbers 0"):
        net.adapt(x, y)


@pytest.mark.parametrize("head", [ProtoNet, R2D2, *HEADS])
@pytest.mark.parametrize("ways", [None, 3])
def test_one_hot_labels_are_refused_by_name(head: Any, ways: int | None) -> None:
    net = Classifier(nn.Linear(4, 3), 3, 5, head=head, ways=ways) if head in HEADS else head(nn.Linear(4, 3), ways=ways)
    x, y = torch.randn(6, 4), F.one_hot(torch.arange(6) % 3)
    with pytest.raises(InputError, match=r"embeddings \(6, 3\) and labels \(6, 3\) do not match: give .* \(B,\)"):
        net.adapt(x, y)
    with pytest.raises(InputError, match=r"support is x \(1, 6, 4\) and y \(1, 6, 3\); give .* \(1, N\)"):
        net.losses((x[None], y[None]), (x[None], y[None]))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1e20])
@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize(
    "net",
    [ProtoNet(nn.Flatten()), R2D2(nn.Flatten()), *(Classifier(nn.Flatten(), 3, 5, head=head) for head in HEADS)],
    ids=["protonet", "r2d2", *HEADS],
)
def test_embeddings_that_are_not_finite_are_no_answer(net: EmbeddingLearner, part: int, bad: float) -> None:
    x, y = torch.randn(2, 2, 6, 3), torch.arange(6).expand(2, -1) % 3
    x[part, 1, 4, 0] = bad
    with pytest.raises(InputError, match="1 of 24 embeddings hold NaN or infinity or more than"):
        net.logits((x[0], y), (x[1], y))
    with pytest.raises(InputError, match="1 of 6 embeddings hold NaN or infinity or more than"):
        net.adapt(x[part, 1], y[1])
