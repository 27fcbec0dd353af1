"""Data files changed at random: a clear line with the file, or the right rows."""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from metapretrain.data import DATASETS
from metapretrain.errors import InputError
from tests.reliability.lengths import lengths
from tests.reliability.small_sets import SETS, rows_of

Change = Callable[[bytes, random.Random], bytes]


def place(data: bytes, drawn: random.Random) -> int:
    return drawn.randrange(len(data))


def cut(data: bytes, drawn: random.Random) -> bytes:
    return data[: place(data, drawn)]


def zero(data: bytes, drawn: random.Random) -> bytes:
    at = place(data, drawn)
    return data[:at] + b"\x00" + data[at:]


def flip(data: bytes, drawn: random.Random) -> bytes:
    at = place(data, drawn)
    return data[:at] + bytes([data[at] ^ 1 << drawn.randrange(8)]) + data[at + 1 :]


def drop_line(data: bytes, drawn: random.Random) -> bytes:
    lines = data.splitlines(keepends=True)
    del lines[drawn.randrange(len(lines))]
    return b"".join(lines)


def swap_columns(data: bytes, drawn: random.Random) -> bytes:
    """In every line, header included."""
    mark = next((mark for mark in (b"\t", b'","', b" ") if mark in data), b"\t")
    rows = [line.split(mark) for line in data.split(b"\n")]
    first, second = drawn.sample(range(max(map(len, rows))), 2) if max(map(len, rows)) > 1 else (0, 0)
    for row in rows:
        if len(row) > max(first, second):
            row[first], row[second] = row[second], row[first]
    return b"\n".join(mark.join(row) for row in rows)


def line_ends(data: bytes, drawn: random.Random) -> bytes:
    return data.replace(b"\n", drawn.choice([b"\r\n", b"\r"]))


def no_last_line_end(data: bytes, _: random.Random) -> bytes:
    return data.rstrip(b"\n")


def mark(data: bytes, _: random.Random) -> bytes:
    """UTF-8's byte order mark."""
    return b"\xef\xbb\xbf" + data


def recoded(data: bytes, drawn: random.Random) -> bytes:
    encoding = drawn.choice(["latin-1", "utf-16", "utf-16-le", "utf-32", "cp1252"])
    return data.decode(errors="replace").encode(encoding, "replace")


# How many rows a change may alter (times the set's own number) or lose unseen; None: any number.
LOCAL: dict[Change, int | None] = {cut: None, zero: 1, flip: 2, drop_line: 1}  # a flip of a line end joins two rows
WHOLE: tuple[Change, ...] = (line_ends, no_last_line_end, mark)
TEXTS = sorted(SETS.keys() - {"stl10", "omniglot", "image-folder", "mutual", "ptb-zip"})
PROSE = {"gutenberg", "wikitext-2", "dailydialog"}  # without columns: a word elsewhere makes other sentences


def read(name: str, folder: Path, file: str, data: bytes) -> tuple[str, object]:
    """The line that refuses a folder with one changed file, and the rows that are read otherwise."""
    whole = SETS[name].files[file]
    (folder / file).write_bytes(data)
    try:
        return "", SETS[name].load(folder)
    except InputError as error:
        return str(error), None
    finally:
        (folder / file).write_bytes(whole)


def check_line(line: str, file: str, what: str) -> None:
    """One line that names the file, its folder or its task (in CS224N's files, a part of the name)."""
    names = {*Path(file).parts, *re.split(r"[-_.]", Path(file).stem)} - {"glue", "ids", "train", "dev", "test"}
    assert "\n" not in line and any(part in line for part in names), (what, line)


WITHOUT_FILES = {"digits", "made"}
COUNTED = {"cifar-fs", "fc100", "mini-imagenet", "tiered-imagenet", "cub"}
"""Sets of tens of thousands of images, which a small file cannot be: tests/data damages smaller ones by hand."""


def test_every_set_that_has_files_is_here() -> None:
    assert DATASETS.keys() - SETS.keys() == WITHOUT_FILES | COUNTED


@pytest.fixture(params=sorted(SETS))
def folder(request: pytest.FixtureRequest, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> tuple[str, Path]:
    """A set's name and the folder with its files."""
    caplog.set_level(logging.CRITICAL)
    for file, data in SETS[request.param].files.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_bytes(data)
    return request.param, tmp_path


@pytest.mark.parametrize("draws", lengths(3, 60))
def test_a_change_in_one_place(folder: tuple[str, Path], draws: int) -> None:
    name, root = folder
    whole, drawn = rows_of(SETS[name].load(root)), random.Random(name)
    assert sum(whole.values()) > 3
    for change, most in LOCAL.items():
        for draw in range(draws):
            file = drawn.choice(sorted(SETS[name].files))
            data = change(SETS[name].files[file], drawn)
            what = f"{file} {change.__name__} {draw}"
            line, found = read(name, root, file, data)
            if found is None:
                check_line(line, file, what)
                continue
            rows = rows_of(found)
            assert sum((rows - whole).values()) <= SETS[name].touched, (what, rows - whole)
            if most is not None:
                assert sum((whole - rows).values()) <= SETS[name].touched * most, (what, whole - rows)


@pytest.mark.parametrize("draws", lengths(1, 4))
def test_another_form_of_the_whole_file(folder: tuple[str, Path], draws: int) -> None:
    name, root = folder
    whole, drawn = rows_of(SETS[name].load(root)), random.Random(name)
    for file, data in list(SETS[name].files.items())[:12]:
        for change in WHOLE if name in TEXTS else (mark,):
            for draw in range(draws):
                line, found = read(name, root, file, change(data, drawn))
                if found is None:
                    check_line(line, file, f"{file} {change.__name__} {draw}")
                else:
                    assert rows_of(found) == whole, (file, change.__name__, draw)


@pytest.mark.parametrize("draws", lengths(1, 10))
def test_columns_and_encodings(folder: tuple[str, Path], draws: int) -> None:
    """As many rows as there were, with the same labels; a sentence may have another form."""
    name, root = folder
    if name not in TEXTS:
        pytest.skip("no text")
    whole, drawn = rows_of(SETS[name].load(root)), random.Random(name)
    for file, data in SETS[name].files.items():
        for change in (recoded,) if name in PROSE else (swap_columns, recoded):
            for draw in range(draws):
                line, found = read(name, root, file, change(data, drawn))
                if found is None:
                    check_line(line, file, f"{file} {change.__name__} {draw}")
                else:
                    assert sum(rows_of(found).values()) == sum(whole.values()), (file, change.__name__, draw)
