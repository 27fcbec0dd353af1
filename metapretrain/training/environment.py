"""What a run runs on: device, precision, memory, versions, commit, command; and the report of `metapretrain doctor`."""

import functools
import os
import platform
import re
import resource
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

from metapretrain.checks import check_device, check_precision, install
from metapretrain.errors import InputError

GIB = 2**30


def out_of_memory(where: str, step: int, free: int, total: int, reserved: int) -> str:
    """Return one line: where memory ran out, what this process and others hold, and what to do.

    `free`, `total`, `reserved`: bytes that no process holds, that the device has (0: unknown), that this process holds.

    Example:
        >>> out_of_memory("cuda", 400, 1 * GIB, 80 * GIB, 19 * GIB).partition(":")[0]
        'out of memory on cuda at step 400 (19.0 of 80.0 GiB are held by this process, about 60.0 by others)'
    """
    smaller = "lower the batch size (batch_size), or accumulate over smaller batches (accumulate)"
    line = f"out of memory on {where} at step {step}"
    if not total:
        return f"{line}: {smaller}"
    others = max(0, total - free - reserved)
    held = f"{reserved / GIB:.1f} of {total / GIB:.1f} GiB are held by this process"
    if others < GIB:
        return f"{line} ({held}): {smaller}"
    return (
        f"{line} ({held}, about {others / GIB:.1f} by others): start it again with --resume when these have ended, or "
        f"{smaller}"
    )


def memory_held(device: torch.device) -> tuple[int, int, int]:
    """Free and total bytes of a GPU, and those that this process reserved; zeros where torch cannot tell."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return 0, 0, 0
    try:
        return (*torch.cuda.mem_get_info(device), torch.cuda.memory_reserved(device))
    except RuntimeError:  # the query itself may need memory
        return 0, 0, 0


def make_accelerator(device: str, precision: str, *, unused_parameters: bool = False) -> Any:
    """Return an `accelerate.Accelerator` for a device name (`auto`, `cpu`, `cuda`, `cuda:N`, `mps`) and a precision.

    `unused_parameters`: some update leaves some parameters without a gradient (one task a step).
    Raises InputError: a device that is not there, or a precision that it cannot compute in.
    """
    from accelerate import Accelerator, DistributedDataParallelKwargs
    from accelerate.state import AcceleratorState

    # Its default arguments are the group of all ranks. Loaded after that is made, it would hold the group for good, and
    # `leave_ranks` could not end its threads.
    if torch.distributed.is_available():
        from torch.distributed.nn import functional  # noqa: F401

    device = check_device(device)
    check_precision(precision, device)
    if device.startswith("cuda:"):
        torch.cuda.set_device(device)
    # accelerate keeps one state a process; a second phase may want another precision or device
    grouped = torch.distributed.is_available() and torch.distributed.is_initialized()
    AcceleratorState._reset_state(reset_partial_state=not grouped)
    found = Accelerator(
        cpu=device == "cpu",
        mixed_precision="no" if precision == "fp32" else precision,
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=unused_parameters)],
    )
    if device != "auto" and found.device.type != device.partition(":")[0]:
        raise InputError(f"the processes compute on {found.device.type} already; for {device} start them anew")
    return found


def mixed_precision(device: str | torch.device, precision: str) -> torch.autocast:
    """Return the context of a forward pass outside the training loop, in the precision that the loop computes in."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[precision]
    return torch.autocast(torch.device(device).type, dtype=dtype, enabled=precision != "fp32")


def compile_parts(module: nn.Module) -> int:
    """Compile, in place, every submodule that says `compilable = True`; return how many there were."""
    parts = [part for part in module.modules() if getattr(part, "compilable", False)]
    for part in parts:
        part.compile()
    return len(parts)


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """Return the state of the default generators of the CPU and, if `device` is one, the GPU."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: Mapping[str, torch.Tensor]) -> None:
    """Go back to a state that :func:`random_state` returned."""
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


_PACKAGES = "metapretrain torch torchvision numpy transformers accelerate safetensors".split()
_PACKAGES += "tensorboard scikit-learn scipy matplotlib pillow tqdm higher pytorch-metric-learning".split()
_EXTRAS = {
    "learn2learn": "the peer of the speed benchmark, task sets",
    "umap-learn": "UMAP figures",
    "peft": "prompts that load in PEFT",
}
_ROOTS = ("/", "~/")
_ABSOLUTE = re.compile(r"(?<![\w./])~?/(?!/)[^\s'\",;:()\[\]{}]+")


def versions() -> dict[str, str]:
    """Return the version of Python and of each package that a run may have used and that is installed."""
    found = {name: version for name in (*_PACKAGES, *_EXTRAS) if (version := _version(name)) is not None}
    return {"python": platform.python_version(), **found, "torch": str(torch.__version__)}


@functools.cache
def commit() -> str | None:
    """The Git commit of this source, ``+changes`` where tracked files differ, or ``METAPRETRAIN_COMMIT``, or None."""
    package = Path(__file__).resolve().parents[1]
    tracked = _git(package, "ls-files", "--error-unmatch", "errors.py") is not None
    head = _git(package, "rev-parse", "HEAD") if tracked else None
    if head is None:
        return os.environ.get("METAPRETRAIN_COMMIT") or None
    return head + ("+changes" if _git(package, "status", "--porcelain", "--untracked-files=no") else "")


def device_name(device: str | torch.device | None = None) -> str:
    """Return the name of `device`, a GPU's model or ``"cpu (2 threads)"``; None: the GPU if there is one."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type == "cuda" and torch.cuda.is_available():
        try:
            return torch.cuda.get_device_name(device)
        except RuntimeError:  # a child forked after CUDA was in use may not ask
            return f"{device} (model unknown)"
    return f"cpu ({torch.get_num_threads()} threads)" if device.type == "cpu" else str(device)


