"""Prototypical representation learning on STL-10: the poster's eleven rows and more on real images.

Each row trains an encoder, puts a head on it and is tested once. The budget is counted in encoder image passes and is
the same for every row; docs/stl10.md gives the reason for each choice below.

    python benchmarks/run_stl10.py --data-dir DIR --recipe paper --seeds 0 1 2 3 4
    python benchmarks/run_stl10.py --dataset digits --smoke
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace

import ctrl_c  # noqa: F401
import torch
from report_stl10 import LAYOUT, plot_reliability
from script_options import refuse_two_schedules, schedule_names, take_image_folder

from metapretrain.data.image_folder import UNLABELED, load_image_folder
from metapretrain.data.images import ImageSet, resized
from metapretrain.data.registry import DATASETS, load_images, names_giving
from metapretrain.errors import InputError, one_of
from metapretrain.experiments.command import Table, machine_of, script_main, table_arguments, table_parser
from metapretrain.experiments.images.data import ImageData
from metapretrain.experiments.images.experiment import ImageExperiment
from metapretrain.experiments.images.objectives import own_objectives
from metapretrain.experiments.images.recipe import ImagePhase, ImageRecipe
from metapretrain.experiments.images.training import SCHEDULED, ImageMethod
from metapretrain.experiments.recipe import Proto, override
from metapretrain.options import Parser, option_type, pixels, positive_int

# A row: what trains the encoder, then the head and whether the encoder is frozen under it. Rows with the same
# pretraining share it. The poster does not say how SimCLR was fine-tuned: both ways are run.
METHODS = {
    "supervised-mlp": ImageMethod("supervised", encoder="mlp"),
    "supervised-resnet18": ImageMethod("supervised"),
    "ce-prl": ImageMethod("supervised", joint=True),  # cross entropy and leave-one-out prototypes in every update
    "simclr": ImageMethod("simclr"),
    "simclr-frozen": ImageMethod("simclr", frozen=True),
} | {
    f"prl-{mode}-{'frozen' if frozen else 'unfrozen'}-{head}": ImageMethod(f"prl-{mode}", head, frozen)
    for mode in ("standard", "query", "loo")
    for frozen in (True, False)
    for head in ("linear", "mlp")
}
# Rows of --schedule: the encoder is pretrained by cross entropy, prototypes and SimCLR, one of them an update.
SCHEDULED_ROWS = {"scheduled": ImageMethod(SCHEDULED), "scheduled-frozen": ImageMethod(SCHEDULED, frozen=True)}

# "paper": random weights and plain training, with the choices that the poster leaves open fixed before the first test.
PAPER = ImageRecipe(
    epochs=100,
    pretrain_share=0.8,
    batch_size=128,
    encoder="resnet18",
    supervised=ImagePhase(lr=1e-3, optimizer="adamw", weight_decay=1e-4),
    prl=ImagePhase(lr=1e-3, optimizer="adamw", weight_decay=1e-4),
    simclr=ImagePhase(lr=1e-3, optimizer="adamw", weight_decay=1e-4, augment="simclr"),
    frozen=ImagePhase(lr=1e-3, optimizer="adamw", weight_decay=1e-4),
    unfrozen=ImagePhase(lr=1e-4, optimizer="adamw", weight_decay=1e-4),
)
# "strong": chosen on the validation images, with as many trials for the supervised row as for PRL.
STRONG = ImageRecipe(
    epochs=200,
    pretrain_share=0.5,
    batch_size=128,
    encoder="resnet18",
    stem="3x3",
    supervised=ImagePhase(lr=0.1, augment="strong", weight_decay=1e-3, label_smoothing=0.1),
    prl=ImagePhase(lr=0.05, augment="strong", weight_decay=1e-3, label_smoothing=0.1),
    simclr=ImagePhase(lr=0.1, augment="simclr"),
    frozen=ImagePhase(lr=0.05, augment="strong", label_smoothing=0.1),
    unfrozen=ImagePhase(lr=0.1, augment="strong", weight_decay=1e-3, label_smoothing=0.1),
    proto=Proto(distance="sqeuclidean", temperature=16.0, learn_temperature=True, query_fraction=0.5),
)
RECIPES = {"paper": PAPER, "strong": STRONG}


@option_type
def dataset_of(text: str) -> str:
    """The name of a data set whose test images are of its training classes."""
    known = names_giving("images")
    if text in names_giving("few-shot"):
        raise InputError(
            f"{text}'s test classes are not among its training classes: run benchmarks/run_fewshot.py, "
            f"or name one of {', '.join(known)}"
        )
    return one_of("dataset", text, known)


def own_rows() -> dict[str, ImageMethod]:
    """A row for each objective that a `--plugin` registers: a linear head is fine-tuned on its encoder."""
    return {name: ImageMethod(name) for name in own_objectives()}


def options_of(argv: Sequence[str] | None) -> Namespace:
    """Read the command line."""
    first = Parser(add_help=False)
    first.add_argument("--schedule")
    parser = table_parser(
        __doc__,
        "stl10",
        methods=METHODS | own_rows() if first.parse_known_args(argv)[0].schedule is None else SCHEDULED_ROWS,
        recipes=RECIPES,
        change="the recipe: prl.lr=0.2",
        schedule=f"rows {', '.join(SCHEDULED_ROWS)}: several objectives, one an update, by "
        f"{schedule_names('OBJECTIVE')}; utility:alpha=0.05 sets an option",
        held_out="test images",
        compiled="compile the encoder and the augmentation (GPU)",
        drawn="maps, confusion matrices and curves",
        maps=True,
    )
    add = parser.add_argument
    known = ", ".join(names_giving("images"))
    add("--dataset", type=dataset_of, default="stl10", metavar="NAME", help=f"{known} (default: stl10)")
    add("--image-folder", metavar="DIR", help="short for --dataset image-folder --data-dir DIR")
    add("--image-size", type=pixels, metavar="PIXELS", help="resize to this height and width")
    add(
        "--unlabelled",
        nargs="?",
        const="",
        metavar="DIR",
        help="train SimCLR on the images below DIR, or on the unlabelled part of stl10",
    )
    add("--download", action="store_true", help="download STL-10 into --data-dir first (2.5 GB)")
    add(
        "--labels-per-class",
        type=positive_int,
        metavar="N",
        help="train on N images of each class, for as many updates as on all of them",
    )
    add("--train-on-all", action="store_true", help="train on the validation images too")
    add("--local-batchnorm", action="store_true", help="several processes: BatchNorm of each one's rows, not of all")
    add("--corrupt", action="store_true", help="also calibration, and accuracy of (1,000) corrupted test images")
    options: Namespace = parser.parse_args(argv)
    return options


def data_of(options: Namespace, recipe: ImageRecipe) -> ImageData:
    """Read the images and hold the validation part back."""
    if options.validate and options.train_on_all:
        raise InputError("--validate scores the images that --train-on-all would train on: give one of them")
    if options.validate and options.corrupt:
        raise InputError("--corrupt is of the test images, which --validate leaves alone: give one of them")
    take_image_folder(options, "stl10")
    if options.download:
        if options.dataset != "stl10" or options.data_dir is None:
            raise InputError("--download needs --dataset stl10 and --data-dir, the folder to download into")
        from metapretrain.data.stl10 import download_stl10

        download_stl10(options.data_dir)
    if options.dataset == "stl10" and not options.data_dir:
        raise InputError(
            f"stl10 needs a data folder (--data-dir, with --download to fetch it): "
            f"{DATASETS['stl10'].layout}; --dataset digits needs none"
        )
    parts = [
        load_images(options.dataset, options.data_dir, split, options.image_size)
        for split in ("train", "test")[: 1 if options.validate else 2]
    ]
    if options.unlabelled is not None:
        parts.append(unlabelled_of(options, parts[0]))
    if options.smoke:
        some = [torch.randperm(len(part), generator=torch.Generator().manual_seed(0))[:400] for part in parts]
        small = [options.image_size or min(32, part.image_size) for part in parts]
        parts = [resized(part.subset(rows), size) for part, rows, size in zip(parts, some, small, strict=True)]
    train, more = parts[0], parts.pop() if options.unlabelled is not None else None
    test = replace(train.subset([]), split="test", files={}) if options.validate else parts[1]
    return ImageData.of(train, test, 0 if options.train_on_all else recipe.validation, more)


def with_few_labels(data: ImageData, recipe: ImageRecipe, count: int) -> tuple[ImageData, ImageRecipe]:
    """The first `count` training images of each class, and the recipe with as many more epochs: updates stay equal.

    InputError: a class has not so many training images.
    """
    labels = data.train.labels
    ranks = torch.stack([(labels == c).cumsum(0) for c in range(len(data.train.classes))])
    least = int(ranks[:, -1].min())
    if count > least:
        raise InputError(f"--labels-per-class {count}: a class has {least} training images; give {least} or fewer")
    kept = (ranks[labels, torch.arange(len(labels))] <= count).nonzero().flatten()
    epochs = max(1, round(recipe.epochs * len(labels) / len(kept)))
    return replace(data, train=data.train.subset(kept)), replace(recipe, epochs=epochs)


def unlabelled_of(options: Namespace, train: ImageSet) -> ImageSet:
    """The images of `--unlabelled`, of the size and the channels of the training images."""
    size = options.image_size or train.image_size
    if options.unlabelled:
        return load_image_folder(options.unlabelled, UNLABELED, size, channels=train.channels)
    if options.dataset != "stl10":
        raise InputError(f"{options.dataset} has no unlabelled part; name a folder of images: --unlabelled DIR")
    return load_images("stl10", options.data_dir, UNLABELED, options.image_size)


def recipe_of(options: Namespace) -> ImageRecipe:
    """Return the chosen recipe with the changes of the command line."""
    refuse_two_schedules(options.schedule, options.changes)
    recipe = RECIPES[options.recipe]
    if options.smoke:
        recipe = replace(recipe, encoder="small-conv", epochs=2, pretrain_share=0.5, batch_size=64, validation=40)
    return override(replace(recipe, scheduler=options.schedule or ""), options.changes)


def tables_of(options: Namespace) -> list[Table]:
    """Read the images; the table has all rows, those of own objectives too."""
    recipe, machine, few = recipe_of(options), machine_of(options), options.labels_per_class
    data = data_of(options, recipe)
    if few is not None:
        data, recipe = with_few_labels(data, recipe, few)
    experiment = ImageExperiment(
        "stl10",
        recipe=recipe,
        data=data,
        dataset=options.dataset + "-unlabelled" * (options.unlabelled is not None) + (f"-{few}-labels" if few else ""),
        machine=machine,
        map_points=200 if options.smoke else 1000,
        layout=LAYOUT if options.dataset == "stl10" else replace(LAYOUT, title="images"),
        draw=plot_reliability,
        **table_arguments(options, options.recipe, options.schedule),
    )
    return [Table(experiment, METHODS | SCHEDULED_ROWS | own_rows())]


main = script_main(__file__, options_of, tables_of)


if __name__ == "__main__":
    sys.exit(main())
