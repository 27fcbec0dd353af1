"""Rows of texts from records: which columns hold them, what their labels may be, and which rows cannot be used."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch

from metapretrain.data.text_records import Record
from metapretrain.data.texts import TextSet, check_outputs
from metapretrain.errors import InputError

logger = logging.getLogger(__name__)

SHOWN = 3  # unusable rows that an error names


@dataclass(frozen=True)
class Columns:
    """Which columns to read and what their labels may be; turns records into the rows of a set.

    Args:
        where: file or data set, as errors name it.
        text, pair, label, id: columns, as in :func:`~metapretrain.data.text_files.read_texts`.
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
