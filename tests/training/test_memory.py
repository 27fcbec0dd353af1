"""The line of a run that is out of memory: who holds it, and what to do."""

from __future__ import annotations

import pytest
import torch

from metapretrain.training.environment import GIB, memory_held, out_of_memory


def test_what_others_hold_is_told_where_it_is_more_than_a_context() -> None:
    shared = out_of_memory("cuda:1", 400, 1 * GIB // 2, 80 * GIB, 12 * GIB)
    assert "out of memory on cuda:1 at step 400 (12.0 of 80.0 GiB are held by this process, about 67.5 by oth" in shared
    assert "--resume" in shared and "batch_size" in shared and "\n" not in shared
    alone = out_of_memory("cuda", 3, 1 * GIB, 80 * GIB, 78 * GIB + GIB // 2)
    assert "(78.5 of 80.0 GiB are held by this process): lower the batch size" in alone
    assert "others" not in out_of_memory("cuda", 3, 2 * GIB, 80 * GIB, 79 * GIB)  # read at different moments
    assert out_of_memory("cpu", 3, 0, 0, 0).startswith("out of memory on cpu at step 3: lower the batch size")


def test_a_query_that_fails_leaves_the_plain_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(device: torch.device) -> tuple[int, int]:
        raise RuntimeError("CUDA error: out of memory")

    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 5)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1, 9))
    assert memory_held(device) == (1, 9, 5)
    monkeypatch.setattr(torch.cuda, "mem_get_info", fails)
    assert memory_held(device) == (0, 0, 0)
