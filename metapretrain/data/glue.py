"""Readers of GLUE's and SuperGLUE's sets."""

import re
from pathlib import Path
from typing import Any

import torch

from metapretrain.data.annotated import Dialogue
from metapretrain.data.images import file_record
from metapretrain.data.published import Parts, concatenate, find_folder, read_file, read_parts
from metapretrain.data.tables import read_json_lines
from metapretrain.data.texts import Rows, TextSet, hold_out
from metapretrain.errors import InputError, one_of

COLA_TEST = ("in_domain_dev.tsv", "out_of_domain_dev.tsv")
RTE_CLASSES = ("not_entailment", "entailment")
MRPC_CLASSES = ("different", "paraphrase")
WIC_TEST = "FewGLUE_32dev/val.jsonl"
LAYOUTS = {
    "cola": f"in_domain_train.tsv, {' and '.join(COLA_TEST)}: source, label, mark, sentence, without a header",
    "qnli": "train.json and dev.json: an object of {text_a, text_b, label}",
    "rte": "train.tsv and dev.tsv with columns sentence1, sentence2, label",
    "mrpc": "msr_paraphrase_train.txt and msr_paraphrase_test.txt, as published",
    "wic": f'train.jsonl: {{label, text: "Word: W. Sentence 1: A Sentence 2: B"}}; {WIC_TEST} as published',
    "cb": "train.jsonl and val.jsonl: {premise, hypothesis, label}",
    "copa": "train.jsonl and val.jsonl: {premise, choice1, choice2, question, label}",
}
QUESTIONS = {"cause": "What was the cause of this?", "effect": "What happened as a result?"}
HELD = 10  # of training rows, one in so many is for validation
_TSV: dict[str, Any] = {"format": "tsv", "quotes": False}
_PAIR: dict[str, Any] = {"kind": "pair-classification", "label": "label"}
SETS: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {  # folder, files of training and test, how to read them
    "cola": (
        "glue/CoLA",
        ("in_domain_train.tsv", *COLA_TEST),
        {"text": "sentence", "label": "label", "header": ("source", "label", "mark", "sentence"), **_TSV}
        | {"classes": ("unacceptable", "acceptable")},
    ),
    "mrpc": (
        "glue/MRPC",
        ("msr_paraphrase_train.txt", "msr_paraphrase_test.txt"),  # a byte order mark, and quotes that do not quote
        {"text": "#1 String", "pair": "#2 String", **_PAIR, "label": "Quality", "classes": MRPC_CLASSES, **_TSV},
    ),
    "qnli": (
        "glue/QNLI_subset",
        ("train.json", "dev.json"),
        {"text": "text_a", "pair": "text_b", **_PAIR, "classes": RTE_CLASSES, "format": "json"},
    ),
    "rte": (
        "glue/RTE",
        ("train.tsv", "dev.tsv"),
        {"text": "sentence1", "pair": "sentence2", **_PAIR, "classes": RTE_CLASSES, **_TSV},
    ),
    "cb": (
        "superglue/CB",
        ("train.jsonl", "val.jsonl"),
        {"text": "premise", "pair": "hypothesis", **_PAIR, "format": "jsonl"}
        | {"classes": ("entailment", "contradiction", "neutral")},
    ),
}


def load_glue(name: str, folder: str | Path) -> dict[str, TextSet]:
    """Read a set; its labelled part that is not for training is the test, since GLUE keeps the test labels.

    ``validation`` is a tenth of the training rows, the same in every run. ``test``: CoLA 1,043 rows, MRPC 1,725, QNLI
    1,000, RTE 277, CB (3 classes) 57, which are too few to tell methods.
    """
    one_of("set of GLUE", name, SETS)
    return held_out(*read_glue(name, folder))


def read_glue(name: str, folder: str | Path) -> Parts:
    """Read both parts; of RTE and MRPC training rows that repeat one another or a test row are dropped."""
    place, files, options = SETS[name]
    root = find_folder(folder, (place, Path(place).name), files, LAYOUTS[name])
    if name in ("rte", "mrpc"):
        return read_parts(root, files, **options)
    tests = [read_file(root / file, split="test", **options) for file in files[1:]]
    return read_file(root / files[0], split="train", **options), concatenate(tests, "test")


