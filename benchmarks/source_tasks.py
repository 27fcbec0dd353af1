"""Pretraining tasks of the scheduling benchmark alone; importing registers them."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from entity_tasks import LabelTask
from numpy.typing import NDArray
from span_tasks import SpanTask, Window, span_batch

from metapretrain.data.documents import UNKNOWN, Corpus, Documents
from metapretrain.errors import InputError
from metapretrain.experiments.schedule.tasks import Frame, Library, Tensors, register
from metapretrain.experiments.schedule.tasks.base import IGNORE, ClassTask, CorpusTask, Example
from metapretrain.experiments.schedule.tasks.tokens import token_runs

Row = tuple[int, int, list[Any]]  # document, sentence, answers
Asked = tuple[list[int], tuple[int, int], tuple[int, int]]
BEFORE = 3  # at most so many sentences before the one with the answer begin a passage
LONGEST = 3  # words of an answer at most
LETTERS = 4  # of the shortest answer of one word
COMMON = 200  # so many of the most frequent words are no answers
DROPPED = 0.15  # share of a question's words that are left out
SHIFT = 3  # places that a word of a question moves at most
CLOZE_QA_LONGEST = 4  # words of an answer at most
_YEAR = re.compile(r"1\d{3}|20\d{2}")
_NUMBER = re.compile(r"\d[\d.,]*")


class WordTask(LabelTask):
    """Two classes of words of running text in lower case; rows are runs of a document's tokens."""

    classes = 2

    def __init__(self, texts: Mapping[str, Documents], frame: Frame) -> None:
        self.corpora = {split: frame.corpus(part, lower=True) for split, part in texts.items()}
        self.rows: dict[str, list[tuple[int, int]]] = {}
        self.labels: dict[str, NDArray[np.int64]] = {}
        for split, corpus in self.corpora.items():
            runs = token_runs(corpus, frame.room())
            labels = np.where(corpus.letters, self.word_labels(corpus, runs), IGNORE)
            at_token = np.full(len(corpus.ids), IGNORE, np.int64)
            shown = corpus.words[1:] > corpus.words[:-1]
            at_token[corpus.words[:-1][shown]] = labels[shown]
            self.labels[split] = at_token
            self.rows[split] = [run for run in runs if (at_token[slice(*run)] != IGNORE).any()]
        super().__init__(frame, texts, self.rows)

    @abstractmethod
    def word_labels(self, corpus: Corpus, runs: list[tuple[int, int]]) -> NDArray[np.int64]:
        """The class (W,) of each word, or IGNORE; words that do not begin with a letter count for nothing."""

    def example(self, split: str, row: int) -> Example:
        run = slice(*self.rows[split][row])
        ids, types, (start,) = self.frame.sequence(self.corpora[split].ids[run])
        labels = np.full(len(ids), IGNORE, np.int64)
        labels[start : start + run.stop - run.start] = self.labels[split][run]
        return ids, types, labels


class Capitalisation(WordTask):
    """Tell which words of a text in lower case began with a capital letter (class 1).

    Texts must have capitals: not the Penn Treebank. The main metric is F1 of the capitalised words.

    Source: Sun et al. (2020, ERNIE 2.0), capitalization prediction.
    """

    name = "capitalisation"

    def word_labels(self, corpus: Corpus, runs: list[tuple[int, int]]) -> NDArray[np.int64]:
        return corpus.capital.astype(np.int64)


class TokenDocument(WordTask):
    """Tell which words of a run are also in the rest of its document (class 1).

    Documents that are one run have no rest and are left out. Five of six words are in the rest, so the main metric is
    the mean F1 of both classes.

    Source: Sun et al. (2020, ERNIE 2.0), token-document relation prediction.
    """

    name = "token-document"
    metric = "macro_f1"

    def word_labels(self, corpus: Corpus, runs: list[tuple[int, int]]) -> NDArray[np.int64]:
        labels = np.full(len(corpus.types), IGNORE, np.int64)
        run = np.searchsorted([begin for begin, _ in runs], corpus.words[:-1], "right")
        for first, last in pairwise(corpus.documents):
            words = slice(int(corpus.sentences[first]), int(corpus.sentences[last]))
            of_word, types = run[words], corpus.types[words]
            if of_word[0] == of_word[-1]:
                continue
            # A word is elsewhere if its type is in two runs or more.
            _, places = np.unique(types, return_inverse=True)
            in_run = np.unique(np.stack([places, of_word]), axis=1)[0]
            labels[words] = np.bincount(in_run)[places] > 1
        return labels


