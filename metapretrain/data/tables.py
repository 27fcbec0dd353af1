"""Sentences, or pairs of them, with labels from a CSV, TSV, JSONL or JSON file or a `datasets` object."""

from __future__ import annotations

import csv
import io
import json
import logging
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any, Literal

import torch

from metapretrain.checks import user_path
from metapretrain.data.images import file_record
from metapretrain.data.texts import KINDS, TextSet, check_outputs
from metapretrain.errors import InputError, one_of

FORMATS = ("auto", "csv", "tsv", "jsonl", "json")
SEPARATORS = {"csv": ",", "tsv": "\t"}
NAMES = {",": "commas", "\t": "tabs", ";": "semicolons"}
TABLES = "name a CSV, TSV, JSONL or JSON file"  # what to do where a file is missing
MOST = 2**31  # no number in a text set reaches it
_HALF = re.compile("[\ud800-\udfff]")  # JSON may write half of a surrogate pair, which no tokenizer takes
Record = tuple[str, dict[str, Any]]  # where it begins, its values by column


def decode_text(path: Path, encoding: str, undecodable: str, expected: str = TABLES) -> tuple[str, int]:
    """Return the text of a file, without a byte order mark, and the number of lines that were not in `encoding`.

    Args:
        path: of the file.
        encoding: such as ``"utf-8"``.
        undecodable: ``"refuse"``, ``"replace"`` their wrong bytes by U+FFFD, or read those lines as ``"latin-1"``.
        expected: what to do where there is no such file.

    Raises:
        InputError: no such file, or as :func:`decode_bytes`.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        what = "is a folder" if path.is_dir() else "cannot be read" if path.exists() else "does not exist"
        raise InputError(f"{path} {what}: {expected}") from error
    return decode_bytes(raw, str(path), encoding, undecodable)


def read_utf8(path: Path, expected: str = TABLES) -> str:
    """Return the text of a UTF-8 file.

    Raises:
        InputError: as :func:`decode_text`.
    """
    return decode_text(path, "utf-8", "refuse", expected)[0]


def json_lines(text: str, where: str | Path) -> Iterator[tuple[int, Any]]:
    """Yield the number from 1 and the JSON value of each line that is not empty.

    Raises:
        InputError: a line is malformed.

    Example:
        >>> list(json_lines("[1]\\n\\n{}", "a.jsonl"))
        [(1, [1]), (3, {})]
    """
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield number, parse_json(line, where, number)


def read_json(file: Path, schema: Any, layout: str) -> Any:
    """Return the JSON value that a UTF-8 file holds, its types checked: see :func:`check_json`."""
    return check_json(parse_json(read_utf8(file, f"expected {layout}"), file, 1), schema, str(file), layout)


def read_json_lines(file: Path, schema: Any, layout: str) -> Iterator[tuple[str, Any]]:
    """Yield file and line of each JSON value of a UTF-8 file, and the value: see :func:`check_json`."""
    for number, item in json_lines(read_utf8(file, f"expected {layout}"), file):
        where = f"{file}, line {number}"
        yield where, check_json(item, schema, where, layout)


_CALLED = {str: "a text", int: f"a whole number below {MOST}", list: "a list", dict: "an object"}


def check_json(value: Any, schema: Any, where: str, layout: str) -> Any:
    """Return a JSON value whose types are those of a schema.

    Args:
        value: any.
        schema: ``str`` or ``int``; ``[schema]`` for a list; ``{name: schema}`` for an object with these names, and
            perhaps others; ``(value, ...)`` for one of some texts or whole numbers.
        where: file, and line or part of it.
        layout: what the file must be.

    Raises:
        InputError: it is something else; the place within it is named.

    Example:
        >>> check_json({"spans": [[0, 1.5]]}, {"spans": [[int]]}, "a.json, line 1", "lists of spans")
        Traceback (most recent call last):
        ...
        metapretrain.errors.InputError: a.json, line 1: spans[0][1] must be a whole number below ..., got 1.5; ...
    """
    _check_json(value, schema, where, "", layout)
    return value


def _check_json(value: Any, schema: Any, where: str, path: str, layout: str) -> None:
    kind = type(schema) if isinstance(schema, dict | list) else schema
    if isinstance(schema, tuple):
        wrong = not isinstance(value, int | str) or value not in schema
        wanted = f"one of {', '.join(map(repr, schema))}"
    else:
        wrong = not isinstance(value, kind) or (kind is int and (isinstance(value, bool) or abs(value) >= MOST))
        wanted = _CALLED[kind]
    if not wrong and isinstance(value, str) and not value.isascii():
        wrong, wanted = bool(_HALF.search(value)), "a text without halves of characters"
    if wrong:
        place = f"{where}: {path.removeprefix('.') or 'it'}"
        raise InputError(f"{place} must be {wanted}, got {shorten(value)}; expected {layout}")
    if isinstance(schema, dict):
        for name, part in schema.items():
            if name not in value:
                raise InputError(f"{where}: {path.removeprefix('.') or 'it'} has no {name!r}; expected {layout}")
            _check_json(value[name], part, where, f"{path}.{name}", layout)
    elif isinstance(schema, list):
        for number, item in enumerate(value):
            _check_json(item, schema[0], where, f"{path}[{number}]", layout)


def shorten(value: Any) -> str:
    """A value as an error shows it: in one line of at most 60 characters."""
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def decode_bytes(raw: bytes, where: str, encoding: str, undecodable: str) -> tuple[str, int]:
    """Return what :func:`decode_text` does, of bytes.

    Args:
        raw: the bytes.
        where: they are from, as errors name it.
        encoding: as in :func:`decode_text`.
        undecodable: as in :func:`decode_text`.

    Raises:
        InputError: they are empty or hold a NUL character, the encoding is unknown, or a line is not in it and is
            refused.
    """
    one_of("choice for undecodable lines", undecodable, ("refuse", "replace", "latin-1"))
    try:
        text = raw.decode(encoding)
        wrong = []
    except UnicodeDecodeError:
        wrong = [number for number, line in enumerate(raw.split(b"\n"), 1) if not _decodes(line, encoding)]
        text = raw.decode(encoding, errors="replace")
        if undecodable == "latin-1":
            lines = raw.split(b"\n")
            text = "\n".join(line.decode(encoding if _decodes(line, encoding) else "latin-1") for line in lines)
    except LookupError as error:
        raise InputError(f"unknown encoding {encoding!r}; such as utf-8, latin-1 or utf-16 is meant") from error
    if wrong and undecodable == "refuse":
        more = f" and {len(wrong) - 1} more line{'s' * (len(wrong) > 2)}" if len(wrong) > 1 else ""
        raise InputError(
            f"{where}, line {wrong[0]}{more}: not {encoding}; save the file as UTF-8, name its encoding "
            "(encoding='latin-1'), or pass undecodable='replace'"
        )
    text = text.removeprefix("\ufeff")
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise InputError(f"{where}, line {line}: a NUL character, as in UTF-16 or UTF-32; save the file as UTF-8")
    if "\n" not in text:
        text = text.replace("\r", "\n")  # line ends of old Macs
    if not text.strip():
        raise InputError(f"{where} is empty")
    return text, len(wrong)


def _decodes(line: bytes, encoding: str) -> bool:
    try:
        line.decode(encoding)
    except UnicodeDecodeError:
        return False
    return True


def read_records(
    path: Path, text: str, file_format: str, columns: Sequence[str], header: Sequence[str] | None, quotes: bool
) -> Iterator[Record]:
    """Yield (where, values by column) of each record of a file's text.

    Args:
        path: named in errors, and whose suffix tells an ``"auto"`` format.
        text: of the file.
        file_format: one of :data:`FORMATS`.
        columns: that must be there.
        header: column names of a table whose first line holds none.
        quotes: whether ``"`` quotes the fields of a table.

    Raises:
        InputError: a column is missing (the nearest is named), a wrong separator, a quote left open, or malformed
            JSON, with file and line.
    """
    one_of("format", file_format, FORMATS)
    if file_format == "auto":
        file_format = _guess_format(path, text)
    if file_format == "json":
        yield from _json_records(path, text, columns)
    elif file_format == "jsonl":
        for number, item in json_lines(text, path):
            yield f"line {number}", _json_object(path, f"line {number}", item, columns)
    else:
        separator = SEPARATORS.get(file_format) or _guess_separator(text, columns, header)
        yield from _table_records(path, text, separator, columns, header, quotes)


def parse_json(text: str, where: str | Path, line: int | None = None) -> Any:
    """Return the value that a JSON text of a data file holds.

    Args:
        text: the file, a line of it, or a part that `where` names.
        where: what an error names.
        line: number of the text's first line; None: `where` says it.

    Raises:
        InputError: it is malformed.

    Example:
        >>> parse_json("[1,\\n2", "a.json", line=1)
        Traceback (most recent call last):
        ...
        metapretrain.errors.InputError: a.json, line 2: malformed JSON: Expecting ',' delimiter
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        number, reason = error.lineno, error.msg
    except RecursionError:
        number, reason = 1, "nested too deeply"
    except ValueError:  # Python reads 4,300 digits at most
        number, reason = 1, "a number of too many digits"
    place = where if line is None else f"{where}, line {line + number - 1}"
    raise InputError(f"{place}: malformed JSON: {reason}")


