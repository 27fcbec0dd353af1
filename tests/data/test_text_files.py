"""The reader of tables and JSON: every row that cannot be used is named by file and line, in one line."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import random
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from metapretrain.data.published import concatenate, read_file
from metapretrain.data.tables import from_dataset, read_texts, table_options
from metapretrain.data.texts import SentenceData, TextSet, TextTask
from metapretrain.errors import InputError

COLUMNS: dict[str, Any] = {"text": "text", "label": "label", "classes": ("bad", "good")}
PAIR: dict[str, Any] = {"text": "a", "pair": "b", "label": "score", "kind": "pair-regression", "low": 1.0, "high": 5.0}


def write(folder: Path, content: str | bytes, name: str = "dev.csv") -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def refused(message: str, path: Path, **columns: Any) -> None:
    with pytest.raises(InputError, match=message) as error:
        read_texts(path, **{**COLUMNS, **columns})
    assert "\n" not in str(error.value) and path.name in str(error.value)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", 'label,text,id\n1,"one, two",x\n0,three,y\n'),
        ("a.csv", 'label;text;id\n1;"one, two";x\n0;three;y\n'),
        ("a.csv", "label\ttext\tid\n1\tone, two\tx\n0\tthree\ty\n"),
        ("a.tsv", "label\ttext\tid\r\ngood\t one, two \tx\r\n\r\nbad\tthree\ty"),
        ("a.csv", '\ufefflabel,text,id\r\n1.0,"one, two",x\r\n0.0,three,y\r\n'),
        ("a.jsonl", '\ufeff{"label": 1, "text": "one, two", "id": "x"}\r\n\n{"label": 0, "text": "three", "id": "y"}'),
        ("a.json", '{"label": true, "text": "one, two", "id": "x"}\n{"label": 0, "text": "three", "id": "y", "b": 1}'),
        ("a.json", '[{"label": "1", "text": "one, two", "id": "x"}, {"label": 0.0, "text": "three", "id": "y"}]'),
        ("a.json", '{"0": {"label": 1, "text": "one, two", "id": "x"}, "1": {"label": 0, "text": "three", "id": "y"}}'),
    ],
)
def test_formats_separators_line_ends_and_byte_order_marks(tmp_path: Path, name: str, content: str) -> None:
    rows = read_texts(write(tmp_path, content, name), id="id", **COLUMNS)
    assert (rows.first, rows.ids, rows.second) == (["one, two", "three"], ["x", "y"], None)
    assert rows.require_labels().tolist() == [1, 0] and rows.labels is not None and rows.labels.dtype == torch.int64
    assert (rows.split, rows.counts) == ("a", {})
    raw = content.encode()
    md5 = hashlib.md5(raw, usedforsecurity=False).hexdigest()
    assert rows.files == {name: {"bytes": len(raw), "md5": md5, "official": None}}


def test_scores_of_pairs_and_fields_of_several_lines(tmp_path: Path) -> None:
    rows = read_texts(write(tmp_path, 'a,b,score\n"one\ntwo",x,5\n"say ""no""",y,1.25\n'), **PAIR)
    assert rows.first == ["one\ntwo", 'say "no"'] and rows.second == ["x", "y"]
    assert torch.equal(rows.require_labels(), torch.tensor([5.0, 1.25]))


