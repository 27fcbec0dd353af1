"""Records of a CSV, TSV, JSONL or JSON file, each with the line where it begins."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from metapretrain.errors import InputError, one_of

FORMATS = ("auto", "csv", "tsv", "jsonl", "json")
SEPARATORS = {"csv": ",", "tsv": "\t"}
NAMES = {",": "commas", "\t": "tabs", ";": "semicolons"}
Record = tuple[str, dict[str, Any]]  # where it begins, its values by column


def decode_text(
    path: Path, encoding: str, undecodable: str, expected: str = "name a CSV, TSV, JSONL or JSON file"
) -> tuple[str, int]:
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
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                where = f"line {number}"
                yield where, _json_object(path, where, parse_json(line, path, number), columns)
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
