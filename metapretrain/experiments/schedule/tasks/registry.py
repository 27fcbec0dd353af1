"""The benchmark's tasks by name, built from the publishers' files or from made texts; `register` adds one."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from metapretrain.checks import user_path
from metapretrain.data.annotated import Dialogue, load_dailydialog_pp, load_mutual
from metapretrain.data.documents import (
    Documents,
    hold_out_documents,
    load_book,
    read_ptb_documents,
    read_wikitext2_documents,
)
from metapretrain.data.glue import load_copa, load_glue, load_wic
from metapretrain.data.made import made_dialogues, made_documents, made_pairs
from metapretrain.data.texts import Rows, join_rows
from metapretrain.errors import InputError, one_of
from metapretrain.experiments.schedule.tasks.base import Frame, PretrainingTask
from metapretrain.experiments.schedule.tasks.sentences import Reordering, ResponseSelection, Sentences
from metapretrain.experiments.schedule.tasks.tokens import MaskedLM
from metapretrain.models.language_models import tiny_tokenizer

Tasks = dict[str, PretrainingTask]
MADE = ("masked-lm", "reordering", "response-selection", "rte")


class Library:
    """The documents of a folder that has one folder per data set, read once for all tasks that use them.

    Training documents are the Penn Treebank's training part, WikiText-2's ``valid.txt`` and a book, without every
    twentieth, which is for validation; the test is WikiText-2's ``test.txt``.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = user_path(folder)
        if not self.folder.is_dir():
            raise InputError(f"there is no folder {folder}; give the one that holds ptb, wikitext-2, conll04 and so on")
        self._read: dict[bool, dict[str, Documents]] = {}

    def documents(self) -> dict[str, Documents]:
        return self._documents(natural=False)

    def prose(self) -> dict[str, Documents]:
        """Those without the Penn Treebank, which has no capitals and no articles."""
        return self._documents(natural=True)

    def dialogues(self) -> dict[str, Rows[Dialogue]]:
        """DailyDialog++ and MuTual; the test is that of DailyDialog++."""
        daily, mutual = load_dailydialog_pp(self.folder), load_mutual(self.folder)
        parts = {split: join_rows([daily[split], mutual[split]], split) for split in ("train", "validation")}
        return parts | {"test": daily["test"]}

    def _documents(self, *, natural: bool) -> dict[str, Documents]:
        if natural not in self._read:
            parts = [read_wikitext2_documents(self.folder, "valid"), load_book(self.folder)["train"]]
            if not natural:
                parts.insert(0, read_ptb_documents(self.folder))
            train, validation = hold_out_documents(join_rows(parts))
            test = read_wikitext2_documents(self.folder, "test")
            self._read[natural] = {"train": train, "validation": validation, "test": test}
        return self._read[natural]


@dataclass(frozen=True)
class TaskInfo:
    """One task of the benchmark; see :func:`register`."""

    name: str
    kind: str
    data: tuple[str, ...]
    task: Callable[..., PretrainingTask]
    texts: Callable[[Library], Mapping[str, Any]]
    made: Callable[[int], Mapping[str, Any]] | None
    options: Mapping[str, Any]


TASKS: dict[str, TaskInfo] = {}


