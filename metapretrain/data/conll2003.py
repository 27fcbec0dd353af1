"""Reader of CoNLL-2003 (Tjong Kim Sang and De Meulder): sentences of words with named entity tags."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from metapretrain.data.images import file_record
from metapretrain.data.text_records import decode_text
from metapretrain.errors import InputError
from metapretrain.paths import user_path

ENTITIES = ("PER", "ORG", "LOC", "MISC")
TAGS = ("O", *(f"{begin}-{kind}" for kind in ENTITIES for begin in "BI"))
PARTS = {"train": "eng.train", "validation": "eng.testa", "test": "eng.testb"}
LAYOUT = f"{', '.join(PARTS.values())}: a line `word POS chunk entity` a word, an empty line after each sentence"


@dataclass(frozen=True)
class Tagged:
    """Sentences of one split with a tag for each word.

    Attributes:
        words: of each sentence.
        tags: numbers in :data:`TAGS` of each sentence's words; B begins every entity (IOB2).
        split: such as ``"train"``.
        files: as those of :class:`metapretrain.data.TextSet`.
    """

    words: list[list[str]]
    tags: list[list[int]]
    split: str = "train"
    files: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __len__(self) -> int:
        """Return the number of sentences."""
        return len(self.words)


def load_conll2003(folder: str | Path) -> dict[str, Tagged]:
    """Read ``train`` (14,041 sentences), ``validation`` (testa, 3,250) and ``test`` (testb, 3,453).

    Args:
        folder: holds the files, or has the folder ``conll2003`` that does.

    Raises:
        InputError: a file is missing, or a line cannot be used.

    Example:
        >>> load_conll2003("no-such-folder")
        Traceback (most recent call last):
        ...
        metapretrain.errors.InputError: no-such-folder/eng.train does not exist: ...
    """
    root = user_path(folder)
    root = root / "conll2003" if (root / "conll2003").is_dir() else root
    return {split: _read(root / name, split) for split, name in PARTS.items()}


def begin_tags(tags: list[str]) -> list[str]:
    """Tags in which B begins every entity, from those in which it only parts two neighbours of one kind (IOB1).

    Example:
        >>> begin_tags(["I-PER", "I-PER", "B-PER", "O", "I-LOC", "I-ORG"])
        ['B-PER', 'I-PER', 'B-PER', 'O', 'B-LOC', 'B-ORG']
    """
    found = []
    for place, tag in enumerate(tags):
        before = tags[place - 1] if place else "O"
        starts = tag.startswith("I-") and before[2:] != tag[2:]
        found.append(f"B-{tag[2:]}" if starts else tag)
    return found


def _read(file: Path, split: str) -> Tagged:
    text, _ = decode_text(file, "utf-8", "refuse", f"expected {LAYOUT}")
    words: list[list[str]] = [[]]
    tags: list[list[str]] = [[]]
    for number, line in enumerate(text.split("\n"), 1):
        parts = line.split()
        if not parts or parts[0] == "-DOCSTART-":
            if words[-1]:
                words.append([])
                tags.append([])
            continue
        if len(parts) != 4 or parts[3] not in TAGS or "-DOCSTART-" in parts:
            raise InputError(f"{file}, line {number}: expected `word POS chunk entity`, got {line.strip()!r}")
        words[-1].append(parts[0])
        tags[-1].append(parts[3])
    if not words[-1]:
        words, tags = words[:-1], tags[:-1]
    numbers = [[TAGS.index(tag) for tag in begin_tags(row)] for row in tags]
    return Tagged(words, numbers, split, {file.name: file_record(file, None)})
