"""Learners over all sorts of modules, in batches of tasks and by clone() and adapt()."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from metapretrain import ANIL, FOMAML, MAML, Batch, EpisodeSampler, EpisodeSpec, MetaSGD, ProtoNet, evaluate_episodes
from metapretrain.errors import InputError
from metapretrain.maml.learner import pair
from metapretrain.nests import map_tensors
from tests.maml.nets import TASKS, WAYS, cnn, flat, images, relative, task
from tests.maml.test_normalisation import Tied

Y = torch.arange(WAYS).repeat(TASKS, 2)


def rows(*shape: int, seed: int = 0) -> Tensor:
    made = torch.randn(TASKS, 2 * WAYS, *shape, generator=torch.Generator().manual_seed(seed))
    return made.double()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, WAYS)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.lstm(x)[0][:, -1])
        return out


def bert() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=40,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=8,
        num_labels=WAYS,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForSequenceClassification(config)


def sentences() -> Any:
    ids = torch.randint(0, 40, (TASKS, 2 * WAYS, 5), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def resnet() -> Any:
    models = pytest.importorskip("torchvision").models.resnet
    return models.ResNet(models.BasicBlock, [1, 1, 1, 1], num_classes=WAYS)


def of_learn2learn(name: str, **options: Any) -> Any:
    models = pytest.importorskip("learn2learn", exc_type=ImportError).vision.models
    return getattr(models, name)(WAYS, hidden_size=4, **options)


def parametrised() -> nn.Module:
    weight_norm, orthogonal = nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.orthogonal
    return nn.Sequential(weight_norm(nn.Linear(4, 4)), nn.Tanh(), orthogonal(nn.Linear(4, 4)), nn.Linear(4, 3))


MODULES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "cnn": (cnn, lambda: rows(1, 8, 8)),
    "tied": (Tied, lambda: rows(3)),
    "parametrised": (parametrised, lambda: rows(4)),
    "lstm": (Recurrent, lambda: rows(3, 4)),
    "bert": (bert, sentences),
    "resnet": (resnet, lambda: rows(3, 16, 16)),
    "learn2learn CNN4": (lambda: of_learn2learn("CNN4", embedding_size=16), lambda: rows(3, 32, 32)),
    "learn2learn OmniglotCNN": (lambda: of_learn2learn("OmniglotCNN"), lambda: rows(1, 28, 28)),
}


def call(learner: Any, x: Any) -> Tensor:
    out: Tensor = learner(**x).logits if isinstance(x, dict) else learner(x)
    return out


def as_a_script(maml: Any, support: Any, query: Any, steps: int) -> Tensor:
    """The meta-gradient by clone() and adapt(), as scripts of learn2learn compute it."""
    maml.zero_grad()
    for t in range(TASKS):
        learner = maml.clone()
        x, y = task(support, t)
        for _ in range(steps):
            learner.adapt(F.cross_entropy(call(learner, x), y))
        x, y = task(query, t)
        (F.cross_entropy(call(learner, x), y) / TASKS).backward()
    return flat([p.grad for p in maml.parameters()])


@pytest.mark.parametrize("name", list(MODULES))
def test_batches_of_tasks_give_the_gradient_of_clone_and_adapt(name: str) -> None:
    make, data = MODULES[name]
    torch.manual_seed(0)
    module = make().double()
    before = copy.deepcopy(module.state_dict())
    support = data(), Y
    query = map_tensors(lambda x: x.flip(1), support)
    steps = 1 if name == "resnet" else 2
    maml = MAML(module, lr=0.05, steps=steps)
    losses = maml.backward(support, query)
    assert losses.shape == (TASKS,)
    gradient = flat([p.grad for p in maml.parameters()])
    assert gradient.norm() > 0
    assert relative(as_a_script(maml, support, query, steps), gradient) < 1e-9
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())
    learner = maml.clone()
    for _ in range(steps):
        learner.adapt(F.cross_entropy(call(learner, task(support, 1)[0]), Y[1]))
    logits = maml.logits(support, query)
    torch.testing.assert_close(logits[1], call(learner, task(query, 1)[0]).detach())
    assert logits.shape == (TASKS, 2 * WAYS, WAYS)


def test_learn2learns_meta_sgd_gives_the_same() -> None:
    l2l = pytest.importorskip("learn2learn", exc_type=ImportError)
    support, query = images(2, 0), images(3, 1)
    theirs, ours = l2l.algorithms.MetaSGD(cnn(), lr=0.3), MetaSGD(cnn(), lr=0.3)
    expected = as_a_script(theirs, support, query, 1)
    assert relative(as_a_script(ours, support, query, 1), expected) < 1e-10
    ours.zero_grad()
    ours.backward(support, query)
    assert relative(flat([p.grad for p in ours.parameters()]), expected) < 1e-10
    assert [p.shape for p in ours.lrs] == [p.shape for p in theirs.lrs]


def test_an_anil_script_adapts_a_part_of_the_model() -> None:
    body, head = nn.Linear(4, 4).double(), MAML(nn.Linear(4, WAYS).double(), lr=0.1)
    learner = head.clone()
    x = rows(4)[0]
    learner.adapt(F.cross_entropy(learner(body(x)), Y[0]))
    F.cross_entropy(learner(body(x)), Y[0]).backward()
    whole = ANIL(nn.Sequential(body, head.module), lr=0.1)
    expected = [p.grad.clone() for p in (*body.parameters(), *head.parameters())]
    whole.zero_grad()
    whole.backward((x[None], Y[:1]), (x[None], Y[:1]))
    for p, value in zip(whole.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, value)


def test_first_order_differs_from_second_and_anil_leaves_the_body() -> None:
    support, query = images(2, 0), images(3, 1)
    gradients = {}
    for kind in (MAML, FOMAML, ANIL):
        learner = kind(cnn(), 0.3)
        learner.backward(support, query)
        gradients[kind.__name__] = flat([p.grad for p in learner.parameters()])
    assert relative(gradients["FOMAML"], gradients["MAML"]) > 1e-3
    learner = ANIL(cnn(), 0.3)
    clone = learner.clone()
    x, y = task(support, 0)
    before = {name: p.clone() for name, p in clone.module.named_parameters()}
    clone.adapt(F.cross_entropy(clone(x), y))
    changed = {n for n, p in clone.module.named_parameters() if not torch.equal(p, before[n])}
    assert changed == {"9.weight", "9.bias"}


def test_a_clone_gives_access_to_the_parts_of_the_module() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features, self.head = nn.Linear(3, 3), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.features(x))
            return out

    maml = MAML(Net(), lr=0.5)
    learner = maml.clone()
    x = torch.ones(4, 3)
    learner.adapt(F.cross_entropy(learner(x), torch.tensor([0, 1, 0, 1])))
    torch.testing.assert_close(learner.head(learner.features(x)), learner(x))
    assert torch.equal(maml.features(x), maml.module.features(x))
    with pytest.raises(AttributeError, match="no attribute 'tail'"):
        _ = learner.tail


def test_learned_rates_of_maml_are_parameters() -> None:
    maml = MAML(cnn(), lr=nn.Parameter(torch.full((3,), 0.1).double()), steps=3)
    maml.backward(images(2, 0), images(3, 1))
    assert "lr" in maml.meta_parameters()
    assert maml.lr.grad.abs().min() > 0


def test_a_deep_copy_and_a_move_have_weights_of_their_own() -> None:
    maml = MAML(cnn(), 0.1)
    support, query = images(2, 0), images(3, 1)
    expected = maml.logits(support, query)
    other = copy.deepcopy(maml)
    with torch.no_grad():
        for p in maml.parameters():
            p.zero_()
    assert torch.equal(other.logits(support, query), expected)
    assert maml.float().logits(*(map_tensors(narrow, part) for part in (support, query))).dtype == torch.float32


def narrow(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


class Idle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(3, WAYS), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.used(x)
        return out


def test_unused_and_frozen_parameters_are_named() -> None:
    x, y = torch.randn(TASKS, 6, 3), Y
    maml = MAML(Idle(), lr=0.1)
    with pytest.raises(InputError, match=r"unused in the inner loop: idle\.weight, idle\.bias"):
        maml.losses((x, y), (x, y))
    learner = maml.clone()
    with pytest.raises(InputError, match=r"does not use idle\.weight, idle\.bias"):
        learner.adapt(F.cross_entropy(learner(x[0]), y[0]))
    learner.adapt(F.cross_entropy(learner(x[0]), y[0]), allow_unused=True)
    frozen = nn.Sequential(nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, WAYS))
    with pytest.raises(InputError, match=r"0\.weight, 0\.bias: requires_grad is False; pass allow_nograd"):
        MAML(frozen, lr=0.1).losses((x, y), (x, y))
    for rates in (False, True):
        with pytest.raises(InputError, match=r"nothing adapts: all of 0\.weight, 0\.bias are frozen; see"):
            MAML(frozen, lr=0.1, only="0", allow_nograd=True, learn_rates=rates).losses((x, y), (x, y))
    learner = MAML(frozen, lr=0.1, allow_nograd=True).clone()
    learner.adapt(F.cross_entropy(learner(x[0]), y[0]))
    assert learner.module[0].weight is frozen[0].weight
    assert not torch.equal(learner.module[1].weight, frozen[1].weight)
    learner = MAML(frozen, lr=0.1, allow_nograd=True).clone()
    with pytest.raises(InputError, match="adapt: loss returned shape"):
        learner.adapt(learner(x[0]))
    with pytest.raises(InputError, match="the loss has no gradient"):
        learner.adapt(learner(x[0]).detach().sum())


@pytest.mark.parametrize(
    "make",
    [
        lambda: MAML(encoder(), 0.1),
        lambda: FOMAML(encoder(), 0.1),
        lambda: ANIL(encoder(), 0.1),
        lambda: MetaSGD(encoder(), 0.1),
        lambda: ProtoNet(encoder()),
    ],
)
def test_untrained_learners_score_one_in_n_within_their_interval(make: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    x = torch.randn(20000, 6)
    labels = torch.arange(10).repeat(2000)
    data = torch.utils.data.TensorDataset(x, labels)
    result = evaluate_episodes(make().predict, data, EpisodeSampler(labels, EpisodeSpec(3, 1, 5), episodes=150, seed=0))
    assert abs(result.mean - 1 / 3) < 1.3 * result.ci95
    assert result.ci95 < 0.05


def test_evaluation_by_batches_of_episodes_is_that_one_by_one() -> None:
    data = torch.utils.data.TensorDataset(torch.randn(60, 6), torch.arange(6).repeat(10))
    sampler = EpisodeSampler(data.tensors[1], EpisodeSpec(3, 2, 4), episodes=10, seed=0)
    for learner in (MAML(encoder(), 0.1, steps=2), ProtoNet(encoder()).eval()):
        expected = evaluate_episodes(learner, data, sampler)
        assert evaluate_episodes(learner, data, sampler, batch=4).values == expected.values
        assert evaluate_episodes(learner.predict, data, sampler).values == expected.values
        with pytest.raises(InputError, match="needs a learner with `logits`"):
            evaluate_episodes(learner.predict, data, sampler, batch=4)
    ranged = EpisodeSampler(data.tensors[1], EpisodeSpec(3, (1, 4), 4), episodes=10, seed=0)
    with pytest.raises(InputError, match="differ in their numbers of examples"):
        evaluate_episodes(learner, data, ranged, batch=10)


def encoder() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def test_episodes_that_are_not_stacked_are_refused_with_what_to_do() -> None:
    maml = MAML(nn.Linear(3, 2), lr=0.1)
    parts = [Batch(torch.randn(2, 3), torch.tensor([0, 1])), Batch(torch.randn(4, 3), torch.tensor([0, 1, 0, 1]))]
    with pytest.raises(
        InputError,
        match=r"\(x, y\) each, not a list of 2; several episodes become one batch of tasks by metapretrain.stack",
    ):
        maml.backward(parts, parts)
    with pytest.raises(InputError, match=r"which is one episode; give tasks of them"):
        maml.backward(*parts)


def test_inputs_with_labels_of_their_own_are_no_episode_in_a_batch_with_labels() -> None:
    x = SimpleNamespace(y=torch.ones(2))
    assert pair(SimpleNamespace(x=x, y=torch.ones(2)))[0] is x


class Adjustable(nn.Module):
    """A network with state of every kind outside its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop, self.scale, self.options = nn.Linear(4, WAYS), nn.Dropout(0.0), 1.0, {"shift": 0.0}
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.scale * self.drop(self.linear(x - self.mean)) + self.options["shift"]
        return out.square()


