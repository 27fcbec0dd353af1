"""Ctrl-C during the imports of a script or of the command."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from metapretrain.options import INTERRUPTED, STOPPED, interrupt, main_guard

ROOT = Path(__file__).parents[2]
FILES = [*sorted((ROOT / "benchmarks").glob("*.py")), ROOT / "docs" / "build_results.py"]
SCRIPTS = [
    str(file.relative_to(ROOT))
    for file in FILES
    if re.search(r"^@main_guard|script_main\(", file.read_text("utf-8"), re.M)
]


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc to see how far the imports are")
@pytest.mark.parametrize("command", [*([script, "--help"] for script in SCRIPTS), ["-m", "metapretrain", "doctor"]])
def test_ctrl_c_during_imports_is_one_line(command: list[str]) -> None:
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # which tests in a shell's background would not be
    options: dict[str, Any] = {"cwd": ROOT, "stdout": -1, "stderr": -1, "text": True, "preexec_fn": heard}
    process = subprocess.Popen([sys.executable, *command], **options)
    maps, until = Path(f"/proc/{process.pid}/maps"), time.monotonic() + 60
    while process.poll() is None and time.monotonic() < until and "libtorch_cpu" not in maps.read_text():
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == ("", f"{STOPPED}\n")
    assert process.returncode == INTERRUPTED


def test_main_guard_has_a_keyboard_interrupt_and_puts_the_handler_back() -> None:
    seen = []

    @main_guard
    def main(argv: object = None) -> int:
        seen.append(signal.getsignal(signal.SIGINT))
        signal.raise_signal(signal.SIGINT)
        return 0

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert main([]) == INTERRUPTED
        assert (seen, signal.getsignal(signal.SIGINT)) == ([interrupt], signal.default_int_handler)
    finally:
        signal.signal(signal.SIGINT, before)