def held_out(train: TextSet, test: TextSet) -> dict[str, TextSet]:
    """The splits of a set whose training rows hold the validation rows as well."""
    if len(train) < HELD:
        raise InputError(f"{', '.join(train.files)}: {len(train)} training rows, at least {HELD} are needed")
    kept, held = hold_out(train, len(train) // HELD)
    return {"train": kept, "validation": held, "test": test}


_WIC = re.compile(r"Word: (.+?)\. Sentence 1: (.+) Sentence 2: (.+)", re.DOTALL)
_WIC_TRAIN = {"text": str, "label": (0, 1)}
_WIC_TEST = {"word": str, "sentence1": str, "sentence2": str, "label": (0, 1)}
_COPA = {"premise": str, "choice1": str, "choice2": str, "question": tuple(QUESTIONS), "label": (0, 1)}


def load_wic(folder: str | Path) -> dict[str, TextSet]:
    """Read WiC: does a word have one meaning in both sentences (class 1)? The word stands before the first.

    The test is the published validation part (638 rows); training rows with both sentences of a test row are left out.
    """
    root = find_folder(folder, ("superglue/WiC", "WiC"), ("train.jsonl", WIC_TEST), LAYOUTS["wic"])
    train = []
    for where, item in read_json_lines(root / "train.jsonl", _WIC_TRAIN, LAYOUTS["wic"]):
        found = _WIC.fullmatch(item["text"].strip())
        if found is None:
            raise InputError(f"{where}: expected {LAYOUTS['wic']}, got the text {item['text']!r}")
        train.append((*found.groups(), item["label"]))
    test = [
        (item["word"], item["sentence1"], item["sentence2"], item["label"])
        for _, item in read_json_lines(root / WIC_TEST, _WIC_TEST, LAYOUTS["wic"])
    ]
    seen = {_letters(row) for row in test}
    kept = [row for row in train if _letters(row) not in seen]
    parts = []
    for split, rows, name in (("train", kept, "train.jsonl"), ("test", test, WIC_TEST)):
        labels = torch.tensor([int(row[3]) for row in rows])
        first, second = [f"{row[0]}: {row[1]}" for row in rows], [row[2] for row in rows]
        counts = {"in_test": len(train) - len(kept)} if split == "train" else {}
        files = {f"WiC/{name}": file_record(root / name, None)}
        parts.append(TextSet(first, second, labels, split=split, counts=counts, files=files))
    return held_out(*parts)


def load_copa(folder: str | Path) -> dict[str, Rows[Dialogue]]:
    """Read COPA as dialogues: a premise and the question for its cause or effect, a right and a wrong answer.

    The test is the published validation part (100 rows); every tenth training row is for validation.
    """
    names = ("train.jsonl", "val.jsonl")
    root = find_folder(folder, ("superglue/COPA", "COPA"), names, LAYOUTS["copa"])
    train, test = ([_copa(item) for _, item in read_json_lines(root / name, _COPA, LAYOUTS["copa"])] for name in names)
    files = {f"COPA/{name}": file_record(root / name, None) for name in names}
    kept = [row for number, row in enumerate(train) if number % HELD != HELD - 1]
    parts = {"train": kept, "validation": train[HELD - 1 :: HELD], "test": test}
    return {split: Rows(rows, split, files=files) for split, rows in parts.items()}


def _copa(item: dict[str, Any]) -> Dialogue:
    choices, right = [item["choice1"], item["choice2"]], item["label"]
    return Dialogue([item["premise"], QUESTIONS[item["question"]]], [choices[right]], [choices[1 - right]])


def _letters(row: tuple[Any, ...]) -> tuple[str, ...]:
    """Both sentences by their letters, in either order: the two files separate words in different ways."""
    return tuple(sorted(re.sub(r"\W", "", text).lower() for text in row[1:3]))