def find_column(name: str, names: Sequence[str], where: str) -> str:
    """Return `name`, having checked that it is one of a file's column names.

    Raises:
        InputError: it is not (the nearest is named), or it is there twice.
    """
    if list(names).count(name) > 1:
        raise InputError(f"{where}: the column {name!r} is there twice")
    try:
        return one_of("column", name, names)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def _guess_format(path: Path, text: str) -> str:
    suffix = path.suffix.lower()
    if suffix in (".jsonl", ".ndjson"):
        return "jsonl"
    if suffix != ".json":
        return "table"
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return "jsonl"
    return "json"


def _guess_separator(text: str, columns: Sequence[str], header: Sequence[str] | None) -> str:
    """The separator by which the first line has most of the columns; then the one that it has most of."""
    line = re.split(r"[\r\n]", text.lstrip("\r\n"), maxsplit=1)[0]

    def fits(separator: str) -> tuple[int, int]:
        try:
            fields = next(csv.reader([line], delimiter=separator), [])
        except csv.Error:  # a field is over-long by this separator
            return 0, 0
        right = sum(name in fields for name in columns) if header is None else int(len(fields) == len(header))
        return right, len(fields)

    return max(("\t", ",", ";"), key=fits)


def _table_records(
    path: Path, text: str, separator: str, columns: Sequence[str], header: Sequence[str] | None, quotes: bool
) -> Iterator[Record]:
    quoting: Literal[0, 3] = csv.QUOTE_MINIMAL if quotes else csv.QUOTE_NONE
    lines = io.StringIO(text, newline="\n")  # only \n ends a line: text may hold other characters that Python splits at
    reader = csv.reader(lines, delimiter=separator, quoting=quoting, strict=True)
    names = None if header is None else list(header)
    while True:
        start = reader.line_num + 1
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            quoted = '"' in text.split("\n")[start - 1]
            raise InputError(f"{path}, line {start}: {_malformed(str(error), quotes and quoted)}") from error
        if not fields:
            continue
        if names is None:
            names = [field.strip() for field in fields]
            _check_separator(path, names, separator, columns)
            for name in columns:
                find_column(name, names, f"{path}, line {start}")
            continue
        if len(fields) != len(names):
            given = "1 field" if len(fields) == 1 else f"{len(fields)} fields"
            hint = "; is the separator right?" if len(fields) == 1 else ""
            raise InputError(
                f"{path}, line {start}: {given} for {len(names)} columns separated by {NAMES[separator]}{hint}"
            )
        if separator == "\t" and any("\n" in field and "\t" in field for field in fields):
            raise InputError(
                f"{path}, line {start}: a quote was left open: it closes only at line {reader.line_num} (where quotes "
                "are plain characters, pass quotes=False)"
            )
        yield f"line {start}", dict(zip(names, fields, strict=True))


