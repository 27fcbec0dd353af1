"""A module as a function: its policies for batch normalisation, and what it must not do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.fx
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from metapretrain.errors import InputError
from metapretrain.maml import ANIL, FOMAML, MAML, MetaSGD, Reptile, adapt, functional
from metapretrain.maml.normalisation import first_rows
from metapretrain.models.saved import is_transductive
from tests.maml.nets import TASKS, cnn, flat, images, loss_of


def state(net: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in net.state_dict().items()}


def trained() -> nn.Module:
    net = cnn()
    for _ in range(3):
        net(images(4, 7)[0][0] * 2 + 1)
    return net


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("policy", ["batch", "frozen"])
def test_policies_are_the_modules_own_modes(policy: str, training: bool) -> None:
    net, x = trained().train(training), images(3, 1)[0][0]
    reference = copy.deepcopy(net).train(policy == "batch")
    before = state(net)
    apply, params, buffers = functional(net, policy)
    torch.testing.assert_close(apply(params, buffers, x), reference(x))
    after = state(net)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert net.training == training


def test_batch_policy_has_no_buffers_and_frozen_has_the_running_statistics() -> None:
    net = trained()
    assert functional(net).buffers == {}
    names = set(functional(net, "frozen").buffers)
    assert names == {name for name, _ in net.named_buffers()}
    with pytest.raises(InputError, match="needs running statistics, but 1 keeps none"):
        functional(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, track_running_stats=False)), "frozen")


def test_mode_and_weights_follow_the_module() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    apply, params, buffers = functional(net)
    x = torch.ones(8, 4)
    net.eval()
    assert torch.equal(apply(params, buffers, x), net(x))
    net.train()
    assert not torch.equal(apply(params, buffers, x), apply(params, buffers, x))
    net.eval()
    with torch.no_grad():
        net[0].weight.zero_()
    assert torch.equal(apply({}, buffers, x), net[0].bias.expand(8, 4))


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", [(7, 3), (7, 3, 4, 5)])
def test_support_statistics_are_those_of_batch_norm_over_the_first_rows(shape: tuple[int, ...], affine: bool) -> None:
    torch.manual_seed(0)
    norm = (nn.BatchNorm1d(3, affine=affine) if len(shape) == 2 else nn.BatchNorm2d(3, affine=affine)).double()
    for p in norm.parameters():
        nn.init.normal_(p)
    x = torch.randn(shape, dtype=torch.float64)
    apply, params, buffers = functional(norm, "support")
    assert not buffers
    plain = F.batch_norm(x, None, None, norm.weight, norm.bias, True)
    torch.testing.assert_close(apply(params, buffers, x), plain)  # outside of a block: all rows
    axes = [0, *range(2, x.ndim)]
    mean, var = x[:4].mean(axes), x[:4].var(axes, correction=0)
    expected = F.batch_norm(x, mean, var, norm.weight, norm.bias, False)
    with first_rows(4, total=7):
        found = apply(params, buffers, x)
        half = apply(params, buffers, x.bfloat16())
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found[:4], F.batch_norm(x[:4], None, None, norm.weight, norm.bias, True))
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.double(), expected, rtol=0.05, atol=0.05)
    assert norm.running_mean is not None and not norm.running_mean.any()  # the module is left alone


@pytest.mark.parametrize("engine", ["loop", "vmap"])
@pytest.mark.parametrize("training", [True, False])
def test_queries_are_normalised_by_the_support_of_their_task(engine: str, training: bool) -> None:
    """Against a loop over tasks that is written out; the same in both modes."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(108, 3)).double()
    support, query = images(3, 0), images(4, 1)
    maml = MAML(net, 0.3, steps=2, batchnorm="support", engine=engine).train(training)

    def forward(fast: list[Tensor], x: Tensor, own: Tensor) -> Tensor:
        filters, bias, scale, shift, weight, last = fast
        z, of = F.conv2d(x, filters, bias), F.conv2d(own, filters, bias)
        mean, var = of.mean((0, 2, 3), keepdim=True), of.var((0, 2, 3), correction=0, keepdim=True)
        z = (z - mean) / (var + 1e-5).sqrt() * scale[:, None, None] + shift[:, None, None]
        return F.linear(z.relu().flatten(1), weight, last)

    losses, logits = [], []
    for own, y, x, wanted in zip(*support, *query, strict=True):
        fast = list(net.parameters())
        for _ in range(2):
            loss = F.cross_entropy(forward(fast, own, own), y)
            fast = [p - 0.3 * g for p, g in zip(fast, torch.autograd.grad(loss, fast, create_graph=True), strict=True)]
        logits.append(forward(fast, x, own))
        losses.append(F.cross_entropy(logits[-1], wanted))
    torch.testing.assert_close(maml.losses(support, query), torch.stack(losses))
    torch.testing.assert_close(maml.logits(support, query), torch.stack(logits).detach())
    found = torch.autograd.grad(maml.losses(support, query).sum(), list(net.parameters()))
    expected = torch.autograd.grad(torch.stack(losses).sum(), list(net.parameters()))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("make", [MAML, FOMAML, ANIL, MetaSGD, Reptile])