def peak_memory_bytes() -> int:
    """Return the most memory the process has held: the GPUs' if it used any, else resident memory."""
    on_gpu = sum(torch.cuda.max_memory_allocated(i) for i in range(torch.cuda.device_count()))
    if on_gpu:
        return on_gpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


_COMMAND: ContextVar[Sequence[str] | None] = ContextVar("command", default=None)


@contextmanager
def running(argv: Sequence[str]) -> Iterator[None]:
    """Within the block, :func:`command` tells `argv`: a script was called from Python, or with a configuration."""
    token = _COMMAND.set(argv)
    try:
        yield
    finally:
        _COMMAND.reset(token)


def command(argv: Sequence[str] | None = None) -> str:
    """Return the command line that runs (or `argv`) with every absolute path cut to its last part.

    Example:
        >>> command(["/home/me/run_stl10.py", "--data-dir", "/data/stl10", "--out=/tmp/my runs"])
        "run_stl10.py --data-dir stl10 '--out=my runs'"
    """
    words = list((_COMMAND.get() or sys.argv) if argv is None else argv)
    if words and Path(words[0]).name == "__main__.py":
        words[:1] = ["python", "-m", Path(words[0]).parent.name]
    return shlex.join(_shorten(word) for word in words)


def without_absolute_paths(value: Any) -> Any:
    """Return a text, or a nest of lists and dicts of texts, with each absolute path cut to its last part.

    A path that starts with ``~/`` counts as absolute; an address on the web is left as it is.

    Example:
        >>> without_absolute_paths("read /data/stl10/train_X.bin and https://example.org/a/b, 3/4 of it")
        'read train_X.bin and https://example.org/a/b, 3/4 of it'
    """
    if isinstance(value, str):
        return _ABSOLUTE.sub(lambda match: Path(match[0]).name, value)
    if isinstance(value, dict):
        return {without_absolute_paths(key): without_absolute_paths(item) for key, item in value.items()}
    return [without_absolute_paths(item) for item in value] if isinstance(value, list) else value


def doctor() -> str:
    """Return what `metapretrain doctor` prints: versions, devices, and how to install what is missing."""
    rows = [("python", f"{platform.python_version()} on {platform.platform()}")]
    rows += [("commit", commit() or "not a Git checkout"), ("torch", str(torch.__version__)), *_devices()]
    for name in _PACKAGES:
        if name not in {"torch", "metapretrain"}:
            rows.append((name, _version(name) or f"missing: pip install {name}"))
    rows.insert(1, ("metapretrain", _version("metapretrain") or "not installed: pip install -e ."))
    rows += [(name, _version(name) or f"missing ({use}): {install(name)}") for name, use in _EXTRAS.items()]
    names = filter(None, (os.environ.get("CC", "").split(" ")[0], "cc", "gcc", "clang"))
    compiler = next(filter(None, map(shutil.which, names)), None)
    rows.append(("C compiler", compiler or "missing: needed only to build learn2learn; install gcc or clang"))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {said}" for name, said in rows)


def _devices() -> list[tuple[str, str]]:
    rows = [("cpu", f"{os.cpu_count()} cores, {torch.get_num_threads()} threads")]
    if not torch.cuda.is_available():
        build = f"built for CUDA {torch.version.cuda}, no usable GPU" if torch.version.cuda else "built without CUDA"
        return [*rows, ("cuda", f"not available ({build})")]
    for i in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(i)
        rows.append((f"cuda:{i}", f"{card.name}, {card.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"))
    return rows


@functools.cache
def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _git(folder: Path, *words: str) -> str | None:
    """Return Git's answer, or None when it refuses, is slow or is missing."""
    surroundings = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=10, env=surroundings, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _shorten(word: str) -> str:
    option, equals, value = word.partition("=")
    if equals and option.startswith("-") and value.startswith(_ROOTS):
        return f"{option}={Path(value).name}"
    return Path(word).name if word.startswith(_ROOTS) else _ABSOLUTE.sub(lambda match: Path(match[0]).name, word)
