"""Readers of sentences with opinions on aspects, as sentiment of whole sentences: SentiHood and SemEval-2016 task 5."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from metapretrain.data.sentence_files import Parts, collect_rows, concatenate, find_folder, name_rows, unlike
from metapretrain.data.text_records import Record, decode_text, parse_json
from metapretrain.data.texts import TextSet
from metapretrain.errors import InputError

TWO = ("negative", "positive")
THREE = ("negative", "neutral", "positive")
SENTIHOOD = ("sentihood-train.json", "sentihood-dev.json", "sentihood-test.json")
SEMEVAL = {
    "semeval-restaurant": (
        "ABSA16_Restaurants_Train_SB1_v2.xml",
        "EN_REST_SB1_TEST_gold.xml",
        "EN_REST_SB1_TEST.xml.gold",
    ),
    "semeval-laptop": ("ABSA16_Laptops_Train_SB1_v2.xml", "EN_LAPT_SB1_TEST_.xml.gold"),
}
LAYOUT_SENTIHOOD = f"{', '.join(SENTIHOOD)}: lists of {{id, text, opinions: [{{sentiment}}]}}"
LAYOUT_SEMEVAL = (
    "ABSA16_Restaurants_Train_SB1_v2.xml and EN_REST_SB1_TEST.xml.gold, ABSA16_Laptops_Train_SB1_v2.xml and "
    "EN_LAPT_SB1_TEST_.xml.gold, as published"
)


def read_sentihood(folder: str | Path) -> Parts:
    """Read the sentences of SentiHood whose opinions agree; the published train and dev are the training part.

    Counts: ``no_opinion`` and ``opinions_differ``, sentences left out, and those of
    :func:`~metapretrain.data.sentence_files.unlike`.

    Raises:
        InputError: a file is missing, or a sentence cannot be used.
    """
    root = find_folder(folder, ("sentihood",), SENTIHOOD, LAYOUT_SENTIHOOD)
    train, dev, test = (_sentihood(root / name) for name in SENTIHOOD)
    return unlike(concatenate([train, dev], "train"), test), test


def read_semeval(name: str, folder: str | Path, neutral: bool = True) -> Parts:
    """Read the sentences of SemEval-2016 task 5 (English, subtask 1) whose opinions agree.

    Args:
        name: ``"semeval-restaurant"`` or ``"semeval-laptop"``.
        folder: holds the published files.
        neutral: keep sentences of neutral opinions, a class of their own, as the paper (table 3); otherwise they are
            left out and counted as ``neutral``.

    Raises:
        InputError: a file is missing, or a sentence cannot be used.
    """
    train, *tests = SEMEVAL[name]
    root = find_folder(folder, ("semeval2016",), (train,), LAYOUT_SEMEVAL)
    gold = next((test for test in tests if (root / test).is_file()), None)
    if gold is None:
        raise InputError(f"{root} lacks {' or '.join(tests)}; it must hold {LAYOUT_SEMEVAL}")
    parts = [_semeval(root / file, split, neutral) for file, split in ((train, "train"), (gold, "test"))]
    return unlike(parts[0], parts[1]), parts[1]


def _sentihood(file: Path) -> TextSet:
    text, _ = decode_text(file, "utf-8", "refuse")
    items = parse_json(text, file, 1)
    if not isinstance(items, list):
        raise InputError(f"{file} must hold a JSON list of sentences, got {type(items).__name__}")
    counts: dict[str, int] = {}
    rows = collect_rows(_sentihood_records(file, items, counts), file, TWO, file.stem.split("-")[-1], counts)
    return name_rows(rows, file.name)


def _sentihood_records(file: Path, items: list[Any], counts: dict[str, int]) -> Iterator[Record]:
    for number, item in enumerate(items):
        try:
            name, text = item["id"], item["text"]
            opinions = {opinion["sentiment"].lower() for opinion in item["opinions"]}
        except (KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{file}, record {number}: must be {{id, text, opinions: [{{sentiment}}]}}") from error
        if _agree(opinions, counts):
            yield f"record {number} (id {name})", {"text": text, "label": opinions.pop(), "id": name}


def _semeval(file: Path, split: str, neutral: bool) -> TextSet:
    try:
        root = ElementTree.parse(file).getroot()
    except ElementTree.ParseError as error:
        raise InputError(f"{file}, line {error.position[0]}: malformed XML: {error}") from error
    except (LookupError, ValueError) as error:
        raise InputError(f"{file}: the encoding that its first line names cannot be read: {error}") from error
    counts: dict[str, int] = {} if neutral else {"neutral": 0}
    records = _semeval_records(root, counts, neutral)
    return name_rows(collect_rows(records, file, THREE if neutral else TWO, split, counts), file.name)


def _semeval_records(root: ElementTree.Element, counts: dict[str, int], neutral: bool) -> Iterator[Record]:
    for sentence in root.iter("sentence"):
        opinions = {opinion.get("polarity", "no polarity") for opinion in sentence.iter("Opinion")}
        if not _agree(opinions, counts):
            continue
        label = opinions.pop()
        if label == "neutral" and not neutral:
            counts["neutral"] += 1
            continue
        name = sentence.get("id", "without id")
        yield f"sentence {name}", {"text": sentence.findtext("text"), "label": label, "id": name}


def _agree(opinions: set[str], counts: dict[str, int]) -> bool:
    if len(opinions) == 1:
        return True
    what = "opinions_differ" if opinions else "no_opinion"
    counts[what] = counts.get(what, 0) + 1
    return False
