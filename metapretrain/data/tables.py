"""Sentences, or pairs of them, with labels from a table, a JSON file, a DataFrame or a `datasets` object."""

import csv
import io
import json
import logging
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from typing import Any, Literal

import torch

from metapretrain.checks import check_alike, parse_value, user_path
from metapretrain.data.images import file_record
from metapretrain.data.texts import KINDS, TextSet, check_outputs
from metapretrain.errors import InputError, one_of

logger = logging.getLogger(__name__)

FRAMES = {"parquet": "pyarrow", "xlsx": "openpyxl"}  # what pandas reads, and with what
FORMATS = ("auto", "csv", "tsv", "jsonl", "json", *FRAMES)
SEPARATORS = {"csv": ",", "tsv": "\t"}
NAMES = {",": "commas", "\t": "tabs", ";": "semicolons", "|": "bars"}
PACKED = {b"PAR1": "a Parquet file", b"PK\3\4": "an .xlsx or .zip file", b"\x1f\x8b": "a gzip file"}  # first bytes
TABLES = "name a CSV, TSV, JSONL, JSON, Parquet or XLSX file"  # what to do where a file is missing
TABLE_OPTIONS = "text pair label id format separator header encoding undecodable quotes unusable".split()
PLAIN = "quotes=False where quotes are plain characters"
SHOWN = 3  # unusable rows that an error names
MOST = 2**31  # no number in a published text set reaches it
_HALF = re.compile("[\ud800-\udfff]")  # JSON may write half of a surrogate pair, which no tokenizer takes


class TableError(InputError):
    """A table that an option of :func:`read_texts` may make readable; `plain`: the error without the option."""

    def __init__(self, plain: str, option: str, told: str = "") -> None:
        super().__init__(plain + told)
        self.plain, self.option = plain, option

    def as_arguments(self, flag: str) -> str:
        """The option as a command line takes it after `flag`."""
        return re.sub(r"\b(\w+=)", rf"{flag} \1", self.option)


class UnusableRow(InputError):
    """A row that cannot be used; `counted`: the name under which such rows are counted."""

    def __init__(self, message: str, counted: str) -> None:
        super().__init__(message)
        self.counted = counted


Record = tuple[str, dict[str, Any] | UnusableRow]  # where it begins, its values by column


def decode_text(path: Path, encoding: str, undecodable: str, expected: str = TABLES) -> tuple[str, int]:
    """Return what :func:`decode_bytes` does of a file; `expected`: what to do where there is none."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        what = "is a folder" if path.is_dir() else "cannot be read" if path.exists() else "does not exist"
        raise InputError(f"{path} {what}: {expected}") from error
    return decode_bytes(raw, str(path), encoding, undecodable)


def read_utf8(path: Path, expected: str = TABLES) -> str:
    """Return the text of a published UTF-8 file, or raise InputError."""
    return decode_text(path, "utf-8", "refuse", expected)[0]


def decode_bytes(raw: bytes, where: str, encoding: str, undecodable: str) -> tuple[str, int]:
    """Return the text of bytes, without a byte order mark, and the number of lines that were not in `encoding`.

    `undecodable`: ``"refuse"``, ``"replace"`` their wrong bytes by U+FFFD, or read those lines as ``"latin-1"``.
    Raises InputError: they are empty or hold a NUL character, the encoding is unknown, or a line is not in it.
    """
    one_of("choice for undecodable lines", undecodable, ("refuse", "replace", "latin-1"))
    packed = next((name for start, name in PACKED.items() if raw.startswith(start)), None)
    if packed is not None:
        raise InputError(f"{where} is {packed} by its first bytes: unpack it, or give it the suffix of its kind")
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
        way = "its encoding, such as encoding='latin-1', or undecodable='replace'"
        raise TableError(f"{where}, line {wrong[0]}{more}: not {encoding}; save the file as UTF-8", way)
    text = text.removeprefix("\ufeff")
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        told = f"{where}, line {line}: a NUL character, as in UTF-16 or UTF-32; save the file as UTF-8"
        raise TableError(told, "its encoding, such as encoding='utf-16'")
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


def parse_json(text: str, where: str | Path = "", line: int | None = None) -> Any:
    """Return the value that a JSON text holds, whose first line has the number `line` of what `where` names."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        number, reason = error.lineno, error.msg
    except RecursionError:
        number, reason = 1, "nested too deeply"
    except ValueError:  # Python reads 4,300 digits at most
        number, reason = 1, "a number of too many digits"
    place = where if line is None else f"{where}, line {line + number - 1}"
    raise InputError(f"{place}: malformed JSON: {reason}" if place else f"malformed JSON: {reason}")


