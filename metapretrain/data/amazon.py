"""Readers of Amazon reviews in 5 classes (Zhang et al., 2015; Kindle books) and in 2 (Blitzer et al., 2007)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from metapretrain.data.sentence_files import (
    Parts,
    collect_rows,
    concatenate,
    find_folder,
    hold_back,
    name_rows,
    read_parts,
    without_entities,
    without_escapes,
)
from metapretrain.data.text_files import read_texts
from metapretrain.data.text_records import Record, decode_text
from metapretrain.data.texts import TextSet
from metapretrain.data.yelp import CLASSES

POLARITY = ("negative", "positive")
KINDLE = "kindle15k.tsv"
LAYOUT_5 = "amazon_review/{dev,test}.json, records {ori, label} with labels 0..4"
LAYOUT_KINDLE = f"{KINDLE}, separated by tabs, with columns sentence and sentiment (0..4)"
LAYOUT_2 = "DOMAIN/review_negative and DOMAIN/review_positive, a review a line, one folder a domain"


def read_amazon5(folder: str | Path) -> Parts:
    """Read Amazon's reviews in 5 classes; the publisher's ``dev`` is the training part here.

    Raises:
        InputError: a file is missing, or a row cannot be used.
    """
    files = ("amazon_review/dev.json", "amazon_review/test.json")
    root = find_folder(folder, ("amazon5",), files, LAYOUT_5)
    return read_parts(root, files, _clean, text="ori", label="label", format="json", classes=CLASSES)


def read_kindle(folder: str | Path) -> Parts:
    """Read reviews of Kindle books in 5 classes; one row in six of each class is held back as the test part.

    Raises:
        InputError: the file is missing, or a row cannot be used.
    """
    root = find_folder(folder, ("amazon5",), (KINDLE,), LAYOUT_KINDLE)
    rows = read_texts(root / KINDLE, text="sentence", label="sentiment", format="tsv", classes=CLASSES)
    rows = name_rows(rows, KINDLE, _clean)
    return hold_back(rows, rows.require_labels().tolist())


def read_amazon2(folder: str | Path) -> Parts:
    """Read reviews in 2 classes, a folder a domain; one row in six of each class and domain is the test part.

    Raises:
        InputError: no such folders, or a line that cannot be used.
    """
    root = find_folder(folder, ("amazon2",), (), LAYOUT_2)
    domains = sorted(path.parent.name for path in root.glob("*/review_negative"))
    find_folder(root, (), [f"{domain}/review_positive" for domain in domains or ["DOMAIN"]], LAYOUT_2)
    parts = [_read_lines(root, f"{domain}/review_{label}", label) for domain in domains for label in POLARITY]
    rows = concatenate(parts, "train")
    strata = [domains.index(domain) * 2 for domain in amazon2_domains(rows)]
    labels = rows.require_labels().tolist()
    return hold_back(rows, [stratum + label for stratum, label in zip(strata, labels, strict=True)])


def amazon2_domains(rows: TextSet) -> list[str]:
    """Return the domain of each row of Amazon-2: the folder that its review came from.

    Example:
        >>> amazon2_domains(TextSet(["nice"], ids=["books/review_positive:7"]))
        ['books']
    """
    return [name.split("/", 1)[0] for name in rows.ids]


def _read_lines(root: Path, name: str, label: str) -> TextSet:
    text, _ = decode_text(root / name, "utf-8", "refuse")
    rows = collect_rows(_line_records(text, label), root / name, POLARITY, "train")
    return name_rows(rows, name, without_entities)


def _line_records(text: str, label: str) -> Iterator[Record]:
    for number, line in enumerate(text.removesuffix("\n").split("\n"), 1):
        yield f"line {number}", {"text": line, "label": label, "id": number}


def _clean(text: str) -> str:
    return without_entities(without_escapes(text))
