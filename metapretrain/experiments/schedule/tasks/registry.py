"""The benchmark's tasks by name, built from the publishers' files or from made texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from metapretrain.checks import user_path
from metapretrain.data.conll import load_conll04, load_conll2003
from metapretrain.data.dialogues import Dialogues, join_dialogues, load_dailydialog_pp, load_mutual
from metapretrain.data.documents import (
    UNKNOWN,
    Documents,
    hold_out_documents,
    join_documents,
    read_ptb_documents,
    read_wikitext2_documents,
)
from metapretrain.data.glue import load_cb, load_copa, load_glue, load_wic
from metapretrain.data.language_sets import load_book
from metapretrain.data.made import made_dialogues, made_documents, made_pairs, made_questions, made_relations
from metapretrain.data.squad import load_squad
from metapretrain.errors import InputError, one_of
from metapretrain.experiments.schedule.tasks.base import Frame, PretrainingTask
from metapretrain.experiments.schedule.tasks.sentences import (
    RelationExtraction,
    Reordering,
    ResponseSelection,
    SentenceDistance,
    Sentences,
)
from metapretrain.experiments.schedule.tasks.spans import ClozeQA, Reading, SpanSelection
from metapretrain.experiments.schedule.tasks.tokens import Capitalisation, MaskedLM, TokenDocument, TokenLabelling

Tasks = dict[str, PretrainingTask]


def made_schedule_tasks(
    seed: int = 0, tokenizer: Any = None, *, max_length: int = 64, multiple: int = 16
) -> tuple[Tasks, Tasks]:
    """Make small tasks of the same kinds as the benchmark's.

    Args:
        seed: of the texts.
        tokenizer: None: that of the ``tiny`` encoder.
        max_length: as :class:`Frame`.
        multiple: as :class:`Frame`.

    Returns:
        sources ``masked-lm``, ``reordering``, ``response-selection``, and targets ``conll04``, ``rte``, ``squad``.

    Example:
        >>> sources, targets = made_schedule_tasks(0)
        >>> list(sources), list(targets)
        (['masked-lm', 'reordering', 'response-selection'], ['conll04', 'rte', 'squad'])
    """
    if tokenizer is None:
        from metapretrain.models.scratch import tiny_tokenizer

        tokenizer = tiny_tokenizer()
    frame = Frame(tokenizer, max_length, multiple)
    documents = made_documents(seed)
    sources = (MaskedLM(documents, frame), Reordering(documents, frame), ResponseSelection(made_dialogues(seed), frame))
    targets = (
        RelationExtraction(made_relations(seed), frame),
        Sentences(made_pairs(seed), frame, name="rte"),
        Reading(made_questions(seed), frame),
    )
    return {task.name: task for task in sources}, {task.name: task for task in targets}


class Library:
    """The documents of a folder, read once for all tasks that use them.

    Training documents are the Penn Treebank's training part, WikiText-2's ``valid.txt`` and a book, without every
    twentieth, which is for validation; the test is WikiText-2's ``test.txt``.

    Args:
        folder: holds a folder for each set: ``ptb`` (with the book), ``wikitext-2`` and so on.

    Raises:
        InputError: there is no such folder.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = user_path(folder)
        if not self.folder.is_dir():
            raise InputError(f"there is no folder {folder}; give the one that holds ptb, wikitext-2, conll04 and so on")
        self._read: dict[bool, dict[str, Documents]] = {}

    def documents(self, *, natural: bool) -> dict[str, Documents]:
        """Documents of the splits; `natural`: without the Penn Treebank, which has no capitals and no articles."""
        if natural not in self._read:
            parts = [read_wikitext2_documents(self.folder, "valid"), load_book(self.folder)["train"]]
            if not natural:
                parts.insert(0, read_ptb_documents(self.folder))
            train, validation = hold_out_documents(join_documents(parts))
            test = read_wikitext2_documents(self.folder, "test")
            self._read[natural] = {"train": train, "validation": validation, "test": test}
        return self._read[natural]


@dataclass(frozen=True)
class TaskInfo:
    """One task.

    Attributes:
        name: in :data:`TASKS`.
        kind: ``"source"``: labels come from plain text or dialogues; ``"target"``: labels were given by people.
        data: sets that its files are from, as named in :data:`metapretrain.data.TEXT_DATASETS`.
        build: makes it from what is in a folder, and a frame.
    """

    name: str
    kind: str
    data: tuple[str, ...]
    build: Callable[[Library, Frame], PretrainingTask]


