"""Readers of sets of sentences with a sentiment: reviews of Yelp and Amazon, SST, SentiHood and SemEval-2016."""

import logging
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from metapretrain.data import published
from metapretrain.data.cs224n import SST_CLASSES
from metapretrain.data.glue import MRPC_CLASSES, RTE_CLASSES, read_glue
from metapretrain.data.tables import Record, decode_text, read_json
from metapretrain.data.texts import SentenceData, TextSet
from metapretrain.errors import InputError

logger = logging.getLogger(__name__)

POLARITY = ("negative", "positive")
THREE = ("negative", "neutral", "positive")
RATINGS = ("1 star", "2 stars", "3 stars", "4 stars", "5 stars")
STARS = tuple(f"{star}.0" for star in range(1, 6))
KINDLE = "kindle15k.tsv"
SENTIHOOD = ("sentihood-train.json", "sentihood-dev.json", "sentihood-test.json")
SEMEVAL = {
    "semeval-restaurant": (
        "ABSA16_Restaurants_Train_SB1_v2.xml",
        "EN_REST_SB1_TEST_gold.xml",
        "EN_REST_SB1_TEST.xml.gold",
    ),
    "semeval-laptop": ("ABSA16_Laptops_Train_SB1_v2.xml", "EN_LAPT_SB1_TEST_.xml.gold"),
}
SEMEVAL_LAYOUT = (
    "ABSA16_Restaurants_Train_SB1_v2.xml and EN_REST_SB1_TEST.xml.gold, ABSA16_Laptops_Train_SB1_v2.xml and "
    "EN_LAPT_SB1_TEST_.xml.gold, as published"
)
LAYOUTS = {
    "yelp5": "any of train.csv and test.csv of yelp_review_full_csv, augpe/{dev,test}.csv, yelp_review.csv, "
    "yelp_review/{dev,test}.json, 16-shot/*/{train,dev}.tsv; test.csv or yelp_review/test.json is the test part",
    "amazon5": "amazon_review/{dev,test}.json, records {ori, label} with labels 0..4",
    "amazon5-kindle": f"{KINDLE}, separated by tabs, with columns sentence and sentiment (0..4)",
    "amazon2": "DOMAIN/review_negative and DOMAIN/review_positive, a review a line, one folder a domain",
    "sst5": "ids-sst-train.csv and ids-sst-dev.csv of CS224N",
    "sst2": "stsa.binary.train and stsa.binary.dev, lines of a label (0 or 1), a space and a sentence",
    "sentihood": f"{', '.join(SENTIHOOD)}: lists of {{id, text, opinions: [{{sentiment}}]}}",
    "semeval-restaurant": SEMEVAL_LAYOUT,
    "semeval-laptop": SEMEVAL_LAYOUT,
}


def read_sst5(folder: str | Path) -> published.Parts:
    """Read SST in 5 classes; CS224N's ``dev`` is the test part, for its test file has no labels."""
    files = ("ids-sst-train.csv", "ids-sst-dev.csv")
    root = published.find_folder(folder, ("cs224n",), files, LAYOUTS["sst5"])
    how: dict[str, Any] = {"text": "sentence", "label": "sentiment", "format": "tsv", "classes": SST_CLASSES}
    return published.read_parts(root, files, id="id", **how)


def read_sst2(folder: str | Path) -> published.Parts:
    """Read SST in 2 classes (no neutral sentences); ``dev`` is the test part."""
    files = ("stsa.binary.train", "stsa.binary.dev")
    root = published.find_folder(folder, ("sst2",), files, LAYOUTS["sst2"])

    def parse(line: str) -> tuple[str, str]:
        label, _, sentence = line.partition(" ")
        return label or "none", sentence

    train, test = (  # older copies are Latin-1
        _labelled_lines(root / file, file, split, parse, undecodable="latin-1")
        for file, split in zip(files, ("train", "test"), strict=True)
    )
    return published.unlike(train, test), test


def _labelled_lines(
    file: Path,
    name: str,
    split: str,
    parse: Callable[[str], tuple[str, str]],
    clean: Callable[[str], str] = str,
    undecodable: str = "refuse",
) -> TextSet:
    """The rows of a file, one per line; `parse` returns the label and the text of a line."""
    text, _ = decode_text(file, "utf-8", undecodable)
    records: list[Record] = []
    for number, line in enumerate(text.removesuffix("\n").split("\n"), 1):
        label, sentence = parse(line)
        records.append((f"line {number}", {"text": sentence, "label": label, "id": number}))
    return published.name_rows(published.collect_rows(records, file, POLARITY, split), name, clean)