def read_json(file: Path, schema: Any, layout: str) -> Any:
    """Return the JSON value that a UTF-8 file holds, its types checked: see :func:`check_json`."""
    return check_json(parse_json(read_utf8(file, f"expected {layout}"), file, 1), schema, str(file), layout)


def read_json_lines(file: Path, schema: Any, layout: str) -> Iterator[tuple[str, Any]]:
    """Yield file and line of each JSON value of a UTF-8 file, and the value: see :func:`check_json`."""
    for number, line in enumerate(read_utf8(file, f"expected {layout}").split("\n"), 1):
        where = f"{file}, line {number}"
        if line.strip():
            yield where, check_json(parse_json(line, where), schema, where, layout)


_NUMBER = f"a whole number below {MOST}"
_CALLED: dict[Any, str] = {str: "a text that is not blank", str | None: "a text or null", int: _NUMBER}
_CALLED |= {int | str: f"a text or {_NUMBER}", list: "a list", dict: "an object"}


def check_json(value: Any, schema: Any, where: str, layout: str) -> Any:
    """Return a JSON value whose types are those of a schema; `layout`: what the file `where` must be, for the error.

    A schema is ``str`` (not blank), ``str | None``, ``int`` or ``int | str``; ``[schema]`` for a list; ``{name:
    schema}`` for an object with these names and perhaps others; ``(value, ...)`` for one of some values.

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
        wrong = not isinstance(value, kind) or isinstance(value, bool)
        wrong = wrong or (isinstance(value, int) and abs(value) >= MOST) or (kind is str and not value.strip())
        wanted = _CALLED[kind]
    if not wrong and isinstance(value, str) and not value.isascii():
        wrong, wanted = bool(_HALF.search(value)), "a text without halves of characters"
    place = f"{where}: {path.removeprefix('.') or 'it'}"
    if wrong:
        raise InputError(f"{place} must be {wanted}, got {_shorten(value)}; expected {layout}")
    if isinstance(schema, dict):
        for name, part in schema.items():
            if name not in value:
                raise InputError(f"{place} has no {name!r}; expected {layout}")
            _check_json(value[name], part, where, f"{path}.{name}", layout)
    elif isinstance(schema, list):
        for number, item in enumerate(value):
            _check_json(item, schema[0], where, f"{path}[{number}]", layout)


def _shorten(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def find_column(name: str, names: Sequence[str], where: str) -> str:
    """Return `name`, having checked that it is one of a file's column names, and there once."""
    if list(names).count(name) > 1:
        raise InputError(f"{where}: the column {name!r} is there twice")
    try:
        return one_of("column", name, names)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def read_records(
    path: Path,
    text: str,
    file_format: str,
    columns: Sequence[str],
    header: Sequence[str] | None,
    separator: str | None,
    quotes: bool,
) -> Iterator[Record]:
    """Yield where each record of a file's text begins, and its values by column or why it cannot be used."""
    if file_format == "auto":
        file_format = _guess_format(path, text)
    if file_format == "json":
        yield from _json_records(path, text, columns)
    elif file_format == "jsonl":
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                yield f"line {number}", _json_line(line, columns)
    else:
        separator = separator or SEPARATORS.get(file_format) or _guess_separator(text, columns, header)
        yield from _table_records(path, text, separator, columns, header, quotes)


