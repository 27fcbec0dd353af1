"""Checksums of all weights of a folder in one file beside them, so that a damaged or a swapped file is not loaded."""

from __future__ import annotations

import hashlib
from pathlib import Path

from metapretrain.errors import InputError
from metapretrain.training.files import one_line_errors, write_file

SUMS = "weights.sha256"


def write_sums(folder: Path) -> None:
    """Write the SHA-256 of a folder's weights, those in its own folders too, as `sha256sum --check` reads it.

    Raises:
        InputError: the file cannot be written.
    """
    write_file(folder / SUMS, "".join(f"{_sha256(file)}  {name}\n" for name, file in _weights(folder).items()))


def check_sums(folder: Path) -> None:
    """Refuse weights that :func:`write_sums` has not seen; a folder without such a file is not checked.

    Raises:
        InputError: a file of weights is damaged or of another run, or one beside the checksums is not listed.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     weights = Path(folder) / "w.safetensors"
        ...     written = weights.write_bytes(b"ours")
        ...     write_sums(Path(folder))
        ...     written = weights.write_bytes(b"another's")
        ...     check_sums(Path(folder))
        Traceback (most recent call last):
        ...
        metapretrain.errors.InputError: ...w.safetensors is damaged, or of another run: its checksum is not that in ...
    """
    file = folder / SUMS
    if not file.is_file():
        return
    with one_line_errors(f"cannot read {file}"):
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    sums = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    for name, weights in _weights(folder).items():
        if name not in sums and "/" in name:
            continue  # what was put into a folder of its own afterwards
        if name not in sums:
            raise InputError(f"{file} is damaged: it has no {name}; remove it if the weights are right")
        if _sha256(weights) != sums[name]:
            raise InputError(
                f"{weights} is damaged, or of another run: its checksum is not that in {file}; put the right file "
                f"back, or remove {SUMS} if you changed the weights yourself"
            )


def _weights(folder: Path) -> dict[str, Path]:
    """All files of weights by their path in the folder; a checkpoint has a manifest of its own."""
    found = {file.relative_to(folder): file for file in sorted(folder.rglob("*.safetensors"))}
    return {name.as_posix(): file for name, file in found.items() if name.parts[0] != "checkpoint"}


def _sha256(file: Path) -> str:
    with one_line_errors(f"cannot read {file}"), file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
