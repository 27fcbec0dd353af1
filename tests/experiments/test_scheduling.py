"""What experiments add to schedulers: probes of rows, in the precision of training."""

from __future__ import annotations

import torch
from torch import nn

from metapretrain.experiments.recipe import probing, row_probe


def test_a_probe_draws_rows_of_which_no_two_are_the_same() -> None:
    probe = row_probe(10, 4, lambda rows: rows.float().mean())
    drawn = [probe.sample(torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)]
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    assert all(len(set(rows.tolist())) == 4 and int(rows.max()) < 10 for rows in drawn)
    assert len(row_probe(3, 4, probe.loss).sample(torch.Generator())) == 3


def test_probing_computes_in_the_precision_of_training() -> None:
    line, x = nn.Linear(2, 2), torch.ones(1, 2)
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        with probing("cpu", precision):
            assert line(x).dtype == dtype
