"""The guide to episodes over one's own data runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

GUIDE = Path(__file__).parents[2] / "docs" / "custom-episodes.md"


def test_the_guide_runs_and_ends_with_an_interval(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")
    blocks = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert blocks
    names: dict[str, Any] = {"__name__": "guide"}
    for number, block in enumerate(blocks):
        exec(compile(block, f"{GUIDE.name} block {number}", "exec"), names)
    assert re.search(r"\d+\.\d+% \+- \d+\.\d+%", capsys.readouterr().out)
    assert names["result"].ci95 > 0
