"""The tasks of a text experiment and their tokens, made once for all rows of a table."""

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from metapretrain.data.tables import TableError, read_texts
from metapretrain.data.texts import TextSet, TextTask, check_tasks
from metapretrain.data.tokens import Tokens, tokenize
from metapretrain.errors import InputError
from metapretrain.experiments.text.recipe import TextRecipe
from metapretrain.files import write_file
from metapretrain.models.text_encoders import TextEncoder


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
            self._cache[whole] = tokenize(rows, encoder.tokenizer, max_length=limit, joined=joined, name=key)
        return self._cache[whole]


def read_rows(task: str, file: Path, kind: str, table: Mapping[str, Any] | None = None) -> TextSet:
    """Read rows to predict by :func:`read_texts`: columns `id` and `sentence`, or `sentence1` and `sentence2`.

    `table`: options of :func:`read_texts`, such as other names of columns. Where one is missing, errors name them all.
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
        other = "others are named by --table text=COLUMN, no ids by --table id=none (in Python: table={...})"
        raise InputError(f"{error}; a table for {task} needs the columns {needed}; {other}") from error


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
    table.writerows([columns, *zip(*columns.values(), strict=True)])
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_file(path, text.getvalue())
