"""The table of docs/fewshot.md is filled from finished runs and from files of results."""

import json
from pathlib import Path

import pytest
from table_fewshot import main

from metapretrain.report.results import bundle, collect


def put(folder: Path, method: str, accuracies: tuple[float, ...], command: str, recipe: str = "resnet12") -> Path:
    for seed, accuracy in enumerate(accuracies):
        run = folder / "fewshot" / f"cifar-fs-5w1s-{recipe}" / f"{method}-s{seed}"
        run.mkdir(parents=True)
        result = {"schema": 1, "benchmark": "fewshot", "dataset": "cifar-fs-5w1s", "recipe": recipe, "method": method}
        result |= {"seed": seed, "kind": "row", "status": "complete", "metrics": {"test_accuracy": accuracy}}
        (run / "result.json").write_text(json.dumps({**result, "command": command}))
    return folder


@pytest.fixture
def page(tmp_path: Path) -> Path:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- table -->\nold\n<!-- end of table -->\nafter\n")
    return page


def test_cells_are_means_over_seeds_and_the_rest_stays(tmp_path: Path, page: Path) -> None:
    runs = put(tmp_path / "runs", "supervised-centroid", (0.70, 0.72, 0.74), "run_fewshot.py")
    assert main([str(runs), "--page", str(page)]) == 0
    written = page.read_text()
    assert written.startswith("before\n") and written.endswith("after\n") and "old" not in written
    assert "| `supervised-centroid` | 72.0 ± 5.0 |  | not run yet |  |" in written
    assert written.count("supervised-centroid") == 1 and "| `r2d2` | not run yet | 72.6 |" in written


def test_rotations_stand_apart_and_later_files_count(tmp_path: Path, page: Path) -> None:
    plain = put(tmp_path / "plain", "protonet", (0.5,), "run_fewshot.py")
    turned = put(tmp_path / "turned", "protonet", (0.6,), "run_fewshot.py --set supervised.turns=true")
    again = bundle(collect(put(tmp_path / "again", "protonet", (0.55,), "run_fewshot.py")).results, tmp_path / "a.json")
    assert main([str(plain), str(turned), str(again), "--page", str(page)]) == 0
    written = page.read_text()
    assert "| CIFAR-FS, ResNet-12, rotations | `protonet` | 60.0 | 72.2 |" in written
    assert "| CIFAR-FS, ResNet-12 | `protonet` | 55.0 | 72.2 |" in written and "50.0" not in written
    assert written.count("rotations") == 1


def test_a_start_from_the_supervised_encoder_stands_apart_and_is_no_missing_run(tmp_path: Path, page: Path) -> None:
    command = "run_fewshot.py --tag pre --set pretrained=true updates=10"
    started = put(tmp_path / "runs", "r2d2", (0.6, 0.62), command, "conv4-pre")
    assert main([str(started), "--page", str(page)]) == 0
    written = page.read_text()
    assert "| CIFAR-FS, conv4, from supervised | `r2d2` | 61.0 ± 12.7 | 60.0 | not run yet | 76.1 |" in written
    assert "| CIFAR-FS, conv4 | `protonet` | not run yet |" in written  # r2d2 of random weights is not missing


def test_precisions_are_rows_of_one_backbone_and_are_not_mixed(tmp_path: Path, page: Path) -> None:
    put(tmp_path / "runs", "maml", (0.5, 0.52), "run_fewshot.py --tag bf16", "conv4-bf16")
    put(tmp_path / "runs", "maml", (0.1,), "run_fewshot.py", "conv4")
    put(tmp_path / "runs", "protonet", (0.4,), "run_fewshot.py", "conv4")
    put(tmp_path / "runs", "r2d2", (0.6,), "run_fewshot.py --set pretrained=true", "conv4-pre-bf16")
    put(tmp_path / "runs", "supervised-centroid", (0.3,), "run_fewshot.py", "conv4-bf16-wide")  # not the same backbone
    assert main([str(tmp_path / "runs"), "--page", str(page)]) == 0
    written = page.read_text()
    assert "|  | `maml` | 51.0 ± 12.7 |" in written and "| `protonet` | 40.0 | 55.5 |" in written
    assert "| CIFAR-FS, conv4, from supervised | `r2d2` | 60.0 |" in written and "centroid" not in written
    again = put(tmp_path / "again", "maml", (0.7,), "run_fewshot.py", "conv4")
    assert main([str(tmp_path / "runs"), str(again), "--page", str(page)]) == 0
    assert "|  | `maml` | 70.0 |" in page.read_text()  # the later argument


def test_a_page_without_marks_and_results_that_are_not_there_are_one_line(
    tmp_path: Path, page: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = put(tmp_path / "runs", "protonet", (0.5,), "run_fewshot.py")
    text = page.read_text()
    for words, told in (
        ([str(tmp_path / "none"), "--page", str(page)], "no such folder"),
        ([str(runs), "--page", str(tmp_path / "none.md")], "has no table between"),
    ):
        assert main(words) == 2 and told in capsys.readouterr().err
    odd = json.loads(next(runs.rglob("result.json")).read_text())
    for name, change in {
        "text": {"recipe": 5},
        "other": {"metrics": {"downstream": 0.5}},
        "none": {"dataset": ""},
    }.items():
        (tmp_path / f"{name}.json").write_text(json.dumps([odd | change]))
        assert main([str(tmp_path / f"{name}.json"), "--page", str(page)]) == 2 and page.read_text() == text
        told = capsys.readouterr().err
        assert "no complete few-shot run" in told and ("'recipe' must be text" in told) == (name == "text")
    assert main([str(runs), str(tmp_path / "text.json"), "--page", str(page)]) == 0
    assert "text.json: 1 results left out, first text.json: 'recipe' must be text" in capsys.readouterr().err
    page.write_bytes(text.encode() + b"\xff")
    assert main([str(runs), "--page", str(page)]) == 2 and "is not UTF-8 text" in capsys.readouterr().err
    page.write_text(text.replace("<!-- end of table -->", ""))
    assert main([str(runs), "--page", str(page)]) == 2 and "old" in page.read_text()
