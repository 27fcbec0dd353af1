"""Sentences without labels, to be given pseudo labels: Penn Treebank, WikiText-2 and DailyDialog++."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from metapretrain.data.archives import unzip_text
from metapretrain.data.images import file_record
from metapretrain.data.sentence_files import find_folder
from metapretrain.data.text_overlap import normalise_text
from metapretrain.data.text_records import decode_text, parse_json
from metapretrain.data.texts import TextSet
from metapretrain.errors import InputError

logger = logging.getLogger(__name__)

WORDS = (5, 60)  # of a sentence that is kept
UNKNOWN = "<unk>"
WIKITEXT = ("train.txt", "valid.txt", "test.txt")
DIALOGUES = ("data_positives.json", "train.json", "dev.json", "test.json")
LAYOUT_PTB = "ptb.train.txt, or ptb.zip that holds it: a sentence a line"
LAYOUT_WIKITEXT = f"any of {', '.join(WIKITEXT)} of WikiText-2, paragraphs and headings a line"
LAYOUT_DIALOGUES = f"any of {', '.join(DIALOGUES)}, JSON lines of {{context, positive_responses}}"


def read_ptb(folder: str | Path) -> TextSet:
    """Read the sentences of the Penn Treebank's training part, words joined as in running text.

    Those with ``<unk>`` are left out; ``N`` stands for a number.

    Raises:
        InputError: the file is missing or unreadable, or no sentence is left.
    """
    root = find_folder(folder, ("ptb",), (), LAYOUT_PTB)
    file = root / "ptb.train.txt"
    if file.is_file():
        text, _ = decode_text(file, "utf-8", "refuse")
    else:
        file = find_folder(root, (), ("ptb.zip",), LAYOUT_PTB) / "ptb.zip"
        text = unzip_text(file, "ptb.train.txt")
    return _kept("ptb", text.split("\n"), [file])


def read_wikitext2(folder: str | Path) -> TextSet:
    """Read the sentences of WikiText-2's files that are there, without headings and those with ``<unk>``.

    Raises:
        InputError: no file is there, one is unreadable, or no sentence is left.
    """
    root = find_folder(folder, ("wikitext-2",), (), LAYOUT_WIKITEXT)
    found = _found(root, WIKITEXT, LAYOUT_WIKITEXT)
    lines = (line for file in found for line in decode_text(file, "utf-8", "refuse")[0].split("\n"))
    paragraphs = (line.strip() for line in lines if not line.lstrip().startswith("="))
    sentences = (part for text in paragraphs for part in re.split(r"(?<= [.!?]) (?=\S)", text))
    return _kept("wikitext-2", sentences, found)


def read_dailydialog(folder: str | Path) -> TextSet:
    """Read the utterances of DailyDialog++: contexts and the responses that fit.

    Raises:
        InputError: no file is there, a line cannot be used, or no utterance is left.
    """
    root = find_folder(folder, ("dailydialog_pp", "dailydialog"), (), LAYOUT_DIALOGUES)
    found = _found(root, DIALOGUES, LAYOUT_DIALOGUES)
    return _kept("dailydialog", (text for file in found for text in _utterances(file)), found)


def _found(root: Path, names: Iterable[str], layout: str) -> list[Path]:
    found = [root / name for name in names if (root / name).is_file()]
    if not found:
        raise InputError(f"{root} must hold {layout}")
    return found


def _utterances(file: Path) -> Iterator[str]:
    text, _ = decode_text(file, "utf-8", "refuse")
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        record = parse_json(line, file, number)
        try:
            spoken = [*record["context"], *record["positive_responses"]]
        except (KeyError, TypeError) as error:
            raise InputError(f"{file}, line {number}: must be JSON {{context, positive_responses}}: {error}") from error
        if not all(isinstance(utterance, str) for utterance in spoken):
            raise InputError(f"{file}, line {number}: context and positive_responses must be lists of text")
        yield from spoken


def _kept(name: str, sentences: Iterable[str], files: Iterable[Path]) -> TextSet:
    """Sentences of known words, neither short nor long, each once; what is left out is logged and counted."""
    seen: set[str] = set()
    kept = []
    counts = {"unknown_words": 0, "length": 0, "duplicates": 0}
    for sentence in sentences:
        if not sentence.strip():
            continue
        key = normalise_text(sentence)
        if UNKNOWN in sentence:
            counts["unknown_words"] += 1
        elif not WORDS[0] <= len(sentence.split()) <= WORDS[1]:
            counts["length"] += 1
        elif key in seen:
            counts["duplicates"] += 1
        else:
            seen.add(key)
            kept.append(running_text(sentence))
    if not kept:
        raise InputError(f"{name} has no sentence of {WORDS[0]} to {WORDS[1]} known words")
    told = ", ".join(f"{what.replace('_', ' ')} {count:,}" for what, count in counts.items())
    logger.info("%s: %s sentences; left out: %s", name, f"{len(kept):,}", told)
    records = {f"{name}/{file.name}": file_record(file, None) for file in files}
    return TextSet(kept, split="plain", counts=counts, files=records)


def running_text(sentence: str) -> str:
    """Join words and marks that a tokeniser separated.

    Example:
        >>> running_text("it 's a well @-@ known play , is n't it ( 2 @,@ 000 seats ) ?")
        "it's a well-known play, isn't it (2,000 seats)?"
    """
    text = re.sub(r" @(\W)@ ", r"\1", sentence.strip())
    text = re.sub(r" (n't|'(?:s|re|ve|ll|d|m))\b", r"\1", text)
    text = re.sub(r" ([.,;:!?)\]%])", r"\1", text)
    return re.sub(r"([(\[$]) ", r"\1", text)
