"""Reader of SuperGLUE's parts for the scheduling benchmark: WiC, CB and COPA."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from metapretrain.data.dialogues import Dialogue, Dialogues
from metapretrain.data.glue import held_out
from metapretrain.data.images import file_record
from metapretrain.data.sentence_files import find_folder
from metapretrain.data.text_files import read_texts
from metapretrain.data.text_records import decode_text, parse_json
from metapretrain.data.texts import TextSet
from metapretrain.errors import InputError

CB_CLASSES = ("entailment", "contradiction", "neutral")
WIC_TEST = "FewGLUE_32dev/val.jsonl"
LAYOUT_WIC = f'train.jsonl: {{label, text: "Word: W. Sentence 1: A Sentence 2: B"}}; {WIC_TEST} as published'
LAYOUT_CB = "train.jsonl and val.jsonl: {premise, hypothesis, label}"
LAYOUT_COPA = "train.jsonl and val.jsonl: {premise, choice1, choice2, question, label}"
QUESTIONS = {"cause": "What was the cause of this?", "effect": "What happened as a result?"}
_WIC = re.compile(r"Word: (.+?)\. Sentence 1: (.+) Sentence 2: (.+)", re.DOTALL)
Row = TypeVar("Row")


def load_wic(folder: str | Path) -> dict[str, TextSet]:
    """Read WiC: does a word have one meaning in both sentences (class 1)? The word stands before the first.

    The test is the published validation part (638 rows); training rows that have both sentences of one of its rows
    are left out.

    Args:
        folder: holds the files, or has ``superglue/WiC``.

    Returns:
        ``train``, ``validation`` and ``test``.

    Raises:
        InputError: a file is missing, or a line cannot be used.
    """
    root = find_folder(folder, ("superglue/WiC", "WiC"), ("train.jsonl", WIC_TEST), LAYOUT_WIC)
    train = _lines(root / "train.jsonl", _wic)
    test = _lines(root / WIC_TEST, _wic_test)
    seen = {_key(row) for row in test}
    kept = [row for row in train if _key(row) not in seen]
    parts = []
    for split, rows, name in (("train", kept, "train.jsonl"), ("test", test, WIC_TEST)):
        labels = torch.tensor([int(row[3]) for row in rows])
        first, second = [f"{row[0]}: {row[1]}" for row in rows], [row[2] for row in rows]
        counts = {"in_test": len(train) - len(kept)} if split == "train" else {}
        files = {f"WiC/{name}": file_record(root / name, None)}
        parts.append(TextSet(first, second, labels, split=split, counts=counts, files=files))
    return held_out(*parts)


def load_cb(folder: str | Path) -> dict[str, TextSet]:
    """Read CommitmentBank: 3 classes; the test is the published validation part (57 rows: too few to tell methods).

    Raises:
        InputError: a file is missing, or a line cannot be used.
    """
    root = find_folder(folder, ("superglue/CB", "CB"), ("train.jsonl", "val.jsonl"), LAYOUT_CB)
    options: dict[str, Any] = {
        "text": "premise",
        "pair": "hypothesis",
        "label": "label",
        "kind": "pair-classification",
        "classes": CB_CLASSES,
        "format": "jsonl",
    }
    train = read_texts(root / "train.jsonl", split="train", **options)
    return held_out(train, read_texts(root / "val.jsonl", split="test", **options))


def load_copa(folder: str | Path) -> dict[str, Dialogues]:
    """Read COPA as dialogues: a premise and the question for its cause or effect, a right and a wrong answer.

    The test is the published validation part (100 rows); every tenth training row is for validation.

    Raises:
        InputError: a file is missing, or a line cannot be used.
    """
    root = find_folder(folder, ("superglue/COPA", "COPA"), ("train.jsonl", "val.jsonl"), LAYOUT_COPA)
    train, test = (_lines(root / name, _copa) for name in ("train.jsonl", "val.jsonl"))
    files = {f"COPA/{name}": file_record(root / name, None) for name in ("train.jsonl", "val.jsonl")}
    kept = [row for number, row in enumerate(train) if number % 10 != 9]
    parts = {"train": kept, "validation": train[9::10], "test": test}
    return {split: Dialogues(rows, split, files) for split, rows in parts.items()}


def _lines(file: Path, row: Callable[[dict[str, Any]], Row]) -> list[Row]:
    text, _ = decode_text(file, "utf-8", "refuse")
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        item = parse_json(line, file, number)
        try:
            rows.append(row(item))
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{file}, line {number}: {type(error).__name__} {error}") from error
    return rows


def _wic(item: dict[str, Any]) -> tuple[str, str, str, bool]:
    found = _WIC.fullmatch(item["text"].strip())
    if found is None or item["label"] not in (0, 1):
        raise ValueError(f"expected {LAYOUT_WIC}")
    return found[1], found[2], found[3], bool(item["label"])


def _wic_test(item: dict[str, Any]) -> tuple[str, str, str, bool]:
    word, first, second = _texts(item, "word", "sentence1", "sentence2")
    if item["label"] not in (0, 1):
        raise ValueError(f"the label must be true or false, got {item['label']!r}")
    return word, first, second, bool(item["label"])


def _texts(item: dict[str, Any], *names: str) -> list[str]:
    for name in names:
        if not isinstance(item[name], str):
            raise ValueError(f"{name} must be a text, got {item[name]!r}")
    return [item[name] for name in names]


def _copa(item: dict[str, Any]) -> Dialogue:
    choices, right = _texts(item, "choice1", "choice2"), item["label"]
    if right not in (0, 1):
        raise ValueError(f"the label must be 0 or 1, got {right!r}")
    return Dialogue([*_texts(item, "premise"), QUESTIONS[item["question"]]], [choices[right]], [choices[1 - right]])


def _key(row: tuple[str, str, str, bool]) -> tuple[str, ...]:
    """Both sentences by their letters, in either order: the two files separate words in different ways."""
    return tuple(sorted(re.sub(r"\W", "", text).lower() for text in row[1:3]))
