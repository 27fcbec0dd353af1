"""predictions.csv: round trip, identity of images, torn files; and the confusion counts."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import confusion_matrix

from metapretrain.errors import InputError
from metapretrain.evaluation.predictions import confusion, read_predictions, write_predictions


def test_round_trip(tmp_path: Path) -> None:
    path = write_predictions(tmp_path / "new" / "predictions.csv", torch.tensor([3, 1, 2]), np.array([3, 0, 2]))
    assert path.read_text().splitlines() == ["index,label,prediction", "0,3,3", "1,1,0", "2,2,2"]
    read = read_predictions(path)
    assert read.index.tolist() == [0, 1, 2]
    assert read.correct.tolist() == [True, False, True]
    assert [file.name for file in path.parent.iterdir()] == ["predictions.csv"]


def test_names_of_files_are_a_column(tmp_path: Path) -> None:
    names = ["cat/0.png", 'dog/a "b", c.png', "dog/two\nlines.png", "=dog/\udcff.png"]
    path = write_predictions(tmp_path / "a", [0, 1, 1, 1], [0, 0, 1, 1], files=names)
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["file"] for row in rows] == [*names[:3], "=dog/\\udcff.png"]
    read = read_predictions(path)
    assert read.labels.tolist() == [0, 1, 1, 1] and read.predictions.tolist() == [0, 0, 1, 1]
    path.write_text("index,label,prediction,file\n0,1,1\n")
    with pytest.raises(InputError, match="line 2 must be three whole numbers"):
        read_predictions(path)


def test_order_of_lines_does_not_matter(tmp_path: Path) -> None:
    a = read_predictions(write_predictions(tmp_path / "a", [0, 1, 1], [0, 0, 1], index=[5, 7, 9]))
    b = read_predictions(write_predictions(tmp_path / "b", [1, 0, 1], [1, 0, 0], index=[9, 5, 7]))
    assert a.images == b.images
    assert a.correct.tolist() == b.correct.tolist()


def test_images_tell_index_and_label_apart_but_not_prediction(tmp_path: Path) -> None:
    base = read_predictions(write_predictions(tmp_path / "a", [0, 1], [0, 0]))
    assert base.images == read_predictions(write_predictions(tmp_path / "b", [0, 1], [1, 1])).images
    assert base.images != read_predictions(write_predictions(tmp_path / "c", [1, 1], [0, 0])).images
    assert base.images != read_predictions(write_predictions(tmp_path / "d", [0, 1], [0, 0], index=[0, 2])).images


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "first line must be"),
        ("index;label;prediction\n0;1;1\n", "first line must be"),
        ("index,label,prediction\n0,1,1\n1,2", "line 3 must be three whole numbers"),
        ("index,label,prediction\n0,1,x\n", "line 2"),
        ("index,label,prediction\n0,1,1\n0,1,1\n", "appears twice"),
    ],
)
def test_torn_or_foreign_file_is_one_line(tmp_path: Path, text: str, match: str) -> None:
    path = tmp_path / "predictions.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=match) as caught:
        read_predictions(path)
    assert "\n" not in str(caught.value)


def test_missing_file_and_bad_values(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read predictions"):
        read_predictions(tmp_path / "predictions.csv")
    with pytest.raises(InputError, match="2 labels, 3 predictions"):
        write_predictions(tmp_path / "x", [0, 1], [0, 1, 2])
    with pytest.raises(InputError, match="whole numbers"):
        write_predictions(tmp_path / "x", [0, 1], np.array([0.5, 1.0]))
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write"):
        write_predictions(tmp_path / "file" / "x", [0], [0])
    assert not (tmp_path / "x").exists()


def test_confusion_is_scikit_learns() -> None:
    rng = np.random.default_rng(0)
    y, predicted = rng.integers(0, 5, 300), rng.integers(0, 4, 300)
    counts = confusion(torch.from_numpy(y), torch.from_numpy(predicted), 5)
    assert counts.tolist() == confusion_matrix(y, predicted, labels=range(5)).tolist()
    with pytest.raises(InputError, match=r"must be 0\.\.2"):
        confusion(torch.tensor([0, 1]), torch.tensor([0, 3]), 3)
    with pytest.raises(InputError, match="label must be"):
        confusion(torch.tensor([0, -1]), torch.tensor([0, 1]), 3)


@pytest.mark.parametrize("digits", [40, 5000, 200_000])
def test_a_number_too_large_is_one_line(tmp_path: Path, digits: int) -> None:
    (tmp_path / "predictions.csv").write_text(f"index,label,prediction\n0,1,{'9' * digits}\n")
    with pytest.raises(InputError, match=r"predictions\.csv"):
        read_predictions(tmp_path / "predictions.csv")
