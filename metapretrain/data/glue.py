"""Reader of GLUE's parts for the scheduling benchmark: RTE, MRPC, CoLA, and a part of QNLI."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from metapretrain.data.sentence_files import concatenate, find_folder
from metapretrain.data.sentence_pairs import read_mrpc, read_rte
from metapretrain.data.text_files import read_texts
from metapretrain.data.texts import TextSet, hold_out
from metapretrain.errors import InputError, one_of

NAMES = ("cola", "mrpc", "qnli", "rte")
COLA_CLASSES = ("unacceptable", "acceptable")
QNLI_CLASSES = ("not_entailment", "entailment")
COLA_TEST = ("in_domain_dev.tsv", "out_of_domain_dev.tsv")
LAYOUT_COLA = f"in_domain_train.tsv, {' and '.join(COLA_TEST)}: source, label, mark, sentence, without a header"
LAYOUT_QNLI = "train.json and dev.json: an object of {text_a, text_b, label}"
HELD = 10  # of training rows, one in so many is for validation


def load_glue(name: str, folder: str | Path) -> dict[str, TextSet]:
    """Read a set; its labelled part that is not for training is the test, since GLUE keeps the test labels.

    Args:
        name: ``"cola"``, ``"mrpc"``, ``"qnli"`` or ``"rte"``.
        folder: of the set, or one that has ``glue``.

    Returns:
        ``train``, ``validation`` (a tenth of the training rows, the same in every run) and ``test``: CoLA 1,043 rows,
        MRPC 1,725, QNLI 1,000, RTE 277.

    Raises:
        InputError: an unknown name, a file is missing, or a row cannot be used.

    Example:
        >>> load_glue("rte", "no-such-folder")
        Traceback (most recent call last):
        ...
        metapretrain.errors.InputError: no folder no-such-folder: it must hold ...
    """
    one_of("set of GLUE", name, NAMES)
    readers = {"cola": _cola, "mrpc": read_mrpc, "qnli": _qnli, "rte": read_rte}
    train, test = readers[name](folder)
    return held_out(train, test)


def held_out(train: TextSet, test: TextSet) -> dict[str, TextSet]:
    """The splits of a set whose training rows hold the validation rows as well.

    Raises:
        InputError: too few training rows.
    """
    if len(train) < HELD:
        raise InputError(f"{', '.join(train.files)}: {len(train)} training rows, at least {HELD} are needed")
    kept, held = hold_out(train, len(train) // HELD)
    return {"train": kept, "validation": held, "test": test}


def _cola(folder: str | Path) -> tuple[TextSet, TextSet]:
    root = find_folder(folder, ("glue/CoLA", "CoLA"), ("in_domain_train.tsv", *COLA_TEST), LAYOUT_COLA)
    options: dict[str, Any] = {
        "text": "sentence",
        "label": "label",
        "classes": COLA_CLASSES,
        "format": "tsv",
        "header": ("source", "label", "mark", "sentence"),
        "quotes": False,
    }
    test = [read_texts(root / name, split="test", **options) for name in COLA_TEST]
    return read_texts(root / "in_domain_train.tsv", split="train", **options), concatenate(test, "test")


def _qnli(folder: str | Path) -> tuple[TextSet, TextSet]:
    root = find_folder(folder, ("glue/QNLI_subset", "QNLI_subset"), ("train.json", "dev.json"), LAYOUT_QNLI)
    options: dict[str, Any] = {
        "text": "text_a",
        "pair": "text_b",
        "label": "label",
        "kind": "pair-classification",
        "classes": QNLI_CLASSES,
        "format": "json",
    }
    train, test = (
        read_texts(root / file, split=split, **options)
        for file, split in (("train.json", "train"), ("dev.json", "test"))
    )
    return train, test