def replaced(net: Any) -> None:
    torch.manual_seed(7)
    net.linear = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, WAYS)).double()


def hooked(net: Any) -> None:
    net.linear.register_forward_hook(lambda module, inputs, output: output + 1)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "an attribute": lambda net: setattr(net, "scale", 3.0),
    "an entry of a dict": lambda net: net.options.update(shift=1.0),
    "a part's attribute": lambda net: setattr(net.drop, "p", 1.0),
    "a layer": replaced,
    "a layer without parameters": lambda net: setattr(net, "drop", nn.Tanh()),
    "a buffer": lambda net: setattr(net, "mean", torch.ones(4, dtype=torch.float64)),
    "a hook": hooked,
    "a method": lambda net: setattr(net, "forward", lambda x: net.linear(x).cos()),
    "a frozen part": lambda net: net.linear.bias.requires_grad_(False),
}


@pytest.mark.parametrize("engine", ["auto", "loop"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_changed_on_the_module_is_seen_at_the_next_call(change: str, engine: str) -> None:
    torch.manual_seed(0)
    net, batch = Adjustable().double(), (rows(4), Y)
    maml = MAML(net, 0.1, steps=2, engine=engine, allow_nograd=True)
    before = [maml.losses(batch, batch), maml.logits(batch, batch), maml.backward(batch, batch)]
    CHANGES[change](net)
    fresh = MAML(net, 0.1, steps=2, engine=engine, allow_nograd=True)
    seen, expected = [], []
    for found, learner in ((seen, maml), (expected, fresh)):
        learner.zero_grad()
        found += [learner.losses(batch, batch), learner.logits(batch, batch), learner.backward(batch, batch)]
        found += [p.grad for p in learner.parameters() if p.grad is not None]
    torch.testing.assert_close(seen, expected, rtol=0, atol=0)
    assert not torch.equal(before[0], seen[0])


def test_a_learner_is_pickled_and_copied_before_and_after_use() -> None:
    batch = (rows(4), Y)
    for make in (
        lambda: MAML(Adjustable().double(), 0.1),
        lambda: MAML(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, WAYS)).double(), 0.1, batchnorm="support"),
        lambda: MetaSGD(nn.Embedding(3, WAYS, padding_idx=0), 0.1),
        lambda: ProtoNet(nn.Linear(4, 5).double()),
    ):
        torch.manual_seed(0)
        learner = make()
        data = (torch.arange(6).repeat(TASKS, 1) % 3, Y) if isinstance(learner, MetaSGD) else batch
        for copied in (pickle.loads(pickle.dumps(learner)), copy.deepcopy(learner)):
            torch.testing.assert_close(copied.eval().losses(data, data), learner.eval().losses(data, data))
        assert copied is not learner


