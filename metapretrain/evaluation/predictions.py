"""`predictions.csv`: what a run predicted for each test image, to compare runs image by image and count again."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from metapretrain.errors import InputError
from metapretrain.evaluation.metrics import calibration_error, f1, pearson, spearman
from metapretrain.files import sha256, write_file

Classes = Sequence[int] | NDArray[np.int64] | Tensor
HEADER = ("index", "label", "prediction")
SAME = 1e-6  # figures that differ by less are the same


@dataclass(frozen=True)
class Predictions:
    """Rows of one split, in order of `index`; all int64 (N,)."""

    index: NDArray[np.int64]
    labels: NDArray[np.int64]
    predictions: NDArray[np.int64]

    @property
    def correct(self) -> NDArray[np.bool_]:
        """Whether each prediction is right, (N,)."""
        return np.equal(self.labels, self.predictions)

    @property
    def images(self) -> str:
        """A short fingerprint of which images these are: their indices and labels."""
        return sha256(np.stack([self.index, self.labels]).astype("<i8").tobytes())[:16]


def _integers(values: Classes, what: str) -> NDArray[np.int64]:
    array = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    if array.ndim != 1 or not (np.issubdtype(array.dtype, np.integer) or array.size == 0):
        raise InputError(f"{what} must be a list of whole numbers, (N,); got {array.dtype} of shape {array.shape}")
    return array.astype(np.int64)


def write_predictions(
    path: Path | str, labels: Classes, predictions: Classes, index: Classes | None = None, files: Sequence[str] = ()
) -> Path:
    """Write a line per image: its index (by default 0..N-1), label and predicted one, int (N,), and file if given."""
    y, predicted = _integers(labels, "labels"), _integers(predictions, "predictions")
    rows = np.arange(len(y)) if index is None else _integers(index, "index")
    if not len(rows) == len(y) == len(predicted):
        raise InputError(f"{len(y)} labels, {len(predicted)} predictions and {len(rows)} indices: they must be as many")
    names = [[name.encode(errors="backslashreplace").decode()] for name in files] or [[]] * len(y)
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(HEADER + ("file",) * bool(files))
    writer.writerows([*row, *name] for row, name in zip(np.stack([rows, y, predicted], 1).tolist(), names, strict=True))
    return write_file(Path(path), table.getvalue())


def read_predictions(path: Path | str) -> Predictions:
    """Read what `write_predictions` wrote."""
    try:
        with open(path, encoding="utf-8", newline="") as file:
            header, *lines = list(csv.reader(file)) or [[]]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"cannot read predictions {path}: {error}") from error
    if tuple(header) == (*HEADER, "file"):
        lines = [line[:3] if len(line) == 4 else line[:2] for line in lines]
    elif tuple(header) != HEADER:
        raise InputError(f"{path}: the first line must be {','.join(HEADER)!r}; got {','.join(header)!r}")
    for number, line in enumerate(lines, start=2):
        if len(line) != 3 or not all(field.removeprefix("-").isdecimal() for field in line):
            raise InputError(f"{path}: line {number} must be three whole numbers; got {','.join(line)!r}")
    try:
        table = np.asarray(lines, dtype=np.int64).reshape(-1, 3)
    except (OverflowError, ValueError):
        raise InputError(f"{path}: a number is too large; indices and classes have at most 18 digits") from None
    table = table[np.argsort(table[:, 0], kind="stable")]
    if len(np.unique(table[:, 0])) != len(table):
        raise InputError(f"{path}: an index appears twice; each image has one line")
    return Predictions(table[:, 0], table[:, 1], table[:, 2])


def recounted(path: Path, metrics: Mapping[str, Any]) -> str | None:
    """Say which of a run's `metrics` (`TASK_accuracy`, ...) is not that of the predictions in `TASK.csv`, or None.

    Raises InputError: the file cannot be read, or holds no numbers.
    """
    try:
        with open(path, encoding="utf-8", newline="") as file:
            table = csv.DictReader(file)
            columns = table.fieldnames or ()
            known = "label" in columns and ("index" in columns or path.stem.endswith("-dev"))  # else of own test rows
            rows = [(row["label"], row["prediction"]) for row in table if known]
        y, predicted = np.asarray_chkfinite(rows, dtype=np.float64).reshape(-1, 2).T
    except (OSError, UnicodeDecodeError, csv.Error, KeyError, TypeError, ValueError) as error:
        raise InputError(f"cannot read predictions {path}: {error}") from error
    task = path.stem.removesuffix("-dev")
    for name in ("accuracy", "f1", "pearson", "spearman") if len(y) else ():
        stated = metrics.get(f"{task}_{name}")
        if isinstance(stated, float) and math.isfinite(stated):
            counted = _counted(name, y, predicted, stated)
            if abs(counted - stated) > SAME:
                return contradiction(f"{task}_{name}", stated, counted, f"predictions/{path.name}", len(y))
    return None


def table_scores(path: Path) -> dict[str, float]:
    """Scores of a table of predictions of texts: of classes, or of numbers (predictions with a point), if labelled."""
    with open(path, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    if not rows or "label" not in rows[0]:
        return {}
    y, predicted = (np.array([float(row[name]) for row in rows]) for name in ("label", "prediction"))
    if any("." in row["prediction"] for row in rows):
        return {"Pearson": pearson(y, predicted), "Spearman": spearman(y, predicted)}
    names = [name for name in rows[0] if name.startswith("p_")]
    classes = max(2, len(names), 1 + int(max(y.max(), predicted.max())))
    scores = {"accuracy": float((y == predicted).mean()), "macro-F1": f1(y, predicted, classes, macro=True)}
    shares = [[float(row[name]) for name in names] for row in rows]
    return scores | ({"calibration error": calibration_error(shares, y)} if names else {})


def contradiction(metric: str, stated: float, counted: float, file: str, rows: int) -> str:
    """One line for a figure that is not that of a run's predictions."""
    told = f"metrics.{metric} is {stated:.6g}, but counted again from the {rows:,} rows of {file} it is {counted:.6g}"
    return f"{told}: left out; restore the file that was changed, or run it again"


def _counted(name: str, y: NDArray[np.float64], predicted: NDArray[np.float64], stated: float) -> float:
    if name == "accuracy":
        return float((y == predicted).mean())
    if name != "f1":
        return (pearson if name == "pearson" else spearman)(y, predicted)
    classes = max(2, 1 + int(max(y.max(), predicted.max())))
    total = classes * f1(y, predicted, classes, macro=True)  # there may be further classes, without a row
    found = [total / max(classes, round(total / stated) if stated else classes)]
    return min(found + [f1(y, predicted)] * (classes == 2), key=lambda value: abs(value - stated))


def confusion(y: Tensor, predicted: Tensor, classes: int) -> Tensor:
    """Counts of (true class, predicted class), int64 (C, C)."""
    if y.shape != predicted.shape or y.ndim != 1:
        raise InputError(f"labels {tuple(y.shape)} and predictions {tuple(predicted.shape)} must both be (N,)")
    for what, values in (("label", y), ("prediction", predicted)):
        if len(values) and not 0 <= int(values.min()) <= int(values.max()) < classes:
            raise InputError(f"each {what} must be 0..{classes - 1}; got {int(values.min())}..{int(values.max())}")
    pairs = y.long().cpu() * classes + predicted.long().cpu()
    return torch.bincount(pairs, minlength=classes * classes).reshape(classes, classes)
