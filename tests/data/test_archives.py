"""An archive that decompresses to far more than what is published is refused before the memory is full."""

from __future__ import annotations

import gzip
import io
import tarfile
import tracemalloc
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from metapretrain.data import published
from metapretrain.data.published import untar_texts, unzip_text
from metapretrain.errors import InputError


def zip_of(file: Path, size: int, how: int) -> None:
    with zipfile.ZipFile(file, "w", how) as archive:
        archive.writestr("a.txt", b"a" * size)


def tar_of(file: Path, size: int) -> None:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as archive:
        member = tarfile.TarInfo("a.txt")
        member.size = size
        archive.addfile(member, io.BytesIO(b"a" * size))
    file.write_bytes(gzip.compress(raw.getvalue()))


def unzip(file: Path) -> str:
    return unzip_text(file, "a.txt")


def untar(file: Path) -> Any:
    return untar_texts(file, "texts")


# The last figure: the most bytes in memory. The readers of bzip2 and LZMA decompress 4 kB at once, whatever they hold.
KINDS: dict[str, tuple[Callable[[Path, int], None], Callable[[Path], Any], int]] = {
    "deflated": (partial(zip_of, how=zipfile.ZIP_DEFLATED), unzip, 2**24),
    "bzip2": (partial(zip_of, how=zipfile.ZIP_BZIP2), unzip, 2**28),
    "lzma": (partial(zip_of, how=zipfile.ZIP_LZMA), unzip, 2**28),
    "tar": (tar_of, untar, 2**24),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_bomb_is_refused_in_little_memory(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, read, most = KINDS[kind]
    monkeypatch.setattr(published, "LARGEST", 2**20)
    write(tmp_path / "x", 2**18)
    assert read(tmp_path / "x")
    write(tmp_path / "x", 2**26)
    tracemalloc.start()
    with pytest.raises(InputError, match="is of more than 1 MiB when it is decompressed"):
        read(tmp_path / "x")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < most