def test_with_support_statistics_no_query_depends_on_another(make: Any) -> None:
    torch.manual_seed(0)
    support, query = images(3, 0), images(4, 1)
    one = query[0][:, :1], query[1][:, :1]
    for policy, alike in (("support", True), ("batch", False)):
        learner = make(cnn(), 0.1, batchnorm=policy)
        both = learner.logits(support, query)[:, :1], learner.logits(support, one)
        assert torch.allclose(*both) == alike
        assert is_transductive(learner) != alike
        outputs = learner.adapted((support[0][0], support[1][0]))
        torch.testing.assert_close(outputs(query[0][0]), learner.logits(support, query)[0])


class Rectified(nn.BatchNorm1d):
    """A layer with a forward of its own, as timm has them."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


class Written(nn.Module):
    """Batch normalisation without a layer."""

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, training=True).relu()


class Doubled(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return 2 * w


def parametrized() -> nn.Module:
    norm = nn.BatchNorm1d(5)
    nn.utils.parametrize.register_parametrization(norm, "weight", Doubled())
    norm.register_forward_hook(lambda _, __, out: out.relu() / 2)
    return norm


def traced() -> nn.Module:
    return torch.fx.symbolic_trace(nn.Sequential(nn.BatchNorm1d(5)))


KINDS = [lambda: Rectified(5), Written, parametrized, traced, lambda: nn.SyncBatchNorm(5)]


@pytest.mark.parametrize("make", KINDS)
def test_normalisation_of_any_kind_is_by_the_support(make: Any) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)).double()
    net = nn.Sequential(plain[0], make().double(), nn.ReLU(), plain[3])  # the second ReLU of some changes nothing
    x, y = torch.randn(2, 7, 4).double(), torch.tensor([[0, 1, 2, 0, 1, 2, 0]] * 2)
    options: Any = {"lr": 0.3, "steps": 2, "batchnorm": "support", "only": "0.weight"}
    parts = (x[:, :4], y[:, :4]), (x[:, 4:], y[:, 4:])
    torch.testing.assert_close(MAML(net, **options).losses(*parts), MAML(plain, **options).losses(*parts))
    torch.testing.assert_close(MAML(net, **options).logits(*parts), MAML(plain, **options).logits(*parts))


class Direct(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.batch_norm(x, None, None, None, None, True, 0.1, 1e-5, False)


def test_normalisation_that_cannot_be_told_and_scripts_are_refused() -> None:
    x, y = torch.randn(2, 6, 4), torch.zeros(2, 6, dtype=torch.long)
    with pytest.raises(InputError, match=r"torch\.batch_norm knows no support"):
        MAML(nn.Sequential(nn.Linear(4, 3), Direct()), 0.1, batchnorm="support").losses((x, y), (x, y))
    for scripted in (torch.jit.script(nn.Linear(4, 3)), torch.jit.trace(nn.Linear(4, 3), x[0])):
        with pytest.raises(InputError, match=r"its part '0' is compiled: torch\.jit keeps its own weights"):
            MAML(nn.Sequential(scripted), 0.1).losses((x, y), (x, y))


class Folded(nn.Module):
    """Tokens in the place of rows (`order` 0, 1), or rows in parts (2)."""

    def __init__(self, order: int) -> None:
        super().__init__()
        self.norm, self.order = nn.BatchNorm1d(4), order

    def forward(self, x: Tensor) -> Tensor:
        if self.order == 2:
            return torch.cat([self.norm(part[:, 0]) for part in x.split(3)])
        y: Tensor = self.norm(x.transpose(0, self.order).flatten(0, 1)).unflatten(0, x.shape[:2]).mean(1)
        return y


@pytest.mark.parametrize("engine", ["loop", "vmap"])
@pytest.mark.parametrize("order", [0, 1, 2])
def test_rows_that_are_not_the_examples_are_refused(order: int, engine: str) -> None:
    x, y = torch.randn(2, 6, 5, 4), torch.zeros(2, 6, dtype=torch.long)
    maml = MAML(Folded(order), 0.1, batchnorm="support", engine=engine)
    for call in (maml.losses, maml.backward, maml.logits):
        with pytest.raises(InputError, match=r"sees \(.*\) for 6 support and 4 other rows"):
            call((x, y), (x[:, :4], y[:, :4]))


def test_outputs_that_are_not_one_per_row_and_statistics_of_one_number_are_refused() -> None:
    pooled = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3), nn.Unflatten(0, (2, -1)), nn.Flatten(1))
    x, y = torch.randn(2, 6, 4), torch.zeros(2, 2, dtype=torch.long)
    with pytest.raises(InputError, match=r"\(2, 18\) are no logits of 12 rows"):
        MAML(pooled, 0.1, batchnorm="support").losses((x, y), (x, y))
    net, one = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), (x[:, :1], y[:, :1])
    for policy, steps in (("support", 1), ("support", 0), ("batch", 1)):
        with pytest.raises(InputError, match="one number per channel has no variance"):
            MAML(net, 0.1, steps=steps, batchnorm=policy).losses(one, (x, y.repeat(1, 3)))


@pytest.mark.parametrize("make", [MAML, Reptile])
def test_labels_need_not_be_one_per_row(make: Any) -> None:
    """Of each task one number, which its rows' mean output has."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 1)).double()
    x, y = torch.randn(2, 9, 4).double(), torch.randn(2, 1, 1, 1).double()
    learner = make(net, 0.3, steps=0, batchnorm="support", loss=lambda out, y: (out.mean() - y).square().mean())
    apply, params, buffers = functional(net, "support")
    for task, loss in enumerate(learner.losses((x[:, :5], y), (x[:, 5:], y))):
        with first_rows(5, total=9):
            out = apply(params, buffers, x[task])[5:]
        torch.testing.assert_close(loss, (out.mean() - y[task]).square().mean())