_Form = tuple[str, dict[str, Any]]  # files of one form, and how they are read
_FULL: dict[str, Any] = {"text": "text", "label": "class", "format": "csv", "header": ("class", "text")}
_FULL["classes"] = ("1", "2", "3", "4", "5")
_JSON: dict[str, Any] = {"text": "ori", "label": "label", "format": "json", "classes": RATINGS}
_AUGPE = {"text": "text", "label": "label2", "format": "csv", "classes": tuple(f"Review Stars: {s}" for s in STARS)}
TESTS: tuple[_Form, ...] = (("test.csv", _FULL), ("yelp_review/test.json", _JSON))
TRAINING: tuple[_Form, ...] = (
    ("train.csv", _FULL),
    ("augpe/dev.csv", _AUGPE),
    ("augpe/test.csv", _AUGPE),
    ("yelp_review.csv", {"text": "text", "label": "stars", "format": "csv", "classes": STARS}),
    ("yelp_review/dev.json", _JSON),
    ("16-shot/*/*.tsv", {"text": "sentence", "label": "label", "format": "tsv", "quotes": False, "classes": RATINGS}),
)


def read_yelp5(folder: str | Path) -> published.Parts:
    """Read all forms of Yelp's reviews that a folder holds, without repetitions and escapes, labels 0 (one star) to 4.

    Counts of training: ``rows FILE`` as they were read, and those of :func:`~metapretrain.data.published.unlike`.
    """
    root = published.find_folder(folder, ("yelp5", "yelp_review_full_csv"), (), LAYOUTS["yelp5"])
    test, train = (_read(root, forms, split) for forms, split in ((TESTS, "test"), (TRAINING, "train")))
    return published.unlike(train, test), test


def _read(root: Path, forms: tuple[_Form, ...], split: str) -> TextSet:
    parts = []
    counts = {}
    for pattern, options in forms:
        found = [
            published.name_rows(
                published.read_file(file, **options), file.relative_to(root).as_posix(), published.without_escapes
            )
            for file in sorted(root.glob(pattern))
        ]
        if found:
            counts[f"rows {pattern}"] = sum(map(len, found))
        parts += found
    if not parts:
        raise InputError(f"{root} has no {split} file of Yelp's reviews; it must hold {LAYOUTS['yelp5']}")
    joined = published.concatenate(parts, split)
    return replace(joined, counts={**counts, **joined.counts})


def read_amazon5(folder: str | Path) -> published.Parts:
    """Read Amazon's reviews in 5 classes; the publisher's ``dev`` is the training part here."""
    files = ("amazon_review/dev.json", "amazon_review/test.json")
    root = published.find_folder(folder, ("amazon5",), files, LAYOUTS["amazon5"])
    return published.read_parts(root, files, _clean, text="ori", label="label", format="json", classes=RATINGS)


def read_kindle(folder: str | Path) -> published.Parts:
    """Read reviews of Kindle books in 5 classes; one row in six of each class is held back as the test part."""
    root = published.find_folder(folder, ("amazon5",), (KINDLE,), LAYOUTS["amazon5-kindle"])
    rows = published.read_file(root / KINDLE, text="sentence", label="sentiment", format="tsv", classes=RATINGS)
    rows = published.name_rows(rows, KINDLE, _clean)
    return published.hold_back(rows, rows.require_labels().tolist())


def read_amazon2(folder: str | Path) -> published.Parts:
    """Read reviews in 2 classes, a folder a domain; one row in six of each class and domain is the test part."""
    root = published.find_folder(folder, ("amazon2",), (), LAYOUTS["amazon2"])
    domains = sorted(path.parent.name for path in root.glob("*/review_negative"))
    positive = [f"{domain}/review_positive" for domain in domains or ["DOMAIN"]]
    published.find_folder(root, (), positive, LAYOUTS["amazon2"])
    parts = []
    for name, label in ((f"{domain}/review_{label}", label) for domain in domains for label in POLARITY):
        parse = partial(lambda label, line: (label, line), label)
        parts.append(_labelled_lines(root / name, name, "train", parse, published.without_entities))
    rows = published.concatenate(parts, "train")
    strata = [domains.index(domain) * 2 for domain in amazon2_domains(rows)]
    labels = rows.require_labels().tolist()
    return published.hold_back(rows, [stratum + label for stratum, label in zip(strata, labels, strict=True)])


def amazon2_domains(rows: TextSet) -> list[str]:
    """Return the domain of each row of Amazon-2: the folder that its review came from."""
    return [name.split("/", 1)[0] for name in rows.ids]


def _clean(text: str) -> str:
    return published.without_entities(published.without_escapes(text))


def read_sentihood(folder: str | Path) -> published.Parts:
    """Read the sentences of SentiHood whose opinions agree; the published train and dev are the training part."""
    root = published.find_folder(folder, ("sentihood",), SENTIHOOD, LAYOUTS["sentihood"])
    train, dev, test = (_sentihood(root / name) for name in SENTIHOOD)
    return published.unlike(published.concatenate([train, dev], "train"), test), test


