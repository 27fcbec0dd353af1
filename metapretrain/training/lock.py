"""One process at a time in a folder; a lock ends with its process, however that ends."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from pathlib import Path

from metapretrain.errors import InputError
from metapretrain.training.files import write_all

_log = logging.getLogger(__name__)
_held: set[int] = set()


class Lock:
    """An exclusive lock on a file, held until :meth:`release` or the process's end (kill -9 included).

    The operating system holds it (``flock``), so no file is left that must be cleaned away. Forked children
    close their copy: a data-loader worker that outlives a killed run does not keep its folder locked.

    Args:
        file: made when missing, never removed.

    Raises:
        InputError: another process (or another run of this one) holds it.
        OSError: the file cannot be made.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     first = Lock(Path(folder) / ".lock")
        ...     first.release()
        ...     Lock(Path(folder) / ".lock").release()
    """

    def __init__(self, file: Path) -> None:
        import fcntl

        self._descriptor: int | None = None
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.read(descriptor, 64).decode(errors="replace").strip()
            os.close(descriptor)
            by = f" by process {holder}" if holder.isdigit() else ""
            raise InputError(
                f"{file.parent} is in use{by}; wait for it to end or choose another --out"
            ) from error
        except OSError as error:
            if error.errno not in {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS}:
                os.close(descriptor)
                raise
            _log.warning("the file system of %s has no locks: start no second run in it", file.parent)
        os.ftruncate(descriptor, 0)
        write_all(descriptor, f"{os.getpid()}\n".encode())
        _held.add(descriptor)
        self._descriptor = descriptor

    def release(self) -> None:
        """Give the lock free; a second call does nothing."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            if descriptor in _held:
                _held.discard(descriptor)
                os.close(descriptor)


def _close_in_child() -> None:
    for descriptor in _held:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)
