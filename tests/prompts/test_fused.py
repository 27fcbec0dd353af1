"""Fused layers give the losses and gradients of plain ones, with fewer operations and no product computed twice."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from metapretrain.prompts import OuterStep, PromptMAML
from tests.prompts.test_learner import learner, parts
from tests.prompts.test_outer_step import OPTIONS


def pair(name: str, backend: str = "eager", dtype: torch.dtype = torch.float64, **options: Any) -> list[PromptMAML]:
    """A plain learner and a compiled one; T5's norms would round to float32, whatever the model's type."""
    found = [learner(name, compile=fused, **options).to(dtype) for fused in (False, True)]
    for maml in found:
        for part in list(maml.prompted.model.modules()):
            for own, norm in list(part.named_children()):
                if type(norm).__name__ == "T5LayerNorm":
                    other = nn.RMSNorm(16, eps=1e-6, dtype=dtype).requires_grad_(False)
                    other.weight.copy_(norm.weight)
                    setattr(part, own, other)
    found[1].prompted.fused.backend = backend
    return found


def step(maml: PromptMAML, seed: int = 0) -> tuple[Tensor, Tensor]:
    maml.zero_grad()
    losses = OuterStep(maml)(*parts(maml, seed))
    assert maml.prompt.weight.grad is not None
    return losses, maml.prompt.weight.grad.clone()


def check(plain: PromptMAML, fused: PromptMAML, seed: int = 0, **close: float) -> None:
    torch.testing.assert_close(step(fused, seed), step(plain, seed), **(close or {"rtol": 1e-10, "atol": 1e-12}))
    assert fused.prompted.fused.possible and fused.prompted.fused.pieces
    assert not any("forward" in vars(layer) for layer in fused.prompted.fused.layers)


@pytest.mark.parametrize("name", ["t5", "llama"])
@pytest.mark.parametrize("options", OPTIONS)
def test_a_step_is_that_of_plain_layers(name: str, options: dict[str, Any]) -> None:
    plain, fused = pair(name, **options)
    check(plain, fused)
    layers, chunks = 1 + (name == "t5"), 1 + ("chunk" in options)  # of 2 tasks and of 1
    assert len(fused.prompted.fused.pieces) == layers * chunks
    with torch.no_grad():
        fused.prompted.model.get_input_embeddings().weight.mul_(1.1)
        for model in (plain.prompted.model, fused.prompted.model):
            for layer in model.modules():
                if isinstance(layer, nn.Linear) and layer.in_features == 16:
                    layer.weight.mul_(0.9)
        plain.prompted.model.get_input_embeddings().weight.mul_(1.1)
    check(plain, fused, 1)  # weights are read anew


@pytest.mark.parametrize("name", ["t5", "llama"])
def test_autocast_is_part_of_what_is_compiled(name: str) -> None:
    plain, fused = pair(name, dtype=torch.float32, inner_lr=0.05)
    exact = step(plain)[1]
    with torch.autocast("cpu", torch.bfloat16):
        near, own = step(plain)[1], step(fused)[1]
    pieces = list(fused.prompted.fused.pieces.values())
    assert all(len(piece.casts) >= 6 for piece in pieces)  # of matrices, outside of the pieces
    assert 0 < (own - exact).norm() < 2 * (near - exact).norm() < 0.3 * exact.norm()
    check(plain, fused, rtol=1e-3, atol=1e-4)  # without autocast it is another form
    assert len(fused.prompted.fused.pieces) == 2 * len(pieces)


class Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["t5", "llama"])
def test_no_product_is_computed_twice(name: str) -> None:
    plain, fused = pair(name)
    step(fused)  # compiles
    found = []
    for maml in (plain, fused):
        with Counted() as counted:
            step(maml)
        found.append(sum(counted.counts[product] for product in ("mm", "bmm", "addmm", "baddbmm")))
    # Plain attention of query rows is one operation; T5's first decoder layer asks for one gradient less.
    assert found[1] <= 1.3 * found[0]


def test_what_cannot_be_compiled_runs_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    plain, fused = pair("llama")
    for maml in (plain, fused):
        layer = maml.prompted.model.model.layers[0]
        hidden = layer.mlp.forward
        layer.mlp.forward = lambda x, hidden=hidden: hidden(x) * float(x.detach().sum() > -1e9)  # reads a value
    torch.testing.assert_close(step(fused), step(plain))
    assert not fused.prompted.fused.possible
    assert len([record for record in caplog.records if "layers are not compiled" in record.message]) == 1


@pytest.mark.parametrize("name", ["t5", "llama"])
def test_a_capture_has_the_forms_of_other_steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, fused = pair(name)
    check(plain, fused)
    pieces, wanted = len(fused.prompted.fused.pieces), step(plain, 1)
    monkeypatch.setattr("transformers.masking_utils.is_tracing", lambda *_: True)  # as in a capture
    torch.testing.assert_close(step(fused, 1), wanted, rtol=1e-10, atol=1e-12)
    assert fused.prompted.fused.possible and len(fused.prompted.fused.pieces) == pieces


@pytest.mark.slow
@pytest.mark.parametrize("name", ["t5", "llama"])
def test_compiled_by_inductor(name: str) -> None:
    check(*pair(name, "inductor"))
