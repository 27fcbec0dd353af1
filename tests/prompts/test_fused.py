"""Compiled layers give the losses and gradients of plain ones, with fewer operations and no product computed twice."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from metapretrain.errors import InputError
from metapretrain.prompts import OuterStep, PromptBatch, PromptMAML
from metapretrain.prompts import fused as module
from tests.prompts.test_learner import learner, parts
from tests.prompts.test_outer_step import OPTIONS

KEPT: dict[str, dict[Any, Any]] = {}  # pieces of each model in float64: they depend on no setting of the learner


def pair(name: str, backend: str = "eager", dtype: torch.dtype = torch.float64, **options: Any) -> list[PromptMAML]:
    """A plain learner and a compiled one; T5's norms would round to float32, whatever the model's type."""
    found = [learner(name, compile=compiled, **options).to(dtype) for compiled in (False, True)]
    for maml in found:
        for part in list(maml.prompted.model.modules()):
            for own, norm in list(part.named_children()):
                if type(norm).__name__ == "T5LayerNorm":
                    other = nn.RMSNorm(16, eps=1e-6, dtype=dtype).requires_grad_(False).eval()
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
@pytest.mark.parametrize("options", [pytest.param(o, marks=pytest.mark.slow) if "chunk" in o else o for o in OPTIONS])
def test_a_step_is_that_of_plain_layers(name: str, options: dict[str, Any]) -> None:
    plain, fused = pair(name, **options)
    fused.prompted.fused.pieces = KEPT.setdefault(name, {})
    check(plain, fused)
    assert len(KEPT[name]) >= 1 + (name == "t5")
    layers = fused.prompted.fused.layers  # T5's first ones are like the others
    keys = {module._Call(layer, torch.zeros(1, 2, 16), ((), {})).key() for layer in layers}
    assert len(keys) == 1 + (name == "t5")
    with torch.no_grad():
        for model in (plain.prompted.model, fused.prompted.model):
            model.get_input_embeddings().weight.mul_(1.1)
            for layer in model.modules():
                if isinstance(layer, nn.Linear) and layer.in_features == 16:
                    layer.weight.mul_(0.9)
    check(plain, fused, 1)  # weights are read anew


def test_autocast_is_part_of_what_is_compiled() -> None:
    plain, fused = pair("llama", dtype=torch.float32, inner_lr=0.05)
    exact = step(plain)[1]
    with torch.autocast("cpu", torch.bfloat16):
        near, own = step(plain)[1], step(fused)[1]
    pieces = list(fused.prompted.fused.pieces.values())
    assert len(pieces) == 1 and len(pieces[0].casts) >= 6  # of matrices, outside of the pieces
    assert 0 < (own - exact).norm() < 2 * (near - exact).norm() < 0.3 * exact.norm()


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
    fused.prompted.fused.pieces = KEPT.setdefault(name, {})
    step(fused)  # compiles
    found = []
    for maml in (plain, fused):
        with Counted() as counted:
            step(maml)
        found.append(sum(counted.counts[product] for product in ("mm", "bmm", "addmm", "baddbmm")))
    # Plain attention of query rows is one operation; T5's first decoder layer asks for one gradient less.
    assert found[1] <= 1.3 * found[0]
    for pieces in fused.prompted.fused.pieces.values():  # nor is a zero, such as a ReLU's second derivative
        graphs: list[Any] = [pieces.double, pieces.merged]
        assert not [node for graph in graphs for node in graph.graph.nodes if "zeros_like" in node.name]


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.name == module.__name__]


def test_what_cannot_be_compiled_runs_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain, fused = pair("llama")
    kind = type(plain.prompted.model.model.layers[0].mlp)
    hidden = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: hidden(self, x) * float(x.detach().sum() > -1e9))  # reads it
    torch.testing.assert_close(step(fused), step(plain))
    assert not fused.prompted.fused.possible
    assert len([told for told in warnings_of(caplog) if "layers are not compiled" in told]) == 1


def test_a_layer_that_returns_more_runs_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain, fused = pair("t5")
    kind = type(plain.prompted.model.encoder.block[0])
    own = kind.forward
    monkeypatch.setattr(kind, "forward", lambda *given, **named: (*own(*given, **named)[:2], torch.ones(1)))
    torch.testing.assert_close(step(fused), step(plain))
    assert not fused.prompted.fused.possible and "returns more than hidden states" in warnings_of(caplog)[-1]


def test_a_layer_that_gives_something_else_when_compiled_runs_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As T5's would in versions of transformers that add the mask to a bias only where a layer makes it itself."""
    plain, fused = pair("t5")
    kind = type(plain.prompted.model.encoder.block[0].layer[0].SelfAttention)
    newer = kind.forward

    def older(
        self: Any, hidden: Tensor, mask: Any = None, states: Any = None, position_bias: Any = None, **o: Any
    ) -> Any:
        if position_bias is None:
            length = hidden.shape[1]
            position_bias = self.compute_bias(length, length, hidden.device) + mask
        return newer(self, hidden, None, states, position_bias, **o)

    monkeypatch.setattr(kind, "forward", older)
    torch.testing.assert_close(step(fused), step(plain))
    assert not fused.prompted.fused.possible and "results differ" in warnings_of(caplog)[-1]


