"""Few-shot learning: Omniglot 5-way and 20-way, 1-shot and 5-shot, by prototypes and by MAML and its kin.

Each row meta-learns on the training classes, takes the weights that are best on the validation classes, and is tested
once on a frozen set of episodes of the test classes; docs/fewshot.md gives the reason for each choice below.

    python benchmarks/run_fewshot.py --data-dir DIR --seeds 0 1 2 --test-episodes 1000
    python benchmarks/run_fewshot.py --data-dir DIR --encoder runs/stl10/stl10-paper/simclr-s0
    python benchmarks/run_fewshot.py --smoke
"""

from __future__ import annotations

import re
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from report_fewshot import LAYOUT

from metapretrain.data.few_shot import FewShotData
from metapretrain.data.images import ImageSet
from metapretrain.data.registry import DATASETS, load_few_shot, names_giving
from metapretrain.episodes import EpisodeSpec, to_metadataset
from metapretrain.errors import InputError, one_of
from metapretrain.experiments.base import Machine
from metapretrain.experiments.command import Table, machine_of, script_main, table_arguments, table_parser
from metapretrain.experiments.fewshot.experiment import FewShotExperiment
from metapretrain.experiments.fewshot.learning import WITHIN, FewShotMethod, FewShotRecipe, SavedEncoder
from metapretrain.experiments.recipe import override
from metapretrain.models.encoders import BACKBONES
from metapretrain.options import option_type, pixels, positive_int

SETTINGS = ("5w1s", "5w5s", "20w1s", "20w5s")
ENCODER = "encoder"
Rows = dict[str, FewShotMethod | SavedEncoder]

# Snell et al. (2017): 60-way training episodes, 5 queries a class.
PROTONET = FewShotMethod("protonet", updates=20_000, tasks=1, ways=60, queries=5)
# Finn et al. (2017): 5-way with 1 inner step of 0.4 and 32 tasks, 20-way with 5 inner steps of 0.1 and 16 tasks; with
# five steps training is steadier where the outer gradient is clipped (ours, docs/results.md).
MAML = {
    False: FewShotMethod("maml", updates=30_000, tasks=32, inner_lr=0.4, inner_steps=1, test_steps=3),
    True: FewShotMethod("maml", updates=30_000, tasks=16, inner_lr=0.1, inner_steps=5, test_steps=5, clip=1.0),
}
METHODS = ("protonet", "maml", "fomaml", "anil", "metasgd")


def methods_of(ways: int) -> dict[str, FewShotMethod]:
    """The rows of a setting: MAML's kin differ from it by the learner alone."""
    maml = MAML[ways >= 20]
    return {name: PROTONET if name == "protonet" else replace(maml, learner=name) for name in METHODS}


HOLDERS = ("labels", "learn2learn")


def held_by(holder: str, data: FewShotData) -> FewShotData:
    """The data with the classes of their rows as `holder` has them, one of `HOLDERS`: the same ones by each.

    Raises:
        InputError: an unknown name, or learn2learn is not installed.
    """
    if one_of("holder", holder, HOLDERS) == "labels":
        return data
    return replace(data, train=_held(data.train), validation=_held(data.validation), test=_held(data.test))


def _held(images: ImageSet) -> ImageSet:
    classes = to_metadataset(images.images, images.labels).indices_to_labels
    return replace(images, labels=torch.tensor([classes[row] for row in range(len(images))]))


@option_type
def ways_shots(text: str) -> list[str]:
    """Ways and shots such as `5w1s,20w5s`, or `all` of the four of the papers."""
    given = list(SETTINGS) if text == "all" else [part for part in text.split(",") if part]
    wrong = [part for part in given if re.fullmatch(r"[1-9]\d*w[1-9]\d*s", part) is None]
    if wrong or not given:
        raise InputError(f"expected ways and shots such as 5w1s,20w5s, or all; given {(wrong or [text])[0]!r}")
    return list(dict.fromkeys(given))


