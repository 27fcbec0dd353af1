"""Files that are whole or absent: temporary name, flush, rename; and JSON that every reader accepts."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from metapretrain.errors import InputError


@contextlib.contextmanager
def one_line_errors(what: str, advice: str = "") -> Iterator[None]:
    """Turn an :class:`OSError` of the body into one line that says what could not be done and why.

    Args:
        what: the sentence's beginning, such as ``"cannot write run/config.json"``.
        advice: what to do; "free some space ..." is said by itself when the disk is full.

    Raises:
        InputError: in place of the :class:`OSError`.

    Example:
        >>> with one_line_errors("cannot write x", advice="choose another --out"):
        ...     raise OSError(28, "No space left on device")
        Traceback (most recent call last):
        ...
        metapretrain.errors.InputError: cannot write x: No space left on device; choose another --out
    """
    try:
        yield
    except OSError as error:
        raise InputError(f"{what}: {reason(error)}{'; ' + advice if advice else ''}") from error


def reason(error: OSError) -> str:
    """Return the reason of `error` without its path, in one line.

    Example:
        >>> reason(PermissionError(13, "Permission denied", "somewhere"))
        'Permission denied'
    """
    return " ".join((error.strerror or str(error) or type(error).__name__).split())


def write_all(descriptor: int, data: bytes) -> None:
    """Write every byte of `data` to the file `descriptor`; a short write goes on where it stopped.

    Raises:
        OSError: the disk is full, or the file has reached a size limit.
    """
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def write_durably(path: Path, data: bytes) -> None:
    """Write `data` to the new file `path` and wait until it is on the disk.

    Raises:
        OSError: it cannot be written; what was written of it is left to the caller.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        write_all(descriptor, data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Wait until the names in `folder` (its renames) are on the disk, where its file system can do that.

    Raises:
        OSError: the folder cannot be opened or synchronised.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in {errno.EINVAL, errno.ENOTSUP}:
            raise
    finally:
        os.close(descriptor)


def write_whole(path: Path, data: bytes) -> None:
    """Replace `path` by `data`, so that a reader sees the old bytes or the new ones and never a part.

    Raises:
        OSError: it cannot be written; the old file is untouched.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write_durably(temporary, data)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_file(path: Path, content: str | bytes) -> Path:
    """Write `path`, whole or not at all, and the folders above it where they are missing; text as UTF-8.

    What UTF-8 has not, such as a file's name that is none, is written with escapes.

    Raises:
        InputError: a folder cannot be made, or the file not written; an older one is untouched.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_file(Path(folder) / "report" / "table.csv", "a,b").read_text()
        'a,b'
    """
    with one_line_errors(f"cannot write {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content.encode(errors="backslashreplace") if isinstance(content, str) else content)
    return path


def plain(value: Any) -> Any:
    """Return `value` as JSON has it: tuples as lists, keys as strings, numbers that are not finite as None.

    JSON has no NaN and no infinity, so ``null`` stands for both in every file but the checkpoint's, which
    keeps them exactly. NumPy and torch scalars become Python's; a :class:`~pathlib.Path` its text.

    Raises:
        InputError: a value that JSON cannot hold, named by its type.

    Example:
        >>> plain({"rates": (0.1, float("nan")), 3: None})
        {'rates': [0.1, None], '3': None}
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    raise InputError(f"cannot write a {type(value).__name__} as JSON; give numbers, text, lists and dicts")


def json_bytes(value: Any) -> bytes:
    """Return `value` as indented JSON text that any JSON reader accepts (see :func:`plain`).

    Example:
        >>> json_bytes({"a": float("inf")})
        b'{\\n  "a": null\\n}\\n'
    """
    text = json.dumps(plain(value), indent=2, allow_nan=False, ensure_ascii=False) + "\n"
    return text.encode(errors="backslashreplace")  # a name that is no UTF-8: its escape is JSON's own


def read_json(file: Path) -> dict[str, Any] | None:
    """Return the JSON object in `file`, or None when there is no such file.

    Raises:
        InputError: it cannot be read or is not a JSON object.

    Example:
        >>> read_json(Path("no-such-file.json")) is None
        True
    """
    if not file.exists():
        return None
    with one_line_errors(f"cannot read {file}"):
        data = file.read_bytes()
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise InputError(f"{file} is damaged: not a JSON object; restore it or choose another folder")
    return value