def read_semeval(name: str, folder: str | Path, neutral: bool = True) -> published.Parts:
    """Read the sentences of SemEval-2016 task 5 (English, subtask 1) whose opinions agree.

    Neutral sentences are a class of their own, as in the paper (table 3); without `neutral` left out and counted.
    """
    train, *tests = SEMEVAL[name]
    root = published.find_folder(folder, ("semeval2016",), (train,), SEMEVAL_LAYOUT)
    gold = next((test for test in tests if (root / test).is_file()), None)
    if gold is None:
        raise InputError(f"{root} lacks {' or '.join(tests)}; it must hold {SEMEVAL_LAYOUT}")
    parts = [_semeval(root / file, split, neutral) for file, split in ((train, "train"), (gold, "test"))]
    return published.unlike(parts[0], parts[1]), parts[1]


def _sentihood(file: Path) -> TextSet:
    items = read_json(file, [{"id": int | str, "text": str, "opinions": [{"sentiment": str}]}], LAYOUTS["sentihood"])
    counts: dict[str, int] = {}
    records: list[Record] = []
    for number, item in enumerate(items):
        opinions = {opinion["sentiment"].lower() for opinion in item["opinions"]}
        if _agree(opinions, counts):
            records.append((f"record {number} (id {item['id']})", {**item, "label": opinions.pop()}))
    rows = published.collect_rows(records, file, POLARITY, file.stem.split("-")[-1], counts)
    return published.name_rows(rows, file.name)


def _semeval(file: Path, split: str, neutral: bool) -> TextSet:
    try:
        root = ElementTree.parse(file).getroot()
    except ElementTree.ParseError as error:
        raise InputError(f"{file}, line {error.position[0]}: malformed XML: {error}") from error
    except (LookupError, ValueError) as error:
        raise InputError(f"{file}: the encoding that its first line names cannot be read: {error}") from error
    counts: dict[str, int] = {} if neutral else {"neutral": 0}
    records: list[Record] = []
    for sentence in root.iter("sentence"):
        opinions = {opinion.get("polarity", "no polarity") for opinion in sentence.iter("Opinion")}
        if not _agree(opinions, counts):
            continue
        label = opinions.pop()
        if label == "neutral" and not neutral:
            counts["neutral"] += 1
            continue
        name = sentence.get("id", "without id")
        records.append((f"sentence {name}", {"text": sentence.findtext("text"), "label": label, "id": name}))
    rows = published.collect_rows(records, file, THREE if neutral else POLARITY, split, counts)
    return published.name_rows(rows, file.name)


def _agree(opinions: set[str], counts: dict[str, int]) -> bool:
    if len(opinions) == 1:
        return True
    what = "opinions_differ" if opinions else "no_opinion"
    counts[what] = counts.get(what, 0) + 1
    return False


_AGREE = "sentences whose opinions agree"
_SETS: dict[str, tuple[str, Callable[..., published.Parts], tuple[str, ...], str]] = {  # place, reader, classes, note
    "yelp5": ("yelp5", read_yelp5, RATINGS, "several samples of Yelp's reviews, many more good than bad ones"),
    "amazon5": ("amazon5", read_amazon5, RATINGS, "training: 1,000 published as dev; test: 1,000 of the test part"),
    "amazon5-kindle": ("amazon5", read_kindle, RATINGS, "Kindle books only; test: one row in six held back"),
    "amazon2": (
        "amazon2",
        read_amazon2,
        POLARITY,
        "the four domains of Blitzer et al. (2007), not the Amazon-2 of Zhang et al. (2015) that the paper has; test: "
        "one row in six held back",
    ),
    "sst5": ("cs224n", read_sst5, SST_CLASSES, "test: CS224N's dev part"),
    "sst2": ("sst2", read_sst2, POLARITY, "test: dev part"),
    "sentihood": ("sentihood", read_sentihood, POLARITY, f"{_AGREE}; training: train and dev parts"),
    **{name: ("semeval2016", partial(read_semeval, name), THREE, f"{_AGREE}, published test part") for name in SEMEVAL},
    "rte": ("glue/RTE", partial(read_glue, "rte"), RTE_CLASSES, "test: GLUE's dev part"),
    "mrpc": ("glue/MRPC", partial(read_glue, "mrpc"), MRPC_CLASSES, ""),
}
PLACES = {name: place for name, (place, *_) in _SETS.items()}


def load(name: str, folder: str | Path, *, neutral: bool = True) -> SentenceData:
    """Read a set and log what was read and left out; `neutral`: see :func:`read_semeval`."""
    _, read, classes, note = _SETS[name]
    if name in SEMEVAL and not neutral:
        read, classes, note = partial(read, neutral=False), POLARITY, f"{note}; neutral ones left out"
    train, test = read(folder)
    for rows in (train, test):
        told = "".join(f"; {what} {count:,}" for what, count in rows.counts.items())
        logger.info("%s %s: %s rows%s", name, rows.split, f"{len(rows):,}", told)
    return SentenceData(name, classes, train, test, note)
