"""Readers of CoNLL-2003 (named entities) and CoNLL04 (entities and relations)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metapretrain.data.images import file_record
from metapretrain.data.published import inside
from metapretrain.data.tables import read_json, read_utf8
from metapretrain.data.texts import Rows
from metapretrain.errors import InputError

ENTITIES = ("PER", "ORG", "LOC", "MISC")
TAGS = ("O", *(f"{begin}-{kind}" for kind in ENTITIES for begin in "BI"))
PARTS = {"train": "eng.train", "validation": "eng.testa", "test": "eng.testb"}
RELATIONS = ("Kill", "Live_In", "Located_In", "OrgBased_In", "Work_For")
LAYOUTS = {
    "conll2003": f"{', '.join(PARTS.values())}: a line `word POS chunk entity` a word, an empty line after each "
    "sentence",
    "conll04": "conll04.json: {train, dev, test}, each a list of {tokens, entities: [{type, start, end}], "
    "relations: [{type, head, tail}]}",
}
_SENTENCE = {
    "tokens": [str],
    "entities": [{"type": str, "start": int, "end": int}],
    "relations": [{"type": RELATIONS, "head": int, "tail": int}],
}


@dataclass(frozen=True)
class TaggedRow:
    """The words of a sentence, and the numbers of their tags in :data:`TAGS`; B begins every entity (IOB2)."""

    words: list[str]
    tags: list[int]


def load_conll2003(folder: str | Path) -> dict[str, Rows[TaggedRow]]:
    """Read ``train`` (14,041 sentences), ``validation`` (testa, 3,250) and ``test`` (testb, 3,453)."""
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


def _read(file: Path, split: str) -> Rows[TaggedRow]:
    text = read_utf8(file, f"expected {LAYOUTS['conll2003']}")
    sentences: list[list[list[str]]] = [[]]  # of each word its four columns
    for number, line in enumerate(text.split("\n"), 1):
        parts = line.split()
        if not parts or parts[0] == "-DOCSTART-":
            if sentences[-1]:
                sentences.append([])
            continue
        if len(parts) != 4 or parts[3] not in TAGS or "-DOCSTART-" in parts:
            raise InputError(f"{file}, line {number}: expected `word POS chunk entity`, got {line.strip()!r}")
        sentences[-1].append(parts)
    rows = [
        TaggedRow([parts[0] for parts in row], [TAGS.index(tag) for tag in begin_tags([parts[3] for parts in row])])
        for row in sentences
        if row
    ]
    return Rows(rows, split, files={file.name: file_record(file, None)})


@dataclass(frozen=True)
class RelationRow:
    """The words of a sentence, its entities (type, first word, word after the last), and relations by (head, tail)."""

    words: list[str]
    entities: list[tuple[str, int, int]]
    relations: dict[tuple[int, int], str]


def load_conll04(folder: str | Path) -> dict[str, Rows[RelationRow]]:
    """Read ``train`` (922 sentences), ``validation`` (231) and ``test`` (288)."""
    file = inside(folder, "conll04") / "conll04.json"
    names = {"train": "train", "validation": "dev", "test": "test"}
    parts = read_json(file, {part: [_SENTENCE] for part in names.values()}, LAYOUTS["conll04"])
    files = {file.name: file_record(file, None)}
    found = {}
    for split, part in names.items():
        rows = [_row(item, f"{file}, {part} row {number}") for number, item in enumerate(parts[part])]
        if not rows:
            raise InputError(f"{file} has no sentence in {part!r}; it must be {LAYOUTS['conll04']}")
        found[split] = Rows(rows, split, files=files)
    return found


def _row(item: dict[str, Any], where: str) -> RelationRow:
    words = item["tokens"]
    entities = [(about["type"], about["start"], about["end"]) for about in item["entities"]]
    relations = {(about["head"], about["tail"]): about["type"] for about in item["relations"]}
    for kind, start, end in entities:
        if not 0 <= start < end <= len(words):
            raise InputError(f"{where}: the {kind} {start}..{end} is outside of its {len(words)} words")
    for (head, tail), kind in relations.items():
        if not (0 <= head < len(entities) and 0 <= tail < len(entities)) or head == tail:
            told = f"relation {kind!r} of entities {head} and {tail}"
            raise InputError(f"{where}: {told}; there are {len(entities)} entities")
    if not words:
        raise InputError(f"{where}: a sentence without words")
    return RelationRow(words, entities, relations)
