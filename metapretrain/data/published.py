"""What the readers of published texts share: archives, where files are, rows from records, sets joined."""

import gzip
import html
import io
import lzma
import re
import tarfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from metapretrain.checks import user_path
from metapretrain.data.images import file_record, validation_split
from metapretrain.data.tables import Columns, Record, TableError, decode_bytes, read_texts
from metapretrain.data.texts import TextSet, pair_keys
from metapretrain.errors import InputError

# What the readers of zip, tar and gzip raise on damaged files; RuntimeError: encrypted, or of an unknown method.
DAMAGES: tuple[type[Exception], ...] = (zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError)
DAMAGES += (OSError, EOFError, KeyError, ValueError, RuntimeError)

LARGEST = 2**28  # bytes of what an archive holds; all the published ones hold less than a fifth of it


def unzip_text(file: Path, name: str) -> str:
    """Return a UTF-8 text of a zip archive."""
    try:
        with zipfile.ZipFile(file) as archive, archive.open(name) as stream:
            raw = stream.read(LARGEST + 1)
    except DAMAGES as error:
        raise InputError(f"{file}: {_reason(error)}; it must hold {name} in UTF-8") from error
    _check_size(raw, f"{name} in {file}")
    return decode_bytes(raw, f"{file}, {name}", "utf-8", "refuse")[0]


def untar_texts(file: Path, layout: str) -> list[tuple[str, str]]:
    """Return names and UTF-8 texts of the ``.txt`` files of a gzipped tar archive.

    The archive is decompressed as a whole, so that its checksum is compared before anything is used.
    """
    try:
        with gzip.open(file) as stream:
            whole = stream.read(LARGEST + 1)
    except DAMAGES as error:
        raise InputError(f"{file}: {_reason(error)}; expected {layout}") from error
    _check_size(whole, str(file))
    try:
        with tarfile.open(fileobj=io.BytesIO(whole), mode="r:") as archive:
            members = [member for member in archive if member.isfile() and member.name.endswith(".txt")]
            opened = [(member.name, archive.extractfile(member)) for member in members]
            raw = [(name, content.read()) for name, content in opened if content is not None]
    except DAMAGES as error:
        raise InputError(f"{file}: {_reason(error)}; expected {layout}") from error
    return [(name, decode_bytes(text, f"{file}, {name}", "utf-8", "refuse")[0]) for name, text in raw]


def _check_size(decompressed: bytes, what: str) -> None:
    if len(decompressed) > LARGEST:
        told = f"{what} is of more than {LARGEST >> 20} MiB when it is decompressed"
        raise InputError(f"{told}, so it is not the published one; get that from its publisher")


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or "it ends too early"


Parts = tuple[TextSet, TextSet]  # training and test part
HELD_BACK = 6  # where a publisher has no test part, one row in so many is held back


def find_folder(folder: str | Path, names: Sequence[str], files: Sequence[str], layout: str) -> Path:
    """Return the folder that holds all `files`: `folder` itself or one of its folders `names`."""
    given = user_path(folder)
    if not given.is_dir():
        what = f"{given} is a file, not a folder" if given.exists() else f"no folder {given}"
        raise InputError(f"{what}: it must hold {layout}")
    places = [given / name for name in names if (given / name).is_dir()] + [given]
    for place in places:
        if all((place / file).exists() for file in files):
            return place
    missing = [file for file in files if not (places[0] / file).exists()]
    raise InputError(f"{places[0]} lacks {', '.join(missing)}; it must hold {layout}")


def inside(folder: str | Path, name: str) -> Path:
    """Return the folder `name` that is in `folder`; `folder` itself where there is none."""
    root = user_path(folder)
    return root / name if (root / name).is_dir() else root


def existing(root: Path, names: Sequence[str], layout: str) -> list[Path]:
    """Return the files of `names` that are in a folder."""
    found = [root / name for name in names if (root / name).is_file()]
    if not found:
        raise InputError(f"{root} must hold {layout}")
    return found


def concatenate(parts: Sequence[TextSet], split: str) -> TextSet:
    """Return the rows of sets one after the other; counts are added, and files of one name told apart by number."""
    if not parts or len({(part.pairs, part.labels is None) for part in parts}) > 1:
        raise InputError(f"{split}: sets to join must all be of pairs or not, and all have labels or not")
    files: dict[str, dict[str, Any]] = {}
    for part in parts:
        for name, record in part.files.items():
            files[name if name not in files else f"{name} ({len(files) + 1})"] = record
    counts: Counter[str] = Counter()
    for part in parts:
        counts.update(part.counts)
    labels = [part.labels for part in parts if part.labels is not None]
    classes = list(dict.fromkeys(part.classes for part in parts if part.classes))
    if len(classes) > 1:
        told = " and ".join(", ".join(names) for names in classes)
        raise InputError(f"{split}: sets to join were read with the classes {told}; read them with the same ones")
    return TextSet(
        [text for part in parts for text in part.first],
        [text for part in parts for text in part.second or ()] if parts[0].pairs else None,
        torch.cat(labels) if labels else None,
        [name for part in parts for name in part.ids],
        split,
        dict(counts),
        files,
        classes[0] if classes else (),
    )


