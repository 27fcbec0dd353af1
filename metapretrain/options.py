"""Command lines: a parser whose errors are one line, types of option values, and the options of all scripts.

An error says what was given, what is allowed and the nearest valid name; the exit status is 2.
"""

import argparse
import atexit
import functools
import importlib.util
import logging
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

from metapretrain.checks import PRECISIONS, check_device_name, install, leave_ranks, user_path
from metapretrain.errors import InputError, one_of

Value = TypeVar("Value")


class Parser(argparse.ArgumentParser):
    """An `argparse.ArgumentParser` whose errors are one line with the nearest valid name, exit status 2.

    Options are never abbreviated.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        settings.setdefault("allow_abbrev", False)
        settings.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(*args, **settings)
        self.set_defaults(**{_CHOSEN: self})

    def error(self, message: str) -> NoReturn:
        """Print `message` as one line on stderr and exit with status 2."""
        message = re.sub(r"^argument (\S+?)(?:/\S+)?: ", r"\1: ", " ".join(message.split()))
        sys.stderr.write(f"error: {message}\n")
        sys.exit(2)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse `args`; an option that does not exist is an error that names the nearest one that does."""
        found, extra = self.parse_known_args(args, namespace)
        chosen: Parser = found.__dict__.pop(_CHOSEN)
        if extra:
            chosen.error(chosen._unknown(extra))
        return found

    def _unknown(self, extra: list[str]) -> str:
        given = next((text for text in extra if text.startswith("-")), None)
        if given is None:
            return f"unexpected argument {extra[0]!r}; see {self.prog} --help"
        if given.partition("=")[0] in self._option_string_actions:
            return f"{given} stands after --, where no option is read; leave the -- out"
        options = [name for name in self._option_string_actions if name.startswith("--")]
        return _line_of("option", given.partition("=")[0], options)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        # argparse's own check prints every choice but not the nearest one; subcommands come through here too.
        if action.choices is not None and value not in action.choices:
            what = "command" if action.nargs == argparse.PARSER else action.dest.replace("_", " ")
            raise argparse.ArgumentError(None, _line_of(what, str(value), map(str, action.choices)))


_CHOSEN = "_parser"  # the (sub)parser whose options were read: it knows the valid names


def _line_of(what: str, given: str, allowed: Iterable[str]) -> str:
    try:
        one_of(what, given, allowed)
    except InputError as error:
        return str(error)
    raise AssertionError(f"{given!r} is a valid {what}")


def option_type(convert: Callable[[str], Value]) -> Callable[[str], Value]:
    """Make `convert` usable as an argparse type: argparse replaces the text of a ValueError by its own."""

    @functools.wraps(convert)
    def converted(text: str) -> Value:
        try:
            return convert(text)
        except InputError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return converted


def _whole(text: str, lowest: int, most: int | None = None) -> int:
    try:
        value = int(text)
    except ValueError:
        raise InputError(f"expected a whole number of at least {lowest}, given {text!r}") from None
    if value < lowest:
        raise InputError(f"expected a whole number of at least {lowest}, given {value}")
    if most is not None and value > most:
        raise InputError(f"expected a whole number of {lowest} to {most}, given {value}")
    return value


positive_int = option_type(lambda text: _whole(text, 1))
nonnegative_int = option_type(lambda text: _whole(text, 0))
place_count = option_type(lambda text: _whole(text, 1, 1000))
pixels = option_type(lambda text: _whole(text, 8, 4096))  # height and width of images


@option_type
def folder_part(text: str) -> str:
    """Part of a folder's name: letters, digits and ``. _ + -``; it may be empty."""
    if re.fullmatch(r"[\w.+-]*", text) is None:
        raise InputError(f"part of a folder's name: letters, digits and . _ + -, not {text!r}")
    return text


@option_type
def named_file(text: str) -> tuple[str, Path]:
    """A name and a file, as ``NAME=FILE``."""
    name, equals, file = text.partition("=")
    if not name or not equals or not file:
        raise InputError(f"expected NAME=FILE, given {text!r}")
    return name, Path(file)


@option_type
def int_list(text: str) -> list[int]:
    """Whole numbers of at least 0 between commas or spaces, each once."""
    values = [_whole(part, 0) for part in text.replace(",", " ").split()]
    if not values:
        raise InputError("expected one or more whole numbers, given none")
    for value in values:
        if values.count(value) > 1:
            raise InputError(f"{value} is given {values.count(value)} times")
    return values


def names(what: str, allowed: Iterable[str]) -> Callable[[str], list[str]]:
    """The type of an option that takes names between commas, or ``all``; the order is kept, each name once.

    Example:
        >>> names("method", ["prl", "simclr", "supervised"])("supervised,prl")
        ['supervised', 'prl']
    """
    known = tuple(allowed)

    @option_type
    def parse(text: str) -> list[str]:
        given = [part.strip() for part in text.split(",") if part.strip()]
        if not given:
            raise InputError(f"expected names between commas or 'all', given {text!r}")
        for name in given:
            one_of(what, name, (*known, "all"))
        return list(known) if "all" in given else list(dict.fromkeys(given))

    return parse


