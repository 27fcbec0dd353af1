"""Reader of sentences, or pairs of them, with labels, from a CSV, TSV, JSONL or JSON file or a `datasets` object."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

import torch

from metapretrain.data.images import file_record
from metapretrain.data.text_records import Record, decode_text, find_column, read_records
from metapretrain.data.texts import KINDS, TextSet, check_outputs
from metapretrain.errors import InputError, one_of

logger = logging.getLogger(__name__)

SHOWN = 3  # unusable rows that an error names


def read_texts(
    path: str | Path,
    *,
    text: str,
    pair: str | None = None,
    label: str | None = None,
    id: str | None = None,
    kind: str = "classification",
    classes: Sequence[str] = (),
    low: float = 0.0,
    high: float = 1.0,
    format: str = "auto",
    header: Sequence[str] | None = None,
    split: str | None = None,
    encoding: str = "utf-8",
    undecodable: str = "refuse",
    quotes: bool = True,
) -> TextSet:
    """Read the rows of one split from a file with named columns.

    Sentences are stripped of white space at their ends. Rows whose label is left empty are counted as ``unlabelled``
    and left out; any other row that cannot be used is an error that names file and line.

    Args:
        path: of the file.
        text: column of the sentence, or of the first of a pair.
        pair: column of the second sentence; needed by the two kinds of pairs.
        label: column of the label: a class name, or its number from 0, or a score; None for an unlabelled split.
        id: column of the rows' names; None: their number in the file from 0.
        kind: ``"classification"``, ``"pair-classification"`` or ``"pair-regression"``.
        classes: names in label order, for classification with labels.
        low: lowest score of regression.
        high: highest score of regression.
        format: ``"csv"``, ``"tsv"``, ``"jsonl"``, ``"json"`` (a list or an object of records) or ``"auto"``: by the
            suffix, and for a table by the separator of its first line.
        header: column names, for a table whose first line has none.
        split: name of the split; None: the file's name without suffix.
        encoding: of the file; a byte order mark is skipped.
        undecodable: ``"refuse"`` a file with lines in another encoding, or ``"replace"`` the bytes and count the lines
            as ``undecodable``.
        quotes: whether ``"`` quotes the fields of a table.

    Raises:
        InputError: the file or a column is missing, or rows cannot be used.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "train.csv"
        >>> _ = file.write_text("review,stars\\nfine work,1\\nno,0\\nwhat?,\\n")
        >>> rows = read_texts(file, text="review", label="stars", classes=("bad", "good"))
        >>> rows.first, rows.labels.tolist(), rows.counts
        (['fine work', 'no'], [1, 0], {'unlabelled': 1})
    """
    _check_kind(kind, pair)
    file = Path(path).expanduser()
    content, wrong = decode_text(file, encoding, undecodable)
    columns = Columns(str(file), text, pair, label, id, kind, tuple(classes), low, high)
    if header is not None:
        for name in columns.names:
            find_column(name, header, f"header given for {file.name}")
    records = read_records(file, content, format, columns.names, header, quotes)
    counts = {"undecodable": wrong} if wrong else {}
    return columns.collect(records, split or file.stem, counts, {file.name: file_record(file, None)})


def from_dataset(
    dataset: Any,
    *,
    text: str,
    pair: str | None = None,
    label: str | None = None,
    id: str | None = None,
    kind: str = "classification",
    classes: Sequence[str] = (),
    low: float = 0.0,
    high: float = 1.0,
    split: str | None = None,
) -> TextSet:
    """Take the rows of one split from a `datasets.Dataset`, a pandas DataFrame or a dictionary of columns.

    Args:
        dataset: gives a column by ``dataset[name]``. Its rows without a label (None, NaN, or class -1 as `datasets`
            writes it) are counted and left out.
        text: as in :func:`read_texts`, and so the others.
        pair: column of the second sentence.
        label: column of the label.
        id: column of the rows' names.
        kind: of the task.
        classes: names in label order; by default those of the dataset's ``ClassLabel`` feature.
        low: lowest score of regression.
        high: highest score of regression.
        split: name of the split; None: the dataset's own, or ``"dataset"``.

    Raises:
        InputError: a column is missing, or rows cannot be used (named by their number from 0).

    Example:
        >>> columns = {"a": ["one", "two"], "b": ["1", "3"], "score": [5.0, 0.5]}
        >>> from_dataset(columns, text="a", pair="b", label="score", kind="pair-regression", high=5.0).second
        ['1', '3']
    """
    _check_kind(kind, pair)
    name = split or str(getattr(dataset, "split", None) or "dataset")
    columns_of = getattr(dataset, "column_names", None)
    if isinstance(columns_of, dict):
        raise InputError(f"{name} has the splits {', '.join(map(str, columns_of))}: give one of them")
    names = [str(column) for column in columns_of or list(dataset)]
    for column in (text, pair, label, id):
        if column is not None:
            find_column(column, names, name)
    if not classes and label is not None and kind != "pair-regression":
        features = getattr(dataset, "features", None) or {}
        classes = getattr(features.get(label), "names", None) or ()
    columns = Columns(name, text, pair, label, id, kind, tuple(classes), low, high, missing=(-1,))
    values = zip(*(list(dataset[column]) for column in columns.names), strict=True)
    records = ((f"row {row}", dict(zip(columns.names, cells, strict=True))) for row, cells in enumerate(values))
    return columns.collect(records, name, {}, {})


def _check_kind(kind: str, pair: str | None) -> None:
    one_of("kind of task", kind, KINDS)
    if kind.startswith("pair") != (pair is not None):
        what = "needs a second column of sentences (pair)" if pair is None else f"has no second column, {pair!r} given"
        raise InputError(f"{kind} {what}")


@dataclass(frozen=True)
class Columns:
    """Which columns to read and what their labels may be; turns records into the rows of a set."""

    where: str  # file or data set, as errors name it
    text: str
    pair: str | None
    label: str | None
    id: str | None
    kind: str
    classes: tuple[str, ...]
    low: float
    high: float
    missing: tuple[int, ...] = ()  # labels that mean none

    def __post_init__(self) -> None:
        if self.label is not None and (self.regression or self.classes):
            check_outputs(self.where, self.kind, self.classes, self.low, self.high)

    @property
    def names(self) -> list[str]:
        return [name for name in (self.text, self.pair, self.label, self.id) if name is not None]

    @property
    def regression(self) -> bool:
        return self.kind == "pair-regression"

    def collect(
        self, records: Iterable[Record], split: str, counts: dict[str, int], files: dict[str, dict[str, Any]]
    ) -> TextSet:
        """Return the set of all usable rows; raise InputError naming the first rows that cannot be used."""
        texts: list[list[str]] = []
        labels: list[float] = []
        ids: list[str] = []
        wrong: list[str] = []
        found: set[str] = set()
        total = 0
        for place, record in records:
            total += 1
            if self.label is not None:
                value = record[self.label]
                if self._is_missing(value):
                    continue
                found.add(str(value))
                if not self.regression and not self.classes:
                    continue
            try:
                row = [_sentence(name, record[name]) for name in (self.text, self.pair) if name is not None]
                labels.append(self._number(record[self.label]) if self.label is not None else 0.0)
            except InputError as error:
                wrong.append(f"{place}: {error}")
                continue
            texts.append(row)
            ids.append(str(record[self.id]) if self.id is not None else str(total - 1))
        if self.label is not None and found and not self.regression and not self.classes:
            shown = ", ".join(repr(value) for value in sorted(found)[:10])
            raise InputError(f"{self.where}: give the classes in label order; the column {self.label!r} has {shown}")
        if wrong:
            more = f"; and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
            raise InputError(
                f"{self.where}: {len(wrong)} of {total} rows cannot be used: {'; '.join(wrong[:SHOWN])}{more}"
            )
        if not texts:
            raise InputError(f"{self.where} has {f'{total} rows without a label' if total else 'no rows'}")
        if len(texts) < total:
            counts = {"unlabelled": total - len(texts), **counts}
            logger.info("%s: %d of %d rows have no label and are left out", self.where, total - len(texts), total)
        dtype = torch.float32 if self.regression else torch.int64
        return TextSet(
            [row[0] for row in texts],
            [row[1] for row in texts] if self.pair is not None else None,
            None if self.label is None else torch.tensor(labels, dtype=torch.float64).to(dtype),
            ids,
            split,
            counts,
            files,
        )

    def _is_missing(self, value: Any) -> bool:
        if value is None or (isinstance(value, str) and not value.strip()):
            return True
        if isinstance(value, Real) and math.isnan(value):
            return True
        return not self.regression and not isinstance(value, str) and value in self.missing

    def _number(self, value: Any) -> float:
        """Return the class number or the score of a label's value."""
        shown = value if isinstance(value, str) else str(value)
        if shown.strip() in self.classes:
            return self.classes.index(shown.strip())
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        low, high = (self.low, self.high) if self.regression else (0, len(self.classes) - 1)
        if not low <= number <= high or (not self.regression and number != int(number)):
            names = "" if self.regression else f" ({', '.join(self.classes)})"
            what = "a score in" if self.regression else "one of"
            raise InputError(f"label {shown!r} is not {what} {low}..{high}{names}")
        return number


def _sentence(column: str, value: Any) -> str:
    if value is None or (isinstance(value, Real) and math.isnan(value)):
        value = ""
    if not isinstance(value, str):
        raise InputError(f"{column} is {type(value).__name__}, not text")
    if not value.strip():
        raise InputError(f"{column} is empty")
    return value.strip()
