"""Which engine `auto` takes, where it falls back, what it says, and that it leaves no trace."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from metapretrain import MAML
from metapretrain.maml import adapt, engine_for, functional, meta_backward, meta_loss, meta_outputs
from tests.maml.nets import TASKS, gradient, loss_of, relative, transformer
from tests.maml.nets import tokens as tokens_of_tasks

TRACE = "attempting to use a Tensor in some data-dependent control flow"


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.lstm(x)[0][:, -1]
        return out


def tokens() -> dict[str, Tensor]:
    ids = torch.randint(0, 40, (3, 4, 5), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def bert() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=40,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=8,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForSequenceClassification(config)


def t5() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        vocab_size=40, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, dropout_rate=0.0, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


def choice_of(net: nn.Module, x: Tensor) -> Any:
    apply, params, buffers = functional(net)
    loss: Any = lambda params, x: apply(params, buffers, x).square().mean()  # noqa: E731
    return engine_for(loss, params, x, lr=0.1, tasks=len(x))


def test_auto_takes_vmap_for_small_tasks_and_the_loop_for_large_ones_on_a_cpu() -> None:
    assert choice_of(nn.Linear(3, 2), torch.ones(4, 5, 3)).engine == "vmap"
    assert choice_of(nn.Linear(3, 2), torch.ones(1, 5, 3)) == ("loop", "a single task")
    assert choice_of(nn.Linear(1000, 1000), torch.ones(4, 5, 1000)).engine == "loop"
    conv = nn.Sequential(nn.Conv2d(3, 32, 3), nn.Conv2d(32, 32, 3))
    assert choice_of(conv, torch.ones(2, 2, 3, 16, 16)).engine == "vmap"
    assert choice_of(conv, torch.ones(2, 50, 3, 32, 32)).engine == "loop"
    assert choice_of(conv, torch.ones(2, 5, 3, 32, 32)).why == "a stack of tasks would hold much more memory than one"


@pytest.mark.parametrize(
    ("make", "data", "reason"),
    [
        (Recurrent, lambda: {"x": torch.ones(3, 4, 6, 3)}, ""),  # torch's words for it differ between versions
        (bert, tokens, TRACE),
        (t5, lambda: {**tokens(), "decoder_input_ids": tokens()["input_ids"][..., :2]}, TRACE),
    ],
)
def test_auto_falls_back_to_the_loop_where_vmap_cannot_trace_and_says_so_once(
    make: Callable[[], Any], data: Callable[[], Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    net, x = make(), data()
    apply, params, buffers = functional(net)

    def loss_fn(params: Any, x: Any) -> Tensor:
        out = apply(params, buffers, **x)
        return getattr(out, "logits", out).square().mean()  # type: ignore[no-any-return]

    with caplog.at_level(logging.DEBUG, logger="metapretrain.maml"):
        fast = adapt(loss_fn, params, x, lr=0.1, tasks=3, allow_unused=True)
        adapt(loss_fn, params, x, lr=0.1, tasks=3, allow_unused=True)
    expected = adapt(loss_fn, params, x, lr=0.1, tasks=3, allow_unused=True, engine="loop")
    assert all(torch.equal(fast[name], expected[name]) for name in params)
    (said,) = [record.getMessage() for record in caplog.records if record.name.startswith("metapretrain")]
    assert said.startswith("engine loop: vmap is not possible (")
    assert reason in said


def test_batch_normalisation_that_tracks_falls_back_unless_it_comes_from_functional() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    before = {name: value.clone() for name, value in net.state_dict().items()}

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        out: Tensor = functional_call(net, params, (x,)).square().mean()
        return out

    x = torch.randn(3, 4, 3, generator=torch.Generator().manual_seed(1))
    choice = engine_for(loss_fn, dict(net.named_parameters()), x, lr=0.1, tasks=3)
    assert choice.engine == "loop"
    assert "running_mean or running_var, which will be updated in place, were not batched" in choice.why
    assert choice_of(net, x).engine == "vmap"
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_a_loss_that_needs_no_data_is_adapted_to() -> None:
    def loss_fn(w: Tensor, _: Any) -> Tensor:
        return (w - 1).square()

    adapted = adapt(loss_fn, torch.tensor(3.0, requires_grad=True), None, tasks=3, lr=0.1)
    torch.testing.assert_close(adapted.detach(), torch.tensor([2.6, 2.6, 2.6]))


def test_a_learner_says_at_debug_level_which_engine_it_takes(caplog: pytest.LogCaptureFixture) -> None:
    x, y = torch.randn(3, 4, 7), torch.arange(2).repeat(3, 2)
    with caplog.at_level(logging.DEBUG, logger="metapretrain.maml"):
        MAML(nn.Linear(7, 2), lr=0.1).losses((x, y), (x, y))
    (record,) = caplog.records
    assert record.levelno == logging.DEBUG
    assert record.getMessage() == "engine vmap: all tasks in one forward pass on cpu"


def test_auto_takes_vmap_for_transformer_layers_in_evaluation_mode() -> None:
    net, before = transformer().eval(), torch.backends.mha.get_fastpath_enabled()
    loss_fn, params = loss_of(net)
    batch, options = tokens_of_tasks(2, 0), dict[str, Any](lr=0.1, tasks=TASKS, steps=2)
    assert engine_for(loss_fn, params, batch, **options).engine == "vmap"
    found = [gradient(meta_loss(loss_fn, params, batch, batch, engine=e, **options), params) for e in ("vmap", "loop")]
    assert relative(*found) < 1e-10
    assert torch.backends.mha.get_fastpath_enabled() == before


def test_auto_does_not_take_vmap_where_it_gives_another_gradient() -> None:
    calls = []

    def counted(w: Tensor, x: Tensor) -> Tensor:
        calls.append(0)  # the loop calls it once a task, vmap once for all
        return F.mse_loss(w, x) * len(calls)

    choice = engine_for(counted, torch.ones(3), torch.zeros(4, 3), lr=0.1, tasks=4)
    assert choice.engine == "loop"
    assert "by vmap the gradient differs" in choice.why


def test_the_probe_leaves_no_trace() -> None:
    net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    assert choice_of(net, torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(1))).engine == "vmap"
    assert torch.equal(torch.rand(4), expected)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())


def test_tf32_is_off_while_the_engines_are_compared_and_as_before_after_it() -> None:
    backends: tuple[Any, ...] = torch.backends.cuda.matmul, torch.backends.cudnn
    before, seen = [backend.allow_tf32 for backend in backends], []

    def loss(w: Tensor, x: Tensor) -> Tensor:
        seen.append([backend.allow_tf32 for backend in backends])
        return F.mse_loss(w, x)

    torch.backends.cudnn.allow_tf32 = True
    assert engine_for(loss, torch.ones(3), torch.zeros(4, 3), lr=0.1, tasks=4).engine == "vmap"
    assert seen
    assert not any(flag for flags in seen for flag in flags)
    assert torch.backends.cudnn.allow_tf32
    for backend, flag in zip(backends, before, strict=True):
        backend.allow_tf32 = flag


def looked_at(loss: Tensor, look: bool) -> Tensor:
    """The loss; with `look` its value is read, which vmap cannot do."""
    return loss * (2.0 if look and float(loss.detach()) > 1e9 else 1.0)


class Looking(nn.Module):
    """A network, or a loss, that reads values or does not, by its state."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.options = nn.Linear(3, 2), {"look": False}

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return looked_at(out.sum(), self.options["look"] and self.training) * 0 + out

    def squared(self, params: Any, x: Tensor) -> Tensor:
        return looked_at((x * params["w"]).square().mean(), self.options["look"])


