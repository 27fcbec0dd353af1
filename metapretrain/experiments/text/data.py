"""The tasks of a text experiment and their tokens, made once for all rows of a table."""

from __future__ import annotations

import csv
import io
import logging
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from metapretrain.checks import parse_value
from metapretrain.data.tables import TABLE_OPTIONS, TableError, read_texts, table_options
from metapretrain.data.texts import KINDS, TextSet, TextTask, check_tasks, hold_out
from metapretrain.data.tokens import Tokens, tokenize
from metapretrain.errors import InputError, one_of
from metapretrain.experiments.text.recipe import TextRecipe
from metapretrain.files import write_file
from metapretrain.models.text_encoders import TextEncoder
from metapretrain.options import Parser, named_file

log = logging.getLogger(__name__)


def width_limit(encoder: TextEncoder, recipe: TextRecipe) -> int:
    """Tokens of a sequence at most: what the recipe allows and the encoder takes."""
    return min(recipe.max_length, encoder.max_length)


@dataclass(frozen=True)
class TextData:
    """The tasks of an experiment, each with a name of its own, and their tokens, made once.

    `tuning`: the dev parts are left alone: what :meth:`scored` gives are the validation parts.
    """

    tasks: tuple[TextTask, ...]
    tuning: bool = False
    _cache: dict[Any, Tokens] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_tasks(self.tasks)
        empty = [task.name for task in self.tasks if not len(task.validation)]
        if self.tuning and empty:
            raise InputError(f"{empty[0]} has no validation rows to choose by; raise the recipe's validation")

    @property
    def test(self) -> tuple[TextSet, ...]:
        return () if self.tuning else tuple(task.dev for task in self.tasks)

    @property
    def scored(self) -> list[TextTask]:
        """The tasks with what is scored as their dev part."""
        return [replace(task, dev=task.validation) for task in self.tasks] if self.tuning else list(self.tasks)

    @property
    def counts(self) -> dict[str, int]:
        found = {}
        for task in self.tasks:
            parts = {"train": task.train, "validation": task.validation, "dev": task.dev, "test": task.test}
            for name, part in parts.items():
                if part is not None and not (self.tuning and name in ("dev", "test")):
                    found[f"{task.name}_{name}"] = len(part)
                    found |= {f"{task.name}_{name}_{what}": count for what, count in part.counts.items()}
        return found

    @property
    def files(self) -> dict[str, dict[str, Any]]:
        parts = [part for task in self.tasks for part in (task.train, task.dev, task.test) if part is not None]
        return {name: about for part in parts for name, about in part.files.items()}

    def tokens(self, rows: TextSet, key: str, encoder: TextEncoder, recipe: TextRecipe, joined: bool) -> Tokens:
        """Return the tokens of `rows`, made the first time; `key` tells them from other rows."""
        whole = (key, joined and rows.pairs, recipe.encoder, recipe.max_length)
        if whole not in self._cache:
            limit = width_limit(encoder, recipe)
            self._cache[whole] = tokenize(rows, encoder.tokenizer, max_length=limit, joined=joined)
        return self._cache[whole]


def read_rows(task: str, file: Path, kind: str, table: Mapping[str, Any] | None = None) -> TextSet:
    """Read rows to predict by :func:`read_texts`: columns `id` and `sentence`, or `sentence1` and `sentence2`.

    Args:
        table: options of :func:`read_texts`, such as other names of columns.

    Raises:
        InputError: as there; where a column is missing, all are named.
    """
    usual = {"text": "sentence1", "pair": "sentence2"} if kind.startswith("pair") else {"text": "sentence"}
    columns: dict[str, Any] = {"id": "id", **usual, **(table or {})}
    try:
        return read_texts(file, kind=kind, **columns)
    except TableError as error:
        raise TableError(error.plain, error.option, f"; pass in table: {error.option}") from error
    except InputError as error:
        if "unknown column" not in str(error):
            raise
        needed = ", ".join(columns[name] for name in ("id", "text", "pair") if columns.get(name))
        raise InputError(f"{error}; a table for {task} needs the columns {needed}") from error


OWN = ("label", "classes", "kind", "low", "high", "words")  # what `--table` says beside how a file is read


