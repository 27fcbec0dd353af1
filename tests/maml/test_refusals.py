"""What learners refuse when they are made, cloned or given a batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from metapretrain import ANIL, FOMAML, MAML, MetaSGD, ProtoNet, Reptile
from metapretrain.errors import InputError
from metapretrain.maml import CompiledMeta, adapt
from metapretrain.protonet.learner import R2D2, Classifier

X, Y = torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(0)), torch.arange(2).repeat(3, 3)


def adapted_clone(maml: Any) -> Any:
    learner = maml.clone()
    learner.adapt(F.cross_entropy(learner(X[0]), Y[0]))
    return learner


@pytest.mark.parametrize("lr", [0.0, -1.0, math.nan, math.inf])
def test_rates_that_are_not_above_zero_are_refused_by_every_way_in(lr: float) -> None:
    ways: list[Callable[[], Any]] = [
        lambda: MetaSGD(nn.Linear(4, 2), lr=lr),
        lambda: adapted_clone(MAML(nn.Linear(4, 2), lr=lr)),
        lambda: adapted_clone(MAML(nn.Linear(4, 2), lr={"weight": 0.1, "bias": lr})),
        lambda: MAML(nn.Linear(4, 2), lr=lr).backward((X, Y), (X, Y)),
        lambda: MAML(nn.Linear(4, 2), lr=lr).logits((X, Y), (X, Y)),
    ]
    for way in ways:
        with pytest.raises(InputError, match=rf"lr.* is {lr}; give a number above 0"):
            way()


@pytest.mark.parametrize("lr", [math.nan, math.inf, -math.inf])
def test_tensors_of_rates_that_are_not_finite_are_refused_by_every_way_in(lr: float) -> None:
    rate, params = torch.tensor(lr), {"w": torch.ones(4)}

    def set_later() -> Any:
        maml = MAML(nn.Linear(4, 2), lr=0.1)
        maml.lr = {"weight": torch.full((2, 4), 0.1).index_fill(0, torch.tensor([0]), lr), "bias": 0.1}
        return maml

    def meta_sgd() -> Any:
        maml = MetaSGD(nn.Linear(4, 2), 0.1)
        maml.lrs[1].data[0] = lr
        return maml

    ways: list[Callable[[], Any]] = [
        lambda: adapt(lambda p, x: (p["w"] - x).square().sum(), params, X[0, 0], lr=rate),
        lambda: adapt(lambda p, x: (p["w"] - x).square().sum(), params, X[0, 0], lr=[0.1, rate], steps=2),
        lambda: MAML(nn.Linear(4, 2), lr=rate),
        lambda: MetaSGD(nn.Linear(4, 2), lrs=[torch.full((2, 4), lr), torch.ones(2)]),
        lambda: adapted_clone(set_later()),
        lambda: set_later().losses((X, Y), (X, Y)),
        lambda: meta_sgd().backward((X, Y), (X, Y)),
        lambda: meta_sgd().adapted((X[0], Y[0])),
    ]
    for way in ways:
        with pytest.raises(InputError, match=r"^lr.* holds NaN or infinity; give finite rates$"):
            way()


@pytest.mark.parametrize("lr", [-0.1, 0.0])
def test_learned_rates_start_above_zero_given_as_a_tensor_too(lr: float) -> None:
    for kind in (MetaSGD, partial(MAML, learn_rates=True)):
        with pytest.raises(InputError, match=r"lr is -?0\.[01]\d*; give a number above 0"):
            kind(nn.Linear(4, 2), lr=torch.tensor(lr))


@pytest.mark.parametrize("lr", [torch.tensor(True), torch.tensor(0.1j)])
def test_tensors_of_rates_hold_real_numbers(lr: Tensor) -> None:
    with pytest.raises(InputError, match=r"lr is of torch\.(bool|complex64); give a number above 0"):
        MAML(nn.Linear(4, 2), lr=lr).losses((X, Y), (X, Y))


@pytest.mark.parametrize("kind", [torch.uint8, torch.int16, torch.int32, torch.uint16, torch.bool, torch.float32, list])
@pytest.mark.parametrize(
    "learner", [MAML, FOMAML, ANIL, Reptile, MetaSGD, lambda net, _: ProtoNet(net), lambda net, _: R2D2(net)]
)
@pytest.mark.parametrize("of_query", [True, False])
def test_labels_are_int64_in_every_learner(learner: Any, kind: Any, of_query: bool) -> None:
    wrong = Y.tolist() if kind is list else Y.to(kind)
    net = learner(nn.Sequential(nn.Linear(4, 2)), 0.1)
    parts = ((X, Y), (X, wrong)) if of_query else ((X, wrong), (X, Y))
    for call in (net.losses, net.backward):
        with pytest.raises(InputError, match=r"^(labels are|query is|support is) .*[;:].* give"):
            call(*parts)
    classifier = Classifier(nn.Identity(), 4, 2)
    with pytest.raises(InputError, match=r"^(labels are|support is) .*; give"):
        classifier.backward((X, wrong))


def test_labels_of_a_classifier_are_those_of_its_classes_and_rows() -> None:
    for wrong in (Y + 5, torch.full_like(Y, -100), Y[:, :1]):
        with pytest.raises(
            InputError, match=r"labels are .*; give whole numbers 0\.\.1|support is .* give \(3, N, \.\.\.\)"
        ):
            Classifier(nn.Identity(), 4, 2).backward((X, wrong))


def test_queries_without_labels_are_predicted() -> None:
    assert MAML(nn.Linear(4, 2), lr=0.1).logits((X, Y), (X, None)).shape == (*Y.shape, 2)


def test_a_clone_takes_rates_by_name_and_none_by_step() -> None:
    net = nn.Linear(4, 2)
    both, one = (adapted_clone(MAML(net, lr=lr)).module for lr in ({"weight": 0.2, "bias": torch.tensor(0.1)}, 0.1))
    torch.testing.assert_close(both.weight - net.weight, 2 * (one.weight - net.weight))
    torch.testing.assert_close(both.bias, one.bias)
    with pytest.raises(InputError, match=r"lr has shape \(2,\), which does not fit \(\)"):
        adapted_clone(MAML(net, lr=torch.tensor([0.1, 0.2]), steps=2))
    with pytest.raises(InputError, match="lr has no entry for bias"):
        adapted_clone(MAML(net, lr={"weight": 0.1}))


def test_a_batch_that_is_no_pair_is_refused() -> None:
    with pytest.raises(InputError, match=r"support and query are \(x, y\) each, not a Tensor"):
        MAML(nn.Linear(4, 2), lr=0.1).backward(X, X)


def test_a_learner_names_the_part_that_is_compiled() -> None:
    net: Any = torch.compile(nn.Linear(4, 2))
    compiled = MAML(net, lr=0.1)
    with pytest.raises(InputError, match="the OptimizedModule is compiled"):
        compiled.backward((X, Y), (X, Y))
    with pytest.raises(InputError, match="is compiled"):
        CompiledMeta(compiled).backward((X, Y), (X, Y))


LEARNERS: list[Callable[..., Any]] = [
    lambda net, **options: MAML(net, lr=0.1, **options),
    lambda net, **options: ANIL(net, lr=0.1, **options),
    lambda net, **options: MetaSGD(net, lr=0.1, **options),
    ProtoNet,
]


@pytest.mark.parametrize("make", LEARNERS)
@pytest.mark.parametrize("way", ["losses", "backward", "logits"])
def test_empty_tasks_and_meta_tensors_are_refused(make: Callable[..., Any], way: str) -> None:
    call, whole = getattr(make(nn.Sequential(nn.Linear(4, 2))), way), (X, Y)
    for none in ((X[:, :0], Y[:, :0]), (X[:0], Y[:0])):
        for given in ((none, whole), (whole, none)):
            with pytest.raises(InputError, match="one of their tensors is empty"):
                call(*given)
    if make is not ProtoNet:  # which is no inner loop: PyTorch itself refuses
        for given in (((X.to("meta"), Y), whole), (whole, (X.to("meta"), Y))):
            with pytest.raises(InputError, match="on the meta device, where tensors have no values"):
                call(*given)


@pytest.mark.parametrize("make", LEARNERS)
@pytest.mark.parametrize("net", [None, "net", torch.relu])
def test_what_is_no_module_is_refused(make: Callable[..., Any], net: Any) -> None:
    with pytest.raises(InputError, match="model must be a torch module, not a "):
        make(net)


def test_a_loss_is_a_function() -> None:
    with pytest.raises(InputError, match="loss is 'mse'; give a function"):
        MAML(nn.Linear(4, 2), lr=0.1, loss="mse")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("support", "query", "message"),
    [
        ((X, Y[:, :3]), (X, Y), r"support is x \(3, 6, 4\) and y \(3, 3\); give \(3, N, ...\) and \(3, N\)"),
        ((X, Y), (X, Y[:, :3]), "query is x"),
        ((X, Y), (X[:2], Y[:2]), r"query is x \(2, 6, 4\) and y \(2, 6\); give \(3, N"),
        ((X[0], Y[0]), (X[0], Y[0]), r"support is x \(6, 4\) and y \(6,\)"),
        (([1], [2]), (X, Y), "support is x list and y list"),
        ((X, Y), (X.numpy(), Y), "query is x ndarray"),
    ],
)
def test_protonet_names_the_part_that_does_not_fit(support: Any, query: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        ProtoNet(nn.Linear(4, 2)).losses(support, query)


def without_labels(one: bool, mark: int = -100) -> Tensor:
    """Labels of three tasks, all of one or of all of them not to be counted."""
    return torch.where(torch.arange(3)[:, None] < (1 if one else 3), mark, Y)


@pytest.mark.parametrize("learner", [MAML, FOMAML, ANIL, Reptile, MetaSGD])
@pytest.mark.parametrize("one", [True, False])
@pytest.mark.parametrize("mark", [-100, 1])
def test_tasks_whose_labels_are_all_ignored_are_refused(learner: Any, one: bool, mark: int) -> None:
    loss = F.cross_entropy if mark == -100 else nn.CrossEntropyLoss(ignore_index=mark)
    net, none = learner(nn.Sequential(nn.Linear(4, 2)), 0.1, loss=loss), without_labels(one, mark)
    for call in (net.losses, net.backward):
        for name, parts in (("support", ((X, none), (X, Y))), ("query", ((X, Y), (X, none)))):
            with pytest.raises(InputError, match=rf"^all {name} labels of a task are {mark}, which the loss ignores;"):
                call(*parts)
    for predict in (lambda: net.logits((X, none), (X, Y)), lambda: net.adapted((X[0], none[0]))):
        with pytest.raises(InputError, match=f"^all support labels of a task are {mark}, which the loss ignores;"):
            predict()


def test_examples_whose_labels_are_ignored_are_as_if_they_were_not_there() -> None:
    net = MAML(nn.Linear(4, 2), lr=0.1)
    some = Y.clone()
    some[:, 4:] = -100
    found, expected = net.losses((X, some), (X, some)), net.losses((X[:, :4], Y[:, :4]), (X[:, :4], Y[:, :4]))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("engine", ["loop", "vmap", "higher", "learn2learn"])
@pytest.mark.parametrize("order", [1, 2])
def test_a_loss_of_ignored_labels_alone_adapts_nothing_and_is_refused(engine: str, order: int) -> None:
    if engine in ("higher", "learn2learn"):
        pytest.importorskip(engine)
    start = {"w": torch.randn(2, 4, requires_grad=True)}
    call = partial(adapt, lambda p, b: F.cross_entropy(b[0] @ p["w"].T, b[1]), start, lr=0.1, order=order, tasks=3)
    for y in (without_labels(one=True), without_labels(one=False)):
        with pytest.raises(InputError, match=r"^the loss is NaN but its gradient is not, .* would adapt nothing"):
            call((X, y), engine=engine)
    learner = MAML(nn.Linear(4, 2), lr=0.1, first_order=order == 1).clone()
    with pytest.raises(InputError, match=r"^the loss is NaN but its gradient is not, .* would adapt nothing"):
        learner.adapt(F.cross_entropy(learner(X[0]), torch.full((6,), -100)))
    assert call((X * torch.nan, Y), engine=engine)["w"].isnan().all()  # what has diverged is seen in the weights


@pytest.mark.parametrize("learner", [MAML, FOMAML, ANIL, Reptile, MetaSGD])
@pytest.mark.parametrize("y", [F.one_hot(Y), F.one_hot(Y, 3), F.one_hot(Y, 3).float(), Y[..., None], Y[:, :4]])
def test_labels_that_do_not_fit_the_outputs_are_told_what_to_be(learner: Any, y: Tensor) -> None:
    net = learner(nn.Sequential(nn.Linear(4, 2)), 0.1)
    told = rf"outputs are \(\d+, 2\) and labels {y.dtype} \(\d.*\) of each task; give class indices \(N,\)"
    for call in (net.losses, net.backward, net.logits):
        with pytest.raises(InputError, match=told):
            call((X, y), (X, y))
    with pytest.raises(InputError, match=told):
        net.adapted((X[0], y[0]))


def test_labels_of_each_place_are_classes_too() -> None:
    y = torch.randint(0, 2, (3, 6, 5))
    losses = [MAML(nn.Conv1d(4, 2, 1), lr=0.1, engine=way) for way in ("loop", "vmap")]
    losses[1].load_state_dict(losses[0].state_dict())
    x = torch.randn(3, 6, 4, 5)
    torch.testing.assert_close(*(maml.losses((x, y), (x, y)) for maml in losses))


REGRESSION: list[tuple[Any, tuple[int, ...]]] = [
    (torch.randn, (3, 6, 1)),
    (torch.randn, (3, 6, 2)),
    (torch.rand, (3, 6, 2)),
    (torch.randn, (3, 6)),
]


@pytest.mark.parametrize(("draw", "shape"), REGRESSION)
@pytest.mark.parametrize("loss", [None, nn.CrossEntropyLoss()])
@pytest.mark.parametrize("way", ["losses", "backward", "logits", "compiled"])
def test_regression_without_its_loss_is_refused_with_what_to_give(draw: Any, shape: Any, loss: Any, way: str) -> None:
    x, y = torch.randn(3, 6, 4), draw(*shape)
    maml = MAML(nn.Linear(4, 2 if shape[-1] == 2 else 1), lr=0.1, **({} if loss is None else {"loss": loss}))
    call = CompiledMeta(maml, backend="eager").backward if way == "compiled" else getattr(maml, way)
    with pytest.raises(InputError, match=r"labels are torch.float32 .* for regression give loss=F.mse_loss"):
        call((x, y), (x, y))
    if len(shape) == 3:
        learned = MAML(maml.module, lr=0.1, loss=nn.functional.mse_loss)
        assert learned.backward((x, y), (x, y)).shape == (3,)
        assert learned.module.weight.grad.abs().sum() > 0


PAIRED = [nn.functional.mse_loss, nn.functional.huber_loss, nn.MSELoss(), nn.L1Loss(), nn.SmoothL1Loss()]


@pytest.mark.parametrize("loss", PAIRED)
@pytest.mark.parametrize("engine", ["loop", "vmap", "compiled"])
def test_outputs_and_labels_of_other_shapes_are_not_broadcast(loss: Any, engine: str) -> None:
    x, y = torch.randn(3, 6, 4), torch.randn(3, 6)
    maml = MAML(nn.Linear(4, 1), lr=0.1, loss=loss, engine="auto" if engine == "compiled" else engine)
    call = CompiledMeta(maml, backend="eager").backward if engine == "compiled" else maml.backward
    with pytest.raises(
        InputError, match=r"outputs are \(6, 1\) and labels torch.float32 \(6,\) of each task; this loss"
    ):
        call((x, y), (x, y))
    assert call((x, y[..., None]), (x, y[..., None])).shape == (3,)


def test_probabilities_are_labels_of_cross_entropy() -> None:
    x, y = torch.randn(3, 6, 4), torch.rand(3, 6, 5).softmax(-1)
    found = [MAML(nn.Linear(4, 5), lr=0.1, engine=engine) for engine in ("loop", "auto")]
    found[1].load_state_dict(found[0].state_dict())
    torch.testing.assert_close(*(maml.losses((x, y), (x, y)) for maml in found))


EPISODES: dict[str, tuple[Any, Any]] = {
    "images": (torch.randn(6, 1, 4, 4), torch.arange(2).repeat(3)),
    "vectors": (torch.randn(6, 4), torch.arange(2).repeat(3)),
    "words": (torch.randint(0, 9, (6, 5)), torch.arange(2).repeat(3)),
    "named inputs": ({"ids": torch.randint(0, 9, (6, 5))}, torch.arange(2).repeat(3)),
    "regression": (torch.randn(6, 4), torch.randn(6, 1)),
    "regression of numbers": (torch.randn(6, 1), torch.randn(6, 1)),
    "regression, labels (N,)": (torch.randn(6, 4), torch.randn(6)),
    "a number": (torch.randn(4), torch.tensor(1)),
}


@pytest.mark.parametrize("way", ["losses", "backward", "logits", "compiled"])
@pytest.mark.parametrize("name", EPISODES)
def test_one_episode_in_place_of_tasks_is_refused_in_one_line(name: str, way: str) -> None:
    part, functional = EPISODES[name], nn.functional
    loss = functional.mse_loss if "regression" in name else functional.cross_entropy
    maml = MAML(nn.Linear(4, 2), lr=0.1, loss=loss)
    call = CompiledMeta(maml, backend="eager").backward if way == "compiled" else getattr(maml, way)
    with pytest.raises(InputError, match=r"is one episode; .* of one episode x\[None\] and y\[None\]"):
        call(part, part)
    if way != "compiled":
        with pytest.raises(InputError, match=r"give \(|give whole numbers"):
            getattr(ProtoNet(nn.Linear(4, 2)), way)(part, part)


def test_labels_in_numbers_are_no_classes_of_a_prototypical_network() -> None:
    x, y = torch.randn(3, 6, 4), torch.rand(3, 6)
    for way in ("losses", "backward", "logits"):
        with pytest.raises(InputError, match=r"labels are torch.float32; give whole numbers 0..W-1"):
            getattr(ProtoNet(nn.Linear(4, 2)), way)((x, y), (x, y))
    with pytest.raises(InputError, match="give whole numbers"):
        ProtoNet(nn.Linear(4, 2)).adapt(x[0], y[0])


def test_a_single_label_for_all_support_rows_is_refused() -> None:
    with pytest.raises(InputError, match="support labels are a single number"):
        MAML(nn.Linear(3, 2), lr=0.1).adapted((torch.ones(1, 3), torch.tensor(1)))
