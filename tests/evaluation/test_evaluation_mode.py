"""Evaluation moves no statistics and draws no dropout, and gives every part its mode back, whatever is evaluated."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from metapretrain import ANIL, FOMAML, MAML, EpisodeSampler, EpisodeSpec, MetaSGD, ProtoNet, evaluate_episodes
from metapretrain.evaluation.representation import embed
from metapretrain.nests import evaluation_mode

X, Y = torch.randn(40, 6, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 4
WAYS = 3


def network() -> nn.Module:
    """Dropout and two normalisations, one of them frozen in evaluation mode by its owner."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.BatchNorm1d(16).eval(), nn.Linear(16, WAYS)
    )
    net[2].train()
    return net


class Classifier(nn.Module):
    """A module of one's own with a `predict`."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def predict(self, episode: Any, scale: float = 1.0) -> Tensor:
        out: Tensor = scale * self.net(episode.query.x)
        return out

    forward = predict


def learner(kind: Callable[..., nn.Module], **options: Any) -> tuple[nn.Module, Any]:
    made = kind(network(), **options)
    return made, made


def method(make: Callable[[Classifier], Any]) -> tuple[nn.Module, Any]:
    module = Classifier()
    return module, make(module)


EVALUATED: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "MAML": lambda: learner(MAML, lr=0.1),
    "MAML, per-step": lambda: learner(MAML, lr=0.1, steps=2, batchnorm="support"),
    "MAML, frozen": lambda: learner(MAML, lr=0.1, batchnorm="frozen"),
    "FOMAML": lambda: learner(FOMAML, lr=0.1),
    "ANIL": lambda: learner(ANIL, lr=0.1),
    "MetaSGD": lambda: learner(MetaSGD, lr=0.1),
    "ProtoNet": lambda: learner(ProtoNet),
    "a module with predict": lambda: method(lambda module: module),
    "its method": lambda: method(lambda module: module.predict),
    "its forward": lambda: method(lambda module: module.forward),
    "a partial of its method": lambda: method(lambda module: partial(partial(module.predict, scale=2.0))),
    "a partial of the module": lambda: method(lambda module: partial(module, scale=2.0)),
    "a method of a learner": lambda: (lambda made: (made, made.predict))(MAML(network(), lr=0.1)),
}


def episodes() -> EpisodeSampler:
    return EpisodeSampler(Y, EpisodeSpec(WAYS, 2, 4), episodes=3, seed=0)


@pytest.mark.parametrize("name", EVALUATED)
def test_evaluation_has_no_dropout_and_leaves_the_module_as_it_was(name: str) -> None:
    module, predict = EVALUATED[name]()
    modes = [part.training for part in module.modules()]
    before = {key: value.clone() for key, value in module.state_dict().items()}
    first, second = (evaluate_episodes(predict, TensorDataset(X, Y), episodes()).values for _ in range(2))
    assert first == second
    module.eval()
    assert evaluate_episodes(predict, TensorDataset(X, Y), episodes()).values == first
    for part, mode in zip(module.modules(), modes, strict=True):
        part.training = mode
    if hasattr(predict, "logits"):
        assert evaluate_episodes(predict, TensorDataset(X, Y), episodes(), batch=3).values == first
    assert [part.training for part in module.modules()] == modes
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())


@pytest.mark.parametrize("make", [MAML, ProtoNet])
def test_logits_and_predict_are_in_evaluation_mode_by_themselves(make: Any) -> None:
    made = make(network(), **({"lr": 0.1} if make is MAML else {}))
    batch = (torch.randn(2, 6, 6), torch.arange(WAYS).repeat(2, 2))
    before = {key: value.clone() for key, value in made.state_dict().items()}
    first = made.logits(batch, batch)
    assert torch.equal(first, made.logits(batch, batch))
    assert torch.equal(first, made.eval().logits(batch, batch))
    assert all(torch.equal(value, before[key]) for key, value in made.state_dict().items())


def test_modes_are_restored_after_an_error() -> None:
    module = Classifier()
    modes = [part.training for part in module.modules()]
    with pytest.raises(RuntimeError):
        evaluate_episodes(module, TensorDataset(X[:, :5], Y), episodes())
    with pytest.raises(RuntimeError):
        embed(module.net, X[:, :5])
    assert [part.training for part in module.modules()] == modes
    assert modes.count(False) == 1


def test_a_function_without_a_module_changes_none() -> None:
    net = network()
    with evaluation_mode(lambda x: net(x), len, "".join):
        assert net.training