def test_a_prompt_that_rows_share_is_part_of_the_form() -> None:
    """As many tokens of two rows or of four are two forms: each row sees only the prompt and itself."""
    plain, fused = pair("llama")
    found = []
    for maml in (plain, fused):
        ids = torch.randint(4, 20, (2, 16), generator=torch.Generator().manual_seed(0))
        batches = [
            PromptBatch(
                ids.view(2, rows, -1),
                torch.ones(2, rows, 16 // rows).long(),
                torch.full((2, rows), 16 // rows - 1),
                torch.arange(2 * rows).view(2, rows) % 5,
            )
            for rows in (2, 4)
        ]
        losses = maml.losses(*batches)
        found.append((losses, *torch.autograd.grad(losses.sum(), maml.prompt.weight)))
    torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=1e-12)
    assert len(fused.prompted.fused.pieces) == 2


@pytest.mark.parametrize("what", ["weights", "hook"])
def test_a_layer_whose_weights_learn_or_that_has_hooks_is_plain(what: str) -> None:
    plain, fused = pair("llama")
    fused.prompted.fused.pieces = KEPT.setdefault("llama", {})
    calls = []
    for maml in (plain, fused):
        layer = maml.prompted.model.model.layers[0]
        if what == "weights":
            layer.requires_grad_(True)
        else:
            layer.mlp.register_forward_hook(lambda *_: calls.append(1))
        step(maml)
    if what == "hook":
        assert len(calls) == 4  # of support and query rows, by both
    else:
        grads = [[p.grad for p in maml.prompted.model.model.layers[0].parameters()] for maml in (plain, fused)]
        torch.testing.assert_close(grads[1], grads[0], rtol=1e-10, atol=1e-12)


class Twice(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def twice(mlp: Any) -> None:
    other = mlp.down_proj
    mlp.down_proj = Twice(other.in_features, other.out_features, bias=False, dtype=other.weight.dtype).eval()
    mlp.down_proj.weight = other.weight


CHANGES: dict[str, Any] = {
    "activation": lambda mlp: setattr(mlp, "act_fn", nn.Tanh()),
    "forward": lambda mlp: setattr(mlp, "forward", lambda x, plain=mlp.forward: 2 * plain(x)),
    "class": twice,
    "hook": lambda mlp: mlp.register_full_backward_hook(lambda _mlp, gradients, _: tuple(2 * g for g in gradients)),
    "training": lambda mlp: mlp.register_module("act_fn", nn.Sequential(mlp.act_fn, nn.Dropout(0.5)).train()),
}


@pytest.mark.parametrize("change", [*CHANGES, "number"])
def test_a_layer_that_was_changed_is_not_taken_for_those_like_it(change: str) -> None:
    plain, fused = pair("llama")
    fused.prompted.fused.pieces = KEPT.setdefault("llama", {})
    before = step(fused)
    for maml in (plain, fused):
        layer = maml.prompted.model.model.layers[1]
        if change == "number":
            layer.self_attn.scaling *= 3
        else:
            CHANGES[change](layer.mlp)
    found = []
    for maml in (plain, fused):
        torch.manual_seed(0)
        found.append(step(maml))
    torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=1e-12)
    assert not torch.allclose(found[1][1], before[1], rtol=1e-2)


def test_a_number_of_one_layer_is_another_form_but_its_place_is_not() -> None:
    (first, second), x = pair("llama")[1].prompted.fused.layers[:2], torch.zeros(1, 2, 16)
    keys = [module._Call(layer, x, ((), {})).key() for layer in (first, second)]
    first.self_attn.is_causal = False
    assert keys[0] == keys[1] != module._Call(first, x, ((), {})).key()


def test_a_tensor_that_is_given_in_another_place_is_another_form() -> None:
    layer, x = pair("llama")[1].prompted.fused.layers[0], torch.zeros(1, 2, 16)
    keys = [module._Call(layer, x, (given, {})).key() for given in ((x, None), (None, x))]
    assert keys[0] != keys[1]


def test_the_form_of_an_inner_block_ends_with_it() -> None:
    """A prompt that is shared inside is not shared behind, where as many tokens see each other."""
    plain, fused = pair("llama")
    x = torch.randn(1, 8, 16, dtype=torch.float64, requires_grad=True)
    rows = PromptBatch(torch.arange(4, 8).view(1, 2, 2), torch.ones(1, 2, 2).long(), torch.ones(1, 2).long())
    with fused.prompted.fused():
        fused.prompted(fused.prompt(), rows)  # 4 + 2 * 2 tokens
        found = fused.prompted.model(inputs_embeds=x, use_cache=False).logits
    assert len(fused.prompted.fused.pieces) == 2
    torch.testing.assert_close(found, plain.prompted.model(inputs_embeds=x, use_cache=False).logits)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda maml: pickle.loads(pickle.dumps(maml))])
