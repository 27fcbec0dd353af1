"""`metapretrain demo`: prototypical pretraining beside its baselines on handwritten digits, in a minute or two."""

from __future__ import annotations

import os
from argparse import Namespace
from dataclasses import replace

import torch

from metapretrain.data.registry import load_images
from metapretrain.experiments.command import Table, due, machine_of, table_arguments, tell
from metapretrain.experiments.images.data import ImageData
from metapretrain.experiments.images.experiment import ImageExperiment
from metapretrain.experiments.images.recipe import ImagePhase, ImageRecipe
from metapretrain.experiments.images.training import ImageMethod
from metapretrain.experiments.recipe import Proto

METHODS = {
    "supervised": ImageMethod("supervised"),
    "simclr": ImageMethod("simclr"),
    "prl-standard": ImageMethod("prl-standard"),
    "prl-query": ImageMethod("prl-query"),
}
RECIPE = ImageRecipe(
    epochs=20,
    pretrain_share=0.7,
    batch_size=64,
    encoder="small-conv",
    supervised=ImagePhase(lr=0.05, augment="plain"),
    prl=ImagePhase(lr=0.05, augment="plain"),
    simclr=ImagePhase(lr=0.05, augment="plain"),
    frozen=ImagePhase(lr=0.05, augment="plain"),
    unfrozen=ImagePhase(lr=0.02, augment="plain"),
    proto=Proto(distance="euclidean"),
    validation=147,
)


def main(options: Namespace) -> int:
    """Run the demo with the options of `metapretrain demo`; finished runs below `--out` are kept."""
    train, test = (load_images("digits", None, split) for split in ("train", "test"))
    recipe = replace(RECIPE, epochs=2) if options.smoke else RECIPE
    options.tag = "" if options.smoke else "demo"
    experiment = ImageExperiment(
        "demo",
        "digits",
        recipe=recipe,
        data=ImageData.of(train, test, recipe.validation),
        machine=machine_of(options),
        map_points=200 if options.smoke else 500,
        **table_arguments(options) | {"resume": True},
    )
    command = ["-m", "metapretrain", "demo", "--out", str(options.out), "--device", options.device]
    command += ["--precision", options.precision, *["--smoke"] * options.smoke]
    threads = torch.get_num_threads()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # for models this small more threads gain little, and wait long on a busy machine
    try:
        for _, batch in due([Table(experiment, METHODS)], options, [*command, *["--no-figures"] * options.no_figures]):
            tell(experiment.run(batch))
        return 0
    finally:
        torch.set_num_threads(threads)
