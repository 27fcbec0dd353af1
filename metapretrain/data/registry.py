"""The image data sets that can be read: source, terms, layout, and a check of a folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from metapretrain.data.digits import SPLITS as DIGITS_SPLITS
from metapretrain.data.digits import check_digits, load_digits_images
from metapretrain.data.image_folder import SPLITS as FOLDER_SPLITS
from metapretrain.data.image_folder import check_image_folder, load_image_folder
from metapretrain.data.images import ImageSet, resized
from metapretrain.data.omniglot import LAYOUT as OMNIGLOT_LAYOUT
from metapretrain.data.omniglot import SPLITS as OMNIGLOT_SPLITS
from metapretrain.data.omniglot import check_omniglot, load_omniglot
from metapretrain.data.splits import validation_split
from metapretrain.data.stl10 import SPLITS as STL10_SPLITS
from metapretrain.data.stl10 import check_stl10, load_stl10
from metapretrain.errors import InputError, one_of

__all__ = ["DATASETS", "DatasetInfo", "load_images", "validation_split"]

Folder = str | Path | None


@dataclass(frozen=True)
class DatasetInfo:
    """One data set of the registry.

    Attributes:
        name: as given to ``--dataset``.
        source: address of the publisher.
        terms: of use, in one line.
        layout: what the folder must hold.
        read_by: what reads it.
        splits: names of the splits.
        needs_folder: whether a data folder must be named.
        check: returns one line about a folder, or raises InputError.
        load: (folder, split, image size or None) -> ImageSet.
    """

    name: str
    source: str
    terms: str
    layout: str
    read_by: str
    splits: tuple[str, ...]
    needs_folder: bool
    check: Callable[[Folder], str]
    load: Callable[[Folder, str, int | None], ImageSet]


def _require(folder: Folder, name: str) -> Path:
    if folder is None or str(folder) == "":
        raise InputError(f"{name} needs a data folder (--data-dir): {DATASETS[name].layout}")
    return Path(folder)


_ROWS = (
    DatasetInfo(
        name="stl10",
        source="https://cs.stanford.edu/~acoates/stl10/",
        terms="no licence stated; images from ImageNet (research use); cite Coates, Ng and Lee (2011)",
        layout="stl10_binary/ with train_X.bin, train_y.bin, test_X.bin, test_y.bin; a split needs its own",
        read_by="benchmarks/run_stl10.py",
        splits=STL10_SPLITS,
        needs_folder=True,
        check=lambda folder: check_stl10(_require(folder, "stl10")),
        load=lambda folder, split, size: resized(load_stl10(_require(folder, "stl10"), split), size),
    ),
    DatasetInfo(
        name="digits",
        source="https://archive.ics.uci.edu/dataset/80/optical+recognition+of+handwritten+digits",
        terms="CC BY 4.0 (UCI); shipped with scikit-learn",
        layout="none: part of scikit-learn",
        read_by="metapretrain demo, benchmarks/run_stl10.py --dataset digits",
        splits=DIGITS_SPLITS,
        needs_folder=False,
        check=check_digits,
        load=lambda folder, split, size: resized(load_digits_images(split), size),
    ),
    DatasetInfo(
        name="omniglot",
        source="https://github.com/brendenlake/omniglot; split: https://github.com/jakesnell/prototypical-networks",
        terms="MIT; cite Lake, Salakhutdinov and Tenenbaum (2015)",
        layout=OMNIGLOT_LAYOUT,
        read_by="benchmarks/run_fewshot.py",
        splits=OMNIGLOT_SPLITS,
        needs_folder=True,
        check=lambda folder: check_omniglot(_require(folder, "omniglot")),
        load=lambda folder, split, size: load_omniglot(_require(folder, "omniglot"), split, size or 28),
    ),
    DatasetInfo(
        name="image-folder",
        source="your own images",
        terms="your own",
        layout="<class>/<image>. Or, for run_stl10.py, {train,test}/<class>/<image>, no class in test alone (else a "
        "stratified fifth of the images is the test); for run_fewshot.py, {train,validation,test}/<class>/<image>, no "
        "class in two of them (else a fixed fifth of the classes each is for validation and test)",
        read_by="benchmarks/run_stl10.py and run_fewshot.py, each with --image-folder; metapretrain few-shot, which "
        "takes all images of <class>/<image> or {train,test}/<class>/<image>",
        splits=FOLDER_SPLITS,
        needs_folder=True,
        check=lambda folder: check_image_folder(_require(folder, "image-folder")),
        load=lambda folder, split, size: load_image_folder(
            _require(folder, "image-folder"), split, size or 96
        ),
    ),
)
DATASETS: dict[str, DatasetInfo] = {row.name: row for row in _ROWS}


def load_images(name: str, data_dir: Folder, split: str, image_size: int | None = None) -> ImageSet:
    """Read a split of a registered data set.

    Args:
        name: key of :data:`DATASETS`.
        data_dir: its folder; may be None for a set that needs none.
        split: one of the set's splits.
        image_size: height and width in pixels; None: the set's own (96 for an image folder).

    Returns:
        images uint8 (N, C, H, W) and labels int64 (N,) on the CPU.

    Raises:
        InputError: unknown name or split (with the nearest valid one), or the data cannot be read.

    Example:
        >>> len(load_images("digits", None, "train")), load_images("digits", None, "test", 16).image_size
        (1347, 16)
    """
    info = DATASETS[one_of("data set", name, DATASETS)]
    one_of(f"split of {name}", split, info.splits)
    return info.load(data_dir, split, image_size)