class Again(nn.Module):
    """Its forward pass is done again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.net, x, use_reentrant=False)
        return y


@pytest.mark.parametrize("policy", ["batch", "support"])
def test_checkpoints_in_the_module_would_see_later_weights_and_are_refused(policy: str) -> None:
    maml = MAML(Again(), 0.1, batchnorm=policy)
    x, y = torch.randn(2, 6, 4), torch.zeros(2, 6, dtype=torch.long)
    with pytest.raises(InputError, match=r"torch\.utils\.checkpoint in the module would use other weights"):
        maml.losses((x, y), (x, y))
    if policy == "batch":
        with pytest.raises(InputError, match=r"torch\.utils\.checkpoint in the module"):
            maml.clone()(x[0])
    plain = MAML(nn.Linear(4, 3), 0.1)
    with torch.autograd.graph.save_on_cpu():  # around the whole it is right
        assert plain.losses((x, y), (x, y)).requires_grad


def test_support_and_query_that_cannot_be_one_batch_are_refused() -> None:
    net, y = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.BatchNorm1d(3)), torch.zeros(2, 6, dtype=torch.long)
    maml, x = MAML(net, 0.1, batchnorm="support"), torch.rand(2, 6, 4)
    others = {
        r"torch\.float32 \(2, 6, 4\) and torch\.uint8 \(2, 6, 4\)": (x * 255).to(torch.uint8),
        r"and torch\.float32 \(2, 6, 5\)": torch.rand(2, 6, 5),
        r"and 0 torch\.float32 \(2, 6, 4\)": (x,),
    }
    for line, other in others.items():
        with pytest.raises(InputError, match=line):
            maml.losses((x, y), (other, y))
    with pytest.raises(InputError, match=r"a row per example .* c torch\.float32 \(2,\)"):
        maml.losses(({"x": x, "c": x[:, 0, 0]}, y), ({"x": x, "c": x[:, 0, 0]}, y))
    outputs = maml.adapted((own := x[0].clone(), y[0]))
    expected = outputs(x[1])
    own.zero_()  # the caller's next support
    assert torch.equal(outputs(x[1]), expected)
    with pytest.raises(InputError, match="in one batch"):
        outputs(x[1, 0])


def test_a_layer_without_batch_statistics_is_as_under_batch() -> None:
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.InstanceNorm2d(2), nn.Flatten(), nn.LazyLinear(3)).double()
    support, query = images(3, 0), images(4, 1)
    net(support[0][0])
    found = [MAML(net, 0.1, batchnorm=policy).losses(support, query) for policy in ("support", "batch")]
    torch.testing.assert_close(*found)


def test_an_unknown_policy_is_told_and_a_clone_knows_no_support() -> None:
    with pytest.raises(InputError, match="unknown batchnorm 'batsh'; did you mean 'batch'"):
        functional(nn.BatchNorm1d(2), "batsh")
    with pytest.raises(InputError, match="unknown batchnorm 'per-step'"):
        MAML(cnn(), 0.1, batchnorm="per-step")
    with pytest.raises(InputError, match="know no support"):
        MAML(cnn(), 0.1, batchnorm="support").clone()


def test_a_module_that_changes_its_state_in_place_is_named() -> None:
    net = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)))
    apply, params, buffers = functional(net)
    with pytest.raises(InputError, match=r"changes 0\.parametrizations\.weight\.0\._u.* in place"):
        apply(params, buffers, torch.ones(2, 3))
    net.eval()
    torch.testing.assert_close(apply(params, buffers, torch.ones(2, 3)), net(torch.ones(2, 3)))


class Tied(nn.Module):
    """One weight under two names, and a method kept as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.run = self._run

    def _run(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x).tanh())
        return out

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


