"""Error of finished few-shot runs on Lake's 20 one-shot runs: 20-way within an alphabet (Lake et al., 2015).

    python benchmarks/run_fewshot.py --dataset omniglot-lake --data-dir DIR --settings 20w1s --queries 1 --within tests
    python benchmarks/score_lake.py runs/fewshot/omniglot-lake-*/*-s* --data-dir DIR

Each of the 20 runs shows one drawing of 20 characters and asks for 20 drawings by another person, once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from metapretrain.checks import check_device
from metapretrain.data.images import ImageSet
from metapretrain.data.registry import load_images
from metapretrain.experiments.saved import load
from metapretrain.files import json_bytes, write_file
from metapretrain.options import Parser, add_device_options, main_guard

# Lake, Salakhutdinov and Tenenbaum (2019), The Omniglot challenge: a 3-year progress report, table 1.
PUBLISHED = {"people": 0.045, "Siamese nets": 0.080, "ProtoNet": 0.137}


def lake_errors(model: Any, runs: ImageSet) -> list[float]:
    """The share of wrong answers in each run; `runs` is the test part of `omniglot-lake`."""
    shown, asked = runs.images[0::2], runs.images[1::2]
    y = torch.arange(20)
    errors = []
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
    parser.add_argument("--data-dir", type=Path, required=True, metavar="DIR", help="folder of omniglot-lake")
    add_device_options(parser, precision=False)
    options = parser.parse_args(argv)
    read: dict[int, ImageSet] = {}
    for run in options.runs:
        model: Any = load(run, check_device(options.device))
        size = model.image_size
        read.setdefault(size, load_images("omniglot-lake", options.data_dir, "test", size))
        errors = lake_errors(model, read[size])
        mean = sum(errors) / len(errors)
        write_file(run / "lake.json", json_bytes({"lake_error": mean, "runs": errors}))
        print(f"{run}: error {mean:.2%} over {len(errors)} runs")
    print("published: " + ", ".join(f"{name} {error:.1%}" for name, error in PUBLISHED.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
