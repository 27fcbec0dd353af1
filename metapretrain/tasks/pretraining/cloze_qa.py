"""Cloze question answering (unsupervised question answering in the small)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np

from metapretrain.data.documents import Corpus, Documents
from metapretrain.tasks.pretraining.forms import SpanTask
from metapretrain.tasks.pretraining.frame import Batch, Frame
from metapretrain.tasks.pretraining.passages import cut_passage, span_batch, word_tokens

DROPPED = 0.15  # share of a question's words that are left out
SHIFT = 3  # places that a word of a question moves at most
LONGEST = 4  # words of an answer at most
_YEAR = re.compile(r"1\d{3}|20\d{2}")
_NUMBER = re.compile(r"\d[\d.,]*")


class ClozeQA(SpanTask):
    """Answer a question made from a sentence of the passage.

    An answer is a run of up to four capitalised words that begins neither its sentence nor a quotation, a year, or
    another number.
    Its question is the sentence without it, with ``which``, ``when`` or ``how many`` before; 15% of the words are left
    out and the others move by up to three places, drawn for each batch, so that matching words is not enough. Luo et
    al. let models write questions and find answers; here rules do. Texts must have capitals.

    Args:
        texts: documents of each split.
        frame: how sequences are put together.

    Source: Luo et al. (2021), cooperative learning of zero-shot machine reading comprehension; the noise is that of
    Lewis et al. (2019), unsupervised question answering by cloze translation.
    """

    name = "cloze-qa"

    def __init__(self, texts: Mapping[str, Documents], frame: Frame) -> None:
        self.corpora = {split: frame.corpus(part) for split, part in texts.items()}
        self.rows = {split: cloze_rows(corpus) for split, corpus in self.corpora.items()}
        self.asked = {word: frame.ids(word) for word in ("which", "when", "how many", "?")}
        super().__init__(frame, texts, {split: len(rows) for split, rows in self.rows.items()})

    def make(self, split: str, rows: Sequence[int], random: np.random.Generator) -> Batch:
        """See :class:`PretrainingTask`."""
        corpus, room, found = self.corpora[split], self.frame.room(2), []
        for row in rows:
            number, sentence, answers = self.rows[split][row]
            first, last, asked = answers[int(random.integers(len(answers)))]
            begin, end = int(corpus.sentences[sentence]), int(corpus.sentences[sentence + 1])
            words = np.array([word for word in range(begin, end) if not first <= word < last])
            words = words[random.random(len(words)) >= DROPPED]
            # Adding a number below SHIFT + 1 to each place and sorting moves no word by more than SHIFT.
            words = words[np.argsort(np.arange(len(words)) + random.random(len(words)) * (SHIFT + 1), kind="stable")]
            question = [*self.asked[asked], *word_tokens(corpus, words.tolist())][: room // 2 - len(self.asked["?"])]
            question += self.asked["?"]
            bounds = int(corpus.documents[number]), int(corpus.documents[number + 1])
            passage = cut_passage(corpus, (first, last), *bounds, room - len(question), random)
            found.append((question, *passage))
        return span_batch(self.frame, found)


def cloze_rows(corpus: Corpus) -> list[tuple[int, int, list[tuple[int, int, str]]]]:
    """Sentences with answers: document, sentence, and (first word, word after the last, what is asked) of each."""
    document_of = np.repeat(np.arange(len(corpus.documents) - 1), np.diff(corpus.documents))
    shown = corpus.words[1:] > corpus.words[:-1]
    rows = []
    for sentence, (begin, end) in enumerate(
        zip(corpus.sentences[:-1].tolist(), corpus.sentences[1:].tolist(), strict=True)
    ):
        answers, word = [], begin + 1
        while word < end:
            last = word + 1
            if corpus.capital[word] and shown[word] and _continues(corpus, word - 1):
                while last < end and last - word < LONGEST and corpus.capital[last] and shown[last]:
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
