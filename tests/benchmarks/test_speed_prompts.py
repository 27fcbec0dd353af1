"""The prompts rows of the speed benchmark: the contenders agree, and all of them run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import run_speed


def test_the_contenders_agree_and_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    out = tmp_path / "speed.json"
    assert run_speed.main(["--smoke", "--rows", "prompts", "--out", str(out)]) == 0
    results = json.loads(out.read_text())["rows"]
    assert {result["row"] for result in results} == {"prompts-t5-base", "prompts-smollm2"}
    ran = [result for result in results if not result["missing"]]
    assert len(ran) == 6  # bf16 is timed on a GPU alone
    assert all(result["difference"] < 1e-8 and result["median"] > 0 for result in ran)
