"""The prompts rows of the speed benchmark: the contenders agree, and all of them run."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import speed_prompts
import torch
from torch.nn.functional import rms_norm

from benchmarks import run_speed
from benchmarks.speed_prompts import PromptWork


def test_the_contenders_agree_and_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    small = functools.partial(speed_prompts.PromptWork, tasks=4, shots=2, length=10)
    monkeypatch.setattr(speed_prompts, "PromptWork", small)
    out = tmp_path / "speed.json"
    assert run_speed.main(["--smoke", "--rows", "prompts", "--out", str(out)]) == 0
    results = json.loads(out.read_text())["rows"]
    assert {result["row"] for result in results} == {"prompts-t5-base", "prompts-smollm2"}
    ran = [result for result in results if not result["missing"]]
    assert len(ran) == 6  # bf16 is timed on a GPU alone
    assert all(result["difference"] < 1e-8 and result["median"] > 0 for result in ran)


@pytest.mark.parametrize(("kind", "heads", "length"), [("t5", 3, 140), ("llama", 6, 20)])
def test_jax_takes_the_same_outer_step(kind: str, heads: int, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jax")
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.t5.modeling_t5 import T5LayerNorm

    from benchmarks.speed_prompts_jax import outer_step_of_jax

    def exact(norm: Any, x: torch.Tensor) -> torch.Tensor:  # transformers rounds to float32 here
        return rms_norm(x, x.shape[-1:], norm.weight, norm.variance_epsilon)

    for norm in (LlamaRMSNorm, T5LayerNorm):
        monkeypatch.setattr(norm, "forward", exact)
    work = PromptWork(kind, 2, 24, heads, 48, 1_500, tasks=3, shots=2, length=length, width=7)
    maml = work.learner("cpu", torch.float64, None)
    support, query = work.rows(1, "cpu"), work.rows(2, "cpu")
    losses, expected = maml.backward(support, query).sum(), maml.prompt.weight.grad
    assert expected is not None
    loss, gradient = outer_step_of_jax(maml)(support, query)
    assert float(loss) == pytest.approx(float(losses), rel=1e-12)
    assert (torch.tensor(gradient.__array__()) - expected).norm() / expected.norm() < 1e-12
    maml.zero_grad()
    maml.order = 1
    maml.backward(support, query)
    first = maml.prompt.weight.grad
    assert first is not None and (first - expected).norm() / expected.norm() > 1e-6  # the second order is seen