def test_line_ends_of_old_macs_are_read(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_bytes(b"text,label\rone,1\rtwo,0\r")
    assert read_texts(tmp_path / "rows.csv", **COLUMNS).first == ["one", "two"]


def test_rows_without_a_label_are_counted_and_never_a_class(tmp_path: Path) -> None:
    path = write(tmp_path, "text,label\none,1\ntwo,\nthree,0\n,  \n")
    rows = read_texts(path, **COLUMNS)
    assert (rows.first, rows.ids, rows.counts) == (["one", "three"], ["0", "2"], {"unlabelled": 2})
    null = read_texts(write(tmp_path, '[{"text": "x", "label": null}, {"text": "y", "label": 1}]', "a.json"), **COLUMNS)
    assert null.first == ["y"] and null.counts == {"unlabelled": 1}
    refused("has 2 rows without a label", write(tmp_path, "text,label\none,\ntwo,\n"))
    unlabelled = read_texts(write(tmp_path, "text\none\n", "b.csv"), text="text")
    assert unlabelled.labels is None and len(unlabelled) == 1


def test_a_file_without_header(tmp_path: Path) -> None:
    path = write(tmp_path, "1\tone, two\n0\tthree\n", "x.tsv")
    assert read_texts(path, header=("label", "text"), **COLUMNS).first == ["one, two", "three"]
    refused(r"header given for x.tsv: unknown column 'text'; did you mean 'texts'", path, header=("label", "texts"))
    refused("line 1: 2 fields for 3 columns", path, header=("label", "text", "id"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "dev.csv is empty"),
        (b"\xef\xbb\xbf \r\n", "dev.csv is empty"),
        (b"text,label\n", "dev.csv has no rows"),
        (b"sentence,lable\nx,1\n", r"dev.csv, line 1: unknown column 'text';"),
        (b"text,lable\nx,1\n", r"line 1: unknown column 'label'; did you mean 'lable'"),
        (b"text,label,label\nx,1,1\n", r"line 1: the column 'label' is there twice"),
        (b"text,label\none,1\ntwo,7\n", r"1 of 2 rows .*: line 3: label '7' is not one of 0..1 \(bad, good\)"),
        (b"text,label\none,0.5\n", "line 2: label '0.5' is not one of"),
        (b"text,label\none,-1\n", "line 2: label '-1' is not one of"),
        (b"text,label\none,nan\n", "line 2: label 'nan' is not one of"),
        (b"text,label\none,1\n  ,1\n", "line 3: text is empty"),
        (b"text,label\none,1,2\n", "line 2: 3 fields for 2 columns separated by commas"),
        (b"text,label\none\n", "line 2: 1 field for 2 columns separated by commas; is the separator right"),
        (b'text,label\none,1\n"two,1\nthree,0\n', "line 3: unexpected end of data; a quote was left open"),
        (b'text,label\none,1\n"two,1\n"three",0\n', "line 3: .*a quote was left open"),
        (b'label\ttext\n1\t"two\n0\ta 5" pipe\n', "line 2: .*a quote was left open"),
        (b'label\ttext\n1\tone\n1\t"two\n0\tthree\n1\t5"\n', "line 3: .* it closes only at line 5"),
        (b"text,label\none,1\ncaf\xe9,1\nth\xe9,0\n", "line 3 and 1 more line: not utf-8; .*encoding='latin-1'"),
        (b"text,label\none\rtwo,1\n", "line 2: .*a line break stands within a field"),
        (b'text,label\none,1\n"two,1\n' + 20_000 * b"three,0\n", "line 3: a field of more than 131,072 .*left open"),
        (b"text,label\none,1\n" + 20_000 * b"two two " + b",1\n", "line 3: .* 131,072 .*that is read: shorten it"),
        (150_000 * b"a" + b",label\none,1\n", "line 1: a field of more than 131,072 characters"),
    ],
    ids=lambda value: value[:60],
)
def test_malformed_tables_name_file_and_line(tmp_path: Path, content: bytes, message: str) -> None:
    refused(message, write(tmp_path, content))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "x", "label": 1}\n{"text": "y", "lable": 0}\n', "line 2: unknown column 'label'; did you"),
        ('{"text": "x", "label": 1}\n{"text": "y", \n', "line 2: malformed JSON"),
        ("\n[1]\n", "line 2: expected a JSON object of columns, got list"),
        ('{"text": 5, "label": 1}\n', "1 of 1 rows cannot be used: line 1: text is int, not text"),
        ('{"text": null, "label": 1}\n', "line 1: text is empty"),
        ('{"text": "x \\ud83d", "label": 1}\n', "line 1: text has half of a character"),
        ('{"text": "x", "label": [1]}\n', r"line 1: label '\[1\]' is not one of"),
    ],
)
def test_malformed_json_lines_name_file_and_line(tmp_path: Path, content: str, message: str) -> None:
    refused(message, write(tmp_path, content, "dev.jsonl"))