LATER: dict[str, tuple[dict[str, Any], Callable[[Any], Any], str]] = {
    "more steps than rates": ({"learn_rates": True}, lambda m: setattr(m, "steps", 3), "steps is 3, but rates are .*2"),
    "no number of steps": ({"learn_rates": True}, lambda m: setattr(m, "steps", "3"), "steps is '3'"),
    "a word as a truth": ({}, lambda m: setattr(m, "first_order", "False"), "first_order is 'False'; give True or"),
    "a part without shape": ({}, lambda m: m.module.append(nn.LazyLinear(2)), "2.weight, 2.bias: no shape yet"),
}


@pytest.mark.parametrize("engine", ["auto", "loop"])
@pytest.mark.parametrize("change", LATER)
def test_what_is_changed_on_the_learner_and_does_not_fit_is_one_line(change: str, engine: str) -> None:
    options, set_later, message = LATER[change]
    net = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, WAYS)).double()
    maml, batch = MAML(net, 0.1, steps=2, engine=engine, **options), (rows(4), Y)
    maml.backward(batch, batch)
    set_later(maml)
    for call in (maml.backward, maml.losses, *([maml.logits] if "word" not in change else [])):
        with pytest.raises(InputError, match=message):
            call(batch, batch)


def test_fewer_steps_than_rates_take_the_first() -> None:
    batch = (rows(4), Y)
    maml = MAML(nn.Linear(4, WAYS).double(), 0.1, steps=2, learn_rates=True, batchnorm="support")
    maml.steps = 1
    expected = MAML(maml.module, 0.1, steps=1).losses(batch, batch)
    torch.testing.assert_close(maml.losses(batch, batch), expected)


