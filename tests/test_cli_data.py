"""`metapretrain data`: it lists all that is read, says where it belongs, and checks folders."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from metapretrain.data.registry import DATASETS, PLAIN, names_giving
from metapretrain.errors import InputError
from metapretrain.experiments.schedule.tasks.registry import TASKS
from tests.test_cli import show, write_image


def test_data_lists_describes_and_checks(capsys: pytest.CaptureFixture[str]) -> None:
    listed = show(["data"], capsys)
    assert all(word in listed for word in ("stl10", "digits", "image-folder", "terms", "layout"))
    described = show(["data", "stl10"], capsys)
    assert "stl10_binary" in described
    assert "scikit-learn" not in described
    assert "digits" in show(["data", "digits"], capsys)
    assert "cs224n" in listed and "Quora" in show(["data", "qqp"], capsys)


def test_data_lists_what_every_benchmark_reads(capsys: pytest.CaptureFixture[str]) -> None:
    listed = dict(re.findall(r"^(\S+)\n((?:  .*\n)+)", show(["data"], capsys), re.MULTILINE))
    assert set(listed) == set(DATASETS)
    for about in listed.values():
        assert re.fullmatch(r"  source  .+\n  terms   .+\n  layout  .+\n  for     .+\n", about)
    reads = {
        "run_prompts.py": [*names_giving("sentences"), *PLAIN],
        "run_schedule.py": [name for task in TASKS.values() for name in task.data],
    }
    for script, names in reads.items():
        assert names and all(script in listed[name] for name in names)


@pytest.mark.parametrize("name", [name for name, info in DATASETS.items() if info.place])
def test_a_set_of_texts_is_looked_for_where_the_list_says(name: str, tmp_path: Path) -> None:
    (tmp_path / DATASETS[name].place).mkdir(parents=True)
    with pytest.raises(InputError, match=re.escape(str(tmp_path / DATASETS[name].place))):
        DATASETS[name].check(tmp_path)


def test_data_shows_which_sets_a_folder_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_image(tmp_path / "train" / "cat" / "a.png", 9)
    write_image(tmp_path / "train" / "dog" / "a.png", 9)
    write_image(tmp_path / "test" / "cat" / "b.png", 9)
    write_image(tmp_path / "test" / "dog" / "b.png", 9)
    shown = show(["data", "--data-dir", str(tmp_path)], capsys).splitlines()
    assert shown[0].startswith("image-folder: ")
    assert len(shown) == 2 and shown[1].startswith(f"cannot be read from {tmp_path}: stl10, omniglot, cs224n, qqp")


def test_a_folder_that_may_not_be_read_hides_no_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(_: object) -> str:
        raise PermissionError(13, "Permission denied")

    write_image(tmp_path / "train" / "cat" / "a.png", 9)
    write_image(tmp_path / "train" / "dog" / "a.png", 9)
    write_image(tmp_path / "test" / "cat" / "b.png", 9)
    write_image(tmp_path / "test" / "dog" / "b.png", 9)
    monkeypatch.setitem(DATASETS, "omniglot", replace(DATASETS["omniglot"], checker=closed))
    shown = show(["data", "--data-dir", str(tmp_path)], capsys)
    assert shown.startswith("image-folder: ") and "omniglot" in shown
