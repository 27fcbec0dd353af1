"""Files that are whole or absent, JSON that every reader accepts, and tensors with checksums."""

import contextlib
import errno
import glob
import hashlib
import json
import logging
import math
import os
import platform
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from metapretrain.errors import InputError

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def one_line_errors(what: str, advice: str = "") -> Iterator[None]:
    """Turn an :class:`OSError` of the body into an :class:`InputError` of one line: what failed, why, what to do.

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
    """Return the reason of `error` without its path, in one line."""
    return " ".join((error.strerror or str(error) or type(error).__name__).split())


def write_all(descriptor: int, data: bytes) -> None:
    """Write every byte of `data` to the file `descriptor`; a short write goes on where it stopped."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def write_durably(path: Path, data: bytes) -> None:
    """Write `data` to the new file `path` and wait until it is on the disk."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        write_all(descriptor, data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Wait until the names in `folder` (its renames) are on the disk, where its file system can do that."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in {errno.EINVAL, errno.ENOTSUP}:
            raise
    finally:
        os.close(descriptor)


def write_whole(path: Path, data: bytes) -> None:
    """Replace `path` by `data`, all at once for a reader; what killed writers of it left here is removed."""
    machine = re.sub(r"\W", "-", platform.node())  # another's processes cannot be asked about
    for left in path.parent.glob(f".{glob.escape(path.name)}.{machine}.*.tmp"):
        if not _runs(left.name.split(".")[-2]):
            left.unlink(missing_ok=True)
    temporary = path.with_name(f".{path.name}.{machine}.{os.getpid()}.tmp")
    try:
        write_durably(temporary, data)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def _runs(process: str) -> bool:
    try:
        os.kill(int(process), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except (PermissionError, ValueError):  # another user's; a file that is not ours
        pass
    return True


def write_file(path: Path, content: str | bytes) -> Path:
    """Write `path`, whole or not at all, and the folders above it where they are missing; text as UTF-8.

    Raises InputError: a folder cannot be made, or the file not written; an older one is untouched.
    """
    with one_line_errors(f"cannot write {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content.encode(errors="backslashreplace") if isinstance(content, str) else content)
    return path


def plain(value: Any) -> Any:
    """Return `value` as JSON has it: tuples as lists, keys as strings, numbers that are not finite as None.

    NumPy and torch scalars become Python's; a :class:`~pathlib.Path` its text.
    Raises InputError: a value that JSON cannot hold, named by its type.

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
    """Return `value` as indented JSON text that any JSON reader accepts (see :func:`plain`)."""
    text = json.dumps(plain(value), indent=2, allow_nan=False, ensure_ascii=False) + "\n"
    return text.encode(errors="backslashreplace")  # a name that is no UTF-8: its escape is JSON's own


def read_json(file: Path) -> dict[str, Any] | None:
    """Return the JSON object in `file`, None without one; raises InputError: it cannot be read or is no JSON object."""
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


_SUM = "sha256"


def sha256(data: bytes | Path) -> str:
    """Return the SHA-256 of bytes, or of a file read part by part; raises InputError: the file cannot be read."""
    if not isinstance(data, Path):
        return hashlib.sha256(data).hexdigest()
    with one_line_errors(f"cannot read {data}"), data.open("rb") as stream:
        return hashlib.file_digest(stream, _SUM).hexdigest()


