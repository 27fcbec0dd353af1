"""Spans: the best one, made questions, machine reading and its windows."""

from __future__ import annotations

import pytest
import torch
from source_tasks import ClozeQA, SpanSelection
from span_tasks import Reading, answer_f1, best_spans, normalise

from metapretrain.data.annotated import Question
from metapretrain.data.documents import Documents
from metapretrain.data.texts import Rows
from metapretrain.experiments.schedule.tasks import Frame
from metapretrain.experiments.schedule.tasks.base import Tensors
from metapretrain.models.text_encoders import TextEncoder


def plain(text: str) -> str:
    """As the tokenizer's decoder writes it."""
    return text.lower().replace(" .", ".").replace(" ,", ",")


STORY = [
    "Then Anna Brown rode the white horse home .",
    "In 1812 it rained for 40 days .",
    "She sold the white horse to Boris .",
    "They were glad , and I was , too .",
]
TEXTS = {"train": Documents([[sentence.split() for sentence in STORY], ["a b c d e".split()]])}


def read(frame: Frame, batch: Tensors, row: int) -> tuple[str, str, str]:
    """Question, passage and answer of a row."""
    ids = batch["input_ids"][row]
    asked = ids[1 : int((ids == frame.tokenizer.sep_token_id).nonzero()[0])]
    span = ids[int(batch["begin"][row]) : int(batch["end"][row]) + 1]
    assert batch["allowed"][row, batch["begin"][row]] and batch["allowed"][row, batch["end"][row]]
    parts = (asked, ids[batch["allowed"][row]], span)
    question, passage, answer = (frame.tokenizer.decode(part) for part in parts)
    return question, passage, answer


def test_best_spans_are_those_of_a_slow_loop() -> None:
    begin, end = torch.randn(2, 20, 9, generator=torch.Generator().manual_seed(0))
    found, score = best_spans(begin, end, 3)
    for row in range(20):
        a, b = begin[row].log_softmax(0), end[row].log_softmax(0)
        spans = [(float(a[i] + b[j]), i, j) for i in range(9) for j in range(i, min(i + 3, 9))]
        assert (found[row].tolist(), float(score[row])) == (list(max(spans)[1:]), pytest.approx(max(spans)[0]))


def test_what_is_masked_is_the_answer_in_the_passage(frame: Frame) -> None:
    task = SpanSelection(TEXTS, frame)
    assert task.sizes == {"train": 2}  # the two sentences with the horse
    seen = set()
    for draw in range(20):
        batch = task.make("train", [0, 1], task.random("train", draw))
        for row, (own, other) in enumerate(((0, 2), (2, 0))):
            question, passage, answer = read(frame, batch, row)
            assert answer in ("white horse", "horse")
            assert question.replace("[MASK]", answer) == plain(STORY[own])
            assert plain(STORY[other]) in passage and plain(STORY[own]) not in passage
            seen.add((row, answer))
    assert len(seen) == 4


def test_long_sentences_keep_mask_and_answer(frame: Frame) -> None:
    text = [["pad"] * 70 + ["pelican"] + ["pad"] * 70, ["fill"] * 90 + ["pelican"] + ["fill"] * 9]
    task = SpanSelection({"train": Documents([text])}, frame)
    for draw in range(5):
        batch = task.make("train", [0, 1, 0], task.random("train", draw))
        assert batch["input_ids"].shape[1] == 64
        for row in range(3):
            assert read(frame, batch, row)[2] == "pelican" and frame.mask_id in batch["input_ids"][row]