def test_malformed_json_files_name_the_record(tmp_path: Path) -> None:
    refused("record 'k': label '9' is not", write(tmp_path, '{"k": {"text": "x", "label": 9}}', "a.json"))
    refused("line 2: malformed JSON", write(tmp_path, "[\n{]", "b.json"), format="json")
    refused("must hold a list or an object", write(tmp_path, "5", "c.json"))
    refused("line 1: malformed JSON: nested too deeply", write(tmp_path, "[" * 100_000, "d.json"))
    refused("line 2: malformed JSON: a number of too many", write(tmp_path, "\n" + "1" * 5000, "e.jsonl"))


def test_the_first_bad_rows_are_named_and_the_others_counted(tmp_path: Path) -> None:
    path = write(tmp_path, "text,label\n" + "x,9\n" * 5 + "x,1\n")
    refused("5 of 6 rows cannot be used: line 2: .*; line 3: .*; line 4: .*; and 2 more; pass", path)


def test_lines_after_a_field_of_several_lines_keep_their_number(tmp_path: Path) -> None:
    refused("line 5: label '7'", write(tmp_path, 'text,label\n"a\nb\nc",1\nx,7\n'))


def test_scores_outside_of_the_range_are_named(tmp_path: Path) -> None:
    for score in ("5.01", "0.99", "inf", "high"):
        with pytest.raises(InputError, match=rf"line 2: label '{score}' is not a score in 1.0..5.0"):
            read_texts(write(tmp_path, f"a,b,score\nx,y,{score}\n"), **PAIR)


def test_a_wrong_separator_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, "text\tlabel\none\t1\n")
    refused("line 1: columns are separated by tabs, not by commas", path, format="csv")
    refused("separated by commas, not by tabs", write(tmp_path, "text,label\none,1\n"), format="tsv")


def test_other_encodings_are_read_or_replaced(tmp_path: Path) -> None:
    path = write(tmp_path, "text,label\ncafé,1\nx,0\n".encode("latin-1"))
    assert read_texts(path, encoding="latin-1", **COLUMNS).first == ["café", "x"]
    replaced = read_texts(path, undecodable="replace", **COLUMNS)
    assert replaced.first == ["caf\ufffd", "x"] and replaced.counts == {"undecodable": 1}
    wide = write(tmp_path, "text,label\ncafé,1\n".encode("utf-16"))
    assert read_texts(wide, encoding="utf-16", **COLUMNS).first == ["café"]
    with pytest.raises(InputError, match="unknown encoding 'utf9'"):
        read_texts(path, encoding="utf9", **COLUMNS)
    with pytest.raises(InputError, match="did you mean 'replace'"):
        read_texts(path, undecodable="replaced", **COLUMNS)


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le"])
def test_nul_characters_are_refused(encoding: str, tmp_path: Path) -> None:
    path = write(tmp_path, "text,label\nfine,1\n".encode(encoding))
    with pytest.raises(InputError, match=rf"{path.name}, line 1: a NUL character, as in UTF-16"):
        read_texts(path, **COLUMNS)
    assert read_texts(path, encoding=encoding, **COLUMNS).first == ["fine"]
    with pytest.raises(InputError, match=rf"{path.name}, line 3: a NUL character"):
        read_texts(write(tmp_path, b"text,label\nfine,1\nno\0,0\n"), undecodable="replace", **COLUMNS)


def test_quotes_may_be_plain_characters(tmp_path: Path) -> None:
    path = write(tmp_path, 'label\ttext\n1\t"open\n0\ta "b" c"\n')
    assert read_texts(path, quotes=False, **COLUMNS).first == ['"open', 'a "b" c"']


