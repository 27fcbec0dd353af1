"""Tasks of spans: questions made from running text, and machine reading."""

from __future__ import annotations

import re
import string
from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from metapretrain.data.annotated import Question
from metapretrain.data.documents import Corpus, Documents
from metapretrain.data.texts import Rows
from metapretrain.experiments.schedule.tasks.base import CorpusTask, Frame, SpanTask, Tensors, joined, tokenize_rows

Row = tuple[int, int, list[Any]]  # document, sentence, answers
Asked = tuple[list[int], tuple[int, int], tuple[int, int]]
BEFORE = 3  # at most so many sentences before the one with the answer begin a passage


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


@dataclass(frozen=True)
class Window:
    """A question with a passage, or a piece of one, as :class:`SpanTask` reads it."""

    ids: NDArray[np.int64]
    types: NDArray[np.int64]
    start: int  # of the piece in the sequence
    size: int
    span: tuple[int, int]  # first and last token of the answer; (0, 0) where the piece does not hold it
    question: int = 0
    words: NDArray[np.int64] | None = None  # of each token of the piece


def span_batch(frame: Frame, windows: Sequence[Window]) -> Tensors:
    batch = frame.pad([(window.ids, window.types) for window in windows])
    place = torch.arange(batch["input_ids"].shape[1])
    start, size = (torch.tensor([[getattr(window, name)] for window in windows]) for name in ("start", "size"))
    begin, end = (torch.tensor([window.span[part] for window in windows]) for part in (0, 1))
    return batch | {"allowed": (place >= start) & (place < start + size), "begin": begin, "end": end}


def word_tokens(corpus: Corpus, words: Sequence[int]) -> list[int]:
    """Token ids of some words, in the order given."""
    return [int(i) for word in words for i in corpus.ids[corpus.words[word] : corpus.words[word + 1]]]


def _begin(corpus: Corpus, sentence: int) -> int:
    return int(corpus.words[corpus.sentences[sentence]])


LONGEST = 3  # words of an answer at most
LETTERS = 4  # of the shortest answer of one word
COMMON = 200  # so many of the most frequent words are no answers


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


DROPPED = 0.15  # share of a question's words that are left out
SHIFT = 3  # places that a word of a question moves at most
CLOZE_QA_LONGEST = 4  # words of an answer at most
_YEAR = re.compile(r"1\d{3}|20\d{2}")
_NUMBER = re.compile(r"\d[\d.,]*")


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


class Reading(SpanTask):
    """Find the answer to a question in a passage.

    Passages that do not fit are read in windows that overlap by half. Losses are of windows that hold the whole
    answer (rows of batches), scores of the best span of all windows of a question. The main metric is SQuAD's F1 of the
    words, beside exact matches. A question has at most a third of the room.

    Source: Rajpurkar et al. (2016); Devlin et al. (2019), section 4.2.
    """

    longest = 24

    def __init__(self, texts: Mapping[str, Rows[Question]], frame: Frame, *, name: str = "squad") -> None:
        self.name, self.texts = name, dict(texts)
        self.windows = {split: _windows(part, frame) for split, part in texts.items()}
        self.answered: dict[str, list[int]] = {}
        self.order: dict[str, list[int]] = {}  # windows that hold an answer come first: they are the rows
        for split, windows in self.windows.items():
            self.order[split] = sorted(
                range(len(windows)), key=[window.span == (0, 0) for window in windows].__getitem__
            )
            self.answered[split] = [place for place in self.order[split] if windows[place].span != (0, 0)]
        super().__init__(frame, texts, self.answered)

    def make(self, split: str, rows: Sequence[int], random: np.random.Generator) -> Tensors:
        return span_batch(self.frame, self._windows(split, rows))

    def scored_rows(self, split: str, rows: int | None) -> Sequence[int]:
        """All windows of a split's questions, or of the first `rows` questions."""
        count = len(self.texts[split].rows) if rows is None else rows
        row = {place: row for row, place in enumerate(self.order[split])}
        return [row[place] for place, window in enumerate(self.windows[split]) if window.question < count]

    def measure_rows(self, split: str, rows: Sequence[int], outcomes: list[Tensors]) -> dict[str, float]:
        """SQuAD's F1 and exact matches of the best span of all windows of a question."""
        best: dict[int, tuple[float, str]] = {}
        spans, scores, questions = joined(outcomes, "found"), joined(outcomes, "score"), self.texts[split].rows
        for window, (first, last), score in zip(self._windows(split, rows), spans, scores, strict=True):
            assert window.words is not None
            a, b = window.words[first - window.start], window.words[last - window.start]
            if window.question not in best or score > best[window.question][0]:
                best[window.question] = float(score), " ".join(questions[window.question].words[a : b + 1])
        pairs = [(found, questions[number].answer) for number, (_, found) in best.items()]
        return {
            "f1": sum(answer_f1(*pair) for pair in pairs) / len(pairs),
            "exact": sum(normalise(found) == normalise(true) for found, true in pairs) / len(pairs),
        }

    def _windows(self, split: str, rows: Sequence[int]) -> list[Window]:
        return [self.windows[split][self.order[split][row]] for row in rows]


def _windows(texts: Rows[Question], frame: Frame) -> list[Window]:
    windows = []
    coded = tokenize_rows([row.words for row in texts.rows], frame)
    for number, (row, (passage, places)) in enumerate(zip(texts.rows, coded, strict=True)):
        words = np.repeat(np.arange(len(row.words)), np.diff(places))
        answer = int(places[row.begin]), int(places[row.end + 1]) - 1
        question = frame.ids(row.question)[: frame.room(2) // 3]
        room = frame.room(2) - len(question)
        for begin in range(0, max(1, len(passage) - room // 2), max(1, room // 2)):
            piece = slice(begin, begin + room)
            ids, types, (_, start) = frame.sequence(question, passage[piece])
            held = begin <= answer[0] <= answer[1] < begin + room
            span = (answer[0] - begin + start, answer[1] - begin + start) if held else (0, 0)
            windows.append(Window(ids, types, start, len(words[piece]), span, number, words[piece]))
    return windows


def normalise(answer: str) -> str:
    """Lower case without punctuation, articles and more than one space, as SQuAD compares answers.

    Example:
        >>> normalise("The  Duke , of Kent")
        'duke of kent'
    """
    bare = "".join(letter for letter in answer.lower() if letter not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())


def answer_f1(found: str, true: str) -> float:
    """F1 of the words of two answers, compared as SQuAD does.

    Example:
        >>> answer_f1("the Duke", "duke of Kent")
        0.5
    """
    a, b = normalise(found).split(), normalise(true).split()
    both = sum((Counter(a) & Counter(b)).values())
    return 2 * both / (len(a) + len(b)) if both else float(a == b)
