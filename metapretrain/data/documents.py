"""Running text of the Penn Treebank, WikiText-2 and books: documents of sentences of words, or plain sentences."""

import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from metapretrain.checks import user_path
from metapretrain.data.images import file_record
from metapretrain.data.published import existing, inside, unzip_text
from metapretrain.data.tables import read_utf8
from metapretrain.data.texts import Rows, TextSet, normalise_text
from metapretrain.errors import InputError

logger = logging.getLogger(__name__)

UNKNOWN = "<unk>"  # how PTB and WikiText write words that they left out
CHUNK = 2000  # sentences that a tokenizer is given at once


@dataclass(frozen=True)
class Documents(Rows[list[list[str]]]):
    """Documents of one split: lists of sentences, which are lists of words."""

    def __post_init__(self) -> None:
        if not self.rows:
            raise InputError(f"{self.split}: there is no document")
        for number, document in enumerate(self.rows):
            if not document or not all(document):
                raise InputError(f"{self.split}: document {number} has no sentence, or one without a word")

    @property
    def sentences(self) -> int:
        return sum(map(len, self.rows))


def hold_out_documents(texts: Documents, every: int = 20) -> tuple[Documents, Documents]:
    """Split off every `every`-th document for validation: the same ones in every run."""
    if every < 2 or len(texts) < every:
        raise InputError(f"every must be in 2..{len(texts)} (the number of documents), got {every}")
    held = texts.rows[every - 1 :: every]
    kept = [document for row, document in enumerate(texts.rows) if (row + 1) % every]
    return (Documents(kept, texts.split, texts.counts, texts.files), Documents(held, "validation", {}, texts.files))


@dataclass(frozen=True)
class Corpus:
    """Token ids of documents, one after the other, with where words, sentences and documents begin.

    Attributes:
        ids: int32 (T,), without special tokens.
        words, sentences, documents: int64 (W + 1,), (S + 1,), (G + 1,), where each word begins in `ids`, each sentence
            in `words` and each document in `sentences`, and the end; a word may have no token.
        types: int32 (W,), the same number for the same word in lower case; `names` has the words by it.
        capital, letters: bool (W,), the word begins with a capital letter, or any letter.
    """

    ids: NDArray[np.int32]
    words: NDArray[np.int64]
    sentences: NDArray[np.int64]
    documents: NDArray[np.int64]
    types: NDArray[np.int32]
    names: list[str]
    capital: NDArray[np.bool_]
    letters: NDArray[np.bool_]

    def tokens(self, first: int, last: int) -> NDArray[np.int32]:
        """Token ids of the sentences first..last, the last one not included."""
        return self.ids[self.words[self.sentences[first]] : self.words[self.sentences[last]]]


def tokenize_documents(texts: Documents, tokenizer: Any, *, lower: bool = False) -> Corpus:
    """Tokenise documents once; words are joined by spaces, and ``<unk>`` becomes the tokenizer's unknown token.

    The tokenizer is a fast one of the transformers library; with `lower` it cannot tell where capitals were.
    """
    sentences = [sentence for document in texts.rows for sentence in document]
    unknown = tokenizer.unk_token or UNKNOWN
    shown = [[unknown if word == UNKNOWN else word.lower() if lower else word for word in row] for row in sentences]
    ids, sizes = tokenize_words(shown, tokenizer)
    numbers: dict[str, int] = {}
    words = [word for row in sentences for word in row]
    types = [numbers.setdefault(word.lower(), len(numbers)) for word in words]
    return Corpus(
        ids,
        _starts(sizes),
        _starts([len(row) for row in sentences]),
        _starts([len(document) for document in texts.rows]),
        np.array(types, np.int32),
        list(numbers),
        np.array([word[0].isupper() for word in words], bool),
        np.array([word[0].isalpha() for word in words], bool),
    )


