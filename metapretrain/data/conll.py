"""Readers of CoNLL-2003 (named entities) and CoNLL04 (entities and relations)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from metapretrain.data.images import file_record
from metapretrain.data.published import inside
from metapretrain.data.tables import parse_json, read_utf8
from metapretrain.errors import InputError

ENTITIES = ("PER", "ORG", "LOC", "MISC")
TAGS = ("O", *(f"{begin}-{kind}" for kind in ENTITIES for begin in "BI"))
PARTS = {"train": "eng.train", "validation": "eng.testa", "test": "eng.testb"}
RELATIONS = ("Kill", "Live_In", "Located_In", "OrgBased_In", "Work_For")
LAYOUTS = {
    "conll2003": f"{', '.join(PARTS.values())}: a line `word POS chunk entity` a word, an empty line after each "
    "sentence",
    "conll04": "conll04.json: {train, dev, test}, each a list of {tokens, entities: [{type, start, end}], relations}",
}


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
    root = inside(folder, "conll2003")
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
    text = read_utf8(file, f"expected {LAYOUTS['conll2003']}")
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


@dataclass(frozen=True)
class RelationRow:
    """A sentence.

    Attributes:
        words: its W words.
        entities: (type, first word, word after the last).
        relations: relation of (head, tail), the numbers of two entities.
    """

    words: list[str]
    entities: list[tuple[str, int, int]]
    relations: dict[tuple[int, int], str]


@dataclass(frozen=True)
class Relations:
    """Sentences of one split.

    Attributes:
        rows: the sentences.
        split: such as ``"train"``.
        files: as those of :class:`metapretrain.data.TextSet`.
    """

    rows: list[RelationRow]
    split: str = "train"
    files: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __len__(self) -> int:
        """Return the number of sentences."""
        return len(self.rows)


def load_conll04(folder: str | Path) -> dict[str, Relations]:
    """Read the three splits.

    Args:
        folder: holds ``conll04.json``, or has the folder ``conll04`` that does.

    Returns:
        ``train`` (922 sentences), ``validation`` (231) and ``test`` (288).

    Raises:
        InputError: no such file, or a row that cannot be used, named by its split and number.

    Example:
        >>> load_conll04("no-such-folder")
        Traceback (most recent call last):
        ...
        metapretrain.errors.InputError: no-such-folder/conll04.json does not exist: ...
    """
    file = inside(folder, "conll04") / "conll04.json"
    text = read_utf8(file, f"expected {LAYOUTS['conll04']}")
    parts = parse_json(text, file, 1)
    missing = [part for part in ("train", "dev", "test") if not isinstance(parts, dict) or not parts.get(part)]
    if missing:
        raise InputError(f"{file} has no {missing[0]!r}; it must be {LAYOUTS['conll04']}")
    files = {file.name: file_record(file, None)}
    return {
        split: Relations(
            [_row(item, f"{file}, {part} row {number}") for number, item in enumerate(parts[part])], split, files
        )
        for split, part in (("train", "train"), ("validation", "dev"), ("test", "test"))
    }


def _row(item: Any, where: str) -> RelationRow:
    try:
        words = [str(word) for word in item["tokens"]]
        entities = [(str(e["type"]), int(e["start"]), int(e["end"])) for e in item["entities"]]
        relations = {(int(r["head"]), int(r["tail"])): str(r["type"]) for r in item["relations"]}
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{where}: {type(error).__name__} {error}; expected {LAYOUTS['conll04']}") from error
    for kind, start, end in entities:
        if not 0 <= start < end <= len(words):
            raise InputError(f"{where}: the {kind} {start}..{end} is outside of its {len(words)} words")
    for (head, tail), kind in relations.items():
        if kind not in RELATIONS or not (0 <= head < len(entities) and 0 <= tail < len(entities)) or head == tail:
            raise InputError(
                f"{where}: relation {kind!r} of entities {head} and {tail}; there are {len(entities)} entities, "
                f"and the relations {', '.join(RELATIONS)}"
            )
    if not words or not all(words):
        raise InputError(f"{where}: a sentence without words, or an empty word")
    return RelationRow(words, entities, relations)