def _guess_format(path: Path, text: str) -> str:
    suffix = path.suffix.lower()
    if suffix == ".json":
        try:
            json.loads(text)
        except (ValueError, RecursionError):
            return "jsonl"
        return "json"
    return "jsonl" if suffix in (".jsonl", ".ndjson") else "table"


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

    return max(("\t", ",", ";", "|"), key=fits)


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
            raise TableError(f"{path}, line {start}: {_malformed(str(error), quotes and quoted)}", PLAIN) from error
        if not fields:
            continue
        if names is None:
            names = [field.strip() for field in fields]
            _check_separator(path, names, separator, columns)
            for name in columns:
                find_column(name, names, f"{path}, line {start}")
        elif len(fields) != len(names):
            given = "1 field" if len(fields) == 1 else f"{len(fields)} fields"
            hint = "; is the separator right?" if len(fields) == 1 else ""
            message = f"{given} for {len(names)} columns separated by {NAMES.get(separator, repr(separator))}{hint}"
            yield f"line {start}", UnusableRow(message, "other_fields")
        elif separator == "\t" and any("\n" in field and "\t" in field for field in fields):
            last = reader.line_num
            raise TableError(f"{path}, line {start}: a quote was left open: it closes only at line {last}", PLAIN)
        else:
            yield f"line {start}", dict(zip(names, fields, strict=True))


def _malformed(reason: str, quoted: bool) -> str:
    """What is wrong with a record by Python's `csv`; `quoted`: its first line has a quote."""
    if "field limit" not in reason:
        return f"{reason}; a quote was left open or a line break stands within a field"
    cause = "a quote was probably left open; else " if quoted else ""
    return f"a field of more than {csv.field_size_limit():,} characters, the most that is read: {cause}shorten it"


def _check_separator(path: Path, names: list[str], separator: str, columns: Sequence[str]) -> None:
    for other, called in NAMES.items():
        within = next((name for name in names if other in name), None)
        if other != separator and within is not None and set(columns) & set(within.split(other)):
            told = f"columns are separated by {called}, not by {NAMES.get(separator, repr(separator))}"
            raise TableError(f"{path}, line 1: {told}", f"separator={other!r}")


def _json_records(path: Path, text: str, columns: Sequence[str]) -> Iterator[Record]:
    loaded = parse_json(text, path, 1)
    if not isinstance(loaded, list | dict):
        raise InputError(f"{path}: a JSON file must hold a list or an object of records, got {type(loaded).__name__}")
    for key, item in loaded.items() if isinstance(loaded, dict) else enumerate(loaded):
        yield f"record {_shorten(key)}", _json_object(item, columns)


def _json_line(line: str, columns: Sequence[str]) -> dict[str, Any] | UnusableRow:
    try:
        return _json_object(parse_json(line), columns)
    except InputError as error:
        return UnusableRow(str(error), "malformed")


def _json_object(item: Any, columns: Sequence[str]) -> dict[str, Any] | UnusableRow:
    if not isinstance(item, dict):
        return UnusableRow(f"expected a JSON object of columns, got {type(item).__name__}", "malformed")
    try:
        for name in columns:
            one_of("column", name, item)
    except InputError as error:
        return UnusableRow(str(error), "no_column")
    return item


def _read_frame(path: Path, kind: str, header: Sequence[str] | None) -> Any:
    """The DataFrame of a Parquet file, or of the first sheet of an Excel file."""
    if not path.is_file():
        raise InputError(f"{path} {'is a folder' if path.is_dir() else 'does not exist'}: {TABLES}")
    try:
        import pandas

        if kind == "parquet":
            from pyarrow.parquet import read_schema

            frame = pandas.read_parquet(path, engine="pyarrow")
            about = json.loads((read_schema(path).metadata or {}).get(b"huggingface", b"{}"))  # as `datasets` writes it
            frame.attrs["features"] = (about.get("info") or {}).get("features") or {}
            return frame
        with pandas.ExcelFile(path, engine="openpyxl") as book:
            if len(book.sheet_names) > 1:
                logger.warning("%s: the first of its %d sheets is read", path, len(book.sheet_names))
            first = 0 if header is None else None
            return pandas.read_excel(book, header=first, names=header, keep_default_na=False, na_values=[""])
    except ImportError as error:
        needed = f"pandas and {FRAMES[kind]}: pip install pandas {FRAMES[kind]}"
        raise InputError(f"{path}: reading .{kind} needs {needed}") from error
    except Exception as error:  # whatever these libraries raise on a damaged file
        raise InputError(f"{path} cannot be read as .{kind}: {' '.join(str(error).split())}") from error


