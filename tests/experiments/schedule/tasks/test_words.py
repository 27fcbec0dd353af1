"""Capitalisation and token-document relation on texts written out by hand."""

from __future__ import annotations

import pytest
import torch
from entity_tasks import LabelTask
from source_tasks import Capitalisation, TokenDocument

from metapretrain.data.documents import Documents
from metapretrain.experiments.schedule.tasks import Frame
from metapretrain.models.language_models import tiny_tokenizer
from metapretrain.models.text_encoders import TextEncoder


def labelled(task: LabelTask, frame: Frame, row: int) -> list[tuple[str, int]]:
    batch = task.make("train", [row], task.random("train", 0))
    ids, labels = batch["input_ids"][0], batch["labels"][0]
    places = (labels != -100).nonzero().flatten().tolist()
    return [(frame.tokenizer.decode([int(ids[place])]), int(labels[place])) for place in places]


def test_capitals_are_gone_from_the_input_and_in_the_labels(frame: Frame) -> None:
    text = "We saw Anna , I think .".split()
    task = Capitalisation({"train": Documents([[text]])}, frame)
    assert labelled(task, frame, 0) == [("we", 1), ("sa", 0), ("an", 1), ("i", 1), ("th", 0)]  # first tokens of words


def test_a_cased_tokenizer_sees_no_capital() -> None:
    from tokenizers.normalizers import BertNormalizer

    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.normalizer = BertNormalizer(lowercase=False)  # it has no pieces with capitals
    frame = Frame(tokenizer, 64)
    task = Capitalisation({"train": Documents([["Anna saw Boris".split(), "anna saw boris".split()]])}, frame)
    ids = task.make("train", [0], task.random("train", 0))["input_ids"][0]
    assert frame.ids("Anna") == [tokenizer.unk_token_id] and tokenizer.unk_token_id not in ids
    assert ids[1:8].tolist() == ids[8:15].tolist() == frame.ids("anna saw boris")


def test_words_of_other_runs_of_the_document_are_ones(frame: Frame) -> None:
    small = Frame(frame.tokenizer, 16)  # 14 tokens: seven words of two letters and more, two tokens each
    first = ["abcd", "bcde", "cdef", "abcd", "efgh", "fghi", "ghij"]
    second = ["BCDE", "hijk", ".", "hijk", "ghij"]
    alone = ["bcde", "zyxw"]
    task = TokenDocument({"train": Documents([[first, second], [alone]])}, small)
    assert task.sizes == {"train": 2}  # the second document is one run
    assert [label for _, label in labelled(task, small, 0)] == [0, 1, 0, 0, 0, 0, 1]
    assert [label for _, label in labelled(task, small, 1)] == [1, 0, 0, 1]  # the full stop has none


@pytest.mark.parametrize("rows", [[0], [0, 1]])
def test_loss_and_f1_by_hand(frame: Frame, encoder: TextEncoder, rows: list[int]) -> None:
    texts = Documents([["Anna saw a Dog".split()], ["no Capitals here at all".split()]])
    task = Capitalisation({"train": texts}, frame)
    head = task.head(encoder.features).eval()
    batch = task.make("train", rows, task.random("train", 0))
    logits = head(encoder.hidden(batch))
    losses = [
        -logits[row, place].log_softmax(0)[label]
        for row in range(len(rows))
        for place, label in enumerate(batch["labels"][row].tolist())
        if label != -100
    ]
    torch.testing.assert_close(task.loss(encoder, head, batch), torch.stack(losses).mean())
    with torch.no_grad():
        head[1].weight.zero_()
        head[1].bias.copy_(torch.tensor([0.0, 1.0]))  # all words capitalised: 3 of 9 are
    scores = task.score(encoder, head, "train")
    assert scores == pytest.approx({"f1": 2 * 3 / (9 + 3), "macro_f1": 3 / (9 + 3), "accuracy": 3 / 9})
