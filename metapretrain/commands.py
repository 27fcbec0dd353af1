"""What each subcommand of `metapretrain` does; imports wait until it runs, so that help is quick."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from metapretrain.devices import check_device
from metapretrain.errors import InputError, one_of

if TYPE_CHECKING:
    from metapretrain.data.images import ImageSet
    from metapretrain.data.registry import DatasetInfo
    from metapretrain.data.text_registry import TextDatasetInfo


def demo(options: Namespace) -> int:
    """Train the demo's methods on digits and show their table."""
    from metapretrain.demo import main

    return main(options)


def doctor(options: Namespace) -> int:
    """Show versions, devices and what is missing."""
    from metapretrain.training.environment import doctor as report

    print(report())
    return 0


def data(options: Namespace) -> int:
    """List the data sets, or describe, download and check one."""
    from metapretrain.data.registry import DATASETS
    from metapretrain.data.text_registry import TEXT_DATASETS

    known = DATASETS | TEXT_DATASETS
    if options.name is None:
        if options.download:
            raise InputError(f"name the data set first: {', '.join(known)}")
        if options.data_dir is not None:
            return _check_all(options.data_dir, known)
        print("\n\n".join(_described(info) for info in known.values()))
        print("\nYour own texts are tables with columns that you name: docs/own-text-tasks.md")
        print("\nWhat a folder holds: metapretrain data --data-dir DIR; one set: metapretrain data NAME --data-dir DIR")
        return 0
    info = known[one_of("data set", options.name, known)]
    if options.download:
        _download(info.name, options)
    if options.data_dir is None and info.needs_folder:
        print(_described(info))
        return 0
    print(info.check(options.data_dir))
    return 0


def _described(info: DatasetInfo | TextDatasetInfo) -> str:
    lines = {"source": info.source, "terms": info.terms, "layout": info.layout, "for": info.read_by}
    return "\n".join([info.name, *(f"  {name:7} {text}" for name, text in lines.items())])


def _check_all(folder: Path, known: Mapping[str, DatasetInfo | TextDatasetInfo]) -> int:
    """Show which data sets can be read from a folder."""
    if not folder.is_dir():
        raise InputError(f"no such folder: {folder}")
    missing = []
    with _errors_alone():
        for info in known.values():
            if info.needs_folder:
                try:
                    print(info.check(folder))
                except (InputError, OSError):  # a folder of another set that may not be read hides no set
                    missing.append(info.name)
    if missing:
        print(f"cannot be read from {folder}: {', '.join(missing)} (metapretrain data NAME --data-dir DIR says why)")
    return 0


@contextmanager
def _errors_alone() -> Iterator[None]:
    """Log no counts of files and no rows that are left out: of all sets they would hide what is printed."""
    logger = logging.getLogger("metapretrain")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _download(name: str, options: Namespace) -> None:
    from metapretrain.data.stl10 import download_stl10

    if name != "stl10":
        raise InputError(f"--download is for stl10; {name} has nothing to download")
    if options.data_dir is None:
        raise InputError("--download needs --data-dir, the folder to download into")
    download_stl10(options.data_dir)


def report(options: Namespace) -> int:
    """Write the table of a folder of runs in three formats and show one."""
    from metapretrain.evaluation.report import build_table, write
    from metapretrain.evaluation.results import bundle, collect

    text = write(options.runs, options.out)
    if options.bundle is not None:
        bundle(collect(options.runs).results, options.bundle)
    if options.format != "markdown":
        table = build_table(collect(options.runs))
        text = table.csv() if options.format == "csv" else table.json()
    print(text, end="" if text.endswith("\n") else "\n")
    return 0


def plot(options: Namespace) -> int:
    """Draw the curves and the comparison of a folder of runs."""
    from metapretrain.evaluation.plots import plot as draw
    from metapretrain.evaluation.plots import redraw_maps

    maps = redraw_maps(options.runs, options.reducer) if options.reducer is not None else []
    for path in [*draw(options.runs, options.out, options.metrics), *maps]:
        print(path)
    return 0


def corrupt(options: Namespace) -> int:
    """Add accuracy under standard corruptions to the results of finished runs: a line each."""
    from metapretrain.data.registry import load_images
    from metapretrain.evaluation.robustness import corrupt_runs

    def images(dataset: str, size: int) -> ImageSet:
        return load_images(dataset, options.data_dir, "test", size)

    for run, scores in corrupt_runs(options.runs, images, check_device(options.device)):
        clean, corrupted = scores["corrupt_clean_accuracy"], scores["corrupt_accuracy"]
        print(f"{run}: {corrupted:.2%} under corruption, {clean:.2%} of the same images without")
    print(f"now in the results; the table: metapretrain report {options.runs}")
    return 0


def predict(options: Namespace) -> int:
    """Classify image files with a run's model, a line ``file TAB class`` each; or tables of texts, a file each."""
    named = [(name, getattr(options, name)) for name in ("sst", "para", "sts")]
    named = [(name, file) for name, file in named if file is not None] + options.texts
    tables = dict(named)
    if len(tables) < len(named):
        raise InputError(f"one file a task, but there are several of one: {', '.join(name for name, _ in named)}")
    if bool(tables) == bool(options.files):
        raise InputError("give image files, or texts such as --sst FILE or --texts TASK=FILE")
    if tables:
        from metapretrain.tasks.text_saved import predict_files

        device = check_device(options.device)
        for path in predict_files(options.run, tables, options.out, device, model=options.model):
            print(path)
        return 0
    from metapretrain.data.image_folder import read_images
    from metapretrain.models.saved import load

    model = load(options.run, device=check_device(options.device))
    images = read_images(options.files, model.image_size, channels=model.channels)
    for path, label in zip(options.files, model.predict(images).tolist(), strict=True):
        print(f"{path}\t{model.classes[label]}")
    return 0


def few_shot(options: Namespace) -> int:
    """Show the k-shot accuracy of a run's encoder on a folder of images."""
    from metapretrain import EpisodeSpec
    from metapretrain.data.image_folder import load_image_folder
    from metapretrain.evaluation.few_shot import few_shot_accuracy
    from metapretrain.models.saved import load

    model = load(options.run, device=check_device(options.device))
    images = load_image_folder(options.image_folder, "all", model.image_size, channels=model.channels)
    for shots in options.shots:
        spec = EpisodeSpec(options.ways, shots, options.queries)
        result = few_shot_accuracy(model.encode, images, spec, options.episodes, options.seed)
        print(f"{options.ways}-way {shots}-shot  {result}")
    return 0