def options_of(argv: Sequence[str] | None) -> Namespace:
    """Read the command line."""
    parser = table_parser(
        __doc__,
        "fewshot",
        methods=(*METHODS, ENCODER),
        default_methods=",".join(METHODS),
        change="the methods: updates=1000 lr=0.002",
        compiled="compile the meta-steps of MAML and its kin (GPU; minutes at first)",
    )
    add = parser.add_argument
    known = names_giving("few-shot", "images")
    add("--dataset", choices=known, default="omniglot", metavar="NAME", help=f"{', '.join(known)} (default: omniglot)")
    add("--image-folder", type=Path, metavar="DIR", help="short for --dataset image-folder --data-dir DIR")
    add("--image-size", type=pixels, metavar="PIXELS", help="28, or 84 for an image folder")
    add("--settings", type=ways_shots, default=list(SETTINGS), metavar="5w1s,...|all", help="ways and shots (all)")
    add("--queries", type=positive_int, default=15, help="query images a class in validation and test (default: 15)")
    add("--backbone", choices=BACKBONES, default="conv4", help="conv4 (default), or learn2learn's l2l-*")
    add("--holder", choices=HOLDERS, default="labels", help="what holds the classes; learn2learn: its MetaDataset")
    add("--within", choices=WITHIN, help="episodes stay inside an alphabet (tests: of validation and test alone)")
    add("--encoder", type=Path, metavar="RUN", help="score the encoder of a finished run; alone unless --methods")
    add("--test-episodes", type=positive_int, default=600, help="600; 1000 for figures of record")
    add("--validation-episodes", type=positive_int, default=200, help="default: 200")
    options: Namespace = parser.parse_args(argv)
    if options.encoder is not None and ENCODER not in options.methods:
        options.methods = [ENCODER]
    if options.encoder is None and ENCODER in options.methods:
        options.methods = [name for name in options.methods if name != ENCODER]
        if not options.methods:
            parser.error("method encoder needs the run to score: --encoder RUN")
    if options.image_folder is not None:
        options.dataset, options.data_dir = "image-folder", options.image_folder
    if options.smoke and options.data_dir is None and DATASETS[options.dataset].needs_folder:
        options.dataset = "made"
    return options


def table_of(options: Namespace, setting: str, data: FewShotData, machine: Machine) -> Table:
    """The table of one setting, and all its rows by name."""
    ways, shots = map(int, re.findall(r"\d+", setting))
    episodes = {"test": options.test_episodes, "validation": options.validation_episodes}
    methods = methods_of(ways)
    if options.smoke:
        episodes = {"test": 20, "validation": 5}
        methods = {name: replace(m, updates=4, tasks=2, validations=2, ways=None) for name, m in methods.items()}
    rows: Rows = {name: override(method, options.changes) for name, method in methods.items()}
    if options.encoder is not None:
        rows[ENCODER] = SavedEncoder(options.encoder)
    recipe = FewShotRecipe(
        EpisodeSpec(ways, shots, options.queries),
        options.backbone,
        episodes["test"],
        episodes["validation"],
        options.within or "",
    )
    experiment = FewShotExperiment(
        "fewshot",
        "-".join(filter(None, [options.dataset, options.within and f"within-{options.within}", setting])),
        recipe=recipe,
        data=data,
        machine=machine,
        layout=LAYOUT,
        **table_arguments(options, options.backbone),
    )
    return Table(experiment, rows, ["--settings", setting])


def tables_of(options: Namespace) -> list[Table]:
    """Read the images once; each setting is a table."""
    machine = machine_of(options)
    data = held_by(options.holder, load_few_shot(options.dataset, options.data_dir, options.image_size))
    if options.smoke:
        data = data.first(25)
    return [table_of(options, setting, data, machine) for setting in options.settings]


main = script_main(__file__, options_of, tables_of)


if __name__ == "__main__":
    sys.exit(main())