class SentenceDistance(CorpusTask, ClassTask):
    """Tell of two sentences whether the second follows the first (0), is elsewhere in its document (1), or is of
    another document (2).

    A row is a first sentence; each batch draws the class and the second sentence. The last sentence of a document,
    and documents of fewer than four, are no rows. A split with fewer than two documents is an InputError.

    Source: Sun et al. (2020, ERNIE 2.0), sentence distance.
    """

    name = "sentence-distance"
    classes = 3

    def __init__(self, texts: Mapping[str, Documents], frame: Frame) -> None:
        few = [split for split, part in texts.items() if len(part) < 2]
        if few:
            raise InputError(f"{self.name} needs two documents or more, {few[0]} has {len(texts[few[0]])}")

        def rows(corpus: Corpus) -> list[tuple[int, int, int]]:
            bounds = [pair for pair in pairwise(corpus.documents.tolist()) if pair[1] - pair[0] >= 4]
            return [(sentence, first, last) for first, last in bounds for sentence in range(first, last - 1)]

        super().__init__(texts, frame, rows)

    def make(self, split: str, rows: Sequence[int], random: np.random.Generator) -> Tensors:
        corpus, labels = self.corpora[split], random.integers(3, size=len(rows))
        sequences = []
        for row, label in zip(rows, labels, strict=True):
            sentence, first, last = self.rows[split][row]
            if label == 0:
                other = sentence + 1
            elif label == 1:
                far = [place for place in range(first, last) if abs(place - sentence) > 1]
                other = far[int(random.integers(len(far)))]
            else:
                # Skipping the own document keeps the draw uniform over all other sentences.
                other = int(random.integers(int(corpus.documents[-1]) - (last - first)))
                other += (last - first) * (other >= first)
            parts = (corpus.tokens(place, place + 1) for place in (sentence, other))
            sequences.append(self.frame.fitted(*parts))
        return self.frame.pad(sequences) | {"labels": torch.from_numpy(labels)}


def cut_passage(
    corpus: Corpus, answer: tuple[int, int], lowest: int, highest: int, room: int, random: np.random.Generator
) -> tuple[NDArray[np.int32], int, int]:
    """A run of tokens that holds an answer, from the beginning of a sentence where that fits.

    `answer`: first word, and word after the last; `lowest`, `highest`: first sentence that the passage may have, and
    the sentence after the last. Token ids (L,), L at most `room`, and the answer's first and last token in them.
    """
    first, last = int(corpus.words[answer[0]]), int(corpus.words[answer[1]])
    sentence = int(np.searchsorted(corpus.sentences, answer[0], "right")) - 1
    begin = _begin(corpus, max(lowest, sentence - int(random.integers(BEFORE + 1))))
    if last - begin > room:
        begin = _begin(corpus, sentence)
    begin = max(begin, last - room)
    end = min(begin + room, _begin(corpus, highest))
    last = max(first + 1, min(last, end))
    return corpus.ids[begin:end], first - begin, last - 1 - begin


def word_tokens(corpus: Corpus, words: Sequence[int]) -> list[int]:
    """Token ids of some words, in the order given."""
    return [int(i) for word in words for i in corpus.ids[corpus.words[word] : corpus.words[word + 1]]]


def _begin(corpus: Corpus, sentence: int) -> int:
    return int(corpus.words[corpus.sentences[sentence]])