def test_copies_and_pickles(copied: Any) -> None:
    fused = pair("llama")[1]
    wanted = step(fused)
    other = copied(fused)
    assert not other.prompted.fused.pieces
    torch.testing.assert_close(step(other), wanted, rtol=0, atol=0)
    assert len(other.prompted.fused.pieces) == 1


@pytest.mark.parametrize(
    ("name", "value", "told"), [("MOST", 0, "0 compiled"), ("_is_recorded", lambda _: True, "CUDA graph")]
)
def test_forms_that_are_not_compiled_are_told_once(
    name: str, value: Any, told: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, name, value)
    plain, fused = pair("llama")
    torch.testing.assert_close(step(fused), step(plain), rtol=0, atol=0)
    (warning,) = warnings_of(caplog)
    assert told in warning
    assert fused.prompted.fused.possible and not fused.prompted.fused.pieces


def test_refusals() -> None:
    with pytest.raises(InputError, match="layers of a GPT2LMHeadModel cannot be compiled"):
        learner("gpt2", compile=True)
    fused = pair("llama")[1]
    fused.prompted.fused.pieces = KEPT.setdefault("llama", {})
    loss = fused.loss(*parts(fused))
    with pytest.raises(InputError, match="compiled layers have no third derivative"):
        torch.autograd.grad(loss, fused.prompt.weight, create_graph=True)


@pytest.mark.parametrize("name", ["t5", "llama"])
def test_a_capture_has_the_forms_of_other_steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, fused = pair(name)
    fused.prompted.fused.pieces = KEPT.setdefault(name, {})
    check(plain, fused)
    pieces, wanted = len(fused.prompted.fused.pieces), step(plain, 1)
    monkeypatch.setattr("transformers.masking_utils.is_tracing", lambda *_: True)  # as in a capture
    torch.testing.assert_close(step(fused, 1), wanted, rtol=1e-10, atol=1e-12)
    assert fused.prompted.fused.possible and len(fused.prompted.fused.pieces) == pieces


@pytest.mark.slow
@pytest.mark.parametrize("name", ["t5", "llama"])
def test_compiled_by_inductor(name: str) -> None:
    check(*pair(name, "inductor"))


@pytest.mark.slow
def test_mt5() -> None:
    """Its layers are gated, unlike those of T5."""
    from transformers import MT5Config, MT5ForConditionalGeneration

    sizes = {"vocab_size": 100, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4}
    found = []
    for compiled in (False, True):
        base = learner("t5")
        torch.manual_seed(0)
        net = MT5ForConditionalGeneration(MT5Config(**sizes)).double()
        net.config.decoder_start_token_id = 0
        words = base.prompted.verbalizer
        maml = PromptMAML(net, base.prompt, base.prompted.template, words, inner_lr=0.5, compile=compiled)
        if compiled:
            maml.prompted.fused.backend = "eager"
        found.append(step(maml))
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)  # norms round to float32
    assert maml.prompted.fused.possible and len(maml.prompted.fused.pieces) == 2
