"""What an outer step computes: no more products than by hand, and T5's decoder without keys and values."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from metapretrain.prompts import PromptBatch, PromptMAML
from metapretrain.prompts import model as paths
from tests.prompts.test_learner import learner, parts
from tests.prompts.tiny import prompted

BEGIN = 2  # tokens that T5's decoder is given


def exact(model: Any) -> Any:
    """The model with norms that do not round to float32, as those of transformers do whatever its type."""
    for name, part in list(model.named_modules()):
        if type(part).__name__ == "T5LayerNorm":
            norm = nn.RMSNorm(len(part.weight), eps=part.variance_epsilon, dtype=torch.float64)
            model.set_submodule(name, norm.requires_grad_(False))
    return model


def of_linear_layers(maml: PromptMAML, support: PromptBatch, query: PromptBatch) -> float:
    """Operations of an outer step's products with weights, by hand.

    A weight is multiplied by each token's features once forward and once backward, in both parts, and twice more in
    the second order of the support part. The encoder's keys and values for T5's decoder cost none of it.
    """
    (tasks, rows), width, length = support.shape, support.input_ids.shape[-1], maml.prompt.length
    assert query.input_ids.shape == support.input_ids.shape
    total = 0
    for name, part in maml.prompted.model.named_modules():
        if isinstance(part, nn.Linear) and not name.endswith(("EncDecAttention.k", "EncDecAttention.v")):
            if maml.prompted.kind == "encoder-decoder":
                tokens = tasks * rows * (length + width if name.startswith("encoder") else BEGIN)
            else:
                tokens = tasks * (rows if name == "lm_head" else length + rows * width)
            total += (4 + 2) * 2 * tokens * part.weight.numel()
    return total


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_an_outer_step_has_no_more_products_than_by_hand(name: str) -> None:
    maml = learner(name)
    pair = parts(maml)
    with FlopCounterMode(display=False) as counter:
        maml.backward(*pair)
    found = sum(n for kind, n in counter.get_flop_counts()["Global"].items() if str(kind) in ("aten.mm", "aten.addmm"))
    assert 0.95 < found / of_linear_layers(maml, *pair) <= 1  # what the decoder begins with has no gradient


def derivatives(model: Any, batch: PromptBatch) -> list[Tensor]:
    prompt = torch.randn(3, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        scores = model(prompt, batch)
        (first,) = torch.autograd.grad(scores[:, 1].square().sum(), prompt, create_graph=True)
        (second,) = torch.autograd.grad(first.sin().sum(), prompt)
    return [scores.detach(), first.detach(), second]


@pytest.mark.parametrize("words", [("good", "bad"), ("good", "so and so")])
def test_a_decoder_without_keys_answers_as_with_them(words: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = prompted("t5", words=words, several=True)
    exact(model.model)
    batch = model.encode(["the film was great", "a", "bad plot"])
    found = derivatives(model, batch)
    monkeypatch.setattr(paths, "_without_keys", lambda _: nullcontext())
    for mine, theirs in zip(found, derivatives(model, batch), strict=True):
        assert theirs.abs().max() > 1e-4
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-13)


def test_the_model_is_left_as_it_was_and_what_others_changed_is_called() -> None:
    model = prompted("t5")
    layers = [part for name, part in model.model.named_modules() if name.endswith("EncDecAttention")]
    batch, prompt = model.encode(["a film"]), torch.zeros(3, 16, dtype=torch.float64)

    class Own(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    plain = model(prompt, batch)
    layers[0].v.__class__, seen = Own, []
    layers[1].forward = lambda *given, **named: seen.append(1) or type(layers[1]).forward(layers[1], *given, **named)
    assert not torch.equal(model(prompt, batch), plain) and seen
    assert "forward" not in vars(layers[0]) and "forward" in vars(layers[1])
    del layers[1].forward
    with pytest.raises(RuntimeError):
        paths.encoder_decoder(model.model, prompt[None, :, :8], batch, model.verbalizer)
    assert not any("forward" in vars(part) for part in layers)
