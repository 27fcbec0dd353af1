"""Readers of running text: Penn Treebank, WikiText-2, and a book of Project Gutenberg."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from metapretrain.data.archives import unzip_text
from metapretrain.data.documents import Documents
from metapretrain.data.images import file_record
from metapretrain.data.text_records import decode_text
from metapretrain.errors import InputError
from metapretrain.paths import user_path

PTB_PARTS = {"train": "ptb.train.txt", "validation": "ptb.valid.txt", "test": "ptb.test.txt"}
BLOCK = 20  # sentences of PTB that count as a document: its articles are not marked
STOPS = frozenset(".!?")
LAYOUT_GUTENBERG = "a plain text file of Project Gutenberg, such as ptb/warandpeace.txt, with CHAPTER headings"

_TITLE = re.compile(r" = [^=].*[^=] = $")
_CHAPTER = re.compile(r"\s*(CHAPTER|Chapter) \w+\.?\s*$")
_WORD = re.compile(r"\w+(?:['’\-]\w+)*|[^\w\s]")
_END = re.compile(r"(?<=[.!?])[\"'”’)]*\s+(?=[\"'“‘(]*[A-Z])")


def read_ptb_documents(folder: str | Path, split: str = "train") -> Documents:
    """Read the Penn Treebank as prepared by Mikolov et al. (2010): lower case, ``N`` for numbers, ``<unk>``.

    Every 20 sentences in a row count as a document.

    Args:
        folder: holds ``ptb.zip``, or the text files that are in it, or has the folder ``ptb`` that does.
        split: ``"train"``, ``"validation"`` or ``"test"``.

    Raises:
        InputError: the file is missing or unreadable.

    Example:
        >>> read_ptb_documents("no-such-folder")
        Traceback (most recent call last):
        ...
        metapretrain.errors.InputError: no-such-folder must hold ptb.zip or ptb.train.txt
    """
    root = _folder(folder, "ptb")
    name, archive = PTB_PARTS[split], root / "ptb.zip"
    if (root / name).is_file():
        file = root / name
        text, _ = decode_text(file, "utf-8", "refuse")
    elif archive.is_file():
        file = archive
        text = unzip_text(archive, name)
    else:
        raise InputError(f"{root} must hold ptb.zip or {name}")
    sentences = [line.split() for line in text.split("\n") if line.strip()]
    blocks = [sentences[begin : begin + BLOCK] for begin in range(0, len(sentences), BLOCK)]
    return Documents(blocks, split, {}, {file.name: file_record(file, None)})


def read_wikitext2_documents(folder: str | Path, part: str = "valid") -> Documents:
    """Read the articles of a part of WikiText-2; headings are left out, ``@-@`` and the like become their sign.

    Args:
        folder: holds ``valid.txt`` and ``test.txt``, or has the folder ``wikitext-2`` that does.
        part: stem of the file.

    Raises:
        InputError: the file is missing, or no heading of an article is in it.
    """
    file = _folder(folder, "wikitext-2") / f"{part}.txt"
    if not file.exists():
        raise InputError(f"{folder} must hold wikitext-2/{part}.txt, articles of WikiText-2 under lines ' = Title = '")
    text, _ = decode_text(file, "utf-8", "refuse")
    articles: list[list[list[str]]] = [[]]  # the first: text above any title, where a damaged file lost its own
    for line in text.split("\n"):
        if _TITLE.match(line.rstrip("\r")):
            articles.append([])
        elif line.strip() and not line.lstrip().startswith("="):
            articles[-1] += [[_sign(word) for word in sentence] for sentence in _sentences(line.split())]
    if len(articles) == 1:
        raise InputError(f"{file}: no article begins in it; expected lines such as ' = Title = '")
    kept = [article for article in articles if article]
    return Documents(kept, part, {}, {file.name: file_record(file, None)})


def read_gutenberg(path: str | Path) -> Documents:
    """Read a book of Project Gutenberg: a document a chapter, without what stands before and after the book.

    Sentences end at ``.``, ``!`` or ``?`` before a capital letter, and at the end of a paragraph.

    Args:
        path: of the text file.

    Raises:
        InputError: the file is missing, or has no heading of a chapter.
    """
    file = user_path(path)
    text, _ = decode_text(file, "utf-8", "refuse", f"expected {LAYOUT_GUTENBERG}")
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
        sentences = [_WORD.findall(sentence) for text in paragraphs for sentence in _END.split(text)]
        sentences = [sentence for sentence in sentences if sentence]
        if len(sentences) > 2:  # a table of contents has headings, too
            documents.append(sentences)
    if not documents:
        raise InputError(f"{file}: no chapter begins in it; expected {LAYOUT_GUTENBERG}")
    return Documents(documents, "train", {}, {file.name: file_record(file, None)})


def join_documents(parts: Sequence[Documents], split: str = "train") -> Documents:
    """The documents of all parts, one after the other.

    Example:
        >>> len(join_documents([Documents([[["a"]]]), Documents([[["b"]], [["c"]]])]))
        3
    """
    files = {name: record for part in parts for name, record in part.files.items()}
    return Documents([document for part in parts for document in part.documents], split, {}, files)


def _folder(folder: str | Path, name: str) -> Path:
    root = user_path(folder)
    return root / name if (root / name).is_dir() else root


def _sign(word: str) -> str:
    """The sign within a word or number that WikiText writes between two @."""
    return word[1] if len(word) == 3 and word[0] == word[2] == "@" else word


def _sentences(words: list[str]) -> list[list[str]]:
    """Words of a paragraph cut after each full stop, exclamation or question mark."""
    ends = [place + 1 for place, word in enumerate(words[:-1]) if word in STOPS and words[place + 1] not in "\"')"]
    return [words[begin:end] for begin, end in zip([0, *ends], [*ends, len(words)], strict=True)]
