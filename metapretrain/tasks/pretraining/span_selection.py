"""Span selection (masked passage retrieval in the small): find in a passage what a sentence is lacking."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from metapretrain.data.documents import Corpus, Documents
from metapretrain.tasks.pretraining.forms import SpanTask
from metapretrain.tasks.pretraining.frame import Batch, Frame
from metapretrain.tasks.pretraining.passages import cut_passage, span_batch, word_tokens

LONGEST = 3  # words of an answer at most
LETTERS = 4  # of the shortest answer of one word
COMMON = 200  # so many of the most frequent words are no answers


class SpanSelection(SpanTask):
    """Find the words that a mask hides in a sentence, in a passage of the same document that has them, too.

    A row is a sentence that shares a word with another one of its document; the word has at least four letters and
    is not among the 200 most frequent. Each batch draws the word and where else it is; words that follow it in both
    places belong to the answer, up to three. The passage lies before the sentence or after it. Glass et al. retrieve
    passages from all of Wikipedia and take names and noun phrases; here the document is the collection.

    Args:
        texts: documents of each split.
        frame: how sequences are put together.

    Source: Glass et al. (2020), span selection pre-training.
    """

    name = "span-selection"

    def __init__(self, texts: Mapping[str, Documents], frame: Frame) -> None:
        self.corpora = {split: frame.corpus(part) for split, part in texts.items()}
        self.rows = {split: shared_words(corpus) for split, corpus in self.corpora.items()}
        super().__init__(frame, texts, {split: len(rows) for split, rows in self.rows.items()})

    def make(self, split: str, rows: Sequence[int], random: np.random.Generator) -> Batch:
        """See :class:`PretrainingTask`."""
        corpus, room, found = self.corpora[split], self.frame.room(2), []
        for row in rows:
            number, sentence, choices = self.rows[split][row]
            word, others = choices[int(random.integers(len(choices)))]
            other = others[int(random.integers(len(others)))]
            first, last = int(corpus.sentences[sentence]), int(corpus.sentences[sentence + 1])
            size = 1
            while size < LONGEST and word + size < last and _same(corpus, word + size, other + size):
                size += 1
            question = [*word_tokens(corpus, range(first, word)), self.frame.mask_id]
            place = len(question) - 1
            question += word_tokens(corpus, range(word + size, last))
            half = room // 2
            begin = max(0, min(place - half // 2, len(question) - half))  # the mask stays in a long sentence
            question = question[begin : begin + half]
            before = other < first
            lowest = int(corpus.documents[number]) if before else sentence + 1
            highest = sentence if before else int(corpus.documents[number + 1])
            passage = cut_passage(corpus, (other, other + size), lowest, highest, room - len(question), random)
            found.append((question, *passage))
        return span_batch(self.frame, found)


def shared_words(corpus: Corpus) -> list[tuple[int, int, list[tuple[int, list[int]]]]]:
    """Sentences with words that other sentences of their document have, too.

    Returns:
        document, sentence, and (word, the same word in other sentences) for each such word.
    """
    counts = np.bincount(corpus.types, minlength=len(corpus.names))
    common = set(np.argsort(-counts, kind="stable")[:COMMON].tolist()) if len(counts) > 2 * COMMON else set()
    rare = np.array([name.isalpha() and len(name) >= LETTERS for name in corpus.names])
    rare[list(common)] = False
    shown = corpus.words[1:] > corpus.words[:-1]
    sentence_of = np.repeat(np.arange(len(corpus.sentences) - 1), np.diff(corpus.sentences))
    rows = []
    for number, (first, last) in enumerate(zip(corpus.documents[:-1], corpus.documents[1:], strict=True)):
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
