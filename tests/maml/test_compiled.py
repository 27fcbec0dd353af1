"""The pieces of a compiled meta-step give the losses and gradients of the learner's own backward."""

from __future__ import annotations

import copy
import copyreg
import itertools
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from metapretrain.errors import InputError
from metapretrain.maml import ANIL, FOMAML, MAML, CompiledMeta, MetaGraph, MetaSGD, Reptile, ahead, current_step
from metapretrain.maml import compiled as compiled_module
from metapretrain.maml.compiled import _pooled, _traced
from metapretrain.nests import tensors
from metapretrain.protonet.learner import ProtoNet


def net() -> nn.Sequential:
    layers = nn.Conv2d(1, 3, 3, 2, 1), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(27, 3)).double()


def plain() -> nn.Sequential:
    """A network without convolutions, which is traced in a third of the time."""
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(36), nn.Tanh(), nn.Identity(), nn.Linear(36, 3)).double()


def batch(seed: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    x = torch.randn(2, 6, 1, 6, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x.to(device), torch.arange(6, device=device).remainder(3).repeat(2, 1)


def frozen_body(first_order: bool) -> MAML:
    maml = ANIL(net(), 0.1, first_order=first_order, steps=2)
    next(maml.module.parameters()).requires_grad_(False)
    return maml


LEARNERS: dict[str, Any] = {
    "maml": lambda: MAML(net(), 0.1, steps=3),
    "fomaml": lambda: FOMAML(net(), 0.1, steps=2),
    "metasgd": lambda: MetaSGD(net(), 0.1, steps=2),
    "metasgd, first order": lambda: MetaSGD(net(), 0.1, first_order=True, steps=2),
    "anil": lambda: ANIL(net(), 0.1, steps=2),
    "rates by step": lambda: MAML(net(), 0.1, steps=3, learn_rates=True),
    "rates by step, first order": lambda: FOMAML(net(), 0.1, steps=2, learn_rates=True),
    "rates by step of a head": lambda: ANIL(net(), 0.1, steps=2, learn_rates=True),
    "by the support": lambda: MAML(net(), 0.1, steps=2, batchnorm="support"),
    "partly frozen": lambda: frozen_body(False),
    "partly frozen, first order": lambda: frozen_body(True),
}


def assert_same(eager: nn.Module, compiled: nn.Module) -> None:
    for (name, p), q in zip(eager.named_parameters(), compiled.named_parameters(), strict=True):
        assert (p.grad is None) == (q[1].grad is None), name
        if p.grad is not None:
            torch.testing.assert_close(q[1].grad, p.grad, rtol=1e-10, atol=1e-13, msg=name)


@pytest.mark.parametrize("name", LEARNERS)
def test_losses_and_gradients_are_those_of_backward(name: str) -> None:
    torch.manual_seed(0)
    eager = LEARNERS[name]()
    learner = copy.deepcopy(eager)
    compiled = CompiledMeta(learner, backend="eager")
    for seed in range(2):  # new weights are read, and gradients add up
        support, query = batch(seed), batch(seed + 10)
        expected = eager.backward(support, query)
        torch.testing.assert_close(compiled.backward(support, query), expected, rtol=1e-10, atol=1e-13)
        assert_same(eager, learner)
        for parameters in (eager.parameters(), learner.parameters()):
            with torch.no_grad():
                for p in parameters:
                    if p.grad is not None:
                        p.sub_(0.1 * p.grad)
    for piece in itertools.chain(*compiled._pieces.values()):  # an operator that inductor of torch 2.11 cannot compile
        assert not [node for node in piece.graph.nodes if "same_feature_meta" in str(node.target)]


@pytest.mark.parametrize("name", LEARNERS)
def test_losses_after_each_step_count_by_their_weights(name: str) -> None:
    torch.manual_seed(0)
    eager = LEARNERS[name]()
    learner, weights = copy.deepcopy(eager), torch.tensor([0.5, 0.3, 0.2][: eager.steps])
    compiled, parts = CompiledMeta(learner, backend="eager"), (batch(0), batch(10))
    strides: dict[int, set[Any]] = {}  # of what a piece is given: it is compiled for one form

    def watched(number: int, piece: Any) -> Any:
        def call(*given: torch.Tensor) -> Any:
            strides.setdefault(number, set()).add(tuple(x.stride() for x in given))
            return piece(*given)

        return call

    compiled.backward(*parts)
    learner.zero_grad()
    for key, pieces in compiled._pieces.items():
        compiled._pieces[key] = type(pieces)(*(watched(*numbered) for numbered in enumerate(pieces)))
    expected = eager.backward(*parts, step_weights=weights)
    torch.testing.assert_close(compiled.backward(*parts, step_weights=weights), expected, rtol=1e-10, atol=1e-13)
    assert_same(eager, learner)
    compiled.backward(*parts)
    assert len(compiled._pieces) == 1 and all(len(forms) == 1 for forms in strides.values()) and len(strides) == 3


def test_step_weights_that_do_not_fit_are_refused_when_compiled() -> None:
    compiled = CompiledMeta(MAML(net(), 0.1, steps=3), backend="eager")
    with pytest.raises(InputError, match="step_weights that ask for a gradient cannot be compiled"):
        compiled.backward(batch(0), batch(1), step_weights=torch.ones(3, requires_grad=True))
    with pytest.raises(InputError, match=r"step_weights are \(2,\) for steps=3"):
        compiled.backward(batch(0), batch(1), step_weights=torch.ones(2))


@pytest.mark.parametrize(
    ("size", "most", "grouped"),
    [(40, 6 * 40 * 40 * 9, False), (40, 6 * 40 * 40 * 9 - 1, True), (130, compiled_module.PATCHES, True)],
    ids=["products of parts of the rows", "patches of too much memory", "images too large"],
)
def test_large_images_and_small_heads(size: int, most: int, grouped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(compiled_module, "PATCHES", most)
    layers = nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.MaxPool2d(size // 2), nn.Flatten(), nn.Linear(8, 3)
    eager = MAML(nn.Sequential(*layers).double(), 0.1, steps=2)
    learner = copy.deepcopy(eager)
    x, y = torch.randn(2, 2, 6, 1, size, size, dtype=torch.float64), torch.arange(6).remainder(3).expand(2, 6)
    compiled = CompiledMeta(learner, backend="eager")
    losses = compiled.backward((x[0], y), (x[1], y))
    torch.testing.assert_close(losses, eager.eager_backward((x[0], y), (x[1], y)), rtol=1e-10, atol=1e-13)
    assert_same(eager, learner)
    (pieces,) = compiled._pieces.values()
    named = [str(node.target) for piece in pieces for node in piece.graph.nodes]
    assert any("convolution" in name for name in named) == grouped
    assert not any("mm" in name for name in named) if grouped else any("bmm" in name for name in named)


class Functional(nn.Module):
    """Calls that torch takes too: arguments by name, and weights of one dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.mix, self.head = nn.Conv2d(1, 3, 3), nn.Linear(12, 4), nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        z = torch.max_pool2d(input=nn.functional.conv2d(input=x, weight=self.body.weight), kernel_size=2).flatten(1)
        z = nn.functional.linear(input=z, weight=self.mix.weight, bias=self.mix.bias).tanh()
        return nn.functional.linear(z, self.head)


def test_arguments_by_name_and_weights_of_one_dimension() -> None:
    torch.manual_seed(0)
    eager = MAML(Functional().double(), 0.1, steps=2, loss=nn.functional.mse_loss, allow_unused=True)
    learner, (x, y) = copy.deepcopy(eager), batch(0)
    part = x, y.double()
    losses = CompiledMeta(learner, backend="eager").backward(part, part)
    torch.testing.assert_close(losses, eager.eager_backward(part, part), rtol=1e-10, atol=1e-13)
    for p, own in zip(learner.parameters(), eager.parameters(), strict=True):
        unused = torch.zeros_like(own)
        torch.testing.assert_close(p.grad, unused if own.grad is None else own.grad, rtol=1e-10, atol=1e-13)


def test_the_first_gradient_is_compared_without_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rounding is as large as the error that is looked for: right gradients were refused on a GPU."""
    within = []

    def watched(function: Any) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            within.append((torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32))
            return function(*given, **named)

        return call

    for name in ("meta_loss", "_meta_step"):
        monkeypatch.setattr(compiled_module, name, watched(getattr(compiled_module, name)))
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = True
    try:
        CompiledMeta(MAML(plain(), 0.1), backend="eager").backward(batch(0), batch(1))
        assert within == [(False, False), (False, False), (torch.backends.cuda.matmul.allow_tf32, True)]
    finally:
        torch.backends.cudnn.allow_tf32 = before


CASES = [
    ("eager", "cpu"),
    pytest.param("inductor", "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")),
]


@pytest.mark.parametrize(("backend", "device"), CASES)
@pytest.mark.parametrize("steps", [1, 5])
def test_gradients_of_one_and_five_steps_are_those_of_the_loop(steps: int, backend: str, device: str) -> None:
    torch.manual_seed(0)
    block = nn.Conv2d(1, 3, 3, 2, 1), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 4, 3, 2, 1), nn.BatchNorm2d(4)
    made = nn.Sequential(*block, nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)).double().to(device)
    loop = MAML(made, 0.1, steps=steps, engine="loop")
    learner = MAML(copy.deepcopy(made), 0.1, steps=steps)
    parts = batch(0, device), batch(1, device)
    losses = CompiledMeta(learner, backend=backend).backward(*parts)
    torch.testing.assert_close(losses, loop.backward(*parts), rtol=1e-10, atol=1e-13)
    found, expected = (torch.cat([p.grad.flatten() for p in one.parameters()]) for one in (learner, loop))
    assert float((found - expected).norm() / expected.norm()) < 1e-10


def test_shapes_and_modes_are_compiled_apart() -> None:
    torch.manual_seed(0)
    eager = MAML(plain(), 0.1)
    learner = copy.deepcopy(eager)
    compiled = CompiledMeta(learner, backend="eager")
    for rows in (6, 3):
        part = tuple(tensor[:, :rows] for tensor in batch(0))
        torch.testing.assert_close(compiled.backward(part, part), eager.backward(part, part), rtol=1e-10, atol=1e-13)
    assert_same(eager, learner)


@pytest.mark.parametrize(
    ("learner", "words"),
    [
        (lambda: ProtoNet(net(), ways=3), "only MAML and variants"),
        (lambda: MAML(net(), 0.1, optimizer="adam", engine="higher"), "optimizer='adam'"),
        (lambda: MAML(net(), 0.1, chunk=2), "chunk=2"),
        (lambda: MAML(net(), 0.1, engine="loop"), "engine='loop'"),
        (lambda: MAML(nn.Sequential(net(), nn.Dropout(0.5)), 0.1), "dropout"),
    ],
)
def test_what_cannot_be_compiled_is_refused(learner: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        CompiledMeta(learner())


def test_errors_are_those_of_backward() -> None:
    (x, y), other = batch(0), batch(1)
    with pytest.raises(InputError, match="leading dimension"):
        CompiledMeta(MAML(net(), 0.1), backend="eager").backward((x[:1], y), other)


def half_frozen() -> MAML:
    maml = MAML(Changed(lambda output, module: output * (1 + module.training)), 0.1, allow_nograd=True)
    maml.module.get_parameter("net.4.bias").requires_grad_(False)
    return maml


def swap_frozen(maml: MAML) -> None:
    maml.module.get_parameter("net.4.bias").requires_grad_(True)
    maml.module.get_parameter("net.1.bias").requires_grad_(False)
    maml.zero_grad()


@pytest.mark.parametrize(
    "change",
    [
        lambda maml: setattr(maml, "steps", 3),
        lambda maml: setattr(maml, "lr", 1.0),
        lambda maml: setattr(maml, "first_order", True),
        lambda maml: maml.module.eval(),
        lambda maml: setattr(maml.module, "function", lambda output, module: 3 * output),
        lambda maml: setattr(maml.module.get_submodule("net.1"), "eps", 0.5),
        swap_frozen,
    ],
)
def test_changes_of_the_learner_are_not_missed(change: Any) -> None:
    torch.manual_seed(0)
    eager = half_frozen()
    learner = copy.deepcopy(eager)
    compiled = CompiledMeta(learner, backend="eager")
    for _ in range(2):
        losses = compiled.backward(batch(0), batch(1))
        torch.testing.assert_close(losses, eager.backward(batch(0), batch(1)), rtol=1e-10, atol=1e-13)
        assert_same(eager, learner)
        change(eager)
        change(learner)


class Changed(nn.Module):
    """A network whose output, or what it does with it, is told by a function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.net, self.function = plain(), function

    def forward(self, x: Any, minus: Any = None) -> Tensor:
        output: Tensor = self.function(self.net(x if minus is None else x - 2 * minus), self)
        return output


def test_the_names_of_inputs_are_not_mixed_up() -> None:
    torch.manual_seed(0)
    maml = MAML(Changed(lambda output, _: output), 0.1)
    compiled = CompiledMeta(maml, backend="eager")
    (a, y), (b, _) = batch(0), batch(1)
    for first, second in (({"x": a, "minus": b}, "as traced"), ({"minus": a, "x": b}, "the other way round")):
        losses = compiled.backward((first, y), (first, y))
        torch.testing.assert_close(losses, maml.losses((first, y), (first, y)).detach(), msg=second)


def test_precision_is_that_of_each_call() -> None:
    torch.manual_seed(0)
    maml = MAML(nn.Sequential(nn.Flatten(), nn.Linear(36, 3)), 0.1)
    compiled = CompiledMeta(maml, backend="eager")
    part = batch(0)[0].float(), batch(0)[1]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = compiled.backward(part, part)
        assert torch.equal(low, maml.losses(part, part).detach())
    full = compiled.backward(part, part)
    torch.testing.assert_close(full, maml.losses(part, part).detach())
    assert not torch.equal(low, full)


def test_rates_that_are_computed_get_their_gradient() -> None:
    torch.manual_seed(0)
    maml = MAML(plain(), 0.1, steps=2)
    found = []
    for backward in (maml.backward, CompiledMeta(maml, backend="eager").backward):
        log_rate = torch.tensor(-2.0, dtype=torch.float64, requires_grad=True)
        maml.lr = log_rate.exp()
        backward(batch(0), batch(1))
        found.append(log_rate.grad)
    torch.testing.assert_close(found[1], found[0])
    kept = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
    maml.lr = kept
    maml.backward(batch(0), batch(1))
    before, kept.grad = kept.grad, None
    CompiledMeta(maml, backend="eager").backward(batch(0), batch(1))
    torch.testing.assert_close(kept.grad, before)


def test_what_would_be_wrong_is_refused_and_gradients_are_left_alone() -> None:
    scale = nn.Parameter(torch.ones((), dtype=torch.float64))
    rates = torch.tensor([0.1, 0.5], dtype=torch.float64, requires_grad=True)
    for learner, words in (
        (MAML(Changed(lambda out, _: nn.functional.dropout(out)), 0.1), "random numbers"),
        (MAML(Changed(lambda out, _: out * (1 + current_step())), 0.1, steps=2), "current_step"),
        (MAML(net(), [0.1, 0.2], steps=2), "rates by step need tensors alike in shape"),
        (MAML(net(), [rates[0], torch.full((4, 1, 3, 3), 0.1)], steps=2), "shape"),
        (MAML(net(), 0.1, loss=lambda z, y: nn.functional.cross_entropy(z * scale, y)), "learned loss"),
    ):
        learner.zero_grad()
        first = next(learner.parameters())
        first.grad = torch.ones_like(first)
        with pytest.raises(InputError, match=words):
            CompiledMeta(learner, backend="eager").backward(batch(0), batch(1))
        assert [p.grad is None for p in learner.parameters()].count(False) == 1 and bool((first.grad == 1).all())


def test_rates_by_step_have_the_gradients_of_backward() -> None:
    def by_name(rates: Tensor, names: list[str]) -> Any:
        return [{name: rate * (number + 1) for number, name in enumerate(names)} for rate in rates]

    for make in (lambda rates, _: rates, lambda rates, _: list(rates.exp().unbind()), by_name):
        found = []
        for compiled in (False, True):
            torch.manual_seed(0)
            rates = torch.tensor([0.1, 0.5], dtype=torch.float64, requires_grad=True)
            learner = MAML(plain(), 0.1, steps=2)
            learner.lr = make(rates, [name for name, _ in learner.module.named_parameters()])
            step: Any = CompiledMeta(learner, backend="eager") if compiled else learner
            losses = step.backward(batch(0), batch(1))
            found.append([losses, rates.grad, *(p.grad for p in learner.parameters())])
        torch.testing.assert_close(*found, rtol=1e-10, atol=1e-13)


def test_a_rate_may_have_several_uses_and_each_step_a_leaf_of_its_own() -> None:
    def used(net: nn.Module) -> list[Any]:
        a, b = (torch.tensor(rate, dtype=torch.float64, requires_grad=True) for rate in (0.1, 0.5))
        names = [name for name, _ in net.named_parameters()]
        own = dict(zip(names, (a, b, a, b), strict=True))
        return [[a, b, a], dict.fromkeys(names, a), [own, dict.fromkeys(names, b), own], [net[4].bias[0], a, b]]

    for number in range(4):
        found = []
        for compiled in (False, True):
            torch.manual_seed(0)
            learner = MAML(plain(), 0.1, steps=3)
            with torch.no_grad():
                learner.module[4].bias.fill_(0.2)
            learner.lr = used(learner.module)[number]
            step: Any = CompiledMeta(learner, backend="eager") if compiled else learner
            losses = step.backward(batch(0), batch(1))
            leaves = {id(leaf): leaf.grad for leaf in tensors(learner.lr) if leaf.is_leaf}
            found.append([losses, *leaves.values(), *(p.grad for p in learner.parameters())])
        torch.testing.assert_close(*found, rtol=1e-10, atol=1e-13)


def test_pieces_are_compiled_anew_for_rates_of_another_form_and_take_any_strides() -> None:
    torch.manual_seed(0)
    learner = MAML(plain(), 0.1, steps=2)
    compiled, named = CompiledMeta(learner, backend="eager"), dict(learner.module.named_parameters())
    first, *_, last = named
    parts = [tuple(torch.cat([x, x], 1)[:, :6] for x in batch(seed)) for seed in (0, 1)]
    rate = torch.tensor(0.5, dtype=torch.float64)
    for lr in (
        {**dict.fromkeys(named, 0.1), first: rate},
        {**dict.fromkeys(named, 0.1), last: rate},
        {**dict.fromkeys(named, 0.1), last: rate * torch.rand_like(named[last])},
    ):
        learner.lr = lr
        found = []
        for step in (learner, compiled):
            learner.zero_grad()
            found.append([step.backward(*parts), *(p.grad for p in learner.parameters())])  # type: ignore[attr-defined]
        torch.testing.assert_close(*found, rtol=1e-10, atol=1e-13)
    learner.lr, learner.steps = [], 0
    torch.testing.assert_close(compiled.backward(*parts), learner.backward(*parts))


def test_pooling_as_it_is_written_has_the_values_and_gradients_of_torch() -> None:
    torch.manual_seed(0)
    options: dict[str, Any]
    for kernel, size in itertools.product((2, (3, 2), (1, 3)), ((6, 7), (9, 8))):
        options = {"kernel_size": kernel}
        x = torch.randn(2, 3, *size, dtype=torch.float64).round()  # with ties, of which the first counts
        x[0, 0, 0, 1], x[1, 2, 3, 3] = torch.nan, torch.inf
        x.requires_grad_()
        expected, found = nn.functional.max_pool2d(x, **options), _pooled(x, **options)
        assert found is not None
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
        g = torch.randn_like(expected)
        gradients = (torch.autograd.grad(made, x, g)[0] for made in (expected, found))
        torch.testing.assert_close(*gradients)
    for options in ({"stride": 1}, {"padding": 1}, {"dilation": 2}, {"ceil_mode": True}, {"return_indices": True}):
        assert _pooled(x, 2, **options) is None  # left to torch
    assert _pooled(x, 4) is None


def odd_convolutions() -> nn.Sequential:
    first = nn.Conv2d(1, 2, (3, 2), (2, 1), (0, 1)), nn.BatchNorm2d(2, affine=False), nn.ReLU(inplace=True)
    second = nn.Conv2d(2, 4, 3, 3, 2, bias=False), nn.ReLU(), nn.Conv2d(4, 4, 1, groups=2)
    return nn.Sequential(*first, *second, nn.Flatten(), nn.LazyLinear(3))


def pooled() -> nn.Sequential:
    block = nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2)
    after = nn.Conv2d(3, 2, 3, padding="same"), nn.GELU(), nn.MaxPool2d((1, 2))
    return nn.Sequential(*block, *after, nn.Flatten(), nn.LazyLinear(3))


def normalised(layer: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 6), layer, nn.Softmax(1), nn.Linear(6, 3))


NETWORKS: dict[str, Any] = {
    "odd convolutions": odd_convolutions,
    "pooling": pooled,
    "BatchNorm1d": lambda: normalised(nn.BatchNorm1d(6)),
    "LayerNorm": lambda: normalised(nn.LayerNorm(6)),
    "GroupNorm": lambda: normalised(nn.GroupNorm(2, 6)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_of_many_layers(name: str) -> None:
    torch.manual_seed(0)
    made = NETWORKS[name]()
    made.double()(batch(0)[0][0])  # lazy layers
    eager = MAML(made, 0.1, steps=2, engine="auto")
    learner = copy.deepcopy(eager)
    losses = CompiledMeta(learner, backend="eager").backward(batch(0), batch(1))
    eager.engine = "loop"
    torch.testing.assert_close(losses, eager.backward(batch(0), batch(1)), rtol=1e-10, atol=1e-13)
    assert_same(eager, learner)


def cut(out: Tensor, module: nn.Module) -> Tensor:
    with torch.no_grad():
        scale = out.std()
    return out * scale


@pytest.mark.parametrize(
    ("function", "words"), [(lambda out, _: out * out.detach(), "detach"), (cut, "compiled gradient differs")]
)
def test_losses_that_cut_their_gradient_off_are_refused(function: Any, words: str) -> None:
    torch.manual_seed(0)
    maml = MAML(Changed(function), 0.5)
    with pytest.raises(InputError, match=words):
        CompiledMeta(maml, backend="eager").backward(batch(0), batch(1))
    assert all(p.grad is None for p in maml.parameters())


def test_a_first_gradient_that_is_not_finite_is_called_so() -> None:
    (x, y), query = batch(0), batch(1)
    with pytest.raises(InputError, match="the first gradient is not finite"):
        CompiledMeta(MAML(net(), 0.5), backend="eager").backward((x * torch.nan, y), query)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_compiled_for_a_gpu_and_recorded() -> None:
    torch.manual_seed(0)
    eager = MAML(net().cuda(), 0.1, steps=2)
    learner = copy.deepcopy(eager)
    graph = MetaGraph(learner, compile=True)
    for seed in range(2):
        support, query = batch(seed, "cuda"), batch(seed + 10, "cuda")
        torch.testing.assert_close(graph.backward(support, query), eager.backward(support, query))
    assert_same(eager, learner)


class Transposed(nn.Module):
    """Weights that come back from a step with other strides than they went in; tied or not."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed, self.out, self.tied = nn.Embedding(7, 6), nn.Linear(6, 7, bias=False), tied
        self.inwards = nn.Parameter(torch.randn(6, 7))
        if tied:
            self.out.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        z = self.embed(x).mean(1)
        out: Tensor = self.out(z) + z @ self.inwards
        return out


@pytest.mark.parametrize(("tied", "steps"), [(True, 1), (False, 2)])
def test_weights_come_back_from_a_step_as_they_were_laid_out(tied: bool, steps: int) -> None:
    torch.manual_seed(0)
    eager = MAML(Transposed(tied).double(), 0.1, steps=steps)
    learner, x = copy.deepcopy(eager), torch.randint(0, 7, (2, 6, 5))
    data = x, torch.arange(6).repeat(2, 1)
    losses = CompiledMeta(learner, backend="inductor").backward(data, data)
    torch.testing.assert_close(losses, eager.backward(data, data), rtol=1e-10, atol=1e-13)
    assert_same(eager, learner)


def test_pooling_is_compiled_by_inductor_which_cannot_compile_torchs_own() -> None:
    torch.manual_seed(0)
    eager = MAML(nn.Sequential(nn.Conv2d(1, 1, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4, 3)).double(), 0.1)
    learner = copy.deepcopy(eager)
    CompiledMeta(learner, backend="inductor").backward(batch(0), batch(1))
    eager.backward(batch(0), batch(1))
    assert_same(eager, learner)


def test_a_graph_compiled_ahead_by_a_process_is_found_in_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from torch._dynamo.utils import counters

    def scaled(given: list[Tensor]) -> list[Tensor]:
        return [given[0].transpose(0, 1).clone(memory_format=torch.contiguous_format) * given[1]]

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(ahead, "_pays", lambda device: True)
    given = [torch.randn(9, 2).double()[1:], torch.tensor(0.1)]  # a view with an offset, and a single number
    counters.clear()
    (tmp_path / "queue.py").write_text("raise SystemExit('a module of the working folder in place of Python's')")
    with ExitStack() as stack:
        with monkeypatch.context() as patch:
            patch.chdir(tmp_path)
            patch.setattr(sys, "path", [*sys.path, tmp_path / "a path that is no text"])
            processes = stack.enter_context(ahead.Ahead(1, given[0].device))
        graph, pipe = _traced(scaled, given), processes.processes[0].stdin
        assert pipe is not None
        held = os.dup(pipe.fileno())  # as in a worker that was forked meanwhile: the pipe does not end
        processes.compile([graph])
        os.close(held)
    piece = ahead.by_inductor(graph, ahead.forms_of(given))
    found = [counters["aot_autograd"][f"autograd_cache_{name}"] for name in ("hit", "miss", "bypass")]
    assert found == [1, 0, 0]
    torch.testing.assert_close(piece(*given), scaled(given))
    with ahead.Ahead(1, given[0].device) as processes:  # it is known to be there: no process gets it once more
        processes.compile([graph])
        assert processes.processes[0].poll() is None
    changed = _traced(lambda given: [given[0] + given[1]], given)
    assert ahead._mark([graph]).exists() and not ahead._mark([changed]).exists()


def test_no_process_compiles_ahead_where_all_cores_are_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config

    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    for load, threads, pays in ((3.0, 8, True), (5.0, 8, False), (3.0, 2, False)):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        with config.patch(compile_threads=threads):
            assert ahead._pays(torch.device("cuda")) is pays


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ([sys.executable, "-c", "raise SystemExit(3)"], "exit codes [3, 3, 3]"),
        ([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], "exit codes [-9, -9, -9]"),
        ([sys.executable, "-c", "import time; time.sleep(60)"], "timed out"),
        (["no such interpreter"], "No such file"),
    ],
)
def test_processes_that_fail_to_compile_ahead_leave_the_gradient_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, command: list[str], words: str
) -> None:
    monkeypatch.setattr(ahead, "COMMAND", command)
    monkeypatch.setattr(ahead, "LONGEST", 5 if "exit" in words else 0.1)
    monkeypatch.setattr(ahead, "_pays", lambda device: True)
    monkeypatch.setattr("metapretrain.maml.compiled.by_inductor", lambda graph, forms: graph)
    torch.manual_seed(0)
    eager = MAML(plain(), 0.1)
    learner = copy.deepcopy(eager)
    with caplog.at_level("INFO"):
        CompiledMeta(learner, backend="inductor").backward(batch(0), batch(1))
    assert words in caplog.text
    eager.backward(batch(0), batch(1))
    assert_same(eager, learner)