def load_schedule_tasks(
    folder: str | Path, tokenizer: Any, *, names: Sequence[str] | None = None, max_length: int = 128, multiple: int = 16
) -> dict[str, PretrainingTask]:
    """Build tasks by name; documents are read and tokenised once for all of them.

    Args:
        folder: holds a folder for each set: ``ptb``, ``wikitext-2``, ``dailydialog_pp``, ``mutual``, ``conll04``,
            ``conll2003``, ``glue``, ``superglue``, ``squad``, as far as the tasks need them.
        tokenizer: of the encoder; a fast one.
        names: in :data:`TASKS`; None: all.
        max_length: as :class:`Frame`.
        multiple: as :class:`Frame`.

    Returns:
        the tasks in the order of `names`, each with the splits ``train``, ``validation`` and ``test``.

    Raises:
        InputError: an unknown name, a folder or file is missing, or a row cannot be used.
    """
    infos = [TASKS[one_of("task", name, tuple(TASKS))] for name in (TASKS if names is None else names)]
    library, frame = Library(folder), Frame(tokenizer, max_length, multiple)
    return {info.name: info.build(library, frame) for info in infos}


def schedule_texts(folder: str | Path) -> list[str]:
    """The sentences of the training documents and dialogues, to train a tokenizer on; nothing held out is among them.

    Args:
        folder: as :func:`load_schedule_tasks`.

    Raises:
        InputError: a folder or file is missing, or a row cannot be used.
    """
    library = Library(folder)
    documents = library.documents(natural=False)["train"].documents
    texts = [" ".join(word for word in row if word != UNKNOWN) for document in documents for row in document]
    for dialogue in _dialogues(library)["train"].dialogues:
        texts += [*dialogue.context, *dialogue.right]
    return [text for text in texts if text]


def _of_documents(
    task: Callable[..., PretrainingTask], natural: bool, library: Library, frame: Frame
) -> PretrainingTask:
    return task(library.documents(natural=natural), frame)


def _dialogues(library: Library) -> dict[str, Dialogues]:
    daily, mutual = load_dailydialog_pp(library.folder), load_mutual(library.folder)
    parts = {split: join_dialogues([daily[split], mutual[split]], split) for split in ("train", "validation")}
    return parts | {"test": daily["test"]}


def _responses(library: Library, frame: Frame) -> PretrainingTask:
    return ResponseSelection(_dialogues(library), frame)


def _glue(name: str, library: Library, frame: Frame) -> PretrainingTask:
    return Sentences(load_glue(name, library.folder), frame, name=name)


def _simple(
    task: Callable[..., PretrainingTask], load: Callable[[Path], Any], library: Library, frame: Frame, **options: Any
) -> PretrainingTask:
    return task(load(library.folder), frame, **options)


_DOCUMENT_TASKS: tuple[tuple[type[PretrainingTask], bool], ...] = (  # whether only natural texts will do
    (MaskedLM, False),
    (Capitalisation, True),
    (TokenDocument, True),
    (Reordering, False),
    (SentenceDistance, True),
    (SpanSelection, True),
    (ClozeQA, True),
)
_TARGETS: tuple[tuple[str, partial[PretrainingTask]], ...] = (
    ("conll04", partial(_simple, RelationExtraction, load_conll04)),
    ("conll2003", partial(_simple, TokenLabelling, load_conll2003)),
    *((name, partial(_glue, name)) for name in ("rte", "mrpc", "cola", "qnli")),
    ("wic", partial(_simple, Sentences, load_wic, name="wic")),
    ("squad", partial(_simple, Reading, load_squad)),
    ("cb", partial(_simple, Sentences, load_cb, name="cb", classes=3)),
    ("copa", partial(_simple, ResponseSelection, load_copa, name="copa", choices=2)),
)
_ROWS = (
    *(
        TaskInfo(
            task.name,
            "source",
            ("wikitext-2", "gutenberg") if natural else ("ptb", "wikitext-2", "gutenberg"),
            partial(_of_documents, task, natural),
        )
        for task, natural in _DOCUMENT_TASKS
    ),
    TaskInfo("response-selection", "source", ("dailydialog-pp", "mutual"), _responses),
    *(TaskInfo(name, "target", (name,), build) for name, build in _TARGETS),
)
TASKS: dict[str, TaskInfo] = {row.name: row for row in _ROWS}
