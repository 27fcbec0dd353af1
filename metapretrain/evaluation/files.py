"""Files that are either whole or absent."""

from __future__ import annotations

import os
from pathlib import Path

from metapretrain.errors import InputError


def write_text(path: Path, text: str) -> Path:
    """Write `text` to `path` through a temporary name, so that nobody ever reads a half-written file.

    Raises:
        InputError: the folder cannot be made or written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(partial, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True) if partial.parent.is_dir() else None
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error
    return path
