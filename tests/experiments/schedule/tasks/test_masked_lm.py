"""Masked tokens: which are chosen, what stands in their place, and the loss by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from metapretrain.data.documents import Documents
from metapretrain.data.made import made_documents
from metapretrain.errors import InputError
from metapretrain.experiments.schedule.tasks import Frame
from metapretrain.experiments.schedule.tasks.tokens import MaskedLM
from metapretrain.models.text_encoders import TextEncoder

WORDS = "banana potato tomato salami".split()  # three tokens each: ba ##na ##na
TEXTS = {"train": Documents([[WORDS, WORDS], [WORDS]] * 8)}


def test_rows_cover_every_document_once(frame: Frame) -> None:
    task = MaskedLM(TEXTS, Frame(frame.tokenizer, 16))
    corpus, rows = task.corpora["train"], task.rows["train"]
    assert np.concatenate([np.arange(*row) for row in rows]).tolist() == list(range(len(corpus.ids)))
    assert {end - begin for begin, end in rows} == {12}  # room for 14 tokens: four words of three, no word cut
    assert not {begin for begin, _ in rows} - set(corpus.words.tolist())


def test_labels_are_the_tokens_that_stood_there(frame: Frame) -> None:
    task = MaskedLM(TEXTS, frame)
    batch = task.make("train", range(16), task.random("train", 0))
    corpus = task.corpora["train"]
    for row in range(16):
        begin, end = task.rows["train"][row]
        original = frame.sequence(corpus.ids[begin:end])[0]
        chosen = batch["labels"][row] != -100
        places, labels = batch["places"][row][chosen], batch["labels"][row][chosen]
        assert len(places) == len(set(places.tolist())) == round(0.15 * (end - begin))
        assert labels.tolist() == original[places].tolist()
        shown = batch["input_ids"][row, : len(original)].numpy()
        assert set(np.flatnonzero(shown != original)) <= set(places.tolist())


def test_eight_of_ten_become_the_mask(frame: Frame) -> None:
    task = MaskedLM({"train": Documents([[WORDS * 4]] * 600)}, frame)
    batch = task.make("train", range(600), task.random("train", 0))
    chosen = batch["labels"] != -100
    shown = batch["input_ids"].gather(1, batch["places"])[chosen]
    masked, kept = (shown == frame.mask_id), (shown == batch["labels"][chosen])
    assert abs(masked.float().mean() - 0.8) < 0.03 and abs(kept.float().mean() - 0.1) < 0.03


@pytest.mark.parametrize("whole", ["word", "span"])
def test_whole_words_are_masked_together(frame: Frame, whole: str) -> None:
    task = MaskedLM({"train": Documents([[WORDS * 4]] * 40)}, frame, whole=whole, rate=0.3)
    batch = task.make("train", range(40), task.random("train", 0))
    adjacent = 0
    for places, labels in zip(batch["places"], batch["labels"], strict=True):
        words = ((places[labels != -100] - 1) // 3).bincount(minlength=16)  # tokens chosen of each word
        assert set(words.tolist()) == {0, 3} and 3 <= words.sum() <= 14
        adjacent += int((words[1:] * words[:-1] > 0).sum())
    # Of four words in sixteen 0.75 pairs are adjacent by chance.
    assert adjacent / 40 < 1.1 if whole == "word" else adjacent / 40 > 1.3


def test_loss_is_the_mean_cross_entropy_of_the_chosen(frame: Frame, encoder: TextEncoder) -> None:
    task = MaskedLM(made_documents(), frame)
    head = task.head(encoder.features)
    batch = task.batches("train", batch_size=4, seed=0)[0]
    loss = task.loss(encoder, head, batch)
    states, weight = encoder.hidden(batch), encoder.model.get_input_embeddings().weight
    total = []
    for row in range(4):
        for place, label in zip(batch["places"][row].tolist(), batch["labels"][row].tolist(), strict=True):
            if label != -100:
                logits = head.norm(torch.nn.functional.gelu(head.hidden(states[row, place]))) @ weight.T + head.bias
                total.append(-logits.log_softmax(0)[label].item())
    assert math.isclose(loss.item(), sum(total) / len(total), rel_tol=1e-5)


def test_bad_choices_are_named(frame: Frame) -> None:
    with pytest.raises(InputError, match=r"rate is 1\.0; give a number above 0 and below 1"):
        MaskedLM(TEXTS, frame, rate=1.0)
    with pytest.raises(InputError, match="unit of masking"):
        MaskedLM(TEXTS, frame, whole="words")
