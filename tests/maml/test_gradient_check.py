"""The gradient check agrees with right learners and finds wrong ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from metapretrain import ANIL, FOMAML, MAML, MetaSGD, ProtoNet, check_meta_gradient
from metapretrain.errors import InputError
from tests.maml.nets import cnn, images, tokens, transformer

CNN = images(2, 0), images(2, 1)


@pytest.mark.parametrize("engine", ["loop", "vmap"])
@pytest.mark.parametrize("make", [MAML, ANIL, MetaSGD])
def test_learners_of_second_order_agree(make: Any, engine: str) -> None:
    learner = make(cnn().float(), 0.3, engine=engine)
    found = check_meta_gradient(learner, CNN)
    assert found.ok, str(found)
    assert [p.name for p in found.parameters] == [name for name, _ in learner.named_parameters()]
    assert next(learner.parameters()).dtype == torch.float32


def test_attention_and_dropout_and_prototypes_agree() -> None:
    assert check_meta_gradient(MAML(transformer(), 0.1), (tokens(2, 0), tokens(2, 1))).ok
    dropped = nn.Sequential(cnn(), nn.Dropout(0.5))
    assert check_meta_gradient(MAML(dropped, 0.1, steps=2), CNN).ok
    assert check_meta_gradient(ProtoNet(cnn()), CNN).ok


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_attention_and_convolutions_agree_on_a_gpu(engine: str) -> None:
    def moved(batch: Any) -> Any:
        return tuple(tuple(tensor.cuda() for tensor in part) for part in batch)

    attention = MAML(transformer(), 0.1, engine=engine).cuda()
    assert check_meta_gradient(attention, moved((tokens(2, 0), tokens(2, 1)))).ok
    assert check_meta_gradient(MAML(cnn(), 0.1, engine=engine).cuda(), moved(CNN)).ok


class WrongByOne(MAML):
    """A learner whose meta-gradient misses the part of one bias."""

    def _outputs(self) -> Any:
        outputs = super()._outputs()
        return lambda params, x: outputs({**params, "9.bias": Scaled.apply(params["9.bias"])}, x)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 1.001


def test_a_wrong_gradient_is_found_and_named() -> None:
    found = check_meta_gradient(WrongByOne(cnn(), 0.1, engine="loop"), CNN)
    assert not found.ok
    assert found.worst.name == "module.9.bias"
    assert str(found).endswith("DIFFERS: module.9.bias")
    assert not check_meta_gradient(FOMAML(cnn(), 0.3), CNN).ok


class Root(nn.Module):
    """A square root whose slope at zero is infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 3)
        self.zero = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x.flatten(1)) + self.zero.square().sqrt()
        return out


def test_missing_and_infinite_gradients_are_errors_with_names() -> None:
    idle = cnn()
    idle.register_parameter("idle", nn.Parameter(torch.zeros(2)))
    with pytest.raises(InputError, match=r"no meta-gradient reaches module\.idle"):
        check_meta_gradient(MAML(idle, 0.1, only="9"), CNN)
    with pytest.raises(InputError, match=r"the meta-gradient of .*module\.zero.* is not finite"):
        check_meta_gradient(MAML(Root(), 0.1, only="head"), CNN)
