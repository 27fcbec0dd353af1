"""The options that all scripts share, the checks of device and precision, and the guard around `main`."""

from __future__ import annotations

import argparse
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
    fraction,
    int_list,
    names,
    nonnegative_int,
    option_type,
    positive_float,
    positive_int,
)
from metapretrain.errors import InputError, one_of

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
    "fraction",
    "int_list",
    "main_guard",
    "names",
    "nonnegative_int",
    "positive_float",
    "positive_int",
]

DEVICES = ("auto", "cpu", "cuda", "mps")
PRECISIONS = ("bf16", "fp16", "fp32")
INTERRUPTED = 130  # the shell's status of a process that Ctrl-C ended


@option_type
def device_name(text: str) -> str:
    """A device's name, checked for its form only: ``auto``, ``cpu``, ``mps``, ``cuda`` or ``cuda:N``.

    Example:
        >>> device_name("cuda:1")
        'cuda:1'
    """
    if re.fullmatch(r"cuda:\d+", text):
        return text
    if text.lower() in ("gpu", "nvidia"):
        raise InputError(f"unknown device {text!r}; did you mean 'cuda'? allowed: {', '.join(DEVICES)}")
    return one_of("device", text, DEVICES)


def common_options(
    parser: argparse.ArgumentParser,
    benchmark: str,
    *,
    methods: Iterable[str] = (),
    default_methods: str = "all",
    seeds: Sequence[int] = (0,),
    data_dir: bool = True,
) -> None:
    """Add the options that every benchmark shares; `benchmark` names its folder below ``--out``.

    ``--methods`` is added when `methods` are given, ``--data-dir`` unless turned off.
    """
    known = tuple(methods)
    add = parser.add_argument
    if data_dir:
        add("--data-dir", type=Path, metavar="DIR", help="the folder of the data")
    add("--out", type=Path, default=Path("runs"), metavar="DIR", help=f"parent of {benchmark}/ (runs)")
    add_int_list(parser, "--seeds", seeds, f"one run each (default: {' '.join(map(str, seeds))})")
    if known:
        parse = names("method", known)
        add("--methods", type=parse, default=parse(default_methods), metavar="A,B|all", help=", ".join(known))
    add_device_options(parser)
    add("--resume", action="store_true", help="continue from the last checkpoints; finished runs are kept")
    add("--smoke", action="store_true", help="a few tiny steps in seconds, to see that everything works")
    add("--dry-run", action="store_true", help="show the planned runs and their budget, run nothing")
    add("--jobs-per-device", type=positive_int, default=1, metavar="N", help="runs side by side (default: 1)")


def add_device_options(parser: argparse.ArgumentParser, *, precision: bool = True) -> None:
    """Add ``--device`` and, unless turned off, ``--precision``."""
    add = parser.add_argument
    add("--device", type=device_name, default="auto", help="auto, cpu, cuda, cuda:N or mps (default: auto)")
    if precision:
        add("--precision", choices=PRECISIONS, default="fp32", help="of the forward pass (default: fp32)")


def check_device(name: str) -> str:
    """The torch device string of `name`; ``auto`` is the first GPU if there is one, else the CPU.

    Raises:
        InputError: the name is unknown or this machine has no such device.

    Example:
        >>> check_device("cpu")
        'cpu'
    """
    import torch

    try:
        name = device_name(name)
    except argparse.ArgumentTypeError as error:
        raise InputError(str(error)) from None
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return "cuda" if count else "mps" if torch.backends.mps.is_available() else "cpu"
    if name.startswith("cuda") and not count:
        raise InputError(f"device {name!r} is not available: torch sees no CUDA GPU; try --device auto")
    index = int(name.partition(":")[2] or 0)
    if name.startswith("cuda") and index >= count:
        have = "cuda:0" if count == 1 else f"cuda:0 to cuda:{count - 1}"
        raise InputError(f"device {name!r} is not available: this machine has {have}")
    if name == "mps" and not torch.backends.mps.is_available():
        raise InputError("device 'mps' is not available on this machine; use --device cpu or auto")
    return name


def check_precision(name: str, device: str) -> str:
    """`name` if `device` can compute in it: ``fp16`` needs a GPU, ``bf16`` works on the CPU too.

    Raises:
        InputError: the name is unknown, or the device cannot.

    Example:
        >>> check_precision("bf16", "cpu")
        'bf16'
    """
    one_of("precision", name, PRECISIONS)
    if name == "fp16" and device == "cpu":
        raise InputError("precision 'fp16' needs a GPU; on the CPU use --precision bf16 or fp32")
    if name == "bf16" and device.startswith("cuda"):
        import torch

        if not torch.cuda.is_bf16_supported():
            raise InputError(f"precision 'bf16' is not supported by {device!r}; use --precision fp16 or fp32")
    return name


def main_guard(main: Callable[[Sequence[str] | None], int | None]) -> Callable[..., int]:
    """Wrap a script's `main(argv)` so that bad input is one line and exit status 2, and Ctrl-C status 130.

    The wrapped function returns the exit status; any other exception passes through with its traceback.
    """

    @functools.wraps(main)
    def guarded(argv: Sequence[str] | None = None) -> int:
        _log_to_stderr()
        try:
            return main(argv) or 0
        except InputError as error:
            print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print("interrupted; continue with --resume", file=sys.stderr)
            return INTERRUPTED
        except BrokenPipeError:
            # The reader of a pipe (`| head`) has left; else Python complains again when it flushes at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1

    return guarded


def _log_to_stderr() -> None:
    logger = logging.getLogger("metapretrain")
    if not logger.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