def add_table_options(parser: Parser, held: str, more: str) -> None:
    """Add `--train`, `--HELD` and `--table`, for tables of one's own; `more`: further keys of the last one."""
    add, options = parser.add_argument, {"type": named_file, "action": "append", "default": [], "metavar": "NAME=FILE"}
    columns = "a table with the columns sentence (or sentence1 and sentence2) and label"
    add("--train", **options, help=f"training rows of a task of your own: {columns}")  # type: ignore[arg-type]
    add(f"--{held}", **options, help=f"its {held} rows (default: a fifth of its training rows)")  # type: ignore[arg-type]
    told = "how these tables are read: label, text or pair=COLUMN; classes=A,B in label order (default: as they sort); "
    told += f"{more}; separator and others of `metapretrain predict --table`; NAME.KEY=VALUE: of one task"
    add("--table", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help=told)


def own_tasks(options: Namespace, held: str) -> tuple[list[TextTask], dict[str, tuple[str, ...]]]:
    """Read the tasks of `--train`, with the table of `--HELD` or a fifth of the rows, always the same, as dev part.

    Returns:
        the tasks, without validation rows, and label words of those that have some.

    Raises:
        InputError: no such file, column or key, a row that cannot be used, or a name that is given twice.
    """
    files, others = dict(options.train), dict(getattr(options, held))
    if len(files) < len(options.train) or len(others) < len(getattr(options, held)):
        raise InputError(f"--train and --{held} name each task once, with one file")
    for name in others:
        one_of(f"task of --{held}", name, files)
    given: dict[str, dict[str, str]] = {name: {} for name in files}
    for key, equals, value in (setting.partition("=") for setting in options.table):
        task, dot, own = key.rpartition(".")
        if not equals:
            raise InputError(f"expected KEY=VALUE in --table, got {key!r}")
        for name in [one_of("task of --table", task, files)] if dot else files:
            given[name][one_of("key of --table", own, (*OWN, *TABLE_OPTIONS))] = value
    words = {name: tuple(own["words"].split(",")) for name, own in given.items() if "words" in own}
    return [_own_task(name, file, others.get(name), given[name]) for name, file in files.items()], words


def _own_task(name: str, file: Path, other: Path | None, given: Mapping[str, str]) -> TextTask:
    how = table_options(f"{key}={value}" for key, value in given.items() if key not in OWN)
    kind = one_of(
        "kind of task", given.get("kind", "pair-classification" if "pair" in how else "classification"), KINDS
    )
    known: dict[str, Any] = {}
    usual = {"text": "sentence1", "pair": "sentence2"} if kind.startswith("pair") else {"text": "sentence"}
    label, ends = given.get("label", "label"), ("low", "high")
    try:
        if kind.endswith("regression"):
            known |= {key: parse_value(given[key], float) for key in ends if key in given}
        else:
            known["classes"] = tuple(filter(None, given.get("classes", "").split(","))) or None
        columns = {**usual, **how, "label": label, "kind": kind}
        train = read_texts(file, **columns, **known)
        if "classes" in known and known["classes"] is None:
            known["classes"] = train.classes
            log.info("%s: its classes, in label order, are %s", name, ", ".join(train.classes))
        held = None if other is None else read_texts(other, **columns, **known)
    except TableError as error:
        raise InputError(f"{error.plain}; give {error.as_arguments('--table')}") from error
    except InputError as error:
        told = "; name it by --table, such as text=COLUMN or label=COLUMN" * ("unknown column" in str(error))
        raise InputError(f"{error}{told}") from error
    if held is None:
        train, held = hold_out(train, max(1, len(train) // 5))
    return TextTask(name, kind, replace(train, split="train"), train.subset([]), replace(held, split="dev"), **known)


def write_table(path: Path, rows: TextSet, predicted: Tensor, shares: Mapping[str, Tensor] | None = None) -> Path:
    """Write id and prediction of each row, and its label where it has one; classes are whole numbers, scores floats.

    `shares` are probabilities (N,) by class, further columns `p_CLASS`.
    """
    columns: dict[str, list[Any]] = {"id": rows.ids, "prediction": predicted.tolist()}
    if rows.labels is not None:
        columns["label"] = rows.labels.tolist()
    columns |= {f"p_{name}": [f"{value:.6f}" for value in column.tolist()] for name, column in (shares or {}).items()}
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(columns)
    table.writerows(zip(*columns.values(), strict=True))
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_file(path, text.getvalue())
