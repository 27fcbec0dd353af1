"""The data of the prompts benchmark by name: sentiment sets, sentence pairs, and plain sentences for pseudo labels."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from metapretrain.data import amazon, opinions, plain_sentences, sentence_pairs, sst, yelp
from metapretrain.data.cs224n import SST_CLASSES
from metapretrain.data.made_sentiment import made_plain, made_sentiment
from metapretrain.data.sentence_files import Parts
from metapretrain.data.sentence_sets import (
    SentenceData,
    balanced_sample,
    few_shot_draw,
    fixed_sample,
    known_texts,
    without_known,
)
from metapretrain.data.texts import TextSet
from metapretrain.errors import one_of

__all__ = [
    "DOWNSTREAM",
    "PAIRS",
    "PLAIN",
    "PRETRAINING",
    "SentenceData",
    "balanced_sample",
    "few_shot_draw",
    "fixed_sample",
    "known_texts",
    "load_plain",
    "load_sentiment",
    "made_plain",
    "made_sentiment",
    "without_known",
]

logger = logging.getLogger(__name__)

PRETRAINING = "yelp5"
DOWNSTREAM = ("sst5", "sst2", "amazon5", "amazon2", "sentihood", "semeval-restaurant", "semeval-laptop")
PAIRS = ("rte", "mrpc")
PLAIN: dict[str, Callable[[str | Path], TextSet]] = {
    "ptb": plain_sentences.read_ptb,
    "wikitext-2": plain_sentences.read_wikitext2,
    "dailydialog": plain_sentences.read_dailydialog,
}


@dataclass(frozen=True)
class _Source:
    """How a set is read, its classes, and what its readers must know."""

    read: Callable[[str | Path], Parts]
    classes: tuple[str, ...]
    note: str = ""


_AGREE = "sentences whose opinions agree"
_SEMEVAL = f"{_AGREE}, published test part"
SOURCES = {
    "yelp5": _Source(yelp.read_yelp5, yelp.CLASSES, "several samples of Yelp's reviews, many more good than bad ones"),
    "sst5": _Source(sst.read_sst5, SST_CLASSES, "test: CS224N's dev part"),
    "sst2": _Source(sst.read_sst2, sst.POLARITY, "test: dev part"),
    "amazon5": _Source(
        amazon.read_amazon5, yelp.CLASSES, "training: 1,000 published as dev; test: 1,000 of the test part"
    ),
    "amazon5-kindle": _Source(amazon.read_kindle, yelp.CLASSES, "Kindle books only; test: one row in six held back"),
    "amazon2": _Source(
        amazon.read_amazon2,
        amazon.POLARITY,
        "the four domains of Blitzer et al. (2007), not the Amazon-2 of Zhang et al. (2015) that the paper has; test: "
        "one row in six held back",
    ),
    "sentihood": _Source(opinions.read_sentihood, opinions.TWO, f"{_AGREE}; training: train and dev parts"),
    "semeval-restaurant": _Source(partial(opinions.read_semeval, "semeval-restaurant"), opinions.THREE, _SEMEVAL),
    "semeval-laptop": _Source(partial(opinions.read_semeval, "semeval-laptop"), opinions.THREE, _SEMEVAL),
    "rte": _Source(sentence_pairs.read_rte, sentence_pairs.RTE_CLASSES, "test: GLUE's dev part"),
    "mrpc": _Source(sentence_pairs.read_mrpc, sentence_pairs.MRPC_CLASSES),
}


def load_sentiment(name: str, folder: str | Path, *, neutral: bool = True) -> SentenceData:
    """Read a set of the prompts benchmark, training rows free of repetitions and of rows of the test part.

    Args:
        name: one of :data:`SOURCES`: the pretraining data ``"yelp5"``, :data:`DOWNSTREAM`, ``"amazon5-kindle"`` and the
            sentence pairs :data:`PAIRS`.
        folder: of the files, or the folder that holds it and those of other sets.
        neutral: SemEval's neutral sentences are a third class, as in the paper; otherwise they are left out.

    Raises:
        InputError: an unknown name, a file is missing, or a row cannot be used (named by file and line).

    Example:
        >>> load_sentiment("sst2", "no-such-folder")
        Traceback (most recent call last):
        ...
        metapretrain.errors.InputError: no folder no-such-folder: it must hold ...
    """
    source = SOURCES[one_of("sentence data set", name, SOURCES)]
    classes, note = source.classes, source.note
    if name in opinions.SEMEVAL and not neutral:
        train, test = opinions.read_semeval(name, folder, neutral=False)
        classes, note = opinions.TWO, f"{note}; neutral ones left out"
    else:
        train, test = source.read(folder)
    for rows in (train, test):
        told = "".join(f"; {what} {count:,}" for what, count in rows.counts.items())
        logger.info("%s %s: %s rows%s", name, rows.split, f"{len(rows):,}", told)
    return SentenceData(name, classes, train, test, note)


def load_plain(name: str, folder: str | Path) -> TextSet:
    """Read plain sentences of 5 to 60 words, each once, with the checksums of their files.

    Args:
        name: ``"ptb"``, ``"wikitext-2"`` or ``"dailydialog"``.
        folder: of the files, or the folder that holds it and those of other sets.

    Raises:
        InputError: an unknown name, or a file is missing or cannot be used.

    Example:
        >>> load_plain("wikitext", ".")
        Traceback (most recent call last):
        ...
        metapretrain.errors.InputError: unknown plain text 'wikitext'; ...
    """
    return PLAIN[one_of("plain text", name, PLAIN)](folder)


def check_sentiment(name: str, folder: str | Path) -> str:
    """Return one line with the rows of a folder's set by class, and what was left out.

    Raises:
        InputError: as :func:`load_sentiment`.
    """
    data = load_sentiment(name, folder)
    parts = []
    for rows in (data.train, data.test):
        sizes = rows.require_labels().bincount(minlength=data.num_classes).tolist()
        left = [f"{what} {count:,}" for what, count in rows.counts.items() if count and not what.startswith("rows ")]
        parts.append(f"{len(rows):,} {rows.split} {sizes}" + (f" (left out: {', '.join(left)})" if left else ""))
    return f"{name}: {', '.join(parts)}" + (f"; {data.note}" if data.note else "")


def check_plain(name: str, folder: str | Path) -> str:
    """Return one line with the number of sentences of a folder.

    Raises:
        InputError: as :func:`load_plain`.
    """
    return f"{name}: {len(load_plain(name, folder)):,} sentences"