def test_arguments_that_do_not_fit_are_one_line(tmp_path: Path) -> None:
    path = write(tmp_path, "text,label\none,yes\ntwo,no\n")
    refused("give the classes in label order; the column 'label' has 'no', 'yes'", path, classes=())
    refused("does not exist", tmp_path / "nothing.csv")
    (tmp_path / "folder.csv").mkdir()
    refused("is a folder", tmp_path / "folder.csv")
    for columns, message in (
        ({"pair": "text"}, "classification has no second column, 'text' given"),
        ({"kind": "pair-regression"}, "pair-regression needs a second column"),
        ({"kind": "regresion"}, "did you mean 'regression'"),
        ({"format": "xls"}, "unknown format 'xls'"),
        ({"classes": ("a",)}, "two classes or more"),
    ):
        with pytest.raises(InputError, match=message):
            read_texts(path, **{**COLUMNS, **columns})


def test_a_datasets_object_gives_columns_classes_and_split() -> None:
    columns = {"text": ["one", "two", "three"], "label": [1, -1, 0], "idx": [7, 8, 9]}

    class Dataset:
        """As `datasets.Dataset` is used: columns by name, the names of a ClassLabel, and the split."""

        def __init__(self) -> None:
            self.column_names, self.split = list(columns), "validation"
            self.features = {"label": SimpleNamespace(names=["bad", "good"]), "text": SimpleNamespace()}

        def __getitem__(self, name: str) -> list[Any]:
            return columns[name]

    rows = from_dataset(Dataset(), text="text", label="label", id="idx")
    assert (rows.first, rows.ids, rows.split) == (["one", "three"], ["7", "9"], "validation")
    assert rows.require_labels().tolist() == [1, 0] and rows.counts == {"unlabelled": 1}
    with pytest.raises(InputError, match="validation: unknown column 'lable'; did you mean 'label'"):
        from_dataset(Dataset(), text="text", label="lable")
    with pytest.raises(InputError, match="dataset has the splits train, test: give one of them"):
        from_dataset(SimpleNamespace(column_names={"train": ["text"], "test": ["text"]}), text="text")
    with pytest.raises(InputError, match="validation: 1 of 3 rows cannot be used: row 0: label '1' is not a score"):
        from_dataset(Dataset(), text="text", pair="text", label="label", kind="pair-regression", low=-2.0, high=0.5)


def test_classes_called_by_numbers_are_not_taken_for_their_places(tmp_path: Path) -> None:
    stars: dict[str, Any] = {"text": "text", "label": "label", "classes": ("1", "2", "3")}
    for label in ("2", "2.0", 2, 2.0):
        file = write(tmp_path, json.dumps({"text": "x", "label": label}), "a.jsonl")
        assert read_texts(file, **stars).require_labels().tolist() == [1]
    refused(r"line 2: label '0' is not one of the classes 1, 2, 3; pass", write(tmp_path, "text,label\nx,0\n"), **stars)

    # a ClassLabel's numbers are places, whatever its names are
    class Dataset(dict[str, Any]):
        column_names, split = ("text", "label"), "train"
        features: ClassVar[dict[str, Any]] = {
            "label": SimpleNamespace(names=["1", "2", "3"]),
            "text": SimpleNamespace(),
        }

    rows = from_dataset(Dataset(text=["x", "y", "z"], label=[0, 2, -1]), text="text", label="label")
    assert rows.require_labels().tolist() == [0, 2] and rows.counts == {"unlabelled": 1}
    signs = from_dataset({"text": ["x", "y"], "label": [-1, 1]}, text="text", label="label", classes=("-1", "0", "1"))
    assert signs.require_labels().tolist() == [0, 2] and signs.counts == {}


def test_a_data_frame_with_missing_cells_and_columns_called_as_attributes() -> None:
    pandas = pytest.importorskip("pandas")
    label = pandas.array([1, None, 0], dtype="Int64")
    frame = pandas.DataFrame({"text": ["x", "y", "z"], "label": label, "split": ["a"] * 3, "features": [0] * 3})
    rows = from_dataset(frame, **COLUMNS)
    assert (rows.first, rows.split, rows.counts) == (["x", "z"], "dataset", {"unlabelled": 1})
    frame["text"] = pandas.array(["x", "y", None], dtype="string")
    with pytest.raises(InputError, match="dataset: 1 of 3 rows cannot be used: row 2: text is empty"):
        from_dataset(frame, **COLUMNS)