class MadeQuestions(CorpusTask, SpanTask):
    """Questions made from a sentence of running text, in a passage with the answer.

    Each batch draws one of the answers that a row's sentence allows.
    """

    @abstractmethod
    def ask(self, corpus: Corpus, number: int, sentence: int, answer: Any, random: np.random.Generator) -> Asked:
        """Tokens of the question, words (first, after the last) of the answer, sentences that the passage may have."""

    def make(self, split: str, rows: Sequence[int], random: np.random.Generator) -> Tensors:
        corpus, found = self.corpora[split], []
        for row in rows:
            number, sentence, answers = self.rows[split][row]
            answer = answers[int(random.integers(len(answers)))]
            question, words, sentences = self.ask(corpus, number, sentence, answer, random)
            room = self.frame.room(2) - len(question)
            passage, first, last = cut_passage(corpus, words, *sentences, room, random)
            ids, types, (_, start) = self.frame.sequence(question, passage)
            found.append(Window(ids, types, start, len(passage), (first + start, last + start)))
        return span_batch(self.frame, found)


class SpanSelection(MadeQuestions):
    """Find the words that a mask hides in a sentence, in a passage of the same document that has them, too.

    A row is a sentence that shares a word with another one of its document; the word has at least four letters and
    is not among the 200 most frequent. Each batch draws the word and where else it is; words that follow it in both
    places belong to the answer, up to three. The passage lies before the sentence or after it. Glass et al. retrieve
    passages from all of Wikipedia and take names and noun phrases; here the document is the collection.

    Source: Glass et al. (2020), span selection pre-training.
    """

    name = "span-selection"

    def __init__(self, texts: Mapping[str, Documents], frame: Frame) -> None:
        super().__init__(texts, frame, shared_words)

    def ask(self, corpus: Corpus, number: int, sentence: int, answer: Any, random: np.random.Generator) -> Asked:
        word, others = answer
        other = others[int(random.integers(len(others)))]
        first, last = int(corpus.sentences[sentence]), int(corpus.sentences[sentence + 1])
        size = 1
        while size < LONGEST and word + size < last and _same(corpus, word + size, other + size):
            size += 1
        question = [*word_tokens(corpus, range(first, word)), self.frame.mask_id]
        place, half = len(question) - 1, self.frame.room(2) // 2
        question += word_tokens(corpus, range(word + size, last))
        begin = max(0, min(place - half // 2, len(question) - half))  # the mask stays in a long sentence
        if other < first:
            allowed = int(corpus.documents[number]), sentence
        else:
            allowed = sentence + 1, int(corpus.documents[number + 1])
        return question[begin : begin + half], (other, other + size), allowed


def shared_words(corpus: Corpus) -> list[Row]:
    """Rows whose answers are (word, the same word in other sentences)."""
    counts = np.bincount(corpus.types, minlength=len(corpus.names))
    common = set(np.argsort(-counts, kind="stable")[:COMMON].tolist()) if len(counts) > 2 * COMMON else set()
    rare = np.array([name.isalpha() and len(name) >= LETTERS for name in corpus.names])
    rare[list(common)] = False
    shown = corpus.words[1:] > corpus.words[:-1]
    sentence_of = np.repeat(np.arange(len(corpus.sentences) - 1), np.diff(corpus.sentences))
    rows = []
    for number, (first, last) in enumerate(pairwise(corpus.documents)):
        words = np.arange(corpus.sentences[first], corpus.sentences[last])
        places: dict[int, list[int]] = {}
        for word in words[rare[corpus.types[words]] & shown[words]].tolist():
            places.setdefault(int(corpus.types[word]), []).append(word)
        of_sentence: dict[int, list[tuple[int, list[int]]]] = {}
        for same in places.values():
            for word in same:
                sentence = int(sentence_of[word])
                others = [other for other in same if sentence_of[other] != sentence]
                if others:
                    of_sentence.setdefault(sentence, []).append((word, others))
        rows += [(number, sentence, of_sentence[sentence]) for sentence in sorted(of_sentence)]
    return rows


def _same(corpus: Corpus, word: int, other: int) -> bool:
    """Whether two words are alike and the second one begins no sentence."""
    if other >= len(corpus.types) or corpus.types[word] != corpus.types[other] or not corpus.letters[word]:
        return False
    return bool(corpus.sentences[np.searchsorted(corpus.sentences, other)] != other)


class ClozeQA(MadeQuestions):
    """Answer a question made from a sentence of the passage.

    An answer is a run of up to four capitalised words that begins neither its sentence nor a quotation, a year, or
    another number. Its question is the sentence without it, with ``which``, ``when`` or ``how many`` before; 15% of the
    words are left out and the others move by up to three places, drawn for each batch, so that matching words is not
    enough. Luo et al. let models write questions and find answers; here rules do. Texts must have capitals.

    Source: Luo et al. (2021), cooperative learning of zero-shot machine reading comprehension; the noise is that of
    Lewis et al. (2019), unsupervised question answering by cloze translation.
    """

    name = "cloze-qa"

    def __init__(self, texts: Mapping[str, Documents], frame: Frame) -> None:
        self.asked = {word: frame.ids(word) for word in ("which", "when", "how many", "?")}
        super().__init__(texts, frame, cloze_rows)

    def ask(self, corpus: Corpus, number: int, sentence: int, answer: Any, random: np.random.Generator) -> Asked:
        first, last, asked = answer
        words = np.arange(*corpus.sentences[sentence : sentence + 2])
        words = words[(words < first) | (words >= last)]
        words = words[random.random(len(words)) >= DROPPED]
        # Adding a number below SHIFT + 1 to each place and sorting moves no word by more than SHIFT.
        words = words[np.argsort(np.arange(len(words)) + random.random(len(words)) * (SHIFT + 1), kind="stable")]
        most = self.frame.room(2) // 2 - len(self.asked["?"])
        question = [*self.asked[asked], *word_tokens(corpus, words.tolist())][:most] + self.asked["?"]
        return question, (first, last), (int(corpus.documents[number]), int(corpus.documents[number + 1]))


def cloze_rows(corpus: Corpus) -> list[Row]:
    """Rows whose answers are (first word, word after the last, what is asked)."""
    document_of = np.repeat(np.arange(len(corpus.documents) - 1), np.diff(corpus.documents))
    shown = corpus.words[1:] > corpus.words[:-1]
    rows = []
    for sentence, (begin, end) in enumerate(pairwise(corpus.sentences.tolist())):
        answers, word = [], begin + 1
        while word < end:
            last = word + 1
            if corpus.capital[word] and shown[word] and _continues(corpus, word - 1):
                while last < end and last - word < CLOZE_QA_LONGEST and corpus.capital[last] and shown[last]:
                    last += 1
                if last - word > 1 or len(corpus.names[corpus.types[word]]) > 1:  # not the word I
                    answers.append((word, last, "which"))
            elif _NUMBER.fullmatch(corpus.names[corpus.types[word]]) and shown[word]:
                year = _YEAR.fullmatch(corpus.names[corpus.types[word]])
                answers.append((word, last, "when" if year else "how many"))
            word = last
        if answers and end - begin > 4:
            rows.append((int(document_of[sentence]), sentence, answers))
    return rows


def _continues(corpus: Corpus, word: int) -> bool:
    """Whether a capital after this word tells a name: after a quotation mark or a colon it need not."""
    return bool(corpus.letters[word]) or corpus.names[corpus.types[word]] in (",", "(")


def schedule_texts(folder: str | Path) -> list[str]:
    """The sentences of the training documents and dialogues, to train a tokenizer on; nothing that is held out."""
    library = Library(folder)
    documents = library.documents()["train"].rows
    texts = [" ".join(word for word in row if word != UNKNOWN) for document in documents for row in document]
    for dialogue in library.dialogues()["train"].rows:
        texts += [*dialogue.context, *dialogue.right]
    return [text for text in texts if text]


for task in (Capitalisation, TokenDocument, SentenceDistance, SpanSelection, ClozeQA):
    register(task, Library.prose, data=("wikitext-2", "gutenberg"))
