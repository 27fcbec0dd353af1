"""Readers of sentence pairs: RTE (GLUE) and the Microsoft Research Paraphrase Corpus."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from metapretrain.data.sentence_files import Parts, find_folder, read_parts

RTE_CLASSES = ("not_entailment", "entailment")
MRPC_CLASSES = ("different", "paraphrase")
TABLE: dict[str, Any] = {"kind": "pair-classification", "format": "tsv", "quotes": False}
LAYOUT_RTE = "train.tsv and dev.tsv with columns sentence1, sentence2, label"
LAYOUT_MRPC = "msr_paraphrase_train.txt and msr_paraphrase_test.txt, as published"


def read_rte(folder: str | Path) -> Parts:
    """Read RTE; GLUE's ``dev`` is the test part, for its test labels are not public.

    Raises:
        InputError: a file is missing, or a row cannot be used.
    """
    files = ("train.tsv", "dev.tsv")
    root = find_folder(folder, ("glue/RTE", "RTE"), files, LAYOUT_RTE)
    columns: dict[str, Any] = {"text": "sentence1", "pair": "sentence2", "label": "label"}
    return read_parts(root, files, classes=RTE_CLASSES, **columns, **TABLE)


def read_mrpc(folder: str | Path) -> Parts:
    """Read the paraphrase corpus (a byte order mark, and quotes that do not quote) in its published split.

    Raises:
        InputError: a file is missing, or a row cannot be used.
    """
    files = ("msr_paraphrase_train.txt", "msr_paraphrase_test.txt")
    root = find_folder(folder, ("glue/MRPC", "MRPC"), files, LAYOUT_MRPC)
    columns: dict[str, Any] = {"text": "#1 String", "pair": "#2 String", "label": "Quality"}
    return read_parts(root, files, classes=MRPC_CLASSES, **columns, **TABLE)
