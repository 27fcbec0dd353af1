"""Readers of the Stanford Sentiment Treebank as sentences: in 5 classes (CS224N's files) and in 2 (stsa.binary)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from metapretrain.data.cs224n import SST_CLASSES
from metapretrain.data.sentence_files import Parts, collect_rows, find_folder, name_rows, read_parts, unlike
from metapretrain.data.text_records import Record, decode_text
from metapretrain.data.texts import TextSet

POLARITY = ("negative", "positive")
LAYOUT_5 = "ids-sst-train.csv and ids-sst-dev.csv of CS224N"
LAYOUT_2 = "stsa.binary.train and stsa.binary.dev, lines of a label (0 or 1), a space and a sentence"


def read_sst5(folder: str | Path) -> Parts:
    """Read SST in 5 classes; CS224N's ``dev`` is the test part, for its test file has no labels.

    Raises:
        InputError: a file is missing, or a row cannot be used.
    """
    files = ("ids-sst-train.csv", "ids-sst-dev.csv")
    root = find_folder(folder, ("cs224n",), files, LAYOUT_5)
    return read_parts(root, files, text="sentence", label="sentiment", id="id", format="tsv", classes=SST_CLASSES)


def read_sst2(folder: str | Path) -> Parts:
    """Read SST in 2 classes (no neutral sentences); ``dev`` is the test part.

    Raises:
        InputError: a file is missing, or a line cannot be used.
    """
    files = ("stsa.binary.train", "stsa.binary.dev")
    root = find_folder(folder, ("sst2",), files, LAYOUT_2)
    train, test = (_read_lines(root / file, split) for file, split in zip(files, ("train", "test"), strict=True))
    return unlike(train, test), test


def _read_lines(file: Path, split: str) -> TextSet:
    text, _ = decode_text(file, "utf-8", "latin-1")  # older copies are Latin-1
    return name_rows(collect_rows(_line_records(text), file, POLARITY, split), file.name)


def _line_records(text: str) -> Iterator[Record]:
    for number, line in enumerate(text.removesuffix("\n").split("\n"), 1):
        label, _, sentence = line.partition(" ")
        yield f"line {number}", {"text": sentence, "label": label or "none", "id": number}