def _malformed(reason: str, quoted: bool) -> str:
    """What is wrong with a record by Python's `csv`, and what to do; `quoted`: its first line has a quote."""
    plain = "where quotes are plain characters, pass quotes=False"
    if "field limit" not in reason:
        return f"{reason}; a quote was left open or a line break stands within a field ({plain})"
    cause = f"a quote was probably left open ({plain}); else " if quoted else ""
    return f"a field of more than {csv.field_size_limit():,} characters, the most that is read: {cause}shorten it"


def _check_separator(path: Path, names: list[str], separator: str, columns: Sequence[str]) -> None:
    for other, called in NAMES.items():
        within = next((name for name in names if other in name), None)
        if other != separator and within is not None and set(columns) & set(within.split(other)):
            raise InputError(f"{path}, line 1: columns are separated by {called}, not by {NAMES[separator]}")


def _json_records(path: Path, text: str, columns: Sequence[str]) -> Iterator[Record]:
    loaded = parse_json(text, path, 1)
    if not isinstance(loaded, list | dict):
        raise InputError(f"{path}: a JSON file must hold a list or an object of records, got {type(loaded).__name__}")
    items = loaded.items() if isinstance(loaded, dict) else enumerate(loaded)
    for key, item in items:
        where = f"record {key!r}"
        yield where, _json_object(path, where, item, columns)