def test_cloze_questions_ask_for_names_and_numbers(frame: Frame) -> None:
    task = ClozeQA(TEXTS, frame)
    answers = {}
    for draw in range(30):
        batch = task.make("train", range(task.sizes["train"]), task.random("train", draw))
        for row in range(task.sizes["train"]):
            question, passage, answer = read(frame, batch, row)
            asked = next(word for word in ("how many", "when", "which") if question.startswith(word))
            answers[answer] = asked
            assert question.endswith("?") and answer not in question
            sentence = next(plain(text) for text in STORY if answer in plain(text))
            words = question.removeprefix(asked).replace("?", " ").replace(".", " .").split()
            assert sentence in passage and set(words) <= set(sentence.replace(".", " .").split())
    assert answers == {"anna brown": "which", "1812": "when", "40": "how many", "boris": "which"}  # not I


def test_words_of_a_question_move_little(frame: Frame) -> None:
    words = [first + second for first in "bcdf" for second in "aeiou"]  # a token each
    task = ClozeQA({"train": Documents([[["Then", *words, "Zoe"]]])}, frame)
    order = {word: place for place, word in enumerate(["then", *words])}
    places = []
    for draw in range(20):
        question, _, answer = read(frame, task.make("train", [0], task.random("train", draw)), 0)
        shown = [order[word] for word in question.split()[1:-1]]
        places.append(shown)
        assert answer == "zoe" and all(abs(sorted(shown).index(p) - shown.index(p)) <= 3 for p in shown)
    assert 0.75 < sum(map(len, places)) / (20 * 21) < 0.95 and any(row != sorted(row) for row in places)


PASSAGE = "The cat sat on the red mat in Rome".split()


def test_squad_spans_and_scores(frame: Frame, encoder: TextEncoder) -> None:
    rows = Rows([Question("Where ?", PASSAGE, 8, 8, "Rome"), Question("On what ?", PASSAGE, 4, 6, "the red mat")])
    task = Reading({"train": rows}, frame)
    batch = task.make("train", [0, 1], task.random("train", 0))
    assert [read(frame, batch, row)[2] for row in (0, 1)] == ["rome", "the red mat"]
    head = task.head(encoder.features).eval()
    begin, end = task.logits(head, encoder.hidden(batch), batch)
    assert (begin[~batch["allowed"]] < -1e30).all()
    losses = [
        -logits[row].log_softmax(0)[place[row]]
        for logits, place in ((begin, batch["begin"]), (end, batch["end"]))
        for row in (0, 1)
    ]
    torch.testing.assert_close(task.loss(encoder, head, batch), torch.stack(losses).mean())


def test_windows_hold_long_passages_and_the_best_one_answers(frame: Frame, encoder: TextEncoder) -> None:
    words = [*["fill"] * 50, "Rome", *["fill"] * 50]  # two tokens a word: three windows and more
    rows = Rows([Question("Where ?", words, 50, 50, "Rome"), Question("Where ?", ["Rome"], 0, 0, "Paris")])
    task = Reading({"train": rows, "test": rows}, frame)
    windows = [window for window in task.windows["test"] if window.question == 0]
    assert len(windows) > 3 and len(task.answered["test"]) in (2, 3)
    covered = {int(word) for window in windows for word in window.words}
    assert covered == set(range(101)) and all(len(window.ids) <= 64 for window in windows)

    scored = [task.order["test"][row] for row in task.scored_rows("test")]
    assert scored == list(range(len(task.windows["test"])))

    rome = frame.ids("Rome")

    def logits(head: torch.nn.Module, states: torch.Tensor, batch: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        ids = batch["input_ids"]
        return tuple(50.0 * ((ids == token) & batch["allowed"]).float() for token in (rome[0], rome[-1]))

    task.logits = logits  # type: ignore[method-assign]
    scores = task.score(encoder, task.head(encoder.features), "test", batch_size=2)
    assert scores == {"f1": 0.5, "exact": 0.5}


def test_answers_are_compared_as_squad_does() -> None:
    assert normalise("An apple, the  Pear!") == "apple pear"
    assert answer_f1("the red mat", "Red mat.") == 1.0 and answer_f1("a", "b") == 0.0
    assert answer_f1("on the red mat", "red mat") == pytest.approx(2 * 2 / (3 + 2))
