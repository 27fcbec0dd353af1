"""The options that all scripts share, and the guard around `main`."""

from __future__ import annotations

import argparse
import atexit
import functools
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from metapretrain.arguments import (
    Parser,
    add_int_list,
    folder_part,
    fraction,
    int_list,
    names,
    nonnegative_int,
    option_type,
    pixels,
    place_count,
    positive_float,
    positive_int,
)
from metapretrain.devices import DEVICES, PRECISIONS, check_device, check_device_name, check_precision, leave_ranks
from metapretrain.errors import InputError

__all__ = [
    "DEVICES",
    "INTERRUPTED",
    "PRECISIONS",
    "Parser",
    "add_device_options",
    "add_int_list",
    "check_device",
    "check_precision",
    "common_options",
    "device_name",
    "folder_part",
    "fraction",
    "int_list",
    "main_guard",
    "names",
    "nonnegative_int",
    "pixels",
    "positive_float",
    "positive_int",
]

device_name = option_type(check_device_name)
INTERRUPTED = 130  # the shell's status of a process that Ctrl-C ended


def common_options(
    parser: argparse.ArgumentParser,
    benchmark: str,
    *,
    methods: Iterable[str] = (),
    default_methods: str = "all",
    seeds: Sequence[int] = (0,),
    data_dir: bool = True,
    tag: bool = True,
) -> None:
    """Add the options that every benchmark shares; `benchmark` names its folder below ``--out``.

    ``--methods`` is added when `methods` are given, ``--data-dir`` and ``--tag`` unless turned off.
    """
    known = tuple(methods)
    add = parser.add_argument
    if data_dir:
        add("--data-dir", type=Path, metavar="DIR", help="the folder of the data")
    add("--out", type=Path, default=Path("runs"), metavar="DIR", help=f"parent of {benchmark}/ (runs)")
    if tag:
        add("--tag", type=folder_part, default="", metavar="NAME", help="added to the runs' folder, to keep them apart")
    add_int_list(parser, "--seeds", seeds, f"one run each (default: {' '.join(map(str, seeds))})")
    if known:
        parse = names("method", known)
        add("--methods", type=parse, default=parse(default_methods), metavar="A,B|all", help=", ".join(known))
    add_device_options(parser)
    add("--resume", action="store_true", help="continue from the last checkpoints; finished runs are kept")
    add("--smoke", action="store_true", help="a few tiny steps in seconds, to see that everything works")
    add("--dry-run", action="store_true", help="show the planned runs and their budget, run nothing")
    add("--jobs-per-device", type=place_count, default=1, metavar="N", help="runs side by side (default: 1)")


def add_device_options(parser: argparse.ArgumentParser, *, precision: bool = True) -> None:
    """Add ``--device`` and, unless turned off, ``--precision``."""
    add = parser.add_argument
    add("--device", type=device_name, default="auto", help="auto, cpu, cuda, cuda:N or mps (default: auto)")
    if precision:
        add("--precision", choices=PRECISIONS, default="fp32", help="of the forward pass (default: fp32)")


def main_guard(main: Callable[[Sequence[str] | None], int | None]) -> Callable[..., int]:
    """Wrap a script's `main(argv)` so that bad input is one line and exit status 2, and Ctrl-C status 130.

    So is what the machine lacks: a file that cannot be read or written, memory. The wrapped function returns the
    exit status; any other exception passes through with its traceback. Text that the terminal cannot show (names
    of files that are no UTF-8, say) is printed with escapes.
    """

    @functools.wraps(main)
    def guarded(argv: Sequence[str] | None = None) -> int:
        _log_to_stderr()
        _escape_what_cannot_be_shown()
        try:
            try:
                status = main(argv) or 0
                atexit.register(leave_ranks)  # later, since the process may go on with another call
                return status
            finally:
                if sys.stdout is not None:
                    sys.stdout.flush()
        except InputError as error:
            return _failed(str(error))
        except KeyboardInterrupt:
            print("interrupted; the same command with --resume goes on (the demo: without)", file=sys.stderr)
            return INTERRUPTED
        except BrokenPipeError:
            _stop_printing()  # the reader of a pipe (`| head`) has left
            return 1
        except OSError as error:
            _stop_printing()
            named = f"{error.filename}: " if error.filename is not None else ""
            return _failed(f"{named}{error.strerror or error}; make room, or name another file or folder")
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and not re.search(r"(out of|allocate) memory", str(error)):
                raise
            return _failed(f"out of memory ({error}); take smaller images or batches")

    return guarded


def _failed(line: str) -> int:
    print(f"error: {' '.join(line.split())}", file=sys.stderr)
    return 2


def _stop_printing() -> None:
    """Drop what stdout could not take; else Python complains again when it flushes at exit."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _escape_what_cannot_be_shown() -> None:
    if sys.stderr is None:  # closed by the caller (`2>&-`): progress bars write to it
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if getattr(stream, "errors", None) in ("strict", "surrogateescape") and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _log_to_stderr() -> None:
    logger = logging.getLogger("metapretrain")
    if not logger.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
