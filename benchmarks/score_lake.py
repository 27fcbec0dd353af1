"""Error of finished few-shot runs on Lake's 20 one-shot runs: 20-way within an alphabet (Lake et al., 2015).

    python benchmarks/run_fewshot.py --data-dir DIR --settings lake
    python benchmarks/score_lake.py runs/fewshot/omniglot-lake-*/*-s* --data-dir DIR

Each of the 20 runs shows one drawing of 20 characters and asks for 20 drawings by another person, once.
"""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ctrl_c  # noqa: F401
import torch

from metapretrain.checks import check_device, user_path
from metapretrain.data.image_folder import decode
from metapretrain.data.images import LIGHT_ON_DARK, ImageSet
from metapretrain.data.omniglot import DRAWINGS, PARTS, find_characters, turned
from metapretrain.episodes import EpisodePlan
from metapretrain.errors import InputError
from metapretrain.experiments.saved import load
from metapretrain.files import json_bytes, write_file
from metapretrain.options import Parser, add_device_options, main_guard

LAKE_LAYOUT = (
    "omniglot-py/images_background as torchvision.datasets.Omniglot unpacks it, and all_runs.zip of the publisher's "
    "folder one-shot-classification, or its folders run01 to run20"
)


def load_lake(data_dir: str | Path, image_size: int | None = None) -> dict[str, ImageSet]:
    """Read the background alphabets to learn from, and Lake's 20 runs of 20-way one-shot tests (Lake et al., 2015).

    Every sixth alphabet is for validation. The test's classes are `run01/class01` and so on, of two drawings each: the
    one that is shown, then the one that is asked for. Characters for training are turned as Omniglot's are.

    Raises InputError: no drawings or runs there, a run without 20 classes, or a list that names no file of the run.
    """
    size, characters = image_size or 28, find_characters(data_dir, PARTS[:1])
    alphabets = sorted({name.partition("/")[0] for name in characters})
    held = set(alphabets[5::6])
    parts = {"train": range(4), "validation": range(1)}
    made = {}
    for part, turns in parts.items():
        names = [name for name in characters if (name.partition("/")[0] in held) == (part == "validation")]
        drawings, files = decode([path for name in names for path in characters[name]], part, size, 1, None)
        ink = 255 - drawings
        images = torch.cat([turned(ink, torch.full((len(ink),), quarter)) for quarter in turns])
        classes = [f"{name}/rot{90 * quarter:03}" for quarter in turns for name in names]
        labels = torch.arange(len(classes)).repeat_interleave(DRAWINGS)
        made[part] = ImageSet(images, labels, classes, "omniglot-lake", part, files, LIGHT_ON_DARK)
    pairs = [pair for run in _runs(user_path(data_dir)) for pair in _pairs(run)]
    paths = [path for pair in pairs for path in pair]
    one = 1 if isinstance(paths[0], zipfile.Path) else None  # Python 3.12's archives give threads each other's bytes
    drawings, files = decode(paths, "runs", size, 1, one)
    classes = [f"{shown.parent.parent.name}/{Path(shown.name).stem}" for shown, _ in pairs]
    labels = torch.arange(len(classes)).repeat_interleave(2)
    made["test"] = ImageSet(255 - drawings, labels, classes, "omniglot-lake", "test", files, LIGHT_ON_DARK)
    return made


def _runs(root: Path) -> list[Any]:
    """The folders run01 to run20, on the disk or in the archive."""
    for place in (root, root / "one-shot-classification", root / "all_runs", root.parent):
        archive = place / "all_runs.zip"
        base: Any = zipfile.Path(archive) if archive.is_file() else place
        runs = [base / f"run{number:02}" for number in range(1, 21)]
        if all(run.is_dir() for run in runs):
            return runs
    raise InputError(f"no all_runs.zip and no folders run01 to run20 in {root}; expected {LAKE_LAYOUT}")


def _pairs(run: Any) -> list[tuple[Any, Any]]:
    """The drawing that is shown and the one that is asked for, class after class."""
    lines = (run / "class_labels.txt").read_text(encoding="utf-8").split("\n")
    pairs = []
    for number, line in enumerate(lines, start=1):
        files = [run.parent.joinpath(*name.split("/")) for name in line.split()]
        if files and (len(files) != 2 or not all(file.is_file() for file in files)):
            raise InputError(f"{run / 'class_labels.txt'}, line {number}: {line!r} does not name two files of the run")
        pairs += [(files[1], files[0])] if files else []
    if len({shown.name for shown, _ in pairs}) != 20:
        raise InputError(f"{run / 'class_labels.txt'} should name 20 classes, it names {len(pairs)}")
    return sorted(pairs, key=lambda pair: str(pair[0].name))


def lake_plans() -> list[EpisodePlan]:
    """The 20 runs as episodes of the test part: the drawings that are shown, then those that are asked for."""
    y = range(20)
    rows = [[40 * run + 2 * c + asked for asked in (0, 1) for c in y] for run in y]
    return [
        EpisodePlan.of(rows[run], index=run, support_y=y, query_y=y, classes=range(20 * run, 20 * run + 20))
        for run in y
    ]


# Lake, Salakhutdinov and Tenenbaum (2019), The Omniglot challenge: a 3-year progress report, table 1.
PUBLISHED = {"people": 0.045, "Siamese nets": 0.080, "ProtoNet": 0.137}


def lake_errors(model: Any, runs: ImageSet) -> list[float]:
    """The share of wrong answers in each run; `runs` is the test part of `omniglot-lake`."""
    shown, asked = runs.images[0::2], runs.images[1::2]
    y, errors = torch.arange(20), []
    for start in range(0, len(shown), 20):
        rows = slice(start, start + 20)
        predicted = model.adapt(shown[rows], y).predict(asked[rows]).cpu()
        errors.append((predicted != y).double().mean().item())
    return errors


@main_guard
def main(argv: Sequence[str] | None = None) -> int:
    """Print, and write beside each run's results, its error."""
    parser = Parser(prog="score_lake.py", description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folders of finished runs")
    parser.add_argument("--data-dir", type=Path, required=True, metavar="DIR", help=LAKE_LAYOUT)
    add_device_options(parser, precision=False)
    options = parser.parse_args(argv)
    read: dict[int, ImageSet] = {}
    for run in options.runs:
        model: Any = load(run, check_device(options.device))
        size = model.image_size
        if size not in read:
            read[size] = load_lake(options.data_dir, size)["test"]
        errors = lake_errors(model, read[size])
        mean = sum(errors) / len(errors)
        write_file(run / "lake.json", json_bytes({"lake_error": mean, "runs": errors}))
        print(f"{run}: error {mean:.2%} over {len(errors)} runs")
    print("published: " + ", ".join(f"{name} {error:.1%}" for name, error in PUBLISHED.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
