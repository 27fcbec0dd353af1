"""The sets of the scheduling benchmark by name: how each is read, and a check of a folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sized
from functools import partial
from pathlib import Path
from typing import NamedTuple

from metapretrain.checks import user_path
from metapretrain.data import conll, dialogues, documents, glue, squad
from metapretrain.data.documents import Documents

BOOK = "warandpeace.txt"


class LanguageSet(NamedTuple):
    """Where a set comes from, its terms, what its folder must hold, and its reader, which returns splits by name."""

    source: str
    terms: str
    layout: str
    load: Callable[[str | Path], Mapping[str, Sized]]


def load_book(folder: str | Path) -> dict[str, Documents]:
    """Read a folder's book of Project Gutenberg, :data:`BOOK`, which may be in the folder ``ptb``.

    Raises:
        InputError: there is none, or no chapter is in it.
    """
    root = user_path(folder)
    root = root / "ptb" if (root / "ptb").is_dir() else root
    return {"train": documents.read_gutenberg(root / BOOK)}


def check_language(name: str, folder: str | Path) -> str:
    """Return one line with the rows of each split of a folder.

    Raises:
        InputError: a file is missing, or a row cannot be used.
    """
    parts = LANGUAGE_SETS[name].load(folder)
    return f"{name}: {', '.join(f'{split} {len(rows):,}' for split, rows in parts.items())}"


LANGUAGE_SETS = {
    "gutenberg": LanguageSet(
        "https://www.gutenberg.org/ebooks/2600 (War and Peace, or another book)",
        "Project Gutenberg License; in the public domain in the USA",
        documents.LAYOUT_GUTENBERG,
        load_book,
    ),
    "mutual": LanguageSet(
        "https://github.com/Nealcly/MuTual",
        "none stated; cite Cui et al. (2020)",
        dialogues.LAYOUT_MUTUAL,
        dialogues.load_mutual,
    ),
    "dailydialog-pp": LanguageSet(
        "https://github.com/iitmnlp/DailyDialog-plusplus",
        "research use; DailyDialog is CC BY-NC-SA 4.0; cite Sai et al. (2020)",
        dialogues.LAYOUT_DAILY,
        dialogues.load_dailydialog_pp,
    ),
    "conll04": LanguageSet(
        "https://cogcomp.seas.upenn.edu/page/resource_view/43 (in the JSON form of SpERT)",
        "research use; cite Roth and Yih (2004)",
        conll.CONLL04_LAYOUT,
        conll.load_conll04,
    ),
    "conll2003": LanguageSet(
        "https://www.clips.uantwerpen.be/conll2003/ner/",
        "Reuters Corpus agreement (NIST): research use; not to be redistributed",
        conll.LAYOUT,
        conll.load_conll2003,
    ),
    "cola": LanguageSet(
        "https://nyu-mll.github.io/CoLA/",
        "research use; cite Warstadt et al. (2019)",
        glue.LAYOUT_COLA,
        partial(glue.load_glue, "cola"),
    ),
    "qnli": LanguageSet(
        "https://gluebenchmark.com/tasks (a part of it)",
        "CC BY-SA 4.0, as SQuAD, which it is made from; cite Wang et al. (2019)",
        glue.LAYOUT_QNLI,
        partial(glue.load_glue, "qnli"),
    ),
    "wic": LanguageSet(
        "https://pilehvar.github.io/wic/",
        "CC BY-NC 4.0; cite Pilehvar and Camacho-Collados (2019)",
        glue.LAYOUT_WIC,
        glue.load_wic,
    ),
    "cb": LanguageSet(
        "https://github.com/mcdm/CommitmentBank",
        "research use; cite de Marneffe et al. (2019)",
        glue.LAYOUT_CB,
        glue.load_cb,
    ),
    "copa": LanguageSet(
        "https://people.ict.usc.edu/~gordon/copa.html",
        "BSD 2-clause; cite Roemmele et al. (2011)",
        glue.LAYOUT_COPA,
        glue.load_copa,
    ),
    "squad": LanguageSet(
        "https://rajpurkar.github.io/SQuAD-explorer/ and https://github.com/google-deepmind/xquad",
        "CC BY-SA 4.0; cite Rajpurkar et al. (2016), Artetxe et al. (2020)",
        squad.LAYOUT,
        squad.load_squad,
    ),
}
