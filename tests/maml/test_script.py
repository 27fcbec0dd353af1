"""A meta-training script written for learn2learn runs unchanged, with the same losses, on our MAML."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from metapretrain import MAML

WAYS, SHOTS, CLASSES, EACH = 3, 2, 8, 6


def data() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(CLASSES).repeat_interleave(EACH)
    glyphs = torch.randn(CLASSES, 1, 28, 28, generator=generator, dtype=torch.float64)
    noise = torch.randn(len(labels), 1, 28, 28, generator=generator, dtype=torch.float64)
    return torch.utils.data.TensorDataset(glyphs[labels] + 0.5 * noise, labels)


def script(l2l: Any, algorithm: Any, first_order: bool) -> tuple[list[float], list[float], list[Tensor]]:
    """Train for some iterations on a task set; return the losses, accuracies and final weights.

    `algorithm` is all that differs. The inner loop's learner is cloned, adapted and called as a module; the outer
    loop uses `parameters()`, `.grad` and an ordinary optimizer.
    """
    random.seed(1)
    torch.manual_seed(1)
    dataset = l2l.data.MetaDataset(data())
    transforms = l2l.data.transforms
    tasks = l2l.data.Taskset(
        dataset,
        [
            transforms.NWays(dataset, n=WAYS),
            transforms.KShots(dataset, k=2 * SHOTS),
            transforms.LoadData(dataset),
            transforms.RemapLabels(dataset),
            transforms.ConsecutiveLabels(dataset),
        ],
        num_tasks=12,
    )
    model = l2l.vision.models.OmniglotCNN(WAYS, hidden_size=4).double()
    maml = algorithm(model, lr=0.4, first_order=first_order)
    optimizer = torch.optim.Adam(maml.parameters(), lr=0.01)
    criterion = nn.CrossEntropyLoss(reduction="mean")
    losses, accuracies = [], []
    for _ in range(4):
        optimizer.zero_grad()
        for _ in range(3):
            learner = maml.clone()
            x, y = tasks.sample()
            (support_x, support_y), (query_x, query_y) = l2l.data.partition_task(x, y, shots=SHOTS)
            for _ in range(2):
                learner.adapt(criterion(learner(support_x), support_y))
            predictions = learner(query_x)
            loss = criterion(predictions, query_y)
            loss.backward()
            losses.append(loss.item())
            accuracies.append((predictions.argmax(1) == query_y).double().mean().item())
        for parameter in maml.parameters():
            parameter.grad.data.mul_(1 / 3)
        optimizer.step()
    return losses, accuracies, [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("first_order", [False, True])
def test_a_script_of_learn2learn_gives_the_same_losses(first_order: bool) -> None:
    l2l = pytest.importorskip("learn2learn", exc_type=ImportError)
    losses, accuracies, weights = script(l2l, l2l.algorithms.MAML, first_order)
    ours = script(l2l, MAML, first_order)
    assert ours[0] == pytest.approx(losses, rel=1e-9)
    assert ours[1] == accuracies
    torch.testing.assert_close(ours[2], weights, rtol=1e-6, atol=1e-9)
    assert len(set(losses)) > 8  # a task may be drawn twice between two outer updates
