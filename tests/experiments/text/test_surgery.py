"""PCGrad against Yu et al.'s algorithm 1 written as it stands, and the conflict of gradients."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from metapretrain.experiments.text.objectives import cosines, dot_products, pcgrad, projection_weights, task_gradients


def slow_pcgrad(gradients: Tensor, order: list[list[int]]) -> Tensor:
    """Algorithm 1 of Yu et al. (2020)."""
    projected = []
    for i, gradient in enumerate(gradients):
        own = gradient.clone()
        for j in order[i]:
            if j != i and float(own @ gradients[j]) < 0:
                own = own - (own @ gradients[j]) / gradients[j].square().sum() * gradients[j]
        projected.append(own)
    return torch.stack(projected).sum(0)


@pytest.mark.parametrize("tasks", [2, 3, 5])
def test_projections_are_those_of_the_loop_for_all_orders(tasks: int) -> None:
    generator = torch.Generator().manual_seed(tasks)
    orders = list(itertools.permutations(range(tasks)))
    for trial in range(20):
        gradients = torch.randn(tasks, 4, dtype=torch.float64, generator=generator)
        order = [list(orders[(trial * 7 + 3 * row) % len(orders)]) for row in range(tasks)]
        weights = projection_weights(gradients @ gradients.T, torch.tensor(order))
        torch.testing.assert_close(weights @ gradients, slow_pcgrad(gradients, order))


def test_gradients_without_conflict_are_added() -> None:
    gradients = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]])
    order = torch.arange(3).repeat(3, 1)
    assert projection_weights(gradients @ gradients.T, order).tolist() == [1, 1, 1]


def test_losses_keep_their_values_and_heads_their_gradients() -> None:
    torch.manual_seed(0)
    body, heads = nn.Linear(4, 3), nn.ModuleList(nn.Linear(3, 1) for _ in range(3))
    x, wanted = torch.randn(8, 4), torch.randn(3, 8)

    def losses() -> dict[str, Tensor]:
        z = body(x)
        return {str(i): (head(z)[:, 0] - wanted[i]).square().mean() for i, head in enumerate(heads)}

    shared, own = list(body.parameters()), list(heads.parameters())
    gradients = task_gradients(list(losses().values()), shared)
    flat = torch.stack([torch.cat([part.flatten() for part in gradient]) for gradient in gradients])
    assert (flat @ flat.T).min() < 0, "no conflict: the test would show nothing"
    order = [[1, 2, 0], [0, 2, 1], [1, 0, 2]]
    plain = losses()
    own_gradients = torch.autograd.grad(sum(losses().values()), own)
    changed = pcgrad(losses(), shared, torch.tensor(order))
    assert {name: loss.item() for name, loss in changed.items()} == {n: loss.item() for n, loss in plain.items()}
    torch.stack(list(changed.values())).sum().backward()
    found = torch.cat([parameter.grad.flatten() for parameter in shared])
    torch.testing.assert_close(found, slow_pcgrad(flat, order))
    for parameter, gradient in zip(own, own_gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_a_task_that_does_not_use_a_parameter() -> None:
    a, b = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    gradients = task_gradients([a.sum(), (a - b).sum()], [a, b])
    assert dot_products(gradients).tolist() == [[1, 1], [1, 2]]


def test_cosines_do_not_depend_on_the_size_of_gradients() -> None:
    gradients = torch.tensor([[3.0, 0.0], [-1e-12, 1e-12], [0.0, 0.0]])
    table = cosines(gradients @ gradients.T)
    assert table[0, 1].item() == pytest.approx(-(0.5**0.5)) and table[2].tolist() == [0, 0, 0]
