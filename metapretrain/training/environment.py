"""What a run ran on: versions, commit, device, command, memory; and the report of `metapretrain doctor`."""

from __future__ import annotations

import functools
import os
import platform
import re
import resource
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from metapretrain.checks import INSTALL

_PACKAGES = (
    "metapretrain",
    "torch",
    "torchvision",
    "numpy",
    "transformers",
    "accelerate",
    "safetensors",
    "tensorboard",
    "scikit-learn",
    "scipy",
    "matplotlib",
    "pillow",
    "tqdm",
    "higher",
    "pytorch-metric-learning",
)
_EXTRAS = {
    "learn2learn": ("the peer of the speed benchmark, task sets", INSTALL),
    "umap-learn": ("UMAP figures", "pip install umap-learn"),
    "peft": ("prompts that load in PEFT", "pip install peft"),
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


def command(argv: Sequence[str] | None = None) -> str:
    """Return the command line of this process (or of `argv`) with every absolute path cut to its last part.

    Example:
        >>> command(["/home/me/run_stl10.py", "--data-dir", "/data/stl10", "--out=/tmp/my runs"])
        "run_stl10.py --data-dir stl10 '--out=my runs'"
    """
    words = list(sys.argv if argv is None else argv)
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
    for name, (use, install) in _EXTRAS.items():
        rows.append((name, _version(name) or f"missing ({use}): {install}"))
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