def register(
    task: type[PretrainingTask],
    texts: Callable[[Library], Mapping[str, Any]],
    *,
    data: Sequence[str] = (),
    made: Callable[[int], Mapping[str, Any]] | None = None,
    kind: str = "source",
    **options: Any,
) -> None:
    """Make a task known by its name: to `--sources`, `--targets` and `--downstream` of `run_schedule.py`.

    Args:
        task: its class, built as `task(texts, frame, **options)`.
        texts: gives {split: texts} of a :class:`Library`, such as `Library.documents` or a function of your own.
        data: sets that the texts are from, as named in :data:`metapretrain.data.DATASETS`.
        made: gives made texts of a seed, for `--smoke`; None: the task has no part in it.
        kind: ``"source"``: labels come from plain text or dialogues; ``"target"``: labels were given by people.
        options: of the constructor; `name` is the task's name, where it is not that of the class.

    Example:
        >>> from metapretrain.data.made import made_documents
        >>> class Pairs(Reordering):
        ...     name = "pairs"
        >>> register(Pairs, Library.documents, made=made_documents, parts=2)
        >>> made_schedule_tasks(names=["pairs"])[0]["pairs"].classes
        2
        >>> del TASKS["pairs"]
    """
    name = options.get("name", getattr(task, "name", ""))
    one_of("kind of task", kind, ("source", "target"))
    if name in TASKS and getattr(TASKS[name].task, "__qualname__", "") != task.__qualname__:
        raise InputError(f"there is a task {name!r} already; give yours another name")
    TASKS[name] = TaskInfo(name, kind, tuple(data), task, texts, made, options)


def made_schedule_tasks(
    seed: int = 0, tokenizer: Any = None, *, names: Sequence[str] = MADE, max_length: int = 64, multiple: int = 16
) -> tuple[Tasks, Tasks]:
    """Make small tasks of the same kinds as the benchmark's: the sources and the targets, by name.

    `names` are those of tasks in :data:`TASKS` that have made texts; without a tokenizer, that of the ``tiny`` encoder.

    Example:
        >>> sources, targets = made_schedule_tasks(0)
        >>> list(sources), list(targets)
        (['masked-lm', 'reordering', 'response-selection'], ['rte'])
    """
    frame, texts = Frame(tokenizer or tiny_tokenizer(), max_length, multiple), {}
    found: dict[str, Tasks] = {"source": {}, "target": {}}
    for name in names:
        info = TASKS[one_of("task", name, tuple(TASKS))]
        if info.made is None:
            known = ", ".join(name for name, info in TASKS.items() if info.made is not None)
            raise InputError(f"task {name} has no made texts; those that have: {known}")
        if info.made not in texts:
            texts[info.made] = info.made(seed)
        found[info.kind][name] = info.task(texts[info.made], frame, **info.options)
    return found["source"], found["target"]


def load_schedule_tasks(
    folder: str | Path, tokenizer: Any, *, names: Sequence[str] | None = None, max_length: int = 128, multiple: int = 16
) -> dict[str, PretrainingTask]:
    """Build tasks by name; documents are read and tokenised once for all of them.

    `folder` holds a folder for each set, as far as the tasks need them: ``ptb``, ``wikitext-2``, ``dailydialog_pp``,
    ``mutual``, ``conll04``, ``conll2003``, ``glue``, ``superglue``, ``squad``. `names` are in :data:`TASKS`; None: all.
    """
    infos = [TASKS[one_of("task", name, tuple(TASKS))] for name in (TASKS if names is None else names)]
    library, frame = Library(folder), Frame(tokenizer, max_length, multiple)
    return {info.name: info.task(info.texts(library), frame, **info.options) for info in infos}


def _target(
    task: type[PretrainingTask], data: str, load: Callable[[Path], Any], made: Any = None, **options: Any
) -> None:
    register(task, lambda library: load(library.folder), data=(data,), made=made, kind="target", **options)


_PROSE, _SPOKEN = ("ptb", "wikitext-2", "gutenberg"), ("dailydialog-pp", "mutual")
register(MaskedLM, Library.documents, data=_PROSE, made=made_documents)
register(Reordering, Library.documents, data=_PROSE, made=made_documents)
register(ResponseSelection, Library.dialogues, data=_SPOKEN, made=made_dialogues, name="response-selection")
for _name in ("rte", "mrpc", "cola", "qnli"):
    _target(Sentences, _name, partial(load_glue, _name), made_pairs if _name == "rte" else None, name=_name)
_target(Sentences, "wic", load_wic, name="wic")
_target(Sentences, "cb", partial(load_glue, "cb"), name="cb", classes=3)
_target(ResponseSelection, "copa", load_copa, name="copa", choices=2)