def _json_object(path: Path, where: str, item: Any, columns: Sequence[str]) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise InputError(f"{path}, {where}: expected a JSON object of columns, got {type(item).__name__}")
    for name in columns:
        find_column(name, list(item), f"{path}, {where}")
    return item


logger = logging.getLogger(__name__)

SHOWN = 3  # unusable rows that an error names


@dataclass(frozen=True)
class Columns:
    """Which columns to read and what their labels may be; turns records into the rows of a set.

    Args:
        where: file or data set, as errors name it.
        text, pair, label, id: columns, as in :func:`~metapretrain.data.tables.read_texts`.
        kind: one of :data:`~metapretrain.data.texts.KINDS`.
        classes: names in label order, for classification.
        low, high: range of scores, for regression.
        missing: numbers that mean that a row has no label.
        coded: labels are numbers of classes from 0, whatever the classes are called. Otherwise, where classes are
            called by numbers, a label is one of these: 4.0 is the class "4".

    Raises:
        InputError: there is a label, and the classes or the range are no outputs of the kind.

    Example:
        >>> columns = Columns("reviews", "text", None, "stars", None, "classification", ("bad", "good"), 0.0, 1.0)
        >>> columns.collect([("line 2", {"text": "fine work", "stars": "good"})], "train", {}, {}).labels
        tensor([1])
    """

    where: str
    text: str
    pair: str | None
    label: str | None
    id: str | None
    kind: str
    classes: tuple[str, ...]
    low: float
    high: float
    missing: tuple[int, ...] = ()
    coded: bool = False

    def __post_init__(self) -> None:
        """Check classes and range."""
        if self.label is not None and (self.regression or self.classes):
            check_outputs(self.where, self.kind, self.classes, self.low, self.high)

    @property
    def names(self) -> list[str]:
        """The columns that a record must have."""
        return [name for name in (self.text, self.pair, self.label, self.id) if name is not None]

    @property
    def regression(self) -> bool:
        """Whether labels are scores."""
        return self.kind == "pair-regression"

    def collect(
        self, records: Iterable[Record], split: str, counts: dict[str, int], files: dict[str, dict[str, Any]]
    ) -> TextSet:
        """Return the set of all rows that have a label, or of all rows where no label is read.

        Args:
            records: where each begins, and its values by column.
            split: name of the set.
            counts: what reading counted; ``unlabelled`` is added.
            files: the files read, with checksums.

        Raises:
            InputError: rows cannot be used (the first ones are named), or there is none.
        """
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
        if _is_absent(value) or (isinstance(value, str) and not value.strip()):
            return True
        return not self.regression and not isinstance(value, str) and value in self.missing

    def _number(self, value: Any) -> float:
        """Return the class number or the score of a label's value."""
        shown = value if isinstance(value, str) else str(value)
        if not self.coded and shown.strip() in self.classes:
            return self.classes.index(shown.strip())
        number = _float(value)
        called = [] if self.coded else [_float(name) for name in self.classes]
        if not all(map(math.isnan, called)):
            if number in called:
                return called.index(number)
            raise InputError(f"label {shown!r} is not one of the classes {', '.join(self.classes)}")
        low, high = (self.low, self.high) if self.regression else (0, len(self.classes) - 1)
        if not low <= number <= high or (not self.regression and number != int(number)):
            names = "" if self.regression else f" ({', '.join(self.classes)})"
            what = "a score in" if self.regression else "one of"
            raise InputError(f"label {shown!r} is not {what} {low}..{high}{names}")
        return number


