"""Reader of CS224N's default project (Stanford): SST sentiment, Quora paraphrases, STS similarity; more Quora pairs."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from metapretrain.data.published import concatenate, find_folder, inside, read_file
from metapretrain.data.texts import TextSet, TextTask, hold_out, overlap, pair_keys
from metapretrain.errors import InputError

logger = logging.getLogger(__name__)

STEMS = {"sst": "ids-sst", "para": "quora", "sts": "sts"}
SST_CLASSES = ("negative", "somewhat negative", "neutral", "somewhat positive", "positive")
PARA_CLASSES = ("different", "duplicate")
STS_RANGE = (0.0, 5.0)
_PAIR = {"text": "sentence1", "pair": "sentence2"}
COLUMNS: dict[str, dict[str, Any]] = {
    "sst": {"text": "sentence", "label": "sentiment", "kind": "classification", "classes": SST_CLASSES},
    "para": {**_PAIR, "label": "is_duplicate", "kind": "pair-classification", "classes": PARA_CLASSES},
    "sts": {**_PAIR, "label": "similarity", "kind": "pair-regression", "low": STS_RANGE[0], "high": STS_RANGE[1]},
}
MORE = "quora-train-more.csv"  # a part of the training pairs, without a header
QQP_TABLES = ("dev.tsv", "test.tsv")
QQP_JSON = ("glue_pretrain_QQP/train.json", "glue_pretrain_QQP/dev.json")
LAYOUT = (
    "{ids-sst,quora,sts}-{train,dev}.csv as the course gives them (TAB separated), optionally "
    f"{{ids-sst,quora,sts}}-test-student.csv and {MORE}"
)
QQP_LAYOUT = f"{', '.join(QQP_TABLES)} (label, question, question, id; no header) and {', '.join(QQP_JSON)}, or some"


def load_cs224n(folder: str | Path, *, qqp: str | Path | None = None, validation: int = 500) -> list[TextTask]:
    """Read ``sst`` (5 classes), ``para`` (2 classes) and ``sts`` (0..5) of CS224N's default project.

    `folder` holds the files, or the folder ``cs224n``. Of training pairs that occur twice (by normalised text, in
    either order) the first is kept; those that are in dev stay. `validation` training rows are held out, the same with
    and without `qqp`, a folder of more Quora pairs to train PARA on, without those in quora-dev or held out. Counts of
    training: ``unlabelled``, ``duplicates``, ``overlap_pairs``, ``overlap_sentences`` with dev; with `qqp` also ``qqp``
    (pairs read), ``qqp_undecodable``, ``qqp_in_dev``, ``qqp_in_validation``, ``qqp_duplicates``.
    Raises InputError: a folder or file is missing, or a row cannot be used (named by file and line).
    """
    files = [f"{stem}-{split}.csv" for stem in STEMS.values() for split in ("train", "dev")]
    root = find_folder(folder, ("cs224n",), files, LAYOUT)
    return [_load_task(root, name, qqp if name == "para" else None, validation) for name in STEMS]


def load_qqp(folder: str | Path) -> TextSet:
    """Read more labelled Quora pairs: those of :data:`QQP_TABLES` and :data:`QQP_JSON` that are in `folder`.

    Lines that are not UTF-8 are kept, their wrong bytes replaced by U+FFFD, and counted as ``undecodable``.
    """
    root = inside(folder, "qqp")
    common: dict[str, Any] = {"kind": "pair-classification", "classes": PARA_CLASSES, "label": "label"}
    table: dict[str, Any] = {"text": "question1", "pair": "question2", "id": "id", "format": "tsv", **common}
    header = ("label", "question1", "question2", "id")
    parts = []
    for name in (*QQP_TABLES, *QQP_JSON):
        if not (root / name).is_file():
            continue
        if name in QQP_TABLES:
            parts.append(read_file(root / name, header=header, undecodable="replace", **table))
        else:
            parts.append(read_file(root / name, text="text_a", pair="text_b", format="json", **common))
    if not parts:
        raise InputError(f"no Quora pairs in {root}: it must hold {QQP_LAYOUT}")
    return concatenate(parts, "train")


def check_qqp(folder: str | Path) -> str:
    """Return one line with the number of Quora pairs in a folder."""
    rows = load_qqp(folder)
    return f"qqp: {len(rows):,} pairs; files: {len(rows.files)}; lines not UTF-8: {rows.counts.get('undecodable', 0)}"


def _load_task(root: Path, name: str, qqp: str | Path | None, validation: int) -> TextTask:
    columns, stem = COLUMNS[name], STEMS[name]
    table = {**columns, "id": "id", "format": "tsv"}
    train = read_file(root / f"{stem}-train.csv", split="train", **table)
    if name == "para" and (root / MORE).is_file():
        header = ("", "id", table["text"], table["pair"], table["label"])
        train = concatenate([train, read_file(root / MORE, header=header, **table)], "train")
    if name == "para":
        train = _without(train, set(), "duplicates", once=True)
    dev = read_file(root / f"{stem}-dev.csv", split="dev", **table)
    hidden = root / f"{stem}-test-student.csv"
    test = read_file(hidden, split="test", **{**table, "label": None}) if hidden.is_file() else None
    try:
        train, held = hold_out(train, validation)
    except InputError as error:
        raise InputError(f"{name}: {error}") from None
    if qqp is not None:
        train = _with_qqp(train, held, dev, load_qqp(qqp))
    shared = {f"overlap_{what}": count for what, count in overlap(train, dev).items()}
    train = replace(train, counts={**train.counts, **shared})
    for rows in (train, dev):
        told = ", ".join(f"{what} {count:,}" for what, count in rows.counts.items())
        logger.info("%s %s: %s rows%s", name, rows.split, f"{len(rows):,}", f"; {told}" if told else "")
    outputs = {key: columns[key] for key in ("classes", "low", "high") if key in columns}
    return TextTask(name, columns["kind"], train, held, dev, test, **outputs)


def _with_qqp(train: TextSet, held: TextSet, dev: TextSet, more: TextSet) -> TextSet:
    """Add the pairs that are neither in dev, nor held out, nor there already."""
    read = {"qqp": len(more), "qqp_undecodable": more.counts.get("undecodable", 0)}
    more = replace(more, counts=read, ids=[f"qqp-{name}" for name in more.ids])
    more = _without(more, set(pair_keys(dev)), "qqp_in_dev")
    more = _without(more, set(pair_keys(held)), "qqp_in_validation")
    return concatenate([train, _without(more, set(pair_keys(train)), "qqp_duplicates", once=True)], "train")


def _without(rows: TextSet, known: set[tuple[str, ...]], what: str, *, once: bool = False) -> TextSet:
    """Drop the rows whose pair is known, with `once` also those that repeat another row, and count them as `what`."""
    seen = set(known)
    kept = []
    for row, key in enumerate(pair_keys(rows)):
        if key not in seen:
            kept.append(row)
            if once:
                seen.add(key)
    return replace(rows.subset(kept), counts={**rows.counts, what: len(rows) - len(kept)})
