"""Texts out of archives, all of whose damages are told in one line."""

from __future__ import annotations

import gzip
import io
import lzma
import tarfile
import zipfile
import zlib
from pathlib import Path

from metapretrain.data.text_records import decode_bytes
from metapretrain.errors import InputError

# What the readers of zip, tar and gzip raise on damaged files; RuntimeError: encrypted, or of an unknown method.
DAMAGES = (
    zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, OSError, EOFError, KeyError, ValueError,
    RuntimeError,
)  # fmt: skip


def unzip_text(file: Path, name: str) -> str:
    """Return a UTF-8 text of a zip archive.

    Raises:
        InputError: the archive is damaged or encrypted, or does not hold such a text.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            raw = archive.read(name)
    except DAMAGES as error:
        raise InputError(f"{file}: {_reason(error)}; it must hold {name} in UTF-8") from error
    return decode_bytes(raw, f"{file}, {name}", "utf-8", "refuse")[0]


def untar_texts(file: Path, layout: str) -> list[tuple[str, str]]:
    """Return names and UTF-8 texts of the ``.txt`` files of a gzipped tar archive.

    The archive is decompressed as a whole, so that its checksum is compared before anything is used.

    Raises:
        InputError: the archive is damaged, or a text in it is not UTF-8.
    """
    try:
        with tarfile.open(fileobj=io.BytesIO(gzip.decompress(file.read_bytes())), mode="r:") as archive:
            members = [member for member in archive if member.isfile() and member.name.endswith(".txt")]
            opened = [(member.name, archive.extractfile(member)) for member in members]
            raw = [(name, content.read()) for name, content in opened if content is not None]
    except DAMAGES as error:
        raise InputError(f"{file}: {_reason(error)}; expected {layout}") from error
    return [(name, decode_bytes(text, f"{file}, {name}", "utf-8", "refuse")[0]) for name, text in raw]


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or "it ends too early"