@dataclass(frozen=True)
class Columns:
    """Which columns to read and what their labels may be; turns records into the rows of a set.

    Attributes:
        text, pair, label, id, kind, classes, low, high: as in :func:`read_texts`.
        own: names of classes by number, where the data says them itself: a label is then such a number. Where classes
            are called by numbers, a label is one of these: 4.0 is the class "4".
        missing: numbers that mean that a row has no label; sort: the classes are the labels there are, sorted.

    Raises InputError: there is a label, and the classes or the range are no outputs of the kind.
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
    own: tuple[str, ...] = ()
    missing: tuple[int, ...] = ()
    sort: bool = False

    def __post_init__(self) -> None:
        one_of("kind of task", self.kind, KINDS)
        if self.kind.startswith("pair") != (self.pair is not None):
            lacks = "needs a second column of sentences (pair)"
            what = lacks if self.pair is None else f"has no second column, {self.pair!r} given"
            raise InputError(f"{self.kind} {what}")
        if self.own and set(self.own) != set(self.classes):
            told = f"{self.where}: its own classes are {', '.join(self.own)}, but the classes"
            raise InputError(f"{told} {', '.join(self.classes)} are given; give its own names, in any order, or none")
        if self.label is not None and (self.regression or self.classes):
            check_outputs(self.where, self.kind, self.classes, self.low, self.high)

    @property
    def names(self) -> list[str]:
        return [name for name in (self.text, self.pair, self.label, self.id) if name is not None]

    @property
    def regression(self) -> bool:
        return self.kind.endswith("regression")

    def collect(
        self,
        records: Iterable[Record],
        split: str,
        counts: dict[str, int],
        files: dict[str, dict[str, Any]],
        unusable: str = "refuse",
    ) -> TextSet:
        """Return the set of the rows; those left out are added to `counts`, the first are named in the error or log."""
        one_of("choice for unusable rows", unusable, ("refuse", "skip"))
        if self.sort and self.label is not None and not self.classes:
            records = list(records)
            every = [record[self.label] for _, record in records if isinstance(record, dict)]
            if names := sorted({_label(value) for value in every if not self._is_missing(value)}, key=_by_number):
                check_alike(f"{self.where}, column {self.label!r}", names)
                known = replace(self, classes=tuple(names))
                return known.collect(records, split, counts, files, unusable)
        rows: list[tuple[list[str], float, str]] = []
        wrong: list[str] = []
        left: Counter[str] = Counter()
        found: set[str] = set()
        total = 0
        for place, record in records:
            total += 1
            try:
                if isinstance(record, UnusableRow):
                    raise record
                if self.label is not None:
                    if self._is_missing(record[self.label]):
                        left["unlabelled"] += 1
                        continue
                    found.add(_shorten(record[self.label]))
                    if not self.regression and not self.classes:
                        continue
                texts = [_sentence(name, record[name]) for name in (self.text, self.pair) if name is not None]
                number = self._number(record[self.label]) if self.label is not None else 0.0
                name = _name(self.id, record[self.id]) if self.id is not None else str(total - 1)
                rows.append((texts, number, name))
            except UnusableRow as error:
                wrong.append(f"{place}: {error}")
                left[error.counted] += 1
        if self.label is not None and found and not self.regression and not self.classes:
            shown = ", ".join(sorted(found)[:10])
            raise InputError(f"{self.where}: give the classes in label order; the column {self.label!r} has {shown}")
        told = f"{'; '.join(wrong[:SHOWN])}{f'; and {len(wrong) - SHOWN} more' if len(wrong) > SHOWN else ''}"
        if wrong and unusable == "refuse":
            message = f"{self.where}: {len(wrong)} of {total} rows cannot be used: {told}"
            raise TableError(message, "unusable='skip' to leave them out")
        if wrong:
            logger.warning("%s: %d of %d rows are left out: %s", self.where, len(wrong), total, told)
        if not rows:
            rest = f"no row to use of {total}: {told}" if wrong else f"{total} rows without a label"
            raise InputError(f"{self.where} has {rest if total else 'no rows'}")
        if left["unlabelled"]:
            logger.info("%s: %d of %d rows have no label and are left out", self.where, left["unlabelled"], total)
        labels = torch.tensor([number for _, number, _ in rows], dtype=torch.float64)
        return TextSet(
            [texts[0] for texts, *_ in rows],
            [texts[1] for texts, *_ in rows] if self.pair is not None else None,
            None if self.label is None else labels.to(torch.float32 if self.regression else torch.int64),
            [name for *_, name in rows],
            split,
            {**left, **counts},
            files,
            self.classes if self.label is not None else (),
        )

    def _is_missing(self, value: Any) -> bool:
        if _is_absent(value) or (isinstance(value, str) and not value.strip()):
            return True
        return not self.regression and not isinstance(value, str) and _is_scalar(value) and value in self.missing

    def _number(self, value: Any) -> float:
        shown = _label(value)
        if shown in self.classes and (isinstance(value, str) or not self.own):
            return self.classes.index(shown)
        number = _float(value)
        called = [] if self.own else [_float(name) for name in self.classes]
        if not all(map(math.isnan, called)):
            if number in called:
                return called.index(number)
            known = ", ".join(self.classes)
            raise UnusableRow(f"label {_shorten(shown)} is not one of the classes {known}", "other_label")
        low, high = (self.low, self.high) if self.regression else (0, len(self.classes) - 1)
        if not low <= number <= high or (not self.regression and number != int(number)):
            names = "" if self.regression else f" ({', '.join(self.own or self.classes)})"
            what = "a score in" if self.regression else "one of"
            raise UnusableRow(f"label {_shorten(shown)} is not {what} {low}..{high}{names}", "other_label")
        return self.classes.index(self.own[int(number)]) if self.own else number


def _label(value: Any) -> str:
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value).strip()


def _by_number(label: str) -> tuple[bool, float, str]:
    number = _float(label)
    return math.isnan(number), 0.0 if math.isnan(number) else number, label


def _float(value: Any) -> float:
    if isinstance(value, str) and not re.fullmatch(r"[-+.\w]+", value.strip().replace("_", " "), re.ASCII):
        return math.nan  # Python's float takes 1_0 and the digits of other scripts
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _is_absent(value: Any) -> bool:
    """Whether a cell is None, NaN, NaT or pandas.NA, which cannot be asked whether it is true."""
    absent = value is None or type(value).__name__ in ("NAType", "NaTType")
    return absent or (isinstance(value, Real) and value != value)


def _is_scalar(value: Any) -> bool:
    return not isinstance(value, list | dict) and getattr(value, "ndim", 0) == 0


def _sentence(column: str, value: Any) -> str:
    if _is_absent(value) or (isinstance(value, str) and not value.strip()):
        raise UnusableRow(f"{column} is empty", "empty_text")
    if not isinstance(value, str):
        raise UnusableRow(f"{column} is {type(value).__name__}, not text", "no_text")
    if _HALF.search(value):
        raise UnusableRow(f"{column} has half of a character: {_shorten(value)}", "no_text")
    return value.strip()


def _name(column: str, value: Any) -> str:
    shown = str(value)
    if not _is_scalar(value) or _HALF.search(shown):
        raise UnusableRow(f"{column} is {_shorten(value)}, not a text or a number", "other_id")
    return shown


def read_texts(
    path: str | Path,
    *,
    text: str,
    pair: str | None = None,
    label: str | None = None,
    id: str | None = None,
    kind: str = "classification",
    classes: Sequence[str] | None = (),
    low: float = 0.0,
    high: float = 1.0,
    format: str = "auto",
    separator: str | None = None,
    header: Sequence[str] | None = None,
    split: str | None = None,
    encoding: str = "utf-8",
    undecodable: str = "refuse",
    quotes: bool = True,
    unusable: str = "refuse",
) -> TextSet:
    """Read the rows of one split from a file with named columns.

    Sentences are stripped. Rows whose label is left empty are counted as ``unlabelled`` and left out; any other row
    that cannot be used is an error that names file and line.

    Args:
        text, pair: columns of the sentence, and of the second one that the kinds of pairs need.
        label: column of the label: a class name, or its number from 0 where classes are not called by numbers, or a
            score; None for an unlabelled split.
        id: column of the rows' names; None: their number in the file from 0.
        kind: one of :data:`~metapretrain.data.texts.KINDS`; `low`, `high`: range of scores, for regression.
        classes: names in label order, for classification with labels; None: the labels that there are, sorted.
        format: one of :data:`FORMATS`; ``"json"`` is a list or an object of records, ``"auto"`` goes by the suffix.
            Parquet and the first sheet of an Excel file are read through pandas, where it is installed.
        separator: between the fields of a table; None: tab, comma, semicolon or bar, by its first line.
        header: column names, for a table whose first line has none. `split`: None: the file's stem.
        undecodable: ``"refuse"`` a file with lines in another encoding, or ``"replace"`` and count them.
        quotes: whether ``"`` quotes the fields of a table.
        unusable: ``"refuse"`` a file with rows that cannot be used, or ``"skip"`` and count them: ``empty_text``,
            ``no_text``, ``other_fields``, ``other_label``, ``other_id``; in JSON ``no_column`` and ``malformed``.

    Raises InputError: the file or a column is missing, or rows cannot be used; options that may help are named.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "train.csv"
        >>> _ = file.write_text("review,stars\\nfine work,1\\n ,0\\nno,0\\nwhat?,\\n")
        >>> rows = read_texts(file, text="review", label="stars", classes=("bad", "good"), unusable="skip")
        >>> rows.first, rows.labels.tolist(), rows.counts
        (['fine work', 'no'], [1, 0], {'empty_text': 1, 'unlabelled': 1})
    """
    file = user_path(path)
    one_of("format", format, FORMATS)
    if separator is not None and (len(separator) != 1 or separator in '"\r\n'):
        raise InputError(f"a separator is one character and no quote, such as ';'; got {separator!r}")
    sort = classes is None and not kind.endswith("regression")
    columns = Columns(str(file), text, pair, label, id, kind, tuple(classes or ()), low, high, sort=sort)
    if header is not None:
        header = [header] if isinstance(header, str) else list(header)
        for name in columns.names:
            find_column(name, header, f"header given for {file.name}")
    counts: dict[str, int] = {}
    suffix = file.suffix.lower().removeprefix(".")
    try:
        if format in FRAMES or (format == "auto" and suffix in FRAMES):
            frame = _read_frame(file, format if format in FRAMES else suffix, header)
            own = tuple((frame.attrs.get("features", {}).get(label) or {}).get("names", ()))
            columns, records = _by_column(frame, columns, own)
        else:
            content, wrong = decode_text(file, encoding, undecodable)
            records = read_records(file, content, format, columns.names, header, separator, quotes)
            counts = {"undecodable": wrong} if wrong else {}
        return columns.collect(records, split or file.stem, counts, {file.name: file_record(file, None)}, unusable)
    except TableError as error:
        raise TableError(error.plain, error.option, f"; pass {error.option}") from error


def table_options(settings: Iterable[str]) -> dict[str, Any]:
    """Return options of :func:`read_texts` from ``KEY=VALUE``, as a command line gives them.

    Example:
        >>> table_options(["quotes=false", "header=id,sentence", "separator=\\\\t", "id=none"])
        {'quotes': False, 'header': ['id', 'sentence'], 'separator': '\\t', 'id': None}
    """
    found: dict[str, Any] = {}
    for name, equals, value in (setting.partition("=") for setting in settings):
        if not equals or name in found:
            raise InputError(f"expected each option of a table once, as KEY=VALUE, got {name + equals + value!r}")
        one_of("option of a table", name, TABLE_OPTIONS)
        if name == "quotes":
            found[name] = parse_value(value, bool)
        elif name == "header":
            found[name] = value.split(",")
        else:
            found[name] = {"none": None, "\\t": "\t"}.get(value.lower(), value)
    return found


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
    unusable: str = "refuse",
) -> TextSet:
    """Take the rows of one split from a `datasets.Dataset`, a pandas DataFrame or a dictionary of columns.

    Rows without a label (None, NaN, or class -1 as `datasets` writes it) are counted and left out. The options are
    those of :func:`read_texts`; `classes` are by default those of the dataset's ``ClassLabel`` feature, `split` its
    own.
    Raises InputError: a column is missing, `classes` are other ones than the dataset's own, or rows cannot be used.

    Example:
        >>> columns = {"a": ["one", "two"], "b": ["1", "3"], "score": [5.0, 0.5]}
        >>> from_dataset(columns, text="a", pair="b", label="score", kind="pair-regression", high=5.0).second
        ['1', '3']
    """
    # a column of a pandas DataFrame is an attribute, too
    about = {key: getattr(dataset, key, None) for key in ("split", "features") if hasattr(dataset, "column_names")}
    name = split or str(about.get("split") or "dataset")
    if isinstance(getattr(dataset, "column_names", None), dict):
        raise InputError(f"{name} has the splits {', '.join(map(str, dataset.column_names))}: give one of them")
    columns = Columns(name, text, pair, label, id, kind, tuple(classes), low, high)
    own = tuple(getattr((about.get("features") or {}).get(label), "names", None) or ())
    columns, records = _by_column(dataset, columns, own)
    try:
        return columns.collect(records, name, {}, {}, unusable)
    except TableError as error:
        raise TableError(error.plain, error.option, f"; pass {error.option}") from error


def _values(column: Any, where: str) -> list[Any]:
    if isinstance(column, str) or not isinstance(column, Iterable):
        raise InputError(f"{where}: expected a value a row, got {_shorten(column)}")
    return column.to_pylist() if hasattr(column, "to_pylist") else list(column)


def _by_column(data: Any, columns: Columns, own: tuple[str, ...]) -> tuple[Columns, Iterator[Record]]:
    """The columns, with the names of classes that the data has itself, and its records."""
    listed = getattr(data, "column_names", None)
    if listed is None:
        listed = getattr(data, "columns", None) if not isinstance(data, Mapping) else list(data)
    if listed is None:
        given = type(data).__name__
        raise InputError(f"{columns.where}: expected columns by name, as of a DataFrame, got a {given}")
    keys = {str(key): key for key in listed}
    for name in columns.names:
        find_column(str(name), [str(key) for key in listed], columns.where)
    values = [_values(data[keys[str(name)]], f"{columns.where}, column {name!r}") for name in columns.names]
    if len(set(map(len, values))) > 1:
        lengths = {name: len(column) for name, column in zip(columns.names, values, strict=True)}
        raise InputError(f"{columns.where}: its columns have different lengths: {lengths}")
    if not columns.regression:
        missing = () if not own and "-1" in columns.classes else (-1,)
        columns = replace(columns, classes=columns.classes or own, own=own, missing=missing)
    rows = enumerate(zip(*values, strict=True))
    return columns, ((f"row {row}", dict(zip(columns.names, cells, strict=True))) for row, cells in rows)