def tokenize_words(rows: Sequence[Sequence[str]], tokenizer: Any) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Tokenise rows of words, joined by spaces: token ids int32 (T,) of all rows, tokens int64 (W,) of each word."""
    if not tokenizer.is_fast:
        raise InputError(f"{type(tokenizer).__name__} does not tell where tokens stand; take a fast tokenizer")
    parts, sizes = [], []
    off = dict.fromkeys(("add_special_tokens", "return_attention_mask", "truncation", "padding", "verbose"), False)
    for begin in range(0, len(rows), CHUNK):
        chunk = rows[begin : begin + CHUNK]
        coded = tokenizer([" ".join(row) for row in chunk], return_offsets_mapping=True, **off)
        found, offsets = coded["input_ids"], coded["offset_mapping"]
        ends = np.cumsum([len(word) + 1 for row in chunk for word in row])  # in the rows one after the other
        first = np.cumsum([0, *map(len, chunk)])
        begins = np.concatenate([[0], ends])[first[:-1]]
        last = np.fromiter((end for row in offsets for _, end in row), np.int64) - 1
        # A token belongs to the word in which it ends: some tokenizers count the space before to a token.
        places = np.searchsorted(ends, last + np.repeat(begins, [len(row) for row in found]), "right")
        sizes.append(np.bincount(places, minlength=len(ends)))
        parts.append(np.fromiter(chain.from_iterable(found), np.int32))
    if not parts:
        return np.zeros(0, np.int32), np.zeros(0, np.int64)
    return np.concatenate(parts), np.concatenate(sizes).astype(np.int64)


def _starts(sizes: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(np.asarray(sizes, np.int64))]).astype(np.int64)


PTB = "ptb.train.txt"
BLOCK = 20  # sentences of PTB that count as a document: its articles are not marked
WIKITEXT = ("train.txt", "valid.txt", "test.txt")
STOPS = frozenset(".!?")
WORDS = (5, 60)  # of a plain sentence that is kept
LAYOUTS = {
    "ptb": "ptb.train.txt, or ptb.zip that holds it: a sentence a line",
    "wikitext-2": f"any of {', '.join(WIKITEXT)} of WikiText-2, paragraphs and headings a line",
    "gutenberg": "a plain text file of Project Gutenberg, such as ptb/warandpeace.txt, with CHAPTER headings",
}
BOOK = "warandpeace.txt"

_SIGN = re.compile("^@(.)@$")  # the sign within a word or number, as WikiText writes it
_TITLE = re.compile(r" = [^=].*[^=] = $")
_CHAPTER = re.compile(r"\s*(CHAPTER|Chapter) \w+\.?\s*$")
_WORD = re.compile(r"\w+(?:['’\-]\w+)*|[^\w\s]")
_END = re.compile(r"(?<=[.!?])[\"'”’)]*\s+(?=[\"'“‘(]*[A-Z])")


def read_ptb_documents(folder: str | Path) -> Documents:
    """Read the Penn Treebank's training part of Mikolov et al. (2010): lower case, ``N`` for numbers, ``<unk>``.

    Every 20 sentences in a row count as a document. `folder`, or its ``ptb``, holds ``ptb.zip`` or its text files.
    """
    sentences, file = _ptb(folder)
    blocks = [sentences[begin : begin + BLOCK] for begin in range(0, len(sentences), BLOCK)]
    return Documents(blocks, "train", {}, {file.name: file_record(file, None)})


def ptb_sentences(folder: str | Path) -> TextSet:
    """Return the plain sentences of the Penn Treebank's training part: see :func:`plain_sentences`."""
    sentences, file = _ptb(folder)
    return plain_sentences("ptb", map(" ".join, sentences), [file])


def _ptb(folder: str | Path) -> tuple[list[list[str]], Path]:
    root = inside(folder, "ptb")
    file, archive = root / PTB, root / "ptb.zip"
    if file.is_file():
        text = read_utf8(file)
    elif archive.is_file():
        file, text = archive, unzip_text(archive, PTB)
    else:
        raise InputError(f"{root} must hold ptb.zip or {PTB}")
    return [line.split() for line in text.split("\n") if line.strip()], file