def test_a_real_dataset_reads_as_the_file(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_dict({"a": ["x", "y"], "b": ["p", "q"], "score": [1.5, None]})
    rows = from_dataset(made, **PAIR)
    assert rows.first == ["x"] and rows.second == ["p"] and rows.counts == {"unlabelled": 1}
    labels = datasets.ClassLabel(names=["bad", "good"])
    features = datasets.Features({"text": datasets.Value("string"), "label": labels})
    classes = datasets.Dataset.from_dict({"text": ["x", "y"], "label": [1, -1]}, features=features)
    assert from_dataset(classes, text="text", label="label").require_labels().tolist() == [1]


@pytest.mark.parametrize("about", [{}, {"info": None}, {"info": {"features": None}}])
def test_a_parquet_file_may_say_nothing_of_its_columns(tmp_path: Path, about: dict[str, Any]) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"text": ["x", "y"], "label": ["bad", "good"]})
    parquet.write_table(table.replace_schema_metadata({"huggingface": json.dumps(about)}), tmp_path / "rows.parquet")
    rows = read_texts(tmp_path / "rows.parquet", text="text", label="label", classes=["bad", "good"])
    assert rows.require_labels().tolist() == [0, 1]


def test_columns_of_numpy_and_of_a_file_are_the_same(tmp_path: Path) -> None:
    scores = np.array([1.5, np.nan], dtype=np.float32)
    table = {"a": np.array(["x", "y"], dtype=object), "b": ["p", "q"], "score": scores}
    lines = [{"a": "x", "b": "p", "score": 1.5}, {"a": "y", "b": "q", "score": None}]
    file = write(tmp_path, "\n".join(map(json.dumps, lines)), "train.jsonl")
    from_file, from_columns = read_texts(file, **PAIR), from_dataset(table, **PAIR)
    assert from_file.first == from_columns.first == ["x"] and from_file.counts == from_columns.counts
    assert torch.equal(from_file.require_labels(), from_columns.require_labels())


@pytest.mark.parametrize(
    ("content", "counted"),
    [
        ("label\ttext\n1\tnice\n0\t \n0\tpoor\n", {"empty_text": 1}),
        ("label\ttext\n1\tnice\n0\tpoor\n0\tlicence\tMIT\n1\n", {"other_fields": 2}),
        ("label\ttext\n1\tnice\n0\tpoor\n7\tx\nmaybe\ty\n\tz\n", {"other_label": 2, "unlabelled": 1}),
        ('{"label": 1, "text": "nice"}\n{"label": 0, "text": "poor"}\n{"label": 0, "text": ["x"]}\n', {"no_text": 1}),
        (
            '{"label": 1, "text": "nice"}\n{"label": 0, "text": "poor"}\n{"text": "x"}\n{"te',
            {"no_column": 1, "malformed": 1},
        ),
    ],
)
def test_rows_that_cannot_be_used_are_left_out_counted_and_told_where_that_is_asked_for(
    tmp_path: Path, content: str, counted: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path, content, "a.jsonl" if content[0] == "{" else "a.tsv")
    refused(r"cannot be used: line \d.*; pass unusable='skip' to leave them out$", path)
    rows = read_texts(path, unusable="skip", **COLUMNS)
    assert (rows.first, rows.counts) == (["nice", "poor"], counted)
    wrong = sum(counted.values()) - counted.get("unlabelled", 0)
    assert f"{wrong} of {2 + sum(counted.values())} rows are left out: line" in caplog.text
    with pytest.raises(InputError, match="no row to use of 1: line 2: text is empty"):
        read_texts(write(tmp_path, "text,label\n ,1\n"), unusable="skip", **COLUMNS)


@pytest.mark.parametrize("separator", ["|", ";", "~", " "])
@pytest.mark.parametrize("quotes", [True, False])
def test_any_separator_with_and_without_quotes_and_header(tmp_path: Path, separator: str, quotes: bool) -> None:
    one = f'"a{separator}b"' if quotes else 'a"b"'
    text = f"1{separator}{one}\n0{separator}c\n"
    for header in (None, ("label", "text")):
        path = write(tmp_path, text if header else f"label{separator}text\n{text}", "t.txt")
        rows = read_texts(path, separator=separator, quotes=quotes, header=header, **COLUMNS)
        assert rows.first == [one.strip('"') if quotes else one, "c"] and rows.require_labels().tolist() == [1, 0]
    with pytest.raises(InputError, match="a separator is one character"):
        read_texts(path, separator="||", **COLUMNS)


