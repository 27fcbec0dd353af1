"""Values of another type, in JSON, tables and lines of every text set: one line with the place, or rows that hold."""

from __future__ import annotations

import gzip
import io
import json
import logging
import math
import random
import re
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from metapretrain.data.annotated import Question
from metapretrain.data.texts import TextSet
from metapretrain.errors import InputError
from tests.reliability.lengths import lengths
from tests.reliability.small_sets import SETS, Files

Change = Callable[[bytes, random.Random], tuple[bytes, str]]
VALUES = [
    *(None, True, False, 0, 1, -1, 7, 2**31, 3.5, 1e308, math.nan, math.inf, -math.inf, 10**400, -(10**400)),
    *("", " ", "text", "²", "٣", "1_0", "\ud83d", "a\x00b", [], ["a"], [1], {}, {"a": 1}, [["a"]], {"text": "a"}),
]
WORDS = ["", "²", "٣", "1_0", "Infinity", "nan", "1e999", "-1", "9" * 400, '["a"]', "None", "0x1", "½", "1.0"]
JSON_SETS = [*sorted(name for name, of in SETS.items() if any(".json" in file for file in of.files)), "mutual"]
LINES = sorted(SETS.keys() - {"stl10", "omniglot", "image-folder", "mutual", "ptb-zip"})


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value in a JSON value."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def swapped(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """The value with another one at a place; the place is left out where the new one is Ellipsis."""
    if not path:
        return None if new is ... else new
    copy = dict(value) if isinstance(value, dict) else list(value)
    if new is ... and len(path) == 1:
        del copy[path[0]]
    else:
        copy[path[0]] = swapped(value[path[0]], path[1:], new)
    return copy


def swap(data: bytes, drawn: random.Random) -> tuple[bytes, str]:
    """The JSON file, or one of its lines, or one file of an archive of it, with another value at a place."""
    if data[:2] == b"\x1f\x8b":
        with tarfile.open(fileobj=io.BytesIO(gzip.decompress(data))) as archive:
            texts = {member.name: archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]
        chosen = drawn.choice(sorted(texts))
        texts[chosen], what = swap(texts[chosen], drawn)
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            for name, text in texts.items():
                about = tarfile.TarInfo(name)
                about.size = len(text)
                archive.addfile(about, io.BytesIO(text))
        return gzip.compress(packed.getvalue()), f"{chosen} {what}"
    lines = data.split(b"\n")
    try:
        json.loads(data)
        number, text = None, data
    except ValueError:
        number = drawn.randrange(len(lines) - 1)
        text = lines[number]
    whole = json.loads(text)
    shapes: dict[str, list[tuple[Any, ...]]] = {}  # as many draws of a part that is rare as of one that is frequent
    for path in places(whole):
        shapes.setdefault(re.sub(r"\d+", "*", repr(path)), []).append(path)
    path, new = drawn.choice(shapes[drawn.choice(sorted(shapes))]), drawn.choice([*VALUES, ...])
    changed = json.dumps(swapped(whole, path, new)).encode()
    return changed if number is None else b"\n".join(
        [*lines[:number], changed, *lines[number + 1 :]]
    ), f"{path} {new!r}"


def swap_word(data: bytes, drawn: random.Random) -> tuple[bytes, str]:
    """A text file with another word, field or attribute at a place."""
    found = list(re.finditer(rb"[^\t\n ,\"<>=]+", data))
    word, new = drawn.choice(found), drawn.choice(WORDS)
    return data[: word.start()] + new.encode() + data[word.end() :], f"{word.start()} {new!r}"


def check(value: Any, what: str) -> None:
    """Texts are whole and can be encoded, numbers are whole and small, scores are finite, answers within passages."""
    if isinstance(value, str):
        value.encode()
    elif isinstance(value, torch.Tensor):
        assert value.dtype in (torch.int64, torch.float32) and value.isfinite().all(), what
    elif isinstance(value, dict):
        check([*value, *value.values()], what)
    elif isinstance(value, list | tuple):
        for item in value:
            check(item, what)
    elif is_dataclass(value):
        if isinstance(value, TextSet):
            assert all(text.strip() for text in [*value.first, *(value.second or ["-"])]), what
        if isinstance(value, Question):
            assert 0 <= value.begin <= value.end < len(value.words) and value.question.strip(), what
        for field in fields(value):
            if field.name != "files":
                check(getattr(value, field.name), what)
    else:
        assert value is None or (isinstance(value, int) and abs(value) < 2**31) or isinstance(value, float), what


def write(folder: Path, files: Files) -> None:
    for file, data in files.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(data)


def read(folder: Path, name: str, file: str, data: bytes) -> tuple[str, Any]:
    """The line that refuses a set with one changed file, and what is read otherwise."""
    (folder / file).write_bytes(data)
    try:
        return "", SETS[name].load(folder)
    except InputError as error:
        return str(error), None
    finally:
        (folder / file).write_bytes(SETS[name].files[file])


@pytest.mark.parametrize("draws", lengths(40, 800))
@pytest.mark.parametrize(("name", "change"), [*product(JSON_SETS, [swap]), *product(LINES, [swap_word])])
def test_values_of_another_type(
    name: str, change: Change, draws: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    files, drawn = SETS[name].files, random.Random(name)
    write(tmp_path, files)
    json_files = {file for file in files if ".json" in file or file.endswith(".gz")}
    chosen = sorted(json_files if change is swap else files.keys() - json_files)
    if not chosen:
        pytest.skip("JSON only")
    refused = 0
    for _ in range(draws):
        file = drawn.choice(chosen)
        data, what = change(files[file], drawn)
        line, found = read(tmp_path, name, file, data)
        refused += bool(line)
        if line:
            names = {*Path(file).parts, *re.split(r"[-_.]", Path(file).stem)} - {"glue", "ids", "train", "dev", "test"}
            assert "\n" not in line and len(line) < 1_000 and any(part in line for part in names), (file, what, line)
        else:
            check(found, f"{file} {what}")
    assert refused or change is swap_word, name