def test_rates_of_meta_sgd_are_of_the_parameters_that_it_was_made_for() -> None:
    learner = MetaSGD(nn.Sequential(nn.Linear(4, WAYS)).double(), 0.1)
    learner.module.append(nn.Linear(WAYS, WAYS).double())
    with pytest.raises(InputError, match="MetaSGD was made for 2 parameters, but the module has 4 now"):
        learner.backward((rows(4), Y), (rows(4), Y))


@pytest.mark.parametrize("kind", [MAML, FOMAML, MetaSGD])
@pytest.mark.parametrize("lr", [torch.tensor(float("nan")), [0.1, torch.tensor(float("inf"))]])
def test_rates_that_are_not_finite_are_refused(kind: Any, lr: Any) -> None:
    with pytest.raises(InputError, match="lr holds NaN or infinity; give finite rates"):
        kind(nn.Linear(4, WAYS), lr)


@pytest.mark.parametrize("engine", ["auto", "loop", "vmap"])
@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (Y.int(), r"labels are torch.int32; give whole numbers 0..W-1 as an int64 tensor, for example y.long\(\)"),
        (Y > 0, "labels are torch.bool; give whole numbers"),
        (Y + WAYS, f"out of bounds.*: labels must be 0 to {WAYS - 1}; or give the module more outputs"),
    ],
)
def test_labels_that_cross_entropy_cannot_take_are_one_line(labels: Tensor, message: str, engine: str) -> None:
    maml = MAML(nn.Linear(4, WAYS).double(), 0.1, engine=engine)
    for call in (maml.backward, maml.losses):
        with pytest.raises(InputError, match=message):
            call((rows(4), labels), (rows(4), Y))
