"""The data of the prompts benchmark: sentiment sets, sentence pairs, and their readers."""

from __future__ import annotations

import logging
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from metapretrain.data.cs224n import SST_CLASSES
from metapretrain.data.images import file_record
from metapretrain.data.made import made_plain, made_sentiment
from metapretrain.data.published import (
    Parts,
    collect_rows,
    concatenate,
    find_folder,
    hold_back,
    name_rows,
    read_parts,
    unlike,
    unzip_text,
    without_entities,
    without_escapes,
)
from metapretrain.data.tables import Record, decode_text, parse_json, read_texts
from metapretrain.data.texts import (
    SentenceData,
    TextSet,
    balanced_sample,
    few_shot_draw,
    fixed_sample,
    known_texts,
    normalise_text,
    without_known,
)
from metapretrain.errors import InputError, one_of

POLARITY = ("negative", "positive")
LAYOUT_5 = "ids-sst-train.csv and ids-sst-dev.csv of CS224N"
LAYOUT_2 = "stsa.binary.train and stsa.binary.dev, lines of a label (0 or 1), a space and a sentence"


def read_sst5(folder: str | Path) -> Parts:
    """Read SST in 5 classes; CS224N's ``dev`` is the test part, for its test file has no labels.

    Raises:
        InputError: a file is missing, or a row cannot be used.
    """
    files = ("ids-sst-train.csv", "ids-sst-dev.csv")
    root = find_folder(folder, ("cs224n",), files, LAYOUT_5)
    return read_parts(root, files, text="sentence", label="sentiment", id="id", format="tsv", classes=SST_CLASSES)


def read_sst2(folder: str | Path) -> Parts:
    """Read SST in 2 classes (no neutral sentences); ``dev`` is the test part.

    Raises:
        InputError: a file is missing, or a line cannot be used.
    """
    files = ("stsa.binary.train", "stsa.binary.dev")
    root = find_folder(folder, ("sst2",), files, LAYOUT_2)
    train, test = (_read_lines(root / file, split) for file, split in zip(files, ("train", "test"), strict=True))
    return unlike(train, test), test


def _read_lines(file: Path, split: str) -> TextSet:
    text, _ = decode_text(file, "utf-8", "latin-1")  # older copies are Latin-1
    return name_rows(collect_rows(_line_records(text), file, POLARITY, split), file.name)


def _line_records(text: str) -> Iterator[Record]:
    for number, line in enumerate(text.removesuffix("\n").split("\n"), 1):
        label, _, sentence = line.partition(" ")
        yield f"line {number}", {"text": sentence, "label": label or "none", "id": number}


CLASSES = ("1 star", "2 stars", "3 stars", "4 stars", "5 stars")
STARS = tuple(f"{star}.0" for star in range(1, 6))
LAYOUT = (
    "any of train.csv and test.csv of yelp_review_full_csv, augpe/{dev,test}.csv, yelp_review.csv, "
    "yelp_review/{dev,test}.json, 16-shot/*/{train,dev}.tsv; test.csv or yelp_review/test.json is the test part"
)


@dataclass(frozen=True)
class _Form:
    """Files of one form: how they are found and read."""

    pattern: str
    options: dict[str, Any]


_FULL: dict[str, Any] = {"text": "text", "label": "class", "format": "csv", "header": ("class", "text")}
_FULL["classes"] = ("1", "2", "3", "4", "5")
_JSON: dict[str, Any] = {"text": "ori", "label": "label", "format": "json", "classes": CLASSES}
_AUGPE = {"text": "text", "label": "label2", "format": "csv", "classes": tuple(f"Review Stars: {s}" for s in STARS)}
TESTS = (_Form("test.csv", _FULL), _Form("yelp_review/test.json", _JSON))
TRAINING = (
    _Form("train.csv", _FULL),
    _Form("augpe/dev.csv", _AUGPE),
    _Form("augpe/test.csv", _AUGPE),
    _Form("yelp_review.csv", {"text": "text", "label": "stars", "format": "csv", "classes": STARS}),
    _Form("yelp_review/dev.json", _JSON),
    _Form(
        "16-shot/*/*.tsv", {"text": "sentence", "label": "label", "format": "tsv", "quotes": False, "classes": CLASSES}
    ),
)


