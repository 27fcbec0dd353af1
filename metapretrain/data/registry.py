"""Every data set by name: source, terms, layout, how it is read, and a check of a folder; `register` adds one."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from metapretrain.data import (
    annotated,
    cifar100,
    class_lists,
    cs224n,
    documents,
    few_shot,
    glue,
    omniglot,
    sentiment,
    stl10,
)
from metapretrain.data.image_folder import SPLITS as FOLDER_SPLITS
from metapretrain.data.image_folder import check_classes, check_image_folder, load_image_folder
from metapretrain.data.images import ImageSet, load_digits_images, resized
from metapretrain.data.texts import SentenceData, TextSet, TextTask
from metapretrain.errors import InputError, one_of

Folder = str | Path | None
GIVES = {  # what a set's `load` returns, and what reads such a set
    "images": "benchmarks/run_stl10.py and run_fewshot.py, with --dataset",  # (folder, split, image size) -> ImageSet
    "few-shot": "benchmarks/run_fewshot.py --dataset",  # the same, no class in two of train, validation and test
    "text-tasks": "benchmarks/run_text.py --tasks",  # (folder, rows to hold out for validation) -> list of TextTask
    "sentences": "benchmarks/run_prompts.py --sets",  # (folder) -> SentenceData
    "rows": "load_plain",  # (folder) -> TextSet
    "splits": "benchmarks/run_schedule.py",  # (folder) -> splits by name
}


@dataclass(frozen=True)
class DatasetInfo:
    """A registered data set.

    Attributes:
        name: as given to ``--dataset`` and ``metapretrain data``.
        gives: what `load` takes and returns, a key of :data:`GIVES`; images of another size than asked for are resized.
        source, terms, layout: the publisher's address, the terms of use, and what the folder must hold.
        read_by: what reads it; empty: what reads all sets that give the same.
        place: subfolder in which the files are looked for first.
        checker: returns one line about a folder, or raises InputError; None: the set is read and counted.
        few_shot: (folder, image size or None) -> three parts with classes of their own; None: classes are shared out.
    """

    name: str
    gives: str
    load: Callable[..., Any]
    source: str = "your own"
    terms: str = "your own"
    layout: str = "as its reader says"
    read_by: str = ""
    place: str = ""
    splits: tuple[str, ...] = ("train", "test")
    needs_folder: bool = True
    checker: Callable[[Any], str] | None = None
    few_shot: Callable[[Any, int | None], Mapping[str, ImageSet]] | None = None

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", self.name):
            raise InputError(f"a data set's name has letters, digits, - and _ only, got {self.name!r}")
        one_of("kind of data set", self.gives, GIVES)

    def require(self, folder: Folder) -> Folder:
        """Return the folder, which a set with `needs_folder` must have."""
        if self.needs_folder and not (folder and str(folder)):
            raise InputError(f"{self.name} needs a data folder (--data-dir): {self.layout}")
        return folder

    def check(self, folder: Folder) -> str:
        """Read the folder and return one line about it; raises InputError if the set cannot be read from it."""
        self.require(folder)
        return self.checker(folder) if self.checker is not None else f"{self.name}: {_counted(self, folder)}"


DATASETS: dict[str, DatasetInfo] = {}


def register(info: DatasetInfo) -> DatasetInfo:
    """Add a data set under a new name: scripts that read such sets, and ``metapretrain data``, then know it.

    Example:
        >>> from metapretrain.data import load_images
        >>> first = register(DatasetInfo("first-digits", "images", lambda *_: load_images("digits", None, "train")))
        >>> DATASETS.pop("first-digits").gives
        'images'
    """
    if info.name in DATASETS:
        raise InputError(f"there is a data set {info.name!r} already; choose another name")
    DATASETS[info.name] = info
    return info


def names_giving(*gives: str) -> list[str]:
    """Names of the sets that give one of these, such as ``"images"``."""
    return [name for name, info in DATASETS.items() if info.gives in gives]


def load_images(name: str, data_dir: Folder, split: str, image_size: int | None = None) -> ImageSet:
    """Read a split of a registered set: images uint8 (N, C, H, W) and labels int64 (N,) on the CPU.

    `image_size` None is the set's own (96 for an image folder).

    Example:
        >>> len(load_images("digits", None, "train")), load_images("digits", None, "test", 16).image_size
        (1347, 16)
    """
    info = DATASETS[one_of("data set", name, names_giving("images", "few-shot"))]
    one_of(f"split of {name}", split, info.splits)
    found: ImageSet = info.load(info.require(data_dir), split, image_size)
    check_classes(found.classes, name)
    return resized(found, image_size)


def load_few_shot(name: str, data_dir: Folder, image_size: int | None = None) -> few_shot.FewShotData:
    """Read training, validation and test of a registered set, no class in two of them.

    The classes of a set whose splits have the same classes are shared out, a fixed fifth each for validation and test.
    `image_size` None is the set's own (28, or 84 for an image folder).
    """
    info = DATASETS[one_of("data set", name, names_giving("images", "few-shot"))]
    if info.few_shot is not None:
        return few_shot.FewShotData.of(info.few_shot(info.require(data_dir), image_size))
    splits = few_shot.PARTS if info.gives == "few-shot" else info.splits
    parts = {split: load_images(name, data_dir, split, image_size) for split in splits}
    if info.gives == "few-shot":
        return few_shot.FewShotData.of(parts)
    return few_shot.FewShotData.of(few_shot.split_classes(_joined([*parts.values()])))


def _joined(parts: list[ImageSet]) -> ImageSet:
    """The labelled images of splits that have the same classes."""
    labelled = [part.subset(part.labels >= 0) for part in parts]
    images, labels = (torch.cat([getattr(part, what) for part in labelled]) for what in ("images", "labels"))
    files = {name: record for part in parts for name, record in part.files.items()}
    return replace(parts[0], images=images, labels=labels, split="all", files=files, names=())


def load_text_tasks(names: list[str], data_dir: Folder, validation: int = 500, **options: Any) -> list[TextTask]:
    """Read the tasks of registered sets, each with `validation` rows held out of its training rows.

    `options` are those of ``cs224n``, such as `qqp`.
    """
    tasks: list[TextTask] = []
    for name in names:
        info = DATASETS[one_of("set of text tasks", name, names_giving("text-tasks"))]
        tasks += info.load(info.require(data_dir), validation, **(options if name == "cs224n" else {}))
    return tasks


def load_sentiment(name: str, folder: str | Path, **options: Any) -> SentenceData:
    """Read a set of sentences in classes; training rows are neither repeated nor in the test part.

    `folder` holds the files, or the set's folder. Of SemEval's sets, ``neutral=False`` leaves neutral sentences out.
    """
    info = DATASETS[one_of("sentence data set", name, names_giving("sentences"))]
    found: SentenceData = info.load(info.require(folder), **options)
    return found


def load_plain(name: str, folder: str | Path) -> TextSet:
    """Read plain sentences of 5 to 60 words, each once: of ``"ptb"``, ``"wikitext-2"`` or ``"dailydialog"``."""
    info = DATASETS[one_of("plain text", name, PLAIN)]
    found: TextSet = info.load(info.require(folder))
    return found


def _counted(info: DatasetInfo, folder: Folder) -> str:
    if info.gives == "few-shot":
        data = load_few_shot(info.name, folder)
        parts = [(name, getattr(data, name)) for name in few_shot.PARTS]
        return "; ".join(f"{name} {len(part.classes):,} classes, {len(part):,} images" for name, part in parts)
    if info.gives == "images":
        return ", ".join(f"{split} {len(info.load(folder, split, None)):,} images" for split in info.splits)
    if info.gives == "text-tasks":
        tasks = []
        for task in info.load(folder, 0):
            sizes = {"train": len(task.train), "dev": len(task.dev), "test": len(task.test) if task.test else 0}
            tasks.append(f"{task.name} {' + '.join(f'{size:,} {split}' for split, size in sizes.items() if size)}")
        return ", ".join(tasks)
    found = info.load(folder)
    if info.gives == "sentences":
        counted = [_classes_counted(rows, found.num_classes) for rows in (found.train, found.test)]
        return ", ".join(counted) + (f"; {found.note}" if found.note else "")
    if info.gives == "rows":
        return f"{len(found):,} sentences"
    return ", ".join(f"{split} {len(rows):,}" for split, rows in found.items())


def _classes_counted(rows: TextSet, classes: int) -> str:
    sizes = rows.require_labels().bincount(minlength=classes).tolist()
    left = [f"{what} {count:,}" for what, count in rows.counts.items() if count and not what.startswith("rows ")]
    return f"{len(rows):,} {rows.split} {sizes}" + (f" (left out: {', '.join(left)})" if left else "")


TEXT, PROMPTS, SCHEDULE = (f"benchmarks/run_{name}.py" for name in ("text", "prompts", "schedule"))
PLAIN = ("ptb", "wikitext-2", "dailydialog")
_SETS = (
    DatasetInfo(
        "stl10",
        "images",
        lambda folder, split, _: stl10.load_stl10(folder, split),
        "https://cs.stanford.edu/~acoates/stl10/",
        "no licence stated; images from ImageNet (research use); cite Coates, Ng and Lee (2011)",
        "stl10_binary/ with train_X.bin, train_y.bin, test_X.bin, test_y.bin; a split needs its own",
        "benchmarks/run_stl10.py",
        splits=stl10.SPLITS,
        checker=stl10.check_stl10,
    ),
    DatasetInfo(
        "digits",
        "images",
        lambda _, split, __: load_digits_images(split),
        "https://archive.ics.uci.edu/dataset/80/optical+recognition+of+handwritten+digits",
        "CC BY 4.0 (UCI); shipped with scikit-learn",
        "none: part of scikit-learn",
        "metapretrain demo, benchmarks/run_stl10.py --dataset digits",
        needs_folder=False,
    ),
    DatasetInfo(
        "omniglot",
        "few-shot",
        lambda folder, split, size: omniglot.load_omniglot(folder, split, size or 28),
        "https://github.com/brendenlake/omniglot; split: https://github.com/jakesnell/prototypical-networks",
        "MIT; cite Lake, Salakhutdinov and Tenenbaum (2015)",
        omniglot.LAYOUT,
        splits=omniglot.SPLITS,
    ),
    DatasetInfo(
        "image-folder",
        "images",
        lambda folder, split, size: load_image_folder(folder, split, size or 96),
        "your own images",
        "your own",
        "<class>/<image>, two classes or more. Or, for run_stl10.py, {train,test}/<class>/<image>, no class in test "
        "alone (else a stratified fifth of the images is the test); for run_fewshot.py, {train,validation,test}/"
        "<class>/<image>, no class in two of them (else a fixed fifth of the classes each is for validation and test). "
        "Parts may be spelled otherwise, such as Training, val or test_set",
        "benchmarks/run_stl10.py and run_fewshot.py, each with --image-folder; metapretrain few-shot, which "
        "takes all images of all parts",
        splits=FOLDER_SPLITS,
        checker=check_image_folder,
        few_shot=few_shot.folder_parts,
    ),
    DatasetInfo(
        "made",
        "few-shot",
        lambda _, split, size: few_shot.made_glyphs(split, size or 28),
        "made by the project: random blocks as characters, for trying out",
        "none",
        "none: made when it is read",
        "benchmarks/run_fewshot.py --dataset made",
        splits=few_shot.PARTS,
        needs_folder=False,
    ),
    DatasetInfo(
        "cs224n",
        "text-tasks",
        lambda folder, validation, **options: cs224n.load_cs224n(folder, validation=validation, **options),
        "https://web.stanford.edu/class/cs224n/ (default final project: SST, Quora, SemEval STS)",
        "research use, by the terms of SST, Quora and STS-B; cite Socher et al. (2013), Cer et al. (2017)",
        cs224n.LAYOUT,
        TEXT,
    ),
    DatasetInfo(
        "qqp",
        "rows",
        cs224n.load_qqp,
        "https://quoradata.quora.com/First-Quora-Dataset-Release-Question-Pairs (parts of it, to add to cs224n)",
        "Quora's terms of use: non-commercial research; not to be redistributed",
        cs224n.QQP_LAYOUT,
        f"{TEXT} --qqp DIR",
        checker=cs224n.check_qqp,
    ),
)
LAYOUTS = sentiment.LAYOUTS | glue.LAYOUTS | documents.LAYOUTS | annotated.LAYOUTS
_AMAZON = "research use; the reviews are Amazon's and their writers'"
_SEMEVAL = (
    "https://alt.qcri.org/semeval2016/task5/\n"
    "research use, META-SHARE licence for non-commercial use; cite Pontiki et al. (2016)"
)
ABOUT = {  # the source and, below, the terms of use
    "yelp5": "https://www.yelp.com/dataset; as yelp_review_full_csv by Zhang et al. (2015)\n"
    "Yelp's dataset terms: academic use only; not to be redistributed",
    "amazon5": f"https://jmcauley.ucsd.edu/data/amazon/ as amazon_review_full by Zhang et al. (2015)\n{_AMAZON}",
    "amazon5-kindle": f"https://jmcauley.ucsd.edu/data/amazon/\n{_AMAZON}",
    "amazon2": f"https://www.cs.jhu.edu/~mdredze/datasets/sentiment/ (Blitzer et al., 2007)\n{_AMAZON}",
    "sst5": "https://nlp.stanford.edu/sentiment/ in CS224N's files\nresearch use; cite Socher et al. (2013)",
    "sst2": "https://nlp.stanford.edu/sentiment/ as stsa.binary (Kim, 2014)\nresearch use; cite Socher et al. (2013)",
    "sentihood": "https://github.com/uclnlp/jack/tree/master/data/sentihood\nresearch use; cite Saeidi et al. (2016)",
    "semeval-restaurant": _SEMEVAL,
    "semeval-laptop": _SEMEVAL,
    "rte": "https://gluebenchmark.com/tasks\nresearch use; cite Wang et al. (2019)",
    "mrpc": "https://www.microsoft.com/en-us/download/details.aspx?id=52398\n"
    "Microsoft Research's licence: non-commercial research; cite Dolan and Brockett (2005)",
    "ptb": "https://catalog.ldc.upenn.edu/LDC99T42 (prepared by Mikolov et al., 2010)\n"
    "LDC's licence: research use; not to be redistributed",
    "wikitext-2": "https://www.salesforce.com/products/einstein/ai-research/the-wikitext-dependency-language-modeling-"
    "dataset/\nCC BY-SA 3.0",
    "dailydialog": "https://github.com/iitmnlp/DailyDialog-plusplus\n"
    "research use; DailyDialog is CC BY-NC-SA 4.0; cite Li et al. (2017), Sai et al. (2020)",
    "gutenberg": "https://www.gutenberg.org/ebooks/2600 (War and Peace, or another book)\n"
    "Project Gutenberg License; in the public domain in the USA",
    "mutual": "https://github.com/Nealcly/MuTual\nnone stated; cite Cui et al. (2020)",
    "dailydialog-pp": "https://github.com/iitmnlp/DailyDialog-plusplus\n"
    "research use; DailyDialog is CC BY-NC-SA 4.0; cite Sai et al. (2020)",
    "conll04": "https://cogcomp.seas.upenn.edu/page/resource_view/43 (in the JSON form of SpERT)\n"
    "research use; cite Roth and Yih (2004)",
    "conll2003": "https://www.clips.uantwerpen.be/conll2003/ner/\n"
    "Reuters Corpus agreement (NIST): research use; not to be redistributed",
    "cola": "https://nyu-mll.github.io/CoLA/\nresearch use; cite Warstadt et al. (2019)",
    "qnli": "https://gluebenchmark.com/tasks (a part of it)\n"
    "CC BY-SA 4.0, as SQuAD, which it is made from; cite Wang et al. (2019)",
    "wic": "https://pilehvar.github.io/wic/\nCC BY-NC 4.0; cite Pilehvar and Camacho-Collados (2019)",
    "cb": "https://github.com/mcdm/CommitmentBank\nresearch use; cite de Marneffe et al. (2019)",
    "copa": "https://people.ict.usc.edu/~gordon/copa.html\nBSD 2-clause; cite Roemmele et al. (2011)",
    "squad": "https://rajpurkar.github.io/SQuAD-explorer/ and https://github.com/google-deepmind/xquad\n"
    "CC BY-SA 4.0; cite Rajpurkar et al. (2016), Artetxe et al. (2020)",
}
_LOADED: dict[str, tuple[str, str, Callable[..., Any]]] = {  # what it gives, its place, its reader
    **{name: ("sentences", place, partial(sentiment.load, name)) for name, place in sentiment.PLACES.items()},
    "ptb": ("rows", "ptb", documents.ptb_sentences),
    "wikitext-2": ("rows", "wikitext-2", documents.wikitext2_sentences),
    "dailydialog": ("rows", "dailydialog_pp", annotated.dailydialog_sentences),
    "gutenberg": ("splits", "ptb", documents.load_book),
    "mutual": ("splits", "mutual", annotated.load_mutual),
    "dailydialog-pp": ("splits", "dailydialog_pp", annotated.load_dailydialog_pp),
    "conll04": ("splits", "conll04", annotated.load_conll04),
    "conll2003": ("splits", "conll2003", annotated.load_conll2003),
    "cola": ("splits", "glue/CoLA", partial(glue.load_glue, "cola")),
    "qnli": ("splits", "glue/QNLI_subset", partial(glue.load_glue, "qnli")),
    "wic": ("splits", "superglue/WiC", glue.load_wic),
    "cb": ("splits", "superglue/CB", partial(glue.load_glue, "cb")),
    "copa": ("splits", "superglue/COPA", glue.load_copa),
    "squad": ("splits", "squad", annotated.load_squad),
}
for _info in _SETS:
    register(_info)
_READ_WHOLE: tuple[tuple[Callable[..., Any], Mapping[str, tuple[str, str, str]]], ...] = (
    (cifar100.load_cifar100, cifar100.ABOUT),
    (class_lists.load_listed, class_lists.ABOUT),
)
for _reader, _abouts in _READ_WHOLE:
    for _name, (_source, _terms, _layout) in _abouts.items():
        _parts = partial(_reader, _name)
        _one = partial(lambda read, folder, split, size: read(folder, size)[split], _parts)
        _info = DatasetInfo(_name, "few-shot", _one, _source, _terms, _layout, few_shot=_parts)
        register(replace(_info, splits=few_shot.PARTS))
for _name, (_gives, _place, _load) in _LOADED.items():
    _by = SCHEDULE if _gives == "splits" else PROMPTS
    if _name in ("rte", "mrpc", "ptb", "wikitext-2"):
        _by = f"{PROMPTS} and {SCHEDULE}"
    _source, _terms = ABOUT[_name].split("\n")
    register(DatasetInfo(_name, _gives, _load, _source, _terms, LAYOUTS[_name], _by, _place))
