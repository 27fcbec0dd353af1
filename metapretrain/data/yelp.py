"""Reader of Yelp reviews in 5 classes (Zhang et al., 2015, and other samples of Yelp's data): the pretraining data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from metapretrain.data.sentence_files import Parts, concatenate, find_folder, name_rows, unlike, without_escapes
from metapretrain.data.text_files import read_texts
from metapretrain.data.texts import TextSet
from metapretrain.errors import InputError

CLASSES = ("1 star", "2 stars", "3 stars", "4 stars", "5 stars")
STARS = tuple(f"{star}.0" for star in range(1, 6))
LAYOUT = (
    "any of train.csv and test.csv of yelp_review_full_csv, augpe/{dev,test}.csv, yelp_review.csv, "
    "yelp_review/{dev,test}.json, 16-shot/*/{train,dev}.tsv; test.csv or yelp_review/test.json is the test part"
)


@dataclass(frozen=True)
class _Form:
    """Files of one form: how they are found and read."""

    pattern: str
    options: dict[str, Any]


_FULL: dict[str, Any] = {"text": "text", "label": "class", "format": "csv", "header": ("class", "text")}
_FULL["classes"] = ("1", "2", "3", "4", "5")
_JSON: dict[str, Any] = {"text": "ori", "label": "label", "format": "json", "classes": CLASSES}
_AUGPE = {"text": "text", "label": "label2", "format": "csv", "classes": tuple(f"Review Stars: {s}" for s in STARS)}
TESTS = (_Form("test.csv", _FULL), _Form("yelp_review/test.json", _JSON))
TRAINING = (
    _Form("train.csv", _FULL),
    _Form("augpe/dev.csv", _AUGPE),
    _Form("augpe/test.csv", _AUGPE),
    _Form("yelp_review.csv", {"text": "text", "label": "stars", "format": "csv", "classes": STARS}),
    _Form("yelp_review/dev.json", _JSON),
    _Form(
        "16-shot/*/*.tsv",
        {"text": "sentence", "label": "label", "format": "tsv", "quotes": False, "classes": CLASSES},
    ),
)


def read_yelp5(folder: str | Path) -> Parts:
    """Read all forms of Yelp's reviews that a folder holds, without repetitions, labels 0 (one star) to 4.

    Escaped line breaks, quotes and characters are undone. Counts of the training part: ``rows FILE`` as they were
    read, and those of :func:`~metapretrain.data.sentence_files.unlike`.

    Raises:
        InputError: no training or no test file, or a row that cannot be used.
    """
    root = find_folder(folder, ("yelp5", "yelp_review_full_csv"), (), LAYOUT)
    test, train = (_read(root, forms, split) for forms, split in ((TESTS, "test"), (TRAINING, "train")))
    return unlike(train, test), test


def _read(root: Path, forms: tuple[_Form, ...], split: str) -> TextSet:
    parts = []
    counts = {}
    for form in forms:
        found = [
            name_rows(read_texts(file, **form.options), file.relative_to(root).as_posix(), without_escapes)
            for file in sorted(root.glob(form.pattern))
        ]
        if found:
            counts[f"rows {form.pattern}"] = sum(map(len, found))
        parts += found
    if not parts:
        raise InputError(f"{root} has no {split} file of Yelp's reviews; it must hold {LAYOUT}")
    joined = concatenate(parts, split)
    return replace(joined, counts={**counts, **joined.counts})