def read_yelp5(folder: str | Path) -> Parts:
    """Read all forms of Yelp's reviews that a folder holds, without repetitions, labels 0 (one star) to 4.

    Escaped line breaks, quotes and characters are undone. Counts of the training part: ``rows FILE`` as they were
    read, and those of :func:`~metapretrain.data.published.unlike`.

    Raises:
        InputError: no training or no test file, or a row that cannot be used.
    """
    root = find_folder(folder, ("yelp5", "yelp_review_full_csv"), (), LAYOUT)
    test, train = (_read(root, forms, split) for forms, split in ((TESTS, "test"), (TRAINING, "train")))
    return unlike(train, test), test


def _read(root: Path, forms: tuple[_Form, ...], split: str) -> TextSet:
    parts = []
    counts = {}
    for form in forms:
        found = [
            name_rows(read_texts(file, **form.options), file.relative_to(root).as_posix(), without_escapes)
            for file in sorted(root.glob(form.pattern))
        ]
        if found:
            counts[f"rows {form.pattern}"] = sum(map(len, found))
        parts += found
    if not parts:
        raise InputError(f"{root} has no {split} file of Yelp's reviews; it must hold {LAYOUT}")
    joined = concatenate(parts, split)
    return replace(joined, counts={**counts, **joined.counts})


KINDLE = "kindle15k.tsv"
AMAZON_LAYOUT_5 = "amazon_review/{dev,test}.json, records {ori, label} with labels 0..4"
LAYOUT_KINDLE = f"{KINDLE}, separated by tabs, with columns sentence and sentiment (0..4)"
AMAZON_LAYOUT_2 = "DOMAIN/review_negative and DOMAIN/review_positive, a review a line, one folder a domain"


def read_amazon5(folder: str | Path) -> Parts:
    """Read Amazon's reviews in 5 classes; the publisher's ``dev`` is the training part here.

    Raises:
        InputError: a file is missing, or a row cannot be used.
    """
    files = ("amazon_review/dev.json", "amazon_review/test.json")
    root = find_folder(folder, ("amazon5",), files, AMAZON_LAYOUT_5)
    return read_parts(root, files, _clean, text="ori", label="label", format="json", classes=CLASSES)


def read_kindle(folder: str | Path) -> Parts:
    """Read reviews of Kindle books in 5 classes; one row in six of each class is held back as the test part.

    Raises:
        InputError: the file is missing, or a row cannot be used.
    """
    root = find_folder(folder, ("amazon5",), (KINDLE,), LAYOUT_KINDLE)
    rows = read_texts(root / KINDLE, text="sentence", label="sentiment", format="tsv", classes=CLASSES)
    rows = name_rows(rows, KINDLE, _clean)
    return hold_back(rows, rows.require_labels().tolist())


def read_amazon2(folder: str | Path) -> Parts:
    """Read reviews in 2 classes, a folder a domain; one row in six of each class and domain is the test part.

    Raises:
        InputError: no such folders, or a line that cannot be used.
    """
    root = find_folder(folder, ("amazon2",), (), AMAZON_LAYOUT_2)
    domains = sorted(path.parent.name for path in root.glob("*/review_negative"))
    find_folder(root, (), [f"{domain}/review_positive" for domain in domains or ["DOMAIN"]], AMAZON_LAYOUT_2)
    parts = [_amazon_read_lines(root, f"{domain}/review_{label}", label) for domain in domains for label in POLARITY]
    rows = concatenate(parts, "train")
    strata = [domains.index(domain) * 2 for domain in amazon2_domains(rows)]
    labels = rows.require_labels().tolist()
    return hold_back(rows, [stratum + label for stratum, label in zip(strata, labels, strict=True)])


def amazon2_domains(rows: TextSet) -> list[str]:
    """Return the domain of each row of Amazon-2: the folder that its review came from.

    Example:
        >>> amazon2_domains(TextSet(["nice"], ids=["books/review_positive:7"]))
        ['books']
    """
    return [name.split("/", 1)[0] for name in rows.ids]


def _amazon_read_lines(root: Path, name: str, label: str) -> TextSet:
    text, _ = decode_text(root / name, "utf-8", "refuse")
    rows = collect_rows(_amazon_line_records(text, label), root / name, POLARITY, "train")
    return name_rows(rows, name, without_entities)


def _amazon_line_records(text: str, label: str) -> Iterator[Record]:
    for number, line in enumerate(text.removesuffix("\n").split("\n"), 1):
        yield f"line {number}", {"text": line, "label": label, "id": number}


def _clean(text: str) -> str:
    return without_entities(without_escapes(text))


