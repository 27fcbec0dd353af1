"""What the readers of published texts share: where files are, rows from records, sets joined, escapes undone."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from metapretrain.data.images import file_record
from metapretrain.data.splits import validation_split
from metapretrain.data.text_columns import Columns
from metapretrain.data.text_files import read_texts
from metapretrain.data.text_overlap import pair_keys
from metapretrain.data.text_records import Record
from metapretrain.data.texts import TextSet
from metapretrain.errors import InputError
from metapretrain.paths import user_path

Parts = tuple[TextSet, TextSet]  # training and test part
HELD_BACK = 6  # where a publisher has no test part, one row in so many is held back


def find_folder(folder: str | Path, names: Sequence[str], files: Sequence[str], layout: str) -> Path:
    """Return the folder that holds all `files`: `folder` itself or one of its folders `names`.

    Raises:
        InputError: there is none; the files that lack are named.
    """
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


def concatenate(parts: Sequence[TextSet], split: str) -> TextSet:
    """Return the rows of sets one after the other; counts are added, and files of one name told apart by number.

    Raises:
        InputError: there is no set, or only some are of pairs or have labels.
    """
    if not parts or len({(part.pairs, part.labels is None) for part in parts}) > 1:
        raise InputError(f"{split}: sets to join must all be of pairs or not, and all have labels or not")
    files: dict[str, dict[str, Any]] = {}
    for part in parts:
        for name, record in part.files.items():
            files[name if name not in files else f"{name} ({len(files) + 1})"] = record
    counts: dict[str, int] = {}
    for part in parts:
        for what, number in part.counts.items():
            counts[what] = counts.get(what, 0) + number
    labels = [part.labels for part in parts if part.labels is not None]
    return TextSet(
        [text for part in parts for text in part.first],
        [text for part in parts for text in part.second or ()] if parts[0].pairs else None,
        torch.cat(labels) if labels else None,
        [name for part in parts for name in part.ids],
        split,
        counts,
        files,
    )


def collect_rows(
    records: Iterable[Record], file: Path, classes: Sequence[str], split: str, counts: dict[str, int] | None = None
) -> TextSet:
    """Return the set of records with ``text``, ``label`` and ``id``.

    Raises:
        InputError: a row cannot be used; file and place are named.
    """
    columns = Columns(str(file), "text", None, "label", "id", "classification", tuple(classes), 0.0, 1.0)
    rows = columns.collect(records, split, {}, {file.name: file_record(file, None)})
    return replace(rows, counts={**rows.counts, **(counts or {})})  # counts fill up while records are read


def name_rows(rows: TextSet, file: str, clean: Callable[[str], str] = str) -> TextSet:
    """Return the rows with ids ``file:id``, files under that name, and `clean` texts."""
    return replace(
        rows,
        first=[clean(text) for text in rows.first],
        ids=[f"{file}:{name}" for name in rows.ids],
        files={file: next(iter(rows.files.values()))},
    )


def read_parts(root: Path, files: Sequence[str], clean: Callable[[str], str] = str, **options: Any) -> Parts:
    """Read the training and the test file of a set, and drop training rows that repeat one another or a test row.

    Args:
        root: folder of the files.
        files: the training and the test file.
        clean: undoes escapes of a text.
        options: of :func:`~metapretrain.data.text_files.read_texts`.

    Raises:
        InputError: a row cannot be used.
    """
    train, test = (
        name_rows(read_texts(root / file, split=split, **options), file, clean)
        for file, split in zip(files, ("train", "test"), strict=True)
    )
    return unlike(train, test), test


def unlike(train: TextSet, test: TextSet | None = None) -> TextSet:
    """Return the training rows without repetitions of one another (the first stays) or of a test row, and count them.

    Texts are compared normalised. Counts: ``duplicates``, of these ``conflicting`` (with another label than the row
    that stays), and ``in_test``.

    Example:
        >>> import torch
        >>> rows = TextSet(["Good.", "good", "bad"], labels=torch.tensor([1, 0, 0]))
        >>> unlike(rows, rows.subset([2])).counts
        {'duplicates': 1, 'conflicting': 1, 'in_test': 1}
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
    """Split the unlike rows of a set without a test part: one in six of each stratum is the test part, always the same.

    Args:
        rows: labelled.
        strata: integers (N,) of the rows.

    Raises:
        InputError: too few rows of a stratum.
    """
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