def _float(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def _is_absent(value: Any) -> bool:
    """Whether a cell is None, NaN or pandas.NA, which cannot be asked whether it is true."""
    return value is None or type(value).__name__ == "NAType" or (isinstance(value, Real) and math.isnan(value))


def _sentence(column: str, value: Any) -> str:
    if _is_absent(value):
        value = ""
    if not isinstance(value, str):
        raise InputError(f"{column} is {type(value).__name__}, not text")
    if not value.strip():
        raise InputError(f"{column} is empty")
    try:
        value.encode()
    except UnicodeEncodeError:  # JSON may write half of a surrogate pair, which no tokenizer takes
        raise InputError(f"{column} has half of a character: {value!r}") from None
    return value.strip()


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
        label: column of the label: a class name, or its number from 0 where classes are not called by numbers, or a
            score; None for an unlabelled split.
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
    file = user_path(path)
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
    columns_of = getattr(dataset, "column_names", None)
    # a column of a pandas DataFrame is an attribute, too
    about = {} if columns_of is None else {key: getattr(dataset, key, None) for key in ("split", "features")}
    name = split or str(about.get("split") or "dataset")
    if isinstance(columns_of, dict):
        raise InputError(f"{name} has the splits {', '.join(map(str, columns_of))}: give one of them")
    names = [str(column) for column in columns_of or list(dataset)]
    for column in (text, pair, label, id):
        if column is not None:
            find_column(column, names, name)
    feature = None if kind == "pair-regression" else (about.get("features") or {}).get(label)
    own = getattr(feature, "names", None)
    classes = tuple(classes or own or ())
    missing = () if own is None and "-1" in classes else (-1,)
    columns = Columns(name, text, pair, label, id, kind, classes, low, high, missing, coded=own is not None)
    values = zip(*(list(dataset[column]) for column in columns.names), strict=True)
    records = ((f"row {row}", dict(zip(columns.names, cells, strict=True))) for row, cells in enumerate(values))
    return columns.collect(records, name, {}, {})


def _check_kind(kind: str, pair: str | None) -> None:
    one_of("kind of task", kind, KINDS)
    if kind.startswith("pair") != (pair is not None):
        what = "needs a second column of sentences (pair)" if pair is None else f"has no second column, {pair!r} given"
        raise InputError(f"{kind} {what}")