TWO = ("negative", "positive")
THREE = ("negative", "neutral", "positive")
SENTIHOOD = ("sentihood-train.json", "sentihood-dev.json", "sentihood-test.json")
SEMEVAL = {
    "semeval-restaurant": (
        "ABSA16_Restaurants_Train_SB1_v2.xml",
        "EN_REST_SB1_TEST_gold.xml",
        "EN_REST_SB1_TEST.xml.gold",
    ),
    "semeval-laptop": ("ABSA16_Laptops_Train_SB1_v2.xml", "EN_LAPT_SB1_TEST_.xml.gold"),
}
LAYOUT_SENTIHOOD = f"{', '.join(SENTIHOOD)}: lists of {{id, text, opinions: [{{sentiment}}]}}"
LAYOUT_SEMEVAL = (
    "ABSA16_Restaurants_Train_SB1_v2.xml and EN_REST_SB1_TEST.xml.gold, ABSA16_Laptops_Train_SB1_v2.xml and "
    "EN_LAPT_SB1_TEST_.xml.gold, as published"
)


def read_sentihood(folder: str | Path) -> Parts:
    """Read the sentences of SentiHood whose opinions agree; the published train and dev are the training part.

    Counts: ``no_opinion`` and ``opinions_differ``, sentences left out, and those of
    :func:`~metapretrain.data.published.unlike`.

    Raises:
        InputError: a file is missing, or a sentence cannot be used.
    """
    root = find_folder(folder, ("sentihood",), SENTIHOOD, LAYOUT_SENTIHOOD)
    train, dev, test = (_sentihood(root / name) for name in SENTIHOOD)
    return unlike(concatenate([train, dev], "train"), test), test


def read_semeval(name: str, folder: str | Path, neutral: bool = True) -> Parts:
    """Read the sentences of SemEval-2016 task 5 (English, subtask 1) whose opinions agree.

    Args:
        name: ``"semeval-restaurant"`` or ``"semeval-laptop"``.
        folder: holds the published files.
        neutral: keep sentences of neutral opinions, a class of their own, as the paper (table 3); otherwise they are
            left out and counted as ``neutral``.

    Raises:
        InputError: a file is missing, or a sentence cannot be used.
    """
    train, *tests = SEMEVAL[name]
    root = find_folder(folder, ("semeval2016",), (train,), LAYOUT_SEMEVAL)
    gold = next((test for test in tests if (root / test).is_file()), None)
    if gold is None:
        raise InputError(f"{root} lacks {' or '.join(tests)}; it must hold {LAYOUT_SEMEVAL}")
    parts = [_semeval(root / file, split, neutral) for file, split in ((train, "train"), (gold, "test"))]
    return unlike(parts[0], parts[1]), parts[1]


def _sentihood(file: Path) -> TextSet:
    text, _ = decode_text(file, "utf-8", "refuse")
    items = parse_json(text, file, 1)
    if not isinstance(items, list):
        raise InputError(f"{file} must hold a JSON list of sentences, got {type(items).__name__}")
    counts: dict[str, int] = {}
    rows = collect_rows(_sentihood_records(file, items, counts), file, TWO, file.stem.split("-")[-1], counts)
    return name_rows(rows, file.name)


