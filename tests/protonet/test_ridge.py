"""Ridge regression and R2-D2 against solving, scikit-learn, central differences and a loop over tasks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from metapretrain import R2D2
from metapretrain.errors import InputError
from metapretrain.protonet.learner import HEADS, Classifier, logistic, ridge
from tests.maml.nets import TASKS, WAYS
from tests.maml.test_learners import Y, encoder, rows
from tests.protonet.test_heads import head_scores


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


@settings(max_examples=30)
@given(rows=st.integers(1, 8), size=st.integers(1, 8), penalty=st.floats(0.01, 100))
def test_ridge_solves_the_normal_equations_with_few_and_with_many_rows(rows: int, size: int, penalty: float) -> None:
    z, y = drawn(2, rows, size), drawn(2, rows, 3, seed=1)
    expected = torch.linalg.solve(z.mT @ z + penalty * torch.eye(size).double(), z.mT @ y)
    torch.testing.assert_close(ridge(z, y, penalty), expected)


@pytest.mark.parametrize("size", [3, 12])
def test_ridge_is_that_of_scikit_learn(size: int) -> None:
    linear = pytest.importorskip("sklearn.linear_model")
    z, y = drawn(6, size), drawn(6, 2, seed=1)
    found = linear.Ridge(alpha=0.7, fit_intercept=False).fit(z.numpy(), y.numpy()).coef_
    torch.testing.assert_close(ridge(z, y, 0.7), torch.tensor(found).T)


@pytest.mark.parametrize("size", [2, 6])
def test_ridge_passes_gradcheck_twice(size: int) -> None:
    given = drawn(4, size).requires_grad_(), drawn(4, 2, seed=1).requires_grad_(), torch.tensor(0.5).double()
    given[2].requires_grad_()
    assert torch.autograd.gradcheck(ridge, given)
    assert torch.autograd.gradgradcheck(ridge, given)


@pytest.mark.parametrize("inputs", [6, 2])  # more, and less, rows than dimensions
def test_r2d2_is_ridge_regression_of_each_task(inputs: int) -> None:
    torch.manual_seed(0)
    net = R2D2(nn.Linear(6, inputs).double(), penalty=0.5, scale=3.0).double()
    support, query = (rows(6), Y), (rows(6, seed=1), Y)
    logits = net.logits(support, query)
    for t in range(TASKS):
        z, q = (F.pad(net.module(x[t]), (0, 1), value=1.0) for x in (support[0], query[0]))
        # (z'z / S + penalty)^-1 z'y / S, and the paper's scale
        gram = z.T @ z / len(z) + 0.5 * torch.eye(inputs + 1).double()
        expected = 3.0 * q @ torch.linalg.solve(gram, z.T @ F.one_hot(Y[t]).double() / len(z))
        torch.testing.assert_close(logits[t], expected.detach())
        learner = net.clone()
        learner.adapt(support[0][t], Y[t])
        torch.testing.assert_close(learner(query[0][t]).detach(), logits[t])
    expected = torch.stack([F.cross_entropy(logits[t], Y[t]) for t in range(TASKS)])
    torch.testing.assert_close(net.backward(support, query), expected)
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for name, p in net.named_parameters() if name != "bias")
    torch.testing.assert_close(
        R2D2(net.module, penalty=0.5, scale=3.0, ways=WAYS).double().logits(support, query), logits
    )


def test_the_gradient_through_the_solver_is_right_by_finite_differences() -> None:
    net = R2D2(nn.Identity(), penalty=0.5, ways=WAYS).double()
    y = torch.arange(WAYS).repeat(1, 2)

    def loss(z: Tensor, penalty: Tensor, scale: Tensor) -> Tensor:
        net.log_penalty, net.scale = penalty, scale
        return net.losses((z, y), (z.flip(2), y)).sum()

    for name in ("log_penalty", "scale"):
        del net._parameters[name]
    given = drawn(1, 6, 4), torch.tensor(-0.7).double(), torch.tensor(2.0).double()
    assert torch.autograd.gradcheck(loss, [value.requires_grad_() for value in given])


def test_r2d2_refuses_what_it_cannot_use() -> None:
    with pytest.raises(InputError, match="penalty is 0"):
        R2D2(nn.Identity(), penalty=0)
    with pytest.raises(InputError, match="this R2D2 is not adapted yet"):
        R2D2(encoder())(torch.ones(2, 6))


def test_predictions_do_not_depend_on_the_order_of_classes_or_rows() -> None:
    net, order = R2D2(encoder().double(), ways=WAYS).double(), torch.tensor([2, 0, 1])
    support, query = (rows(6), Y), (rows(6, seed=1), Y)
    turned = net.logits((support[0].flip(1), order[Y].flip(1)), query)
    torch.testing.assert_close(turned[..., order], net.logits(support, query))


def test_embeddings_in_half_precision_are_solved_in_full() -> None:
    net = R2D2(nn.Linear(6, 20), ways=WAYS)
    support, query = (rows(6).float(), Y), (rows(6, seed=1).float(), Y)
    expected = net.logits(support, query)
    with torch.autocast("cpu", torch.bfloat16):
        found = net.logits(support, query)
        assert net.backward(support, query).isfinite().all()
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("head", HEADS)
def test_a_classifier_has_the_heads_of_frozen_encoders(head: str) -> None:
    torch.manual_seed(0)
    net = Classifier(nn.Linear(6, 4).double(), 4, 7, head=head).double()
    net.find_centre(drawn(50, 4, seed=2) + 1)
    support, query = (rows(6), Y), (rows(6, seed=1), Y)
    logits = net.logits(support, query)
    for t in range(TASKS):
        z, q = (net.module(x[t])[None].detach() for x in (support[0], query[0]))
        torch.testing.assert_close(logits[t], head_scores(head, z, Y[t][None], q, WAYS, net.centre)[0])
    other = net.over_features(WAYS)
    embedded = [net.module(x.flatten(0, 1)).view(TASKS, -1, 4).detach() for x in (support[0], query[0])]
    torch.testing.assert_close(other.logits((embedded[0], Y), (embedded[1], Y)), logits)
    assert isinstance(net.module, nn.Linear)  # the clone has modules of its own


def test_a_classifier_learns_by_the_cross_entropy_of_all_classes() -> None:
    net = Classifier(nn.Linear(6, 4), 4, 7)
    x, y = torch.randn(1, 9, 6), torch.arange(9).remainder(7)[None]
    loss = net.backward((x, y))
    torch.testing.assert_close(loss, F.cross_entropy(net.classifier(net.module(x[0])), y[0]).detach())
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in net.parameters())


@pytest.mark.parametrize(("rows", "size", "ways"), [(5, 640, 5), (25, 640, 5), (100, 64, 20), (12, 3, 3)])
def test_logistic_regression_is_scikit_learns(rows: int, size: int, ways: int) -> None:
    linear = pytest.importorskip("sklearn.linear_model")
    z, y = F.normalize(drawn(2, rows, size), dim=-1), torch.arange(rows).remainder(ways).repeat(2, 1)
    found, queries = logistic(z, y, ways), F.normalize(drawn(30, size, seed=1), dim=-1)
    for t in range(2):
        theirs = linear.LogisticRegression(tol=1e-10, max_iter=5000).fit(z[t].numpy(), y[t].numpy())
        expected = torch.tensor(theirs.predict_proba(queries.numpy()))
        ours = (F.pad(queries, (0, 1), value=1.0) @ found[t].mT).softmax(-1)
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("y", [["a", "b"], torch.tensor([0, 1]).int(), torch.tensor([False, True])])
def test_labels_that_are_no_class_numbers_are_named(y: Any) -> None:
    with pytest.raises(InputError, match="give whole numbers"):
        R2D2(nn.Identity()).adapt(torch.ones(2, 3), y)


def test_equal_rows_of_a_large_norm_are_solved() -> None:
    z = torch.full((2, 5000), 30.0)
    found = z @ ridge(z, torch.eye(2), 1e-2)
    torch.testing.assert_close(found, torch.full((2, 2), 0.5), atol=1e-3, rtol=0)
