"""The data sets that can be read, images and texts: source, terms, layout, and a check of a folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from metapretrain.data import sentiment
from metapretrain.data.cs224n import LAYOUT, QQP_LAYOUT, check_cs224n, check_qqp
from metapretrain.data.digits import SPLITS as DIGITS_SPLITS
from metapretrain.data.digits import check_digits, load_digits_images
from metapretrain.data.image_folder import SPLITS as FOLDER_SPLITS
from metapretrain.data.image_folder import check_image_folder, load_image_folder
from metapretrain.data.images import ImageSet, resized, validation_split
from metapretrain.data.language_sets import LANGUAGE_SETS, check_language
from metapretrain.data.omniglot import LAYOUT as OMNIGLOT_LAYOUT
from metapretrain.data.omniglot import SPLITS as OMNIGLOT_SPLITS
from metapretrain.data.omniglot import check_omniglot, load_omniglot
from metapretrain.data.sentiment import PLAIN, check_plain, check_sentiment
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


_IMAGE_SETS = (
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
        load=lambda folder, split, size: load_image_folder(_require(folder, "image-folder"), split, size or 96),
    ),
)
DATASETS: dict[str, DatasetInfo] = {row.name: row for row in _IMAGE_SETS}


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


@dataclass(frozen=True)
class TextDatasetInfo:
    """One text data set.

    Attributes:
        name: as given to ``metapretrain data``.
        source: address of the publisher.
        terms: of use, in one line.
        layout: what the folder must hold.
        read_by: what reads it.
        check: returns one line about a folder, or raises InputError.
        needs_folder: whether a data folder must be named.

    Example:
        >>> print(TEXT_DATASETS["qqp"].terms)
        Quora's terms of use: non-commercial research; not to be redistributed
    """

    name: str
    source: str
    terms: str
    layout: str
    read_by: str
    check: Callable[[str | Path], str]
    needs_folder: bool = True


TEXT, PROMPTS, SCHEDULE = (f"benchmarks/run_{name}.py" for name in ("text", "prompts", "schedule"))
# The folders, below the one that PROMPTS and SCHEDULE are given, in which a set is looked for first.
PLACES = {
    "yelp5": "yelp5",
    "amazon5": "amazon5",
    "amazon5-kindle": "amazon5",
    "amazon2": "amazon2",
    "sst5": "cs224n",
    "sst2": "sst2",
    "sentihood": "sentihood",
    "semeval-restaurant": "semeval2016",
    "semeval-laptop": "semeval2016",
    "rte": "glue/RTE",
    "mrpc": "glue/MRPC",
    "cola": "glue/CoLA",
    "qnli": "glue/QNLI_subset",
    "wic": "superglue/WiC",
    "cb": "superglue/CB",
    "copa": "superglue/COPA",
    "ptb": "ptb",
    "gutenberg": "ptb",
    "wikitext-2": "wikitext-2",
    "dailydialog": "dailydialog_pp",
    "dailydialog-pp": "dailydialog_pp",
    "mutual": "mutual",
    "conll04": "conll04",
    "conll2003": "conll2003",
    "squad": "squad",
}
_BOTH = ("rte", "mrpc", "ptb", "wikitext-2")  # the prompts benchmark and that of schedules

_TEXT_SETS: tuple[TextDatasetInfo, ...] = (
    TextDatasetInfo(
        name="cs224n",
        source="https://web.stanford.edu/class/cs224n/ (default final project: SST, Quora, SemEval STS)",
        terms="research use, by the terms of SST, Quora and STS-B; cite Socher et al. (2013), Cer et al. (2017)",
        layout=LAYOUT,
        read_by=TEXT,
        check=check_cs224n,
    ),
    TextDatasetInfo(
        name="qqp",
        source="https://quoradata.quora.com/First-Quora-Dataset-Release-Question-Pairs (parts of it, to add to cs224n)",
        terms="Quora's terms of use: non-commercial research; not to be redistributed",
        layout=QQP_LAYOUT,
        read_by=f"{TEXT} --qqp DIR",
        check=check_qqp,
    ),
)
_YELP = "https://www.yelp.com/dataset; as yelp_review_full_csv by Zhang et al. (2015)"
_YELP_TERMS = "Yelp's dataset terms: academic use only; not to be redistributed"
_AMAZON = "https://jmcauley.ucsd.edu/data/amazon/"
_AMAZON_TERMS = "research use; the reviews are Amazon's and their writers'"
_SST = "https://nlp.stanford.edu/sentiment/"
_SST_TERMS = "research use; cite Socher et al. (2013)"
_SEMEVAL = "https://alt.qcri.org/semeval2016/task5/"
_SEMEVAL_TERMS = "research use, META-SHARE licence for non-commercial use; cite Pontiki et al. (2016)"
_SENTENCES = (  # name, source, terms, layout
    ("yelp5", _YELP, _YELP_TERMS, sentiment.LAYOUT),
    ("amazon5", f"{_AMAZON} as amazon_review_full by Zhang et al. (2015)", _AMAZON_TERMS, sentiment.AMAZON_LAYOUT_5),
    ("amazon5-kindle", _AMAZON, _AMAZON_TERMS, sentiment.LAYOUT_KINDLE),
    (
        "amazon2",
        "https://www.cs.jhu.edu/~mdredze/datasets/sentiment/ (Blitzer et al., 2007)",
        _AMAZON_TERMS,
        sentiment.AMAZON_LAYOUT_2,
    ),
    ("sst5", f"{_SST} in CS224N's files", _SST_TERMS, sentiment.LAYOUT_5),
    ("sst2", f"{_SST} as stsa.binary (Kim, 2014)", _SST_TERMS, sentiment.LAYOUT_2),
    (
        "sentihood",
        "https://github.com/uclnlp/jack/tree/master/data/sentihood",
        "research use; cite Saeidi et al. (2016)",
        sentiment.LAYOUT_SENTIHOOD,
    ),
    ("semeval-restaurant", _SEMEVAL, _SEMEVAL_TERMS, sentiment.LAYOUT_SEMEVAL),
    ("semeval-laptop", _SEMEVAL, _SEMEVAL_TERMS, sentiment.LAYOUT_SEMEVAL),
    ("rte", "https://gluebenchmark.com/tasks", "research use; cite Wang et al. (2019)", sentiment.LAYOUT_RTE),
    (
        "mrpc",
        "https://www.microsoft.com/en-us/download/details.aspx?id=52398",
        "Microsoft Research's licence: non-commercial research; cite Dolan and Brockett (2005)",
        sentiment.LAYOUT_MRPC,
    ),
    (
        "ptb",
        "https://catalog.ldc.upenn.edu/LDC99T42 (prepared by Mikolov et al., 2010)",
        "LDC's licence: research use; not to be redistributed",
        sentiment.LAYOUT_PTB,
    ),
    (
        "wikitext-2",
        "https://www.salesforce.com/products/einstein/ai-research/the-wikitext-dependency-language-modeling-dataset/",
        "CC BY-SA 3.0",
        sentiment.LAYOUT_WIKITEXT,
    ),
    (
        "dailydialog",
        "https://github.com/iitmnlp/DailyDialog-plusplus",
        "research use; DailyDialog is CC BY-NC-SA 4.0; cite Li et al. (2017), Sai et al. (2020)",
        sentiment.LAYOUT_DIALOGUES,
    ),
)
_TEXT_SETS += tuple(
    TextDatasetInfo(
        name,
        source,
        terms,
        f"DIR/{PLACES[name]}: {layout}",
        f"{PROMPTS} and {SCHEDULE}" if name in _BOTH else PROMPTS,
        partial(check_plain if name in PLAIN else check_sentiment, name),
    )
    for name, source, terms, layout in _SENTENCES
)
_TEXT_SETS += tuple(
    TextDatasetInfo(
        name, about.source, about.terms, f"DIR/{PLACES[name]}: {about.layout}", SCHEDULE, partial(check_language, name)
    )
    for name, about in LANGUAGE_SETS.items()
)
TEXT_DATASETS: dict[str, TextDatasetInfo] = {row.name: row for row in _TEXT_SETS}