def tensor_sum(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of names, types, shapes and values, whatever the order of the names."""
    whole = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].contiguous()
        whole.update(json.dumps([name, str(value.dtype), list(value.shape)]).encode())
        whole.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return whole.hexdigest()


SUMS = "weights.sha256"
_DECIDE = re.compile(r".*\.(safetensors|json|model|jinja)|vocab\.txt|merges\.txt")  # weights, choices, tokenizers
_LATER = {"checkpoint", "export", "figures", "logs", "own-texts", "predictions", "projector", "report", "result.json"}
_LATER |= {"wandb"}
_CHANGED = f"put the right file back, or remove {SUMS} if you changed it yourself"


def write_sums(folder: Path, names: Iterable[str] = ()) -> None:
    """Write the SHA-256 of all files that decide a prediction, or of `names`, as `sha256sum --check` reads it."""
    lines = (f"{sha256(folder / name)}  {name}\n" for name in names or _deciding(folder))
    write_file(folder / SUMS, "".join(lines))


def check_sums(folder: Path) -> None:
    """Refuse files that are not those which :func:`write_sums` has seen; what older runs do not cover is told.

    Raises InputError: a file is missing, damaged or of another run, or weights beside the checksums are not listed.
    """
    file = folder / SUMS
    sums: dict[str, str] = {}
    if file.is_file():
        with one_line_errors(f"cannot read {file}"):
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        sums = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    if (folder / "result.json").is_file() and "config.json" not in sums:
        told = "%s is of an older version, whose checksums cover %s: damage to %s is not seen"
        _log.warning(told, folder, *(("weights alone", "other files") if sums else ("nothing", "its files")))
    for name in _deciding(folder) if file.is_file() else ():
        if name not in sums and "/" not in name and name.endswith(".safetensors"):  # folders may be put in afterwards
            raise InputError(f"{file} is damaged: it has no {name}; remove it if the weights are right")
    for name, digest in sums.items():
        if not (folder / name).is_file():
            raise InputError(f"{folder / name} is missing, which {file} lists; {_CHANGED}")
        if sha256(folder / name) != digest:
            told = f"{folder / name} is damaged, or of another run"
            raise InputError(f"{told}: its checksum is not that in {file}; {_CHANGED}")


def _deciding(folder: Path) -> list[str]:
    """Files that decide a prediction, by their path in the folder; a checkpoint has a manifest of its own."""
    names = [file.relative_to(folder) for file in sorted(folder.rglob("*")) if _DECIDE.fullmatch(file.name)]
    return [name.as_posix() for name in names if name.parts[0] not in _LATER and not name.parts[0].startswith(".")]


def encode(tensors: dict[str, Tensor], *, checksum: bool = True) -> bytes:
    """Return CPU tensors as a safetensors file, whose metadata holds a checksum that other readers pass over."""
    from safetensors import SafetensorError
    from safetensors.torch import save

    metadata = {_SUM: tensor_sum(tensors)} if checksum else None  # one entry: safetensors shuffles several
    try:
        return bytes(save(tensors, metadata))
    except (SafetensorError, KeyError, ValueError) as error:
        kinds = sorted({str(tensor.dtype) for tensor in tensors.values()})
        raise InputError(f"safetensors cannot hold these tensors ({', '.join(kinds)}): {error}") from error


def decode(data: bytes) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, of any maker.

    Raises InputError: it is none, or not the one that was written (where it has a checksum).
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors = load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        written = header.get("__metadata__", {}).get(_SUM)
    except (SafetensorError, ValueError, KeyError) as error:
        raise InputError("not a whole safetensors file") from error
    if written is not None and written != tensor_sum(tensors):
        raise InputError("damaged: its tensors are not those that were written")
    return tensors


class CheckpointError(InputError):
    """A checkpoint that cannot be written, or one that cannot be trusted."""


def save_tensors(file: str | os.PathLike[str], tensors: Mapping[str, Tensor]) -> None:
    """Write a plain state dict as one safetensors file with a checksum, whole or not at all.

    Raises CheckpointError: it cannot be written; an older file of that name is untouched.
    """
    copies = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    try:
        write_whole(Path(file), encode(copies))
    except OSError as error:
        raise CheckpointError(f"cannot write {file}: {reason(error)}") from error


def load_tensors(file: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Read a plain safetensors file as a state dict on the CPU.

    Raises CheckpointError: the file is missing, damaged or not safetensors; a pickle is never run.
    """
    path = Path(file)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {reason(error)}") from error
    try:
        return decode(data)
    except InputError as error:
        raise CheckpointError(f"{path} is {error}. {no_pickle(path)}") from error


def no_pickle(file: Path) -> str:
    """Return what to do about a file that is not ours."""
    if file.suffix in {".pt", ".pth", ".pkl", ".pickle", ".bin", ".ckpt"}:
        return "Pickles can run any code and are never loaded; convert it to safetensors where you trust it"
    return "Give a file or folder that metapretrain wrote"


def cache_folder() -> Path:
    """The user's cache folder of this package."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "metapretrain"


def kept(kind: str, key: Any, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """What `make` returns, from the user's cache folder where it was made for this `key` (JSON values) before."""
    file = cache_folder() / kind / f"{sha256(json_bytes(key))[:32]}.safetensors"
    with contextlib.suppress(CheckpointError):  # a damaged file is made again
        return load_tensors(file)
    made = make()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        save_tensors(file, made)
    except (OSError, CheckpointError) as error:
        _log.warning("%s are not kept: %s", kind, error)
    return made