def read_file(file: Path, **options: Any) -> TextSet:
    """Return what :func:`~metapretrain.data.tables.read_texts` does; errors name no option of it to the set's user."""
    try:
        return read_texts(file, **options)
    except TableError as error:
        raise InputError(error.plain) from error


def collect_rows(
    records: Iterable[Record], file: Path, classes: Sequence[str], split: str, counts: dict[str, int] | None = None
) -> TextSet:
    """Return the set of records with ``text``, ``label`` and ``id``."""
    columns = Columns(str(file), "text", None, "label", "id", "classification", tuple(classes), 0.0, 1.0)
    rows = columns.collect(records, split, {}, {file.name: file_record(file, None)})
    return replace(rows, counts={**rows.counts, **(counts or {})})


def name_rows(rows: TextSet, file: str, clean: Callable[[str], str] = str) -> TextSet:
    """Return the rows with ids ``file:id``, files under that name, and `clean` texts; classes may get other names."""
    return replace(
        rows,
        first=[clean(text) for text in rows.first],
        ids=[f"{file}:{name}" for name in rows.ids],
        files={file: next(iter(rows.files.values()))},
        classes=(),
    )


def read_parts(root: Path, files: Sequence[str], clean: Callable[[str], str] = str, **options: Any) -> Parts:
    """Read both files of a set with :func:`read_file`; drop training rows that repeat one another or a test row."""
    train, test = (
        name_rows(read_file(root / file, split=split, **options), file, clean)
        for file, split in zip(files, ("train", "test"), strict=True)
    )
    return unlike(train, test), test


def unlike(train: TextSet, test: TextSet | None = None) -> TextSet:
    """Drop training rows that repeat one another (the first stays) or a test row, by normalised text, and count them.

    Counts: ``duplicates``, of these ``conflicting`` (with another label than the row that stays), and ``in_test``.
    """
    labels = train.require_labels().tolist()
    held = set(pair_keys(test)) if test is not None else set()
    seen: dict[tuple[str, ...], int] = {}
    kept = []
    conflicting = in_test = 0
    for row, key in enumerate(pair_keys(train)):
        if key in seen:
            conflicting += labels[row] != labels[seen[key]]
            continue
        seen[key] = row
        if key in held:
            in_test += 1
        else:
            kept.append(row)
    counts = {**train.counts, "duplicates": len(train) - len(seen), "conflicting": conflicting}
    if test is not None:
        counts["in_test"] = in_test
    return replace(train.subset(kept), counts=counts)


def hold_back(rows: TextSet, strata: Sequence[int]) -> Parts:
    """Split the unlike rows of a set without a test part: one in six of each stratum (N,) is the test part."""
    whole = unlike(replace(rows, ids=[str(row) for row in range(len(rows))]))
    chosen = [int(name) for name in whole.ids]
    whole = replace(whole, ids=[rows.ids[row] for row in chosen])
    kept, held = validation_split([strata[row] for row in chosen], len(whole) // HELD_BACK)
    return replace(whole.subset(kept), split="train"), replace(whole.subset(held), split="test", counts={})


def without_escapes(text: str) -> str:
    r"""Undo what review files write for line breaks, quotes and other characters.

    Example:
        >>> without_escapes('say \\""hi\\""\\nin a ""caf\\u00e9""')
        'say "hi"\nin a "café"'
    """
    text = re.sub(r'\\"+', '"', text).replace('""', '"')
    text = re.sub(r"(?:\\u[0-9a-fA-F]{4})+", _characters, text)
    return text.replace("\\r", "").replace("\\n", "\n").strip()


def without_entities(text: str) -> str:
    """Undo HTML entities, also those that were written twice over.

    Example:
        >>> without_entities("&quot;AT&amp;T&quot; &amp;amp; R&D")
        '"AT&T" & R&D'
    """
    for _ in range(2):
        text = re.sub(r"&#?\w+;", lambda found: html.unescape(found[0]), text)
    return text


def _characters(found: re.Match[str]) -> str:
    units = bytes.fromhex(found[0].replace("\\u", ""))
    return units.decode("utf-16-be", errors="replace")  # an emoji is two units
