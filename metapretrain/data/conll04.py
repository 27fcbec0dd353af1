"""Reader of CoNLL04 (Roth and Yih, 2004): sentences with entities and the relations between them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from metapretrain.data.images import file_record
from metapretrain.data.text_records import decode_text, parse_json
from metapretrain.errors import InputError
from metapretrain.paths import user_path

RELATIONS = ("Kill", "Live_In", "Located_In", "OrgBased_In", "Work_For")
PARTS = {"train": "train", "validation": "dev", "test": "test"}
LAYOUT = "conll04.json: {train, dev, test}, each a list of {tokens, entities: [{type, start, end}], relations}"


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
    root = user_path(folder)
    root = root / "conll04" if (root / "conll04").is_dir() else root
    file = root / "conll04.json"
    text, _ = decode_text(file, "utf-8", "refuse", f"expected {LAYOUT}")
    parts = parse_json(text, file, 1)
    missing = [part for part in PARTS.values() if not isinstance(parts, dict) or not parts.get(part)]
    if missing:
        raise InputError(f"{file} has no {missing[0]!r}; it must be {LAYOUT}")
    files = {file.name: file_record(file, None)}
    return {
        split: Relations(
            [_row(item, f"{file}, {part} row {number}") for number, item in enumerate(parts[part])], split, files
        )
        for split, part in PARTS.items()
    }


def _row(item: Any, where: str) -> RelationRow:
    try:
        words = [str(word) for word in item["tokens"]]
        entities = [(str(e["type"]), int(e["start"]), int(e["end"])) for e in item["entities"]]
        relations = {(int(r["head"]), int(r["tail"])): str(r["type"]) for r in item["relations"]}
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{where}: {type(error).__name__} {error}; expected {LAYOUT}") from error
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