def plain_loss(params: Any, x: Tensor, look: bool = False) -> Tensor:
    return looked_at((x * params["w"]).square().mean(), look)


LOOK = False


def global_loss(params: Any, x: Tensor) -> Tensor:
    return (lambda: looked_at((x * params["w"]).square().mean(), LOOK))()


def closure(look: bool) -> Any:
    return lambda params, x: plain_loss(params, x, look)


def default(look: bool) -> Any:
    def loss(params: Any, x: Tensor, flag: bool = look) -> Tensor:
        return plain_loss(params, x, flag)

    return loss


def wide(function: Any) -> Any:
    """The state deep inside closures and containers."""
    return lambda params, x: [function][0](params, x)


def methods(look: bool) -> Any:
    owner = Looking()
    owner.options["look"] = look
    return owner.squared


def of_global(look: bool) -> Any:
    globals()["LOOK"] = look
    return global_loss


def engine_of(loss: Any, x: Tensor | None = None, **options: Any) -> str:
    x = torch.ones(3, 4, 3) if x is None else x
    return engine_for(loss, {"w": torch.ones(3)}, x, lr=0.1, tasks=3, **options).engine


@pytest.mark.parametrize(
    "make",
    [
        closure,
        default,
        methods,
        of_global,
        lambda look: partial(plain_loss, look=look),
        lambda look: wide(closure(look)),
        lambda look: partial(wide(partial(plain_loss, look=look))),
    ],
)
def test_an_answer_is_not_taken_for_another_state_of_the_loss(make: Callable[[bool], Any]) -> None:
    assert [engine_of(make(look)) for look in (False, True, False, True)] == ["vmap", "loop", "vmap", "loop"]


