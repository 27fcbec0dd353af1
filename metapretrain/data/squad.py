"""Reader of SQuAD questions: tokenised parallel lines with spans of words, and XQuAD's English JSON."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from metapretrain.data.images import file_record
from metapretrain.data.published import inside
from metapretrain.data.tables import parse_json, read_utf8
from metapretrain.errors import InputError

logger = logging.getLogger(__name__)

FOLDERS = {"small_train": "train", "all_val": "val"}
XQUAD = "xquad.en.json"
LAYOUTS = {
    "squad": "small_train/train.{context,question,answer,span} and all_val/val.{context,question,answer,span}, "
    f"parallel lines of words with the first and last word of the answer, and {XQUAD} (SQuAD v1.1 JSON)"
}
_WORD = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True)
class Question:
    """A question, its passage, and the words first..last of the passage that answer it.

    Attributes:
        question: text.
        words: of the passage.
        begin: first word of the answer.
        end: last word of the answer.
        answer: its text.
    """

    question: str
    words: list[str]
    begin: int
    end: int
    answer: str


@dataclass(frozen=True)
class Questions:
    """Questions of one split.

    Attributes:
        rows: the questions.
        split: such as ``"train"``.
        counts: ``unaligned``: answers left out, since they do not begin and end with a word; those of ``all_val`` are
            counted in training.
        files: as those of :class:`metapretrain.data.TextSet`.
    """

    rows: list[Question]
    split: str = "train"
    counts: dict[str, int] = field(default_factory=dict)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __len__(self) -> int:
        """Return the number of questions."""
        return len(self.rows)


def load_squad(folder: str | Path, *, every: int = 10) -> dict[str, Questions]:
    """Read the questions of both folders for training, and XQuAD's as the test.

    XQuAD's passages come from SQuAD's dev set, and none of them is in the folders.

    Args:
        folder: holds the files, or has the folder ``squad`` that does.
        every: questions of each `every`-th passage of ``all_val`` are for validation, the same in every run.

    Returns:
        ``train``, ``validation`` and ``test`` (1,190 questions).

    Raises:
        InputError: a file is missing, or a line cannot be used.
    """
    root = inside(folder, "squad")
    if not root.is_dir():
        raise InputError(f"no folder {root}: it must hold {LAYOUTS['squad']}")
    kept: list[Question] = []
    held: list[Question] = []
    files: dict[str, dict[str, Any]] = {}
    lost = 0
    for place, stem in FOLDERS.items():
        rows, records, backward = _parallel(root / place, stem)
        files |= records
        lost += backward
        if place == "small_train":
            kept += rows
            continue
        numbers: dict[str, int] = {}
        for row in rows:
            number = numbers.setdefault(" ".join(row.words), len(numbers))
            (held if number % every == every - 1 else kept).append(row)
    return {
        "train": Questions(kept, "train", {"unaligned": lost} if lost else {}, files),
        "validation": Questions(held, "validation", {}, files),
        "test": _xquad(root / XQUAD),
    }


def _parallel(folder: Path, stem: str) -> tuple[list[Question], dict[str, dict[str, Any]], int]:
    names = [f"{stem}.{part}" for part in ("context", "question", "answer", "span")]
    lines = []
    for name in names:
        text = read_utf8(folder / name, f"expected {LAYOUTS['squad']}")
        lines.append([line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")])
    counts = {name: len(part) for name, part in zip(names, lines, strict=True)}
    if len(set(counts.values())) > 1:
        raise InputError(f"{folder}: its files must have as many lines as each other, got {counts}")
    rows = []
    for number, (context, question, answer, span) in enumerate(zip(*lines, strict=True), 1):
        where = f"{folder / names[3]}, line {number}"
        words, ends = context.split(), span.split()
        if len(ends) != 2 or not all(end.isdigit() for end in ends):
            raise InputError(f"{where}: expected the numbers of two words, got {span!r}")
        begin, end = (int(place) for place in ends)
        if end == begin - 1:  # how the publisher's aligner marks an answer that it did not find whole
            logger.warning("%s: the answer ends at word %d, before it begins; left out", where, end)
            continue
        if not begin <= end < len(words):
            raise InputError(f"{where}: words {begin}..{end} are not in the {len(words)} of its context")
        if not question.strip():
            raise InputError(f"{folder / names[1]}, line {number}: an empty question")
        rows.append(Question(question.strip(), words, begin, end, answer.strip()))
    files = {f"{folder.name}/{name}": file_record(folder / name, None) for name in names}
    return rows, files, counts[names[0]] - len(rows)


def _xquad(file: Path) -> Questions:
    text = read_utf8(file, f"expected {LAYOUTS['squad']}")
    whole, rows, lost = parse_json(text, file, 1), [], 0
    try:
        paragraphs = [paragraph for article in whole["data"] for paragraph in article["paragraphs"]]
        for number, paragraph in enumerate(paragraphs):
            where = f"{file}, paragraph {number}"
            found = list(_WORD.finditer(paragraph["context"]))
            begins = {match.start(): place for place, match in enumerate(found)}
            ends = {match.end(): place for place, match in enumerate(found)}
            words = [match.group() for match in found]
            for item in paragraph["qas"]:
                answer = item["answers"][0]
                begin, text = int(answer["answer_start"]), answer["text"]
                if paragraph["context"][begin : begin + len(text)] != text:
                    raise InputError(f"{where}: the answer {text!r} does not stand at letter {begin}")
                if begin not in begins or begin + len(text) not in ends:
                    lost += 1
                    continue
                rows.append(Question(item["question"], words, begins[begin], ends[begin + len(text)], text))
    except (KeyError, IndexError, TypeError) as error:
        raise InputError(f"{file}: {type(error).__name__} {error}; expected SQuAD v1.1 JSON") from error
    if lost:
        logger.info("%s: %d answers do not begin and end with a word; left out", file, lost)
    return Questions(rows, "test", {"unaligned": lost} if lost else {}, {file.name: file_record(file, None)})