class _IntListAction(argparse.Action):
    """``--seeds 0 1 2`` and ``--seeds 0,1,2`` alike."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        try:
            setattr(namespace, self.dest, int_list(" ".join(values)))
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentError(self, str(error)) from None


def add_int_list(parser: argparse.ArgumentParser, name: str, default: Sequence[int], help: str) -> None:
    """Add an option that takes whole numbers between spaces or commas, such as ``--seeds 0 1 2``."""
    parser.add_argument(name, nargs="+", action=_IntListAction, default=list(default), metavar="N", help=help)


@option_type
def trackers(text: str) -> list[str]:
    """Services that runs are logged to, between commas; InputError: one that is not installed."""
    given = [one_of("tracker", part.strip(), ("wandb", "mlflow")) for part in text.split(",")]
    for name in given:
        if importlib.util.find_spec(name) is None:
            raise InputError(f"{name} is not installed: pip install {name}, or leave --log-to out")
    return given


device_name = option_type(check_device_name)
JOB = "METAPRETRAIN_JOB"  # set in the environment of a job, whose standard input is a pipe that ends with its parent
INTERRUPTED = 130  # the shell's status of a process that Ctrl-C ended
STOPPED = "interrupted; the same command with --resume goes on (the demo: without)"


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
    if known:
        parse = names("method", known)
        add("--methods", type=parse, default=parse(default_methods), metavar="A,B|all", help=", ".join(known))
    add_run_options(parser, benchmark, seeds)
    if tag:
        add("--tag", type=folder_part, default="", metavar="NAME", help="added to the runs' folder, to keep them apart")
    add("--dry-run", action="store_true", help="show the planned runs and their budget, run nothing")
    add("--jobs-per-device", type=place_count, default=1, metavar="N", help="runs side by side (default: 1)")
    add("--log-to", type=trackers, default=[], metavar="A,B", help="wandb or mlflow, beside TensorBoard")
    add("--plugin", action="append", metavar="FILE", help="Python file that registers something of yours by name")


def add_run_options(parser: argparse.ArgumentParser, benchmark: str, seeds: Sequence[int]) -> None:
    """Add ``--out``, ``--seeds``, ``--resume``, ``--smoke`` and those of the device: of every script that trains."""
    add = parser.add_argument
    add("--out", type=Path, default=Path("runs"), metavar="DIR", help=f"parent of {benchmark}/ (runs)")
    add_int_list(parser, "--seeds", seeds, f"one run each (default: {' '.join(map(str, seeds))})")
    add_device_options(parser)
    add("--resume", action="store_true", help="continue from the last checkpoints; finished runs are kept")
    add("--smoke", action="store_true", help="a few tiny steps, to see that everything works")


def add_device_options(parser: argparse.ArgumentParser, *, precision: bool = True) -> None:
    """Add ``--device`` and, unless turned off, ``--precision``."""
    add = parser.add_argument
    add("--device", type=device_name, default="auto", help="auto, cpu, cuda, cuda:N or mps (default: auto)")
    if precision:
        add("--precision", choices=PRECISIONS, default="fp32", help="of the forward pass (default: fp32)")


def load_plugin(path: str | Path) -> None:
    """Import a Python file, once in a process: what it registers is then known by its name.

    Raises InputError: there is no such Python file, or an error in it, told with its line.
    """
    file = user_path(path).resolve()
    if file.suffix != ".py" or not file.is_file():
        raise InputError(f"--plugin {path}: no such Python file; give one, such as mine.py")
    name = re.sub(r"\W", "_", f"plugin_{file}")
    if name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise InputError(f"--plugin {path}: Python cannot import it")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))  # it may import what stands beside it, as a script may
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, InputError) or not isinstance(error, Exception):
            raise
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
        line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else "?"
        raise InputError(f"--plugin {path}, line {line}: {type(error).__name__}: {error}") from error


def _load_plugins(argv: Sequence[str] | None) -> None:
    """Load the files of `--plugin` before any parser asks which names there are."""
    parser = Parser(add_help=False)
    parser.add_argument("--plugin", action="append", default=[])
    for path in parser.parse_known_args(argv)[0].plugin:
        load_plugin(path)


def main_guard(main: Callable[[Sequence[str] | None], int | None]) -> Callable[..., int]:
    """Wrap a script's `main(argv)`: files of `--plugin` come first, bad input is one line and status 2, Ctrl-C 130.

    So are missing packages, files that cannot be read or written, and lack of memory. The wrapped function returns
    the exit status; other exceptions pass with their traceback. What a terminal cannot show is printed with escapes.
    """

    @functools.wraps(main)
    def guarded(argv: Sequence[str] | None = None) -> int:
        before = signal.getsignal(signal.SIGINT)
        ours = before is signal.default_int_handler and threading.current_thread() is threading.main_thread()
        if ours:
            signal.signal(signal.SIGINT, interrupt)
        if os.environ.pop(JOB, ""):
            threading.Thread(target=_end_with_parent, daemon=True).start()
        _log_to_stderr()
        _escape_what_cannot_be_shown()
        try:
            try:
                _load_plugins(argv)
                status = main(argv) or 0
                atexit.register(leave_ranks)  # later, since the process may go on with another call
                return status
            finally:
                if sys.stdout is not None:
                    sys.stdout.flush()
        except InputError as error:
            return _failed(str(error))
        except ModuleNotFoundError as error:
            if not error.name or "." in error.name or error.name == "metapretrain":
                raise
            return _failed(f"{error.name} is not installed: {install(error.name)}")
        except KeyboardInterrupt:
            print(STOPPED, file=sys.stderr)
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
        finally:
            if ours:
                signal.signal(signal.SIGINT, before)

    return guarded


def interrupt(_: int, frame: FrameType | None) -> None:
    """What Ctrl-C calls: KeyboardInterrupt in :func:`main_guard`, but the end while modules are imported, or before it.

    Modules in C may lose a KeyboardInterrupt while they are imported, or end in an ImportError.
    """
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        if frame.f_code.co_name == "guarded":
            raise KeyboardInterrupt
        frame = frame.f_back
    os.write(2, f"{STOPPED}\n".encode())
    os._exit(INTERRUPTED)


def _end_with_parent() -> None:
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGTERM)


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
