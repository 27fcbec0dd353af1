"""The text data sets that can be read: source, terms, layout, and a check of a folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from metapretrain.data import amazon, opinions, plain_sentences, sentence_pairs, sst, yelp
from metapretrain.data.cs224n import LAYOUT, QQP_LAYOUT, check_cs224n, check_qqp
from metapretrain.data.language_sets import LANGUAGE_SETS, check_language
from metapretrain.data.sentiment import PLAIN, check_plain, check_sentiment


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
    "yelp5": "yelp5", "amazon5": "amazon5", "amazon5-kindle": "amazon5", "amazon2": "amazon2", "sst5": "cs224n",
    "sst2": "sst2", "sentihood": "sentihood", "semeval-restaurant": "semeval2016", "semeval-laptop": "semeval2016",
    "rte": "glue/RTE", "mrpc": "glue/MRPC", "cola": "glue/CoLA", "qnli": "glue/QNLI_subset", "wic": "superglue/WiC",
    "cb": "superglue/CB", "copa": "superglue/COPA", "ptb": "ptb", "gutenberg": "ptb", "wikitext-2": "wikitext-2",
    "dailydialog": "dailydialog_pp", "dailydialog-pp": "dailydialog_pp", "mutual": "mutual", "conll04": "conll04",
    "conll2003": "conll2003", "squad": "squad",
}  # fmt: skip
_BOTH = ("rte", "mrpc", "ptb", "wikitext-2")  # the prompts benchmark and that of schedules

_ROWS: tuple[TextDatasetInfo, ...] = (
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
    ("yelp5", _YELP, _YELP_TERMS, yelp.LAYOUT),
    ("amazon5", f"{_AMAZON} as amazon_review_full by Zhang et al. (2015)", _AMAZON_TERMS, amazon.LAYOUT_5),
    ("amazon5-kindle", _AMAZON, _AMAZON_TERMS, amazon.LAYOUT_KINDLE),
    (
        "amazon2",
        "https://www.cs.jhu.edu/~mdredze/datasets/sentiment/ (Blitzer et al., 2007)",
        _AMAZON_TERMS,
        amazon.LAYOUT_2,
    ),
    ("sst5", f"{_SST} in CS224N's files", _SST_TERMS, sst.LAYOUT_5),
    ("sst2", f"{_SST} as stsa.binary (Kim, 2014)", _SST_TERMS, sst.LAYOUT_2),
    (
        "sentihood",
        "https://github.com/uclnlp/jack/tree/master/data/sentihood",
        "research use; cite Saeidi et al. (2016)",
        opinions.LAYOUT_SENTIHOOD,
    ),
    ("semeval-restaurant", _SEMEVAL, _SEMEVAL_TERMS, opinions.LAYOUT_SEMEVAL),
    ("semeval-laptop", _SEMEVAL, _SEMEVAL_TERMS, opinions.LAYOUT_SEMEVAL),
    ("rte", "https://gluebenchmark.com/tasks", "research use; cite Wang et al. (2019)", sentence_pairs.LAYOUT_RTE),
    (
        "mrpc",
        "https://www.microsoft.com/en-us/download/details.aspx?id=52398",
        "Microsoft Research's licence: non-commercial research; cite Dolan and Brockett (2005)",
        sentence_pairs.LAYOUT_MRPC,
    ),
    (
        "ptb",
        "https://catalog.ldc.upenn.edu/LDC99T42 (prepared by Mikolov et al., 2010)",
        "LDC's licence: research use; not to be redistributed",
        plain_sentences.LAYOUT_PTB,
    ),
    (
        "wikitext-2",
        "https://www.salesforce.com/products/einstein/ai-research/the-wikitext-dependency-language-modeling-dataset/",
        "CC BY-SA 3.0",
        plain_sentences.LAYOUT_WIKITEXT,
    ),
    (
        "dailydialog",
        "https://github.com/iitmnlp/DailyDialog-plusplus",
        "research use; DailyDialog is CC BY-NC-SA 4.0; cite Li et al. (2017), Sai et al. (2020)",
        plain_sentences.LAYOUT_DIALOGUES,
    ),
)
_ROWS += tuple(
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
_ROWS += tuple(
    TextDatasetInfo(
        name, about.source, about.terms, f"DIR/{PLACES[name]}: {about.layout}", SCHEDULE, partial(check_language, name)
    )
    for name, about in LANGUAGE_SETS.items()
)
TEXT_DATASETS: dict[str, TextDatasetInfo] = {row.name: row for row in _ROWS}
