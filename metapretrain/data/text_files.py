"""Reader of sentences, or pairs of them, with labels, from a CSV, TSV, JSONL or JSON file or a `datasets` object."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from metapretrain.data.images import file_record
from metapretrain.data.text_columns import Columns
from metapretrain.data.text_records import decode_text, find_column, read_records
from metapretrain.data.texts import KINDS, TextSet
from metapretrain.errors import InputError, one_of
from metapretrain.paths import user_path


def read_texts(
    path: str | Path,
    *,
    text: str,
    pair: str | None = None,
    label: str | None = None,
    id: str | None = None,
    kind: str = "classification",
    classes: Sequence[str] = (),
    low: float = 0.0,
    high: float = 1.0,
    format: str = "auto",
    header: Sequence[str] | None = None,
    split: str | None = None,
    encoding: str = "utf-8",
    undecodable: str = "refuse",
    quotes: bool = True,
) -> TextSet:
    """Read the rows of one split from a file with named columns.

    Sentences are stripped of white space at their ends. Rows whose label is left empty are counted as ``unlabelled``
    and left out; any other row that cannot be used is an error that names file and line.

    Args:
        path: of the file.
        text: column of the sentence, or of the first of a pair.
        pair: column of the second sentence; needed by the two kinds of pairs.
        label: column of the label: a class name, or its number from 0 where classes are not called by numbers, or a
            score; None for an unlabelled split.
        id: column of the rows' names; None: their number in the file from 0.
        kind: ``"classification"``, ``"pair-classification"`` or ``"pair-regression"``.
        classes: names in label order, for classification with labels.
        low: lowest score of regression.
        high: highest score of regression.
        format: ``"csv"``, ``"tsv"``, ``"jsonl"``, ``"json"`` (a list or an object of records) or ``"auto"``: by the
            suffix, and for a table by the separator of its first line.
        header: column names, for a table whose first line has none.
        split: name of the split; None: the file's name without suffix.
        encoding: of the file; a byte order mark is skipped.
        undecodable: ``"refuse"`` a file with lines in another encoding, or ``"replace"`` the bytes and count the lines
            as ``undecodable``.
        quotes: whether ``"`` quotes the fields of a table.

    Raises:
        InputError: the file or a column is missing, or rows cannot be used.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "train.csv"
        >>> _ = file.write_text("review,stars\\nfine work,1\\nno,0\\nwhat?,\\n")
        >>> rows = read_texts(file, text="review", label="stars", classes=("bad", "good"))
        >>> rows.first, rows.labels.tolist(), rows.counts
        (['fine work', 'no'], [1, 0], {'unlabelled': 1})
    """
    _check_kind(kind, pair)
    file = user_path(path)
    content, wrong = decode_text(file, encoding, undecodable)
    columns = Columns(str(file), text, pair, label, id, kind, tuple(classes), low, high)
    if header is not None:
        for name in columns.names:
            find_column(name, header, f"header given for {file.name}")
    records = read_records(file, content, format, columns.names, header, quotes)
    counts = {"undecodable": wrong} if wrong else {}
    return columns.collect(records, split or file.stem, counts, {file.name: file_record(file, None)})


def from_dataset(
    dataset: Any,
    *,
    text: str,
    pair: str | None = None,
    label: str | None = None,
    id: str | None = None,
    kind: str = "classification",
    classes: Sequence[str] = (),
    low: float = 0.0,
    high: float = 1.0,
    split: str | None = None,
) -> TextSet:
    """Take the rows of one split from a `datasets.Dataset`, a pandas DataFrame or a dictionary of columns.

    Args:
        dataset: gives a column by ``dataset[name]``. Its rows without a label (None, NaN, or class -1 as `datasets`
            writes it) are counted and left out.
        text: as in :func:`read_texts`, and so the others.
        pair: column of the second sentence.
        label: column of the label.
        id: column of the rows' names.
        kind: of the task.
        classes: names in label order; by default those of the dataset's ``ClassLabel`` feature.
        low: lowest score of regression.
        high: highest score of regression.
        split: name of the split; None: the dataset's own, or ``"dataset"``.

    Raises:
        InputError: a column is missing, or rows cannot be used (named by their number from 0).

    Example:
        >>> columns = {"a": ["one", "two"], "b": ["1", "3"], "score": [5.0, 0.5]}
        >>> from_dataset(columns, text="a", pair="b", label="score", kind="pair-regression", high=5.0).second
        ['1', '3']
    """
    _check_kind(kind, pair)
    columns_of = getattr(dataset, "column_names", None)
    # a column of a pandas DataFrame is an attribute, too
    about = {} if columns_of is None else {key: getattr(dataset, key, None) for key in ("split", "features")}
    name = split or str(about.get("split") or "dataset")
    if isinstance(columns_of, dict):
        raise InputError(f"{name} has the splits {', '.join(map(str, columns_of))}: give one of them")
    names = [str(column) for column in columns_of or list(dataset)]
    for column in (text, pair, label, id):
        if column is not None:
            find_column(column, names, name)
    feature = None if kind == "pair-regression" else (about.get("features") or {}).get(label)
    own = getattr(feature, "names", None)
    classes = tuple(classes or own or ())
    missing = () if own is None and "-1" in classes else (-1,)
    columns = Columns(name, text, pair, label, id, kind, classes, low, high, missing, coded=own is not None)
    values = zip(*(list(dataset[column]) for column in columns.names), strict=True)
    records = ((f"row {row}", dict(zip(columns.names, cells, strict=True))) for row, cells in enumerate(values))
    return columns.collect(records, name, {}, {})


def _check_kind(kind: str, pair: str | None) -> None:
    one_of("kind of task", kind, KINDS)
    if kind.startswith("pair") != (pair is not None):
        what = "needs a second column of sentences (pair)" if pair is None else f"has no second column, {pair!r} given"
        raise InputError(f"{kind} {what}")