def test_pieces_are_compiled_ahead_for_the_strides_that_they_are_called_with(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []

    def compare(graph: Any, forms: list[ahead.Form]) -> Any:
        traced = ahead.forms_of(node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder")
        found.extend(a == b for a, b in zip(traced, forms, strict=True))
        return graph

    monkeypatch.setattr("metapretrain.maml.compiled.by_inductor", compare)
    CompiledMeta(MAML(net(), 0.1), backend="inductor").backward(batch(0), batch(1))
    assert len(found) > 30 and all(found)


def test_a_frozen_program_is_not_started_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "_pays", lambda device: True)
    assert ahead.Ahead(3, torch.device("cpu")).count == 3
    monkeypatch.setattr(sys, "executable", None)
    assert ahead.Ahead(3, torch.device("cpu")).count == 0
    monkeypatch.undo()
    monkeypatch.setattr(ahead, "_pays", lambda device: True)
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    assert ahead.Ahead(3, torch.device("cpu")).count == 0


def test_memory_formats_are_pickled_as_before_once_a_graph_is_compiled() -> None:
    table, kind = copyreg.dispatch_table, torch.memory_format
    assert kind not in table
    for own in (None, lambda found: str(found)):
        if own is not None:
            copyreg.pickle(kind, own)
        try:
            with ahead._formats_by_name():
                assert table[kind] is not own
            assert table.get(kind) is own
        finally:
            table.pop(kind, None)
    with ahead._formats_by_name():
        del table[kind]  # as a block of another thread does


def test_no_process_compiles_ahead_on_a_cpu() -> None:
    with ahead.Ahead(3, torch.device("cpu")) as processes:
        assert not processes.processes


def test_learners_with_another_gradient_are_not_compiled() -> None:
    with pytest.raises(InputError, match="Reptile has a gradient of its own"):
        CompiledMeta(Reptile(net(), 0.1))