def test_an_answer_is_not_taken_for_another_state_of_a_learner() -> None:
    net, x, y = Looking(), torch.randn(3, 4, 3), torch.arange(2).repeat(3, 2)
    maml = MAML(net, lr=0.1)
    expected = MAML(net, lr=0.1, engine="loop").losses((x, y), (x, y))
    torch.testing.assert_close(maml.losses((x, y), (x, y)), expected)
    net.options["look"] = True
    torch.testing.assert_close(maml.losses((x, y), (x, y)), expected)
    torch.testing.assert_close(maml.eval().losses((x, y), (x, y)), expected)
    for loss in (nn.CrossEntropyLoss(), nn.CrossEntropyLoss(torch.tensor([1.0, 2.0]), label_smoothing=0.1)):
        auto, loop = (MAML(nn.Linear(3, 2), 0.1, loss=loss, engine=engine) for engine in ("auto", "loop"))
        loop.load_state_dict(auto.state_dict())
        torch.testing.assert_close(auto.losses((x, y), (x, y)), loop.losses((x, y), (x, y)))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 0.0])
def test_an_answer_from_a_gradient_that_says_nothing_is_not_kept(bad: float) -> None:
    loss = numbered(str(bad))
    assert engine_of(loss, torch.full((3, 4, 3), bad)) == "loop"
    assert engine_of(loss) == "vmap"


def test_the_query_part_is_tried_as_well() -> None:
    x, w = torch.ones(3, 4, 3), torch.ones(3, requires_grad=True)
    inner, outer = closure(False), closure(True)
    choice = engine_for(inner, {"w": w}, x, x, query_loss=outer, lr=0.1, tasks=3)
    assert choice.engine == "mixed"
    assert choice.why.startswith("of the query part: vmap is not possible (")
    assert engine_for(inner, {"w": w}, x, x, lr=0.1, tasks=3).engine == "vmap"
    assert engine_for(outer, {"w": w}, x, x, query_loss=inner, lr=0.1, tasks=3).engine == "loop"
    options: Any = {"tasks": 3, "lr": 0.1}
    losses = meta_loss(inner, {"w": w}, x, x, query_loss=outer, **options)
    torch.testing.assert_close(losses, meta_loss(inner, {"w": w}, x, x, query_loss=outer, engine="loop", **options))
    torch.testing.assert_close(losses, meta_backward(inner, {"w": w}, x, x, query_loss=outer, **options))
    outputs = meta_outputs(inner, {"w": w}, x, x, lambda p, x: outer(p, x)[None].expand(2), **options)
    torch.testing.assert_close(outputs, losses[:, None].expand(3, 2))
    labels = meta_outputs(inner, {"w": w}, x, x, lambda p, x: (x * p["w"]).argmax(1), **options)
    assert labels.shape == (3, 4)


def test_each_tensor_of_the_gradient_is_compared_by_itself() -> None:
    calls = []

    def loss(params: Any, x: Tensor) -> Tensor:
        calls.append(0)  # the third call is vmap's
        return (x * params["w"]).sum() + 0.2 * (3.0 if len(calls) == 3 else 1.0) * (params["b"] - 1).sum()

    params = {"w": torch.ones(3), "b": torch.ones(1)}  # gradients of norms 21 and 0.2, the loss itself is the same
    choice = engine_for(loss, params, torch.full((3, 4, 3), 3.0), lr=0.1, tasks=3)
    assert (choice.engine, choice.why[:28]) == ("loop", "by vmap the gradient differs")


def test_few_answers_are_kept() -> None:
    module = importlib.import_module("metapretrain.maml.adapt")
    for number in range(module.KEPT + 5):
        engine_of(numbered(number))
    assert len(module._answers) <= module.KEPT


def numbered(number: object) -> Any:
    return lambda params, x: plain_loss(params, x) * (2 if number else 1)