def test_errors_name_options_that_the_caller_has(tmp_path: Path) -> None:
    open_quote = write(tmp_path, 'label\ttext\n1\t"open\n0\tx\n', "q.tsv")
    latin = write(tmp_path, "text,label\ncaf\xe9,1\nx,0\n".encode("latin-1"), "l.csv")
    wrong = write(tmp_path, "text;label\nx;1\n", "w.csv")
    for path, option, given in (
        (open_quote, "pass quotes=False", {}),
        (latin, "pass its encoding, such as encoding='latin-1', or undecodable='replace'", {}),
        (wrong, "pass separator=';'", {"format": "csv"}),
    ):
        refused(option, path, **given)
        with pytest.raises(InputError) as published:  # a reader of a published set has no such options
            read_file(path, **COLUMNS, **given)
        assert "=" not in str(published.value)
    assert read_texts(wrong, **COLUMNS, **table_options(["separator=;"])).first == ["x"]
    assert read_texts(latin, **COLUMNS, **table_options(["encoding=latin-1"])).first == ["caf\xe9", "x"]
    for settings, told in ((["quote=no"], "did you mean 'quotes'"), (["quotes=no"], "true or false"), (["id"], "KEY=")):
        with pytest.raises(InputError, match=told):
            table_options(settings)
    with pytest.raises(InputError, match="once"):
        table_options(["id=a", "id=b"])


def test_packed_files_are_told_by_what_they_are(tmp_path: Path) -> None:
    for start, told in (
        (b"PAR1", "a Parquet file"),
        (b"PK\3\4", "an .xlsx or .zip file"),
        (b"\x1f\x8b", "a gzip file"),
    ):
        refused(told, write(tmp_path, start + b"rest"))