def _sentihood_records(file: Path, items: list[Any], counts: dict[str, int]) -> Iterator[Record]:
    for number, item in enumerate(items):
        try:
            name, text = item["id"], item["text"]
            opinions = {opinion["sentiment"].lower() for opinion in item["opinions"]}
        except (KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{file}, record {number}: must be {{id, text, opinions: [{{sentiment}}]}}") from error
        if _agree(opinions, counts):
            yield f"record {number} (id {name})", {"text": text, "label": opinions.pop(), "id": name}


def _semeval(file: Path, split: str, neutral: bool) -> TextSet:
    try:
        root = ElementTree.parse(file).getroot()
    except ElementTree.ParseError as error:
        raise InputError(f"{file}, line {error.position[0]}: malformed XML: {error}") from error
    except (LookupError, ValueError) as error:
        raise InputError(f"{file}: the encoding that its first line names cannot be read: {error}") from error
    counts: dict[str, int] = {} if neutral else {"neutral": 0}
    records = _semeval_records(root, counts, neutral)
    return name_rows(collect_rows(records, file, THREE if neutral else TWO, split, counts), file.name)


def _semeval_records(root: ElementTree.Element, counts: dict[str, int], neutral: bool) -> Iterator[Record]:
    for sentence in root.iter("sentence"):
        opinions = {opinion.get("polarity", "no polarity") for opinion in sentence.iter("Opinion")}
        if not _agree(opinions, counts):
            continue
        label = opinions.pop()
        if label == "neutral" and not neutral:
            counts["neutral"] += 1
            continue
        name = sentence.get("id", "without id")
        yield f"sentence {name}", {"text": sentence.findtext("text"), "label": label, "id": name}


def _agree(opinions: set[str], counts: dict[str, int]) -> bool:
    if len(opinions) == 1:
        return True
    what = "opinions_differ" if opinions else "no_opinion"
    counts[what] = counts.get(what, 0) + 1
    return False


RTE_CLASSES = ("not_entailment", "entailment")
MRPC_CLASSES = ("different", "paraphrase")
TABLE: dict[str, Any] = {"kind": "pair-classification", "format": "tsv", "quotes": False}
LAYOUT_RTE = "train.tsv and dev.tsv with columns sentence1, sentence2, label"
LAYOUT_MRPC = "msr_paraphrase_train.txt and msr_paraphrase_test.txt, as published"


def read_rte(folder: str | Path) -> Parts:
    """Read RTE; GLUE's ``dev`` is the test part, for its test labels are not public.

    Raises:
        InputError: a file is missing, or a row cannot be used.
    """
    files = ("train.tsv", "dev.tsv")
    root = find_folder(folder, ("glue/RTE", "RTE"), files, LAYOUT_RTE)
    columns: dict[str, Any] = {"text": "sentence1", "pair": "sentence2", "label": "label"}
    return read_parts(root, files, classes=RTE_CLASSES, **columns, **TABLE)


def read_mrpc(folder: str | Path) -> Parts:
    """Read the paraphrase corpus (a byte order mark, and quotes that do not quote) in its published split.

    Raises:
        InputError: a file is missing, or a row cannot be used.
    """
    files = ("msr_paraphrase_train.txt", "msr_paraphrase_test.txt")
    root = find_folder(folder, ("glue/MRPC", "MRPC"), files, LAYOUT_MRPC)
    columns: dict[str, Any] = {"text": "#1 String", "pair": "#2 String", "label": "Quality"}
    return read_parts(root, files, classes=MRPC_CLASSES, **columns, **TABLE)


logger = logging.getLogger(__name__)

WORDS = (5, 60)  # of a sentence that is kept
UNKNOWN = "<unk>"
WIKITEXT = ("train.txt", "valid.txt", "test.txt")
DIALOGUES = ("data_positives.json", "train.json", "dev.json", "test.json")
LAYOUT_PTB = "ptb.train.txt, or ptb.zip that holds it: a sentence a line"
LAYOUT_WIKITEXT = f"any of {', '.join(WIKITEXT)} of WikiText-2, paragraphs and headings a line"
LAYOUT_DIALOGUES = f"any of {', '.join(DIALOGUES)}, JSON lines of {{context, positive_responses}}"


def read_ptb(folder: str | Path) -> TextSet:
    """Read the sentences of the Penn Treebank's training part, words joined as in running text.

    Those with ``<unk>`` are left out; ``N`` stands for a number.

    Raises:
        InputError: the file is missing or unreadable, or no sentence is left.
    """
    root = find_folder(folder, ("ptb",), (), LAYOUT_PTB)
    file = root / "ptb.train.txt"
    if file.is_file():
        text, _ = decode_text(file, "utf-8", "refuse")
    else:
        file = find_folder(root, (), ("ptb.zip",), LAYOUT_PTB) / "ptb.zip"
        text = unzip_text(file, "ptb.train.txt")
    return _kept("ptb", text.split("\n"), [file])


def read_wikitext2(folder: str | Path) -> TextSet:
    """Read the sentences of WikiText-2's files that are there, without headings and those with ``<unk>``.

    Raises:
        InputError: no file is there, one is unreadable, or no sentence is left.
    """
    root = find_folder(folder, ("wikitext-2",), (), LAYOUT_WIKITEXT)
    found = _found(root, WIKITEXT, LAYOUT_WIKITEXT)
    lines = (line for file in found for line in decode_text(file, "utf-8", "refuse")[0].split("\n"))
    paragraphs = (line.strip() for line in lines if not line.lstrip().startswith("="))
    sentences = (part for text in paragraphs for part in re.split(r"(?<= [.!?]) (?=\S)", text))
    return _kept("wikitext-2", sentences, found)


def read_dailydialog(folder: str | Path) -> TextSet:
    """Read the utterances of DailyDialog++: contexts and the responses that fit.

    Raises:
        InputError: no file is there, a line cannot be used, or no utterance is left.
    """
    root = find_folder(folder, ("dailydialog_pp", "dailydialog"), (), LAYOUT_DIALOGUES)
    found = _found(root, DIALOGUES, LAYOUT_DIALOGUES)
    return _kept("dailydialog", (text for file in found for text in _utterances(file)), found)


def _found(root: Path, names: Iterable[str], layout: str) -> list[Path]:
    found = [root / name for name in names if (root / name).is_file()]
    if not found:
        raise InputError(f"{root} must hold {layout}")
    return found


def _utterances(file: Path) -> Iterator[str]:
    text, _ = decode_text(file, "utf-8", "refuse")
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        record = parse_json(line, file, number)
        try:
            spoken = [*record["context"], *record["positive_responses"]]
        except (KeyError, TypeError) as error:
            raise InputError(f"{file}, line {number}: must be JSON {{context, positive_responses}}: {error}") from error
        if not all(isinstance(utterance, str) for utterance in spoken):
            raise InputError(f"{file}, line {number}: context and positive_responses must be lists of text")
        yield from spoken


def _kept(name: str, sentences: Iterable[str], files: Iterable[Path]) -> TextSet:
    """Sentences of known words, neither short nor long, each once; what is left out is logged and counted."""
    seen: set[str] = set()
    kept = []
    counts = {"unknown_words": 0, "length": 0, "duplicates": 0}
    for sentence in sentences:
        if not sentence.strip():
            continue
        key = normalise_text(sentence)
        if UNKNOWN in sentence:
            counts["unknown_words"] += 1
        elif not WORDS[0] <= len(sentence.split()) <= WORDS[1]:
            counts["length"] += 1
        elif key in seen:
            counts["duplicates"] += 1
        else:
            seen.add(key)
            kept.append(running_text(sentence))
    if not kept:
        raise InputError(f"{name} has no sentence of {WORDS[0]} to {WORDS[1]} known words")
    told = ", ".join(f"{what.replace('_', ' ')} {count:,}" for what, count in counts.items())
    logger.info("%s: %s sentences; left out: %s", name, f"{len(kept):,}", told)
    records = {f"{name}/{file.name}": file_record(file, None) for file in files}
    return TextSet(kept, split="plain", counts=counts, files=records)


def running_text(sentence: str) -> str:
    """Join words and marks that a tokeniser separated.

    Example:
        >>> running_text("it 's a well @-@ known play , is n't it ( 2 @,@ 000 seats ) ?")
        "it's a well-known play, isn't it (2,000 seats)?"
    """
    text = re.sub(r" @(\W)@ ", r"\1", sentence.strip())
    text = re.sub(r" (n't|'(?:s|re|ve|ll|d|m))\b", r"\1", text)
    text = re.sub(r" ([.,;:!?)\]%])", r"\1", text)
    return re.sub(r"([(\[$]) ", r"\1", text)


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


PRETRAINING = "yelp5"
DOWNSTREAM = ("sst5", "sst2", "amazon5", "amazon2", "sentihood", "semeval-restaurant", "semeval-laptop")
PAIRS = ("rte", "mrpc")
PLAIN: dict[str, Callable[[str | Path], TextSet]] = {
    "ptb": read_ptb,
    "wikitext-2": read_wikitext2,
    "dailydialog": read_dailydialog,
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
    "yelp5": _Source(read_yelp5, CLASSES, "several samples of Yelp's reviews, many more good than bad ones"),
    "sst5": _Source(read_sst5, SST_CLASSES, "test: CS224N's dev part"),
    "sst2": _Source(read_sst2, POLARITY, "test: dev part"),
    "amazon5": _Source(read_amazon5, CLASSES, "training: 1,000 published as dev; test: 1,000 of the test part"),
    "amazon5-kindle": _Source(read_kindle, CLASSES, "Kindle books only; test: one row in six held back"),
    "amazon2": _Source(
        read_amazon2,
        POLARITY,
        "the four domains of Blitzer et al. (2007), not the Amazon-2 of Zhang et al. (2015) that the paper has; test: "
        "one row in six held back",
    ),
    "sentihood": _Source(read_sentihood, TWO, f"{_AGREE}; training: train and dev parts"),
    "semeval-restaurant": _Source(partial(read_semeval, "semeval-restaurant"), THREE, _SEMEVAL),
    "semeval-laptop": _Source(partial(read_semeval, "semeval-laptop"), THREE, _SEMEVAL),
    "rte": _Source(read_rte, RTE_CLASSES, "test: GLUE's dev part"),
    "mrpc": _Source(read_mrpc, MRPC_CLASSES),
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
    if name in SEMEVAL and not neutral:
        train, test = read_semeval(name, folder, neutral=False)
        classes, note = TWO, f"{note}; neutral ones left out"
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
