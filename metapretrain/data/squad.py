"""Reader of SQuAD questions: tokenised parallel lines with spans of words, and XQuAD's English JSON."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metapretrain.data.images import file_record
from metapretrain.data.published import inside
from metapretrain.data.tables import read_json, read_utf8
from metapretrain.data.texts import Rows
from metapretrain.errors import InputError

logger = logging.getLogger(__name__)

FOLDERS = {"small_train": "train", "all_val": "val"}
XQUAD = "xquad.en.json"
LAYOUTS = {
    "squad": "small_train/train.{context,question,answer,span} and all_val/val.{context,question,answer,span}, "
    f"parallel lines of words with the first and last word of the answer, and {XQUAD} (SQuAD v1.1 JSON)"
}
_ANSWER = {"answer_start": int, "text": str}
_XQUAD = {"data": [{"paragraphs": [{"context": str, "qas": [{"question": str, "answers": [_ANSWER]}]}]}]}
_WORD = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True)
class Question:
    """A question, the words of its passage, and the words begin..end of it, both included, that answer it."""

    question: str
    words: list[str]
    begin: int
    end: int
    answer: str


def load_squad(folder: str | Path, *, every: int = 10) -> dict[str, Rows[Question]]:
    """Read the questions of both folders for training, and XQuAD's as the test.

    XQuAD's passages come from SQuAD's dev set, and none of them is in the folders. Questions of each `every`-th passage
    of ``all_val`` are for validation, the same in every run. Counts: ``unaligned``, answers left out, since they do not
    begin and end with a word.
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
        "train": Rows(kept, "train", {"unaligned": lost} if lost else {}, files),
        "validation": Rows(held, "validation", {}, files),
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
        if len(ends) != 2 or not all(re.fullmatch("[0-9]{1,9}", end) for end in ends):
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


def _xquad(file: Path) -> Rows[Question]:
    whole = read_json(file, _XQUAD, LAYOUTS["squad"])
    rows, lost = [], 0
    for number, paragraph in enumerate(paragraph for article in whole["data"] for paragraph in article["paragraphs"]):
        where, context = f"{file}, paragraph {number}", paragraph["context"]
        found = list(_WORD.finditer(context))
        begins = {match.start(): place for place, match in enumerate(found)}
        ends = {match.end(): place for place, match in enumerate(found)}
        words = [match.group() for match in found]
        for item in paragraph["qas"]:
            if not item["answers"]:
                raise InputError(f"{where}: a question without an answer")
            begin, text = item["answers"][0]["answer_start"], item["answers"][0]["text"]
            if context[begin : begin + len(text)] != text:
                raise InputError(f"{where}: the answer {text!r} does not stand at letter {begin}")
            if begin not in begins or begin + len(text) not in ends:
                lost += 1
                continue
            rows.append(Question(item["question"], words, begins[begin], ends[begin + len(text)], text))
    if lost:
        logger.info("%s: %d answers do not begin and end with a word; left out", file, lost)
    return Rows(rows, "test", {"unaligned": lost} if lost else {}, {file.name: file_record(file, None)})
