"""Options that several scripts share: tables of one's own, and schedules by name."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pike  # noqa: F401

from metapretrain.checks import parse_value
from metapretrain.data.tables import TABLE_OPTIONS, TableError, read_texts, table_options
from metapretrain.data.texts import KINDS, TextTask, hold_out
from metapretrain.errors import InputError, one_of
from metapretrain.experiments.base import Machine
from metapretrain.experiments.command import machine_of
from metapretrain.options import Parser, named_file
from metapretrain.scheduling import SCHEDULERS

log = logging.getLogger("metapretrain.script_options")

OWN = ("label", "classes", "kind", "low", "high", "words")  # what `--table` says beside how a file is read


def take_image_folder(options: Namespace, default: str) -> None:
    """Make of `--image-folder DIR` what it stands for; InputError: `--dataset` or `--data-dir` says something else."""
    folder = options.image_folder
    if not folder:
        return
    if options.dataset not in (default, "image-folder") or options.data_dir not in (None, Path(folder)):
        raise InputError("--image-folder DIR stands for --dataset image-folder --data-dir DIR: leave these two out")
    options.dataset, options.data_dir = "image-folder", Path(folder)


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


def single_machine_of(options: Namespace) -> Machine:
    """Return the machine of an experiment whose runs are one process each.

    InputError: this is one of several processes.
    """
    machine = machine_of(options)
    if machine.world > 1:
        raise InputError("a run is one process; run rows side by side with --jobs-per-device, on all GPUs")
    return machine


def schedule_names(task: str) -> str:
    """The schedulers for the help of an option; `task` is what the sources are.

    Example:
        >>> schedule_names("TASK")
        'uniform, proportional, round-robin, utility, exp3 or fixed:TASK'
    """
    return f"{', '.join(name for name in SCHEDULERS if name != 'fixed')} or fixed:{task}"


def refuse_two_schedules(schedule: str | None, changes: Sequence[str], setting: str = "scheduler") -> None:
    """Refuse `--schedule` beside a change of the same choice by `--set`, whatever their order.

    Example:
        >>> refuse_two_schedules("exp3", ["epochs=3"])
        >>> refuse_two_schedules("exp3", ["scheduler="])
        Traceback (most recent call last):
        ...
        metapretrain.errors.InputError: --schedule exp3 and --set scheduler= are one choice: give one of them
    """
    for change in changes:
        if schedule is not None and change.partition("=")[0] == setting:
            raise InputError(f"--schedule {schedule} and --set {change} are one choice: give one of them")