def read_wikitext2_documents(folder: str | Path, part: str = "valid") -> Documents:
    """Read the articles of a part of WikiText-2, in `folder` or its ``wikitext-2``; headings are left out."""
    file = inside(folder, "wikitext-2") / f"{part}.txt"
    if not file.exists():
        raise InputError(f"{folder} must hold wikitext-2/{part}.txt, articles of WikiText-2 under lines ' = Title = '")
    articles = _articles(file)
    if len(articles) == 1:
        raise InputError(f"{file}: no article begins in it; expected lines such as ' = Title = '")
    documents = [
        [[_SIGN.sub(r"\1", word) for word in sentence] for text in article for sentence in _sentences(text.split())]
        for article in articles
        if article
    ]
    return Documents(documents, part, {}, {file.name: file_record(file, None)})


def wikitext2_sentences(folder: str | Path) -> TextSet:
    """Return the plain sentences of WikiText-2's files that are there: see :func:`plain_sentences`."""
    found = existing(inside(folder, "wikitext-2"), WIKITEXT, LAYOUTS["wikitext-2"])
    paragraphs = (text for file in found for article in _articles(file) for text in article)
    sentences = (sentence for text in paragraphs for sentence in re.split(r"(?<= [.!?]) (?=\S)", text))
    return plain_sentences("wikitext-2", sentences, found)


def _articles(file: Path) -> list[list[str]]:
    """The paragraphs of each article; the first list: text above any title, where a damaged file lost its own."""
    articles: list[list[str]] = [[]]
    for line in read_utf8(file).split("\n"):
        if _TITLE.match(line.rstrip("\r")):
            articles.append([])
        elif line.strip() and not line.lstrip().startswith("="):
            articles[-1].append(line.strip())
    return articles


def plain_sentences(name: str, sentences: Iterable[str], files: Iterable[Path]) -> TextSet:
    """Join words as in running text; sentences with ``<unk>``, repeated or not of 5..60 words are left out, counted."""
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


def load_book(folder: str | Path) -> dict[str, Documents]:
    """Read a folder's book of Project Gutenberg, :data:`BOOK`, which may be in the folder ``ptb``."""
    return {"train": read_gutenberg(inside(folder, "ptb") / BOOK)}


def read_gutenberg(path: str | Path) -> Documents:
    """Read a book of Project Gutenberg: a document per chapter, without what stands before and after the book.

    Sentences end at ``.``, ``!`` or ``?`` before a capital letter, and at the end of a paragraph.
    """
    file = user_path(path)
    text = read_utf8(file, f"expected {LAYOUTS['gutenberg']}")
    lines = text.replace("\r", "").split("\n")
    begin = next((row + 1 for row, line in enumerate(lines) if line.startswith("*** START")), 0)
    end = next((row for row, line in enumerate(lines) if line.startswith("*** END")), len(lines))
    chapters: list[list[str]] = []
    for line in lines[begin:end]:
        if _CHAPTER.match(line):
            chapters.append([])
        elif chapters:
            chapters[-1].append(line.strip())
    documents = []
    for chapter in chapters:
        paragraphs = [" ".join(part.split("\n")) for part in re.split(r"\n{2,}", "\n".join(chapter)) if part.strip()]
        found = (_WORD.findall(sentence) for text in paragraphs for sentence in _END.split(text))
        sentences = list(filter(None, found))
        if len(sentences) > 2:  # a table of contents has headings, too
            documents.append(sentences)
    if not documents:
        raise InputError(f"{file}: no chapter begins in it; expected {LAYOUTS['gutenberg']}")
    return Documents(documents, "train", {}, {file.name: file_record(file, None)})


def _sentences(words: list[str]) -> list[list[str]]:
    ends = [place + 1 for place, word in enumerate(words[:-1]) if word in STOPS and words[place + 1] not in "\"')"]
    return [words[begin:end] for begin, end in zip([0, *ends], [*ends, len(words)], strict=True)]
