"""``metrics.jsonl``: one line a value, appended; a line torn by a kill is cut."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from metapretrain.training.files import plain, write_all, write_whole

_log = logging.getLogger(__name__)

METRICS = "metrics.jsonl"


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the lines of a run's ``metrics.jsonl`` (``null`` values as NaN); a torn last line is left out.

    A damaged line elsewhere is left out with a warning.

    Example:
        >>> read_metrics("no-such-run")
        []
    """
    file = Path(path) / METRICS
    if not file.exists():
        return []
    lines: list[dict[str, Any]] = []
    bad = 0
    for text in file.read_bytes().split(b"\n")[:-1]:
        try:
            line = json.loads(text)
            value = math.nan if line["value"] is None else float(line["value"])
            if abs(line["step"]) >= 2**63:
                raise ValueError
            found = {"step": int(line["step"]), "split": str(line["split"]), "name": str(line["name"])}
            lines.append({**found, "value": value})
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            bad += 1
    if bad:
        _log.warning("%s: %d damaged lines are left out", file, bad)
    return lines


class MetricsFile:
    """A run's ``metrics.jsonl``, open for appending; each call hands its lines to the operating system.

    Args:
        run: the run folder. The file is made at the first line; a torn last line of an older session is cut.

    Raises:
        OSError: from every method, when the file cannot be written.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = MetricsFile(Path(folder))
        ...     file.append(1, "train", {"loss": 0.5, "rate": float("inf")})
        ...     print((Path(folder) / "metrics.jsonl").read_text(), end="")
        ...     file.close()
        {"step": 1, "split": "train", "name": "loss", "value": 0.5}
        {"step": 1, "split": "train", "name": "rate", "value": null}
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._descriptor: int | None = None

    def append(self, step: int, split: str, values: Mapping[str, float]) -> None:
        """Append a line a value; ``null`` stands for one that is not finite."""
        text = "".join(
            json.dumps({"step": step, "split": split, "name": name, "value": plain(value)}) + "\n"
            for name, value in values.items()
        )
        if self._descriptor is None:
            self._cut_torn_line()
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._descriptor = os.open(self._run / METRICS, flags, 0o666)
        try:
            write_all(self._descriptor, text.encode())
        except OSError:
            self.close()  # the next call cuts what was written of the line
            raise

    def cut_back(self, step: int) -> None:
        """Drop the lines after `step`."""
        self.close()
        if (self._run / METRICS).exists():
            stay = [line for line in read_metrics(self._run) if line["step"] <= step]
            write_whole(
                self._run / METRICS, "".join(json.dumps(plain(line)) + "\n" for line in stay).encode()
            )

    def close(self) -> None:
        """Close the file; the next :meth:`append` opens it again."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)

    def _cut_torn_line(self) -> None:
        file = self._run / METRICS
        if file.exists():
            data = file.read_bytes()
            whole = data.rfind(b"\n") + 1
            if whole < len(data):
                os.truncate(file, whole)
