"""What experiments add to schedulers: probes of rows, in the precision of training."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from metapretrain.experiments.base import Machine
from metapretrain.experiments.recipe import row_probes


def test_a_probe_draws_rows_of_which_no_two_are_the_same() -> None:
    probes = row_probes({"a": (10, 4), "b": (3, 4)}, lambda task, rows: rows.float().mean(), Machine())
    drawn = [probes["a"].sample(torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)]
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    assert all(len(set(rows.tolist())) == 4 and int(rows.max()) < 10 for rows in drawn)
    assert len(probes["b"].sample(torch.Generator())) == 3


def test_probes_compute_in_the_precision_of_training() -> None:
    line, x, seen = nn.Linear(2, 2), torch.ones(1, 2), list[tuple[str, torch.dtype]]()

    def loss(task: str, rows: Tensor) -> Tensor:
        out = line(x)
        seen.append((task, out.dtype))
        return out.sum()

    for precision in ("fp32", "bf16", "fp16"):
        probes = row_probes({"a": (2, 1), "b": (2, 1)}, loss, Machine(precision=precision))
        assert all(probe.loss(torch.zeros(1)).dtype == torch.float32 for probe in probes.values())
    assert seen == [(task, kind) for kind in (torch.float32, torch.bfloat16, torch.float16) for task in "ab"]
