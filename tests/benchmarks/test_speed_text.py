"""The text rows of the speed benchmark: every contender passes the same rows, and all of them run."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import speed_text  # as run_speed.py imports it
import torch

from benchmarks import run_speed

TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
SMALL = speed_text.Size(16, 4, 8, {**TINY, "vocab_size": 1500})


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed_text, "CPU", SMALL)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_all_rows_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "speed.json"
    assert run_speed.main(["--smoke", "--rows", "text", "--out", str(out)]) == 0
    assert "TextStream, CUDA graphs | skipped: needs a CUDA GPU" in capsys.readouterr().out
    results = [row for row in json.loads(out.read_text())["rows"] if not row["missing"]]
    assert Counter(row["row"] for row in results) == {"text-train": 4, "text-embed": 3}
    assert all(row["median"] > 0 and row["unit"] == "tokens" for row in results)


def test_a_pass_has_every_row_once_whoever_makes_it() -> None:
    work = speed_text.Work()
    wanted = {name: sorted(map(tuple, rows)) for name, rows in work.rows.items()}
    assert work.total == sum(len(row) for rows in wanted.values() for row in rows)
    for fixed in (True, False):
        stream, found = work.stream(fixed), dict[str, list[Any]]()
        for _ in range(SMALL.rows // SMALL.batch):
            for name, batch in next(stream).items():
                width = batch["width"].shape[0]
                assert not fixed or width == speed_text.LONGEST
                tokens = work.tokens[name].gather(batch["rows"], width)
                found.setdefault(name, []).extend(unpadded(tokens["input_ids"], tokens["attention_mask"]))
        assert {name: sorted(rows) for name, rows in found.items()} == wanted
    for grouped in (True, False):
        for name, loader in zip(wanted, work.collated(grouped, SMALL.batch), strict=True):
            rows = [row for batch in loader for row in unpadded(batch["input_ids"], batch["attention_mask"])]
            assert sorted(rows) == wanted[name]


def unpadded(ids: torch.Tensor, mask: torch.Tensor) -> list[tuple[int, ...]]:
    return [tuple(row[real == 1].tolist()) for row, real in zip(ids, mask, strict=True)]
