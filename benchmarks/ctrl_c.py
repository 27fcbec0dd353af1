"""Ctrl-C during the imports of a script, which take seconds: one line and status 130. It is imported first."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from metapretrain.options import interrupt

script = Path(getattr(sys.modules["__main__"], "__file__", None) or "").resolve()
here = Path(__file__).resolve().parent
if script.parent in (here, here.parent / "docs") and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
    signal.signal(signal.SIGINT, interrupt)
