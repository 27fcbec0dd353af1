"""Which engine `auto` takes, where it falls back, what it says, and that it leaves no trace."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from metapretrain import MAML
from metapretrain.maml import adapt, engine_for, functional, meta_loss
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
    assert choice_of(conv, torch.ones(2, 5, 3, 32, 32)).engine == "vmap"
    assert choice_of(conv, torch.ones(2, 50, 3, 32, 32)).engine == "loop"


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
