"""Fine-tuning in each episode: against a slow loop, on a copy of the weights, the same in any order of episodes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from metapretrain.episodes import EpisodeSampler, EpisodeSpec
from metapretrain.errors import InputError
from metapretrain.evaluation.episodes import evaluate_finetuning
from metapretrain.files import tensor_sum
from metapretrain.models import build_text_encoder, pretrained
from metapretrain.models.pretrained import FineTuning, PretrainedModel, finetune
from metapretrain.protonet.learner import Classifier

HOW = FineTuning(steps=4, lr=3e-3, head_lr=2e-2, scale=6.0)


def model_of(seed: int = 0) -> PretrainedModel:
    """Convolution, batch normalisation that has recorded something, and dropout."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Dropout(0.5))
        for _ in range(3):
            net(2 * torch.randn(8, 3, 8, 8) + 1)
        return PretrainedModel(nn.Sequential(net, nn.Linear(6 * 36, 5)), 8)


def images_of(count: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (count, 3, 8, 8), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def slow_logits(model: PretrainedModel, support: Tensor, y: Tensor, query: Tensor, how: FineTuning) -> Tensor:
    """Adam written out (Kingma and Ba, 2015, algorithm 1), on a copy of the model, in float64."""
    net = copy.deepcopy(model.encoder).double().eval()
    support, query = model.prepare(support).double(), model.prepare(query).double()

    def unit(x: Tensor) -> Tensor:
        z = net(x)
        return z / z.norm(dim=1, keepdim=True)

    means = torch.stack([unit(support[y == c]).mean(0) for c in range(int(y.max()) + 1)]).detach()
    weight, bias = how.scale * means, torch.stack([-how.scale / 2 * mean.dot(mean) for mean in means])
    trained = [(p, how.lr) for p in net.parameters()] + [(weight, how.head_lr), (bias, how.head_lr)]
    first, second = ([torch.zeros_like(p) for p, _ in trained] for _ in range(2))
    for p, _ in trained:
        p.requires_grad_()
    for step in range(1, how.steps + 1):
        logits = unit(support) @ weight.T + bias
        loss = -sum(row.log_softmax(0)[c] for row, c in zip(logits, y, strict=True)) / len(y)
        grads = torch.autograd.grad(loss, [p for p, _ in trained])
        with torch.no_grad():
            for place, ((p, rate), grad) in enumerate(zip(trained, grads, strict=True)):
                first[place] = 0.9 * first[place] + 0.1 * grad
                second[place] = 0.999 * second[place] + 0.001 * grad**2
                size = (second[place] / (1 - 0.999**step)).sqrt() + 1e-8
                p -= rate * first[place] / (1 - 0.9**step) / size
    with torch.no_grad():
        return unit(query) @ weight.T + bias


@pytest.mark.parametrize("chunk", [64, 4])
def test_it_is_that_of_a_slow_loop_and_leaves_the_model_alone(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrained, "CHUNK", chunk)
    model, support, query = model_of().train(), images_of(9), images_of(7, seed=1)
    before, labels = tensor_sum(model.state_dict()), torch.tensor([4, 8, 6] * 3)
    found = finetune(model, support, labels, HOW)
    expected = slow_logits(model, support, torch.tensor([0, 2, 1] * 3), query, HOW)
    torch.testing.assert_close(found.logits(query).double(), expected, atol=2e-3, rtol=2e-3)
    assert found.predict(support).tolist() == labels.tolist() and found.classes.tolist() == [4, 6, 8]
    assert tensor_sum(model.state_dict()) == before
    assert model.training and not any(p.requires_grad or p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("shots", [1, 3])
def test_it_starts_as_the_head_that_is_normalised(shots: int) -> None:
    model, support, query = model_of(), images_of(4 * shots), images_of(6, seed=1)
    y = torch.arange(4 * shots) % 4
    found = finetune(model, support, y, FineTuning(steps=1, lr=1e-12, head_lr=1e-12, scale=6.0)).logits(query)
    head = Classifier(nn.Identity(), 5, 1, head="normalised", ways=4)
    z, queries = (model.encode(rows)[None] for rows in (support, query))
    expected = 3 * head.logits((z, y[None]), (queries, torch.zeros(1, 6, dtype=torch.int64)))[0]
    torch.testing.assert_close(found.log_softmax(1), expected.log_softmax(1), atol=1e-4, rtol=1e-4)


def test_episodes_in_any_order_alone_or_together_have_the_same_accuracy() -> None:
    model, labels = model_of(), torch.arange(60) % 6
    images = (images_of(6, seed=3)[labels] // 2 + images_of(60) // 2).to(torch.uint8)
    plans = list(EpisodeSampler(labels, EpisodeSpec(4, 2, 5), 5, seed=0))
    together = evaluate_finetuning(model, images, plans, HOW)
    assert together.values == evaluate_finetuning(model, images, plans[::-1], HOW).values[::-1]
    assert together.values == [evaluate_finetuning(model, images, [plan], HOW).mean for plan in plans]
    again = evaluate_finetuning(model, images, EpisodeSampler(labels, EpisodeSpec(4, 2, 5), 5, seed=0), HOW)
    assert again.values == together.values and 0.3 < together.mean <= 1


def test_texts_are_fine_tuned_without_dropout() -> None:
    model = build_text_encoder("tiny", dropout=0.5)
    before = tensor_sum(model.state_dict())
    texts = ["a good film", "a bad film and far too long", "good", "bad"]
    first, second = (finetune(model, texts, [1, 0, 1, 0], FineTuning(steps=5, lr=1e-3)) for _ in range(2))
    assert torch.equal(first.logits(texts), second.logits(texts)) and first.predict(texts).tolist() == [1, 0, 1, 0]
    pairs = [(text, "yes") for text in texts]
    assert finetune(model, pairs, [1, 0, 1, 0]).predict(pairs).tolist() == [1, 0, 1, 0]
    assert tensor_sum(model.state_dict()) == before


class Blind(nn.Module):
    """No gradient reaches its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(192, 3)

    def forward(self, images: Tensor) -> Tensor:
        with torch.no_grad():
            found: Tensor = self.inner(images.flatten(1))
        return found


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (lambda: FineTuning(steps=0), "steps"),
        (lambda: FineTuning(lr=-1.0), "lr is -1.0; give a number above 0"),
        (lambda: finetune(PretrainedModel(Blind(), 8), images_of(2), [0, 1]), "parameters that get gradients"),
        (lambda: finetune(PretrainedModel(nn.Flatten(), 8), images_of(2), [0, 1]), "an encoder with parameters"),
        (lambda: finetune(model_of(), images_of(2), [0, 1, 2]), "got 2 support rows and 3 labels"),
        (lambda: finetune(model_of(), images_of(4), [0, 1, 0, 1], FineTuning(lr=1e30)), "diverged: .* give a lower lr"),
    ],
)
def test_bad_input_is_one_line(given: Any, told: str) -> None:
    with pytest.raises(InputError, match=told):
        given()
