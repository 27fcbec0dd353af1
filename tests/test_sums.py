"""Files that decide a prediction and are not those that were written are not used."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from metapretrain.errors import InputError
from metapretrain.files import SUMS, check_sums, tensor_sum, write_sums

LISTED = ("config.json", "head.safetensors", "encoder/model.safetensors", "encoder/tokenizer.json", "encoder/vocab.txt")
OTHERS = ("checkpoint/step-1/state.safetensors", "notes.txt", "report/table.json", "metrics.jsonl", ".writing/x.json")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in LISTED + OTHERS:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    check_sums(tmp_path)  # written before there were checksums
    write_sums(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", LISTED)
def test_each_file_that_decides_is_checked(folder: Path, name: str) -> None:
    check_sums(folder)
    (folder / name).write_text("another run's")
    with pytest.raises(InputError, match=f"{name} is damaged, or of another run: .*, or remove {SUMS}"):
        check_sums(folder)
    (folder / name).unlink()
    with pytest.raises(InputError, match=f"{name} is missing, which .*, or remove {SUMS}"):
        check_sums(folder)


@pytest.mark.parametrize("name", OTHERS)
def test_no_other_file_is_checked(folder: Path, name: str) -> None:
    (folder / name).write_text("changed")
    check_sums(folder)


def test_weights_that_are_not_listed_are_refused(folder: Path) -> None:
    (folder / "mine").mkdir()
    (folder / "mine/own.safetensors").write_text("")
    check_sums(folder)
    (folder / SUMS).write_text((folder / SUMS).read_text().replace("head", "heap"))
    with pytest.raises(InputError, match=r"damaged: it has no head\.safetensors"):
        check_sums(folder)


@pytest.mark.parametrize("covered", ["weights alone", "nothing"])
def test_what_a_finished_run_of_an_older_version_does_not_cover_is_one_line(
    folder: Path, covered: str, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "result.json").write_text("{}")
    check_sums(folder)
    assert not caplog.records
    old = [line for line in (folder / SUMS).read_text().splitlines(keepends=True) if line.endswith("safetensors\n")]
    (folder / SUMS).write_text("".join(old))
    if covered == "nothing":
        (folder / SUMS).unlink()
    check_sums(folder)
    (record,) = caplog.records
    assert f"of an older version, whose checksums cover {covered}: damage to " in record.message


def test_a_flipped_bit_of_the_sums_is_refused_in_one_line(folder: Path) -> None:
    whole = (folder / SUMS).read_bytes()
    for place in range(len(whole)):
        flipped = whole[place] ^ 1 << place % 8
        if chr(flipped).isspace() == chr(whole[place]).isspace():
            (folder / SUMS).write_bytes(whole[:place] + bytes([flipped]) + whole[place + 1 :])
            with pytest.raises(InputError, match=SUMS) as refused:
                check_sums(folder)
            assert "\n" not in str(refused.value).replace(str(folder), "")


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="needs sha256sum")
def test_the_usual_tool_reads_it(folder: Path) -> None:
    done = subprocess.run(["sha256sum", "--check", "--strict", SUMS], cwd=folder, capture_output=True, text=True)
    assert (done.returncode, sorted(done.stdout.split("\n"))[1:]) == (0, [f"{name}: OK" for name in sorted(LISTED)])


def test_the_sum_of_tensors_is_of_names_types_shapes_and_values_in_any_order() -> None:
    a, b = torch.zeros(2, 3), torch.ones(1)
    others = [{"a": a, "c": b}, {"a": a.int(), "b": b}, {"a": a.view(3, 2), "b": b}, {"a": a, "b": 2 * b}, {"a": a}]
    sums = [tensor_sum(tensors) for tensors in ({"a": a, "b": b}, *others)]
    assert len(set(sums)) == 6 and tensor_sum({"b": b, "a": a}) == sums[0]