@pytest.mark.parametrize("suffix", ["parquet", "xlsx"])
def test_parquet_and_excel_are_read_through_pandas_where_it_is_installed(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    refused("does not exist", path)
    try:
        import pandas

        import_module({"parquet": "pyarrow", "xlsx": "openpyxl"}[suffix])
    except ImportError:
        path.write_bytes(b"x")
        refused(rf"reading \.{suffix} needs pandas and \w+: pip install pandas", path)
        return
    frame = pandas.DataFrame({"text": ["one", "NA", ""], "label": [1, 0, 1]})
    frame.to_parquet(path) if suffix == "parquet" else frame.to_excel(path, index=False)
    rows = read_texts(path, unusable="skip", **COLUMNS)
    assert (rows.first, rows.require_labels().tolist(), rows.counts) == (["one", "NA"], [1, 0], {"empty_text": 1})
    path.write_bytes(path.read_bytes()[:50])
    refused(f"cannot be read as .{suffix}", path)


class Split(dict[str, Any]):
    """As a `datasets.Dataset` with a ClassLabel."""

    split = "train"

    def __init__(self, names: list[str], text: list[str], label: list[Any]) -> None:
        super().__init__(text=text, label=label)
        self.column_names, self.features = list(self), {"label": SimpleNamespace(names=names)}


@pytest.mark.parametrize("names", [["neg", "pos"], ["pos", "neg"], ["1", "0"]])
@pytest.mark.parametrize("given", [None, 0, 1])
def test_names_decide_where_two_orders_of_classes_are_given(names: list[str], given: int | None) -> None:
    rows = Split(names, ["x", "y", "z"], [0, 1, -1])
    classes = () if given is None else tuple(names if given == 0 else names[::-1])
    read = from_dataset(rows, text="text", label="label", classes=classes)
    assert [read.classes[label] for label in read.require_labels().tolist()] == names
    with pytest.raises(InputError, match=rf"its own classes are {', '.join(names)}, but the classes good, bad"):
        from_dataset(rows, text="text", label="label", classes=("good", "bad"))


def test_splits_read_in_another_order_of_classes_are_no_task() -> None:
    one, other = (
        from_dataset(Split(names, ["x", "y"], [0, 1]), text="text", label="label")
        for names in (["neg", "pos"], ["pos", "neg"])
    )
    task = TextTask("t", "classification", one, one.subset([]), one, classes=("neg", "pos"))
    assert task.num_classes == 2
    for make in (
        lambda: TextTask("t", "classification", one, one.subset([]), other, classes=("neg", "pos")),
        lambda: SentenceData("t", ("neg", "pos"), one, other),
    ):
        with pytest.raises(InputError, match="read with the classes pos, neg, but the classes are neg, pos"):
            make()


class Labelled:
    """As a shuffled pandas Series: `[]` goes by index label, iteration by position."""

    def __init__(self, values: list[Any]) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Any:
        return iter(self.values)

    def __getitem__(self, label: int) -> Any:
        return self.values[-1 - label]

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        return np.array(self.values)


def test_columns_with_an_index_are_read_by_position() -> None:
    texts, labels = ["one", "two", "three"], torch.tensor([0, 1, 2])
    rows = TextSet(Labelled(texts), labels=labels, ids=Labelled(["a", "b", "c"]))  # type: ignore[arg-type]
    for index in (Labelled([0, 2]), Labelled([True, False, True])):
        assert rows.subset(index).first == ["one", "three"] and rows.subset(index).ids == ["a", "c"]  # type: ignore[arg-type]
    columns = {"text": Labelled(texts), "label": Labelled([1, 0, 1])}
    read = from_dataset(columns, **COLUMNS)
    assert read.first == texts and read.require_labels().tolist() == [1, 0, 1]
    for wrong in ({"first": "abc"}, {"first": texts, "labels": [0, 1, 2]}, {"first": texts, "ids": 3}, {"first": [3]}):
        with pytest.raises(InputError, match="must be"):
            TextSet(**wrong)


@pytest.mark.parametrize("names", [(0, 1), ("0", "1")])
def test_columns_called_by_numbers(names: tuple[Any, Any]) -> None:
    rows = from_dataset({0: ["a", "b"], 1: [1, 0]}, text=names[0], label=names[1], classes=("x", "y"))
    assert rows.first == ["a", "b"] and rows.require_labels().tolist() == [1, 0]


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ([{"text": "a"}], "expected columns by name, as of a DataFrame, got a list"),
        (7, "got a int"),
        ({"text": "ab", "label": [0, 1]}, "column 'text': expected a value a row, got 'ab'"),
        ({"text": ["a"], "label": 1}, "column 'label': expected a value a row, got 1"),
        ({"text": ["a", "b"], "label": [1]}, "different lengths"),
        ({"text": ["a"], "label": [10**400]}, "label '1000.*is not one of"),
        ({"text": ["a"], "label": [np.zeros((9, 9))]}, "label .* is not one of"),
        ({"text": [np.zeros(3)], "label": [1]}, "text is ndarray, not text"),
    ],
)
def test_what_holds_no_columns_is_one_line(data: Any, told: str) -> None:
    with pytest.raises(InputError, match=told) as refused:
        from_dataset(data, **COLUMNS)
    assert "\n" not in str(refused.value)


LETTERS = ["a", "b", "é", "\u2028", " ", '"', "'", ",", ";", "|", "\t", "#", "\\", "0"]