def test_tied_weights_stay_tied() -> None:
    net = Tied()
    apply, params, buffers = functional(net)
    assert list(params) == ["first.weight", "first.bias", "second.bias"]
    changed = {**params, "first.weight": torch.zeros(3, 3)}
    out = apply(changed, buffers, torch.ones(2, 3))
    torch.testing.assert_close(out, net.second.bias.expand(2, 3))


class Shared(nn.Module):
    """A layer that is used at two places, and a buffer with it."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.BatchNorm1d(4)
        self.b = nn.Sequential(self.a, nn.Linear(4, 4))
        self.alias = self.b[1].weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.a(self.b(x)) + self.alias.sum()
        return out


@pytest.mark.parametrize("policy", ["batch", "frozen"])
@pytest.mark.parametrize("make", [Shared, Tied, lambda: nn.LSTM(4, 3)])
def test_what_is_left_out_of_a_call_is_the_modules_whatever_the_last_call_was(make: Any, policy: str) -> None:
    net = make().eval()
    x = torch.randn(2, 3 if make is Tied else 4)
    apply, params, buffers = functional(net, policy)

    def output(given: Any) -> Tensor:
        out: Any = apply(given, buffers, x)
        return out if isinstance(out, Tensor) else out[0]  # type: ignore[no-any-return]

    expected = output(params)
    for name, p in params.items():
        changed = output({name: 2 * p.detach()})
        assert torch.equal(output({}), expected), name
        whole = {other: 2 * q.detach() if other == name else q for other, q in params.items()}
        assert torch.equal(output(whole), changed), name
        with pytest.raises((RuntimeError, TypeError, InputError)):
            apply({name: 2 * p.detach()}, buffers, torch.ones(2, 9))
        assert torch.equal(output({}), expected), name
    fast = adapt(lambda p, b: output(p).square().mean(), params, torch.zeros(3, 1), tasks=3, lr=0.1, allow_unused=True)
    assert len(fast) == len(params)
    assert torch.equal(output({}), expected)


def test_unknown_names_and_two_values_of_a_tied_weight_are_refused() -> None:
    apply, params, buffers = functional(Tied())
    with pytest.raises(InputError, match=r"no parameter or buffer 'third'; it has first\.weight, first\.bias, second"):
        apply({"third": torch.zeros(1)}, buffers, torch.ones(2, 3))
    w = params["first.weight"]
    with pytest.raises(InputError, match=r"second\.weight is tied to another parameter that was given another value"):
        apply({"first.weight": w, "second.weight": 2 * w}, buffers, torch.ones(2, 3))
    out = apply({"first.weight": w, "second.weight": w}, buffers, torch.ones(2, 3))
    torch.testing.assert_close(apply({"second.weight": w}, buffers, torch.ones(2, 3)), out)


def test_recurrent_layers_use_the_weights_that_they_are_given() -> None:
    net = nn.LSTM(3, 2)
    apply, params, buffers = functional(net)
    out, _ = apply({name: torch.zeros_like(p) for name, p in params.items()}, buffers, torch.ones(4, 1, 3))
    assert torch.equal(out, torch.zeros(4, 1, 2))
    assert net(torch.ones(4, 1, 3))[0].abs().sum() > 0


def test_adaptation_leaves_the_module_as_it_was() -> None:
    net = trained()
    before = state(net)
    loss_fn, params = loss_of(net)
    adapt(loss_fn, params, images(2, 0), lr=0.3, steps=2, tasks=TASKS)
    after = state(net)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert flat(params).isfinite().all()