@pytest.mark.parametrize("seed", range(150))
def test_generated_tables_are_read_as_they_were_written(tmp_path: Path, seed: int) -> None:
    drawn = random.Random(seed)
    separator, encoding = drawn.choice(",;|\t~"), drawn.choice(["utf-8", "utf-8-sig", "utf-16"])
    names, extra = ["label", "text", "id"], drawn.randrange(3)
    names += [f"more {n}" for n in range(extra)]
    drawn.shuffle(names)
    expected, lines = [], io.StringIO(newline="")
    table = csv.writer(lines, delimiter=separator, lineterminator=drawn.choice(["\n", "\r\n"]))
    headed = drawn.random() < 0.5
    if headed:
        table.writerow(names)
    kinds = ["good"] * 4 + ["empty_text", "other_fields", "other_label", "unlabelled"]
    counts = dict.fromkeys(kinds, 0)
    for number in range(20):
        kind = drawn.choice(kinds) if number else "good"
        counts[kind] += 1
        text = "x" + "".join(drawn.choices(LETTERS, k=drawn.randrange(9))) + "y"
        row = dict.fromkeys(names, "-") | {"label": str(number % 2), "text": text, "id": f"r{number}"}
        row |= {"empty_text": {"text": " "}, "other_label": {"label": "2"}, "unlabelled": {"label": ""}}.get(kind, {})
        fields = [row[name] for name in names]
        table.writerow([*fields, "z"] if kind == "other_fields" else fields)
        if kind == "good":
            expected.append((text, number % 2, f"r{number}"))
    path = write(tmp_path, lines.getvalue().encode(encoding), "t.csv")
    options = {"header": None if headed else names, "encoding": encoding, "id": "id", "separator": separator}
    rows = read_texts(path, unusable="skip", **options, **COLUMNS)
    assert list(zip(rows.first, rows.require_labels().tolist(), rows.ids, strict=True)) == expected
    assert rows.counts == {kind: count for kind, count in counts.items() if count and kind != "good"}
    wrong = sum(counts.values()) - counts["good"] - counts["unlabelled"]
    if wrong:
        refused(f"{wrong} of 20 rows cannot be used", path, **options)


def test_classes_may_be_the_labels_that_there_are(tmp_path: Path) -> None:
    for content, classes in (
        ('[{"text": "a", "label": 10}, {"text": "b", "label": 2.0}, {"text": "c", "label": null}]', ("2", "10")),
        ('[{"text": "a", "label": "b"}, {"text": "b", "label": 3}, {"text": "c", "label": " a "}]', ("3", "a", "b")),
    ):
        rows = read_texts(write(tmp_path, content, "a.json"), text="text", label="label", classes=None)
        found = [str(row["label"]).strip().removesuffix(".0") for row in json.loads(content) if row["label"]]
        assert rows.classes == classes and [classes[label] for label in rows.require_labels().tolist()] == found
    with pytest.raises(InputError, match="needs two classes or more"):
        read_texts(write(tmp_path, "text,label\na,1\n"), text="text", label="label", classes=None)


def test_sets_read_with_other_classes_are_not_joined() -> None:
    rows = TextSet(["a", "b"], labels=torch.tensor([0, 1]), classes=("x", "y"))
    assert concatenate([rows, replace(rows, classes=())], "train").classes == ("x", "y")
    with pytest.raises(InputError, match="read with the classes x, y and y, x"):
        concatenate([rows, replace(rows, classes=("y", "x"))], "train")


def test_a_table_of_a_header_alone_has_no_rows(tmp_path: Path) -> None:
    (tmp_path / "texts.csv").write_text("sentence,label\n")
    with pytest.raises(InputError, match="has no rows"):
        read_texts(tmp_path / "texts.csv", text="sentence", label="label", classes=None)


def test_labels_that_are_one_number_are_refused_and_those_that_differ_by_capitals_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "t.csv"
    for one, other in (("1", "1.0"), ("-2", "-2.00"), ("10", "1e1")):
        file.write_text(f"text,label\nx,{one}\ny,0\nz,{other}\n")
        with pytest.raises(InputError, match=rf"{one}.*{other}.* are two classes, but one number; write them"):
            read_texts(file, text="text", label="label", classes=None)
    file.write_text("text,label\nx,good\ny,Good\nz,1\nw,one\n")
    assert read_texts(file, text="text", label="label", classes=None).classes == ("1", "Good", "good", "one")
    assert "'Good' and 'good' are two classes; write them alike if they are one" in caplog.text
    caplog.clear()
    read_texts(file, text="text", label="label", classes=("1", "Good", "good", "one"))
    assert not caplog.text  # they are meant so
