"""Sentence distance, response selection, classes of pairs, and relations, by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from entity_tasks import RelationExtraction
from source_tasks import SentenceDistance

from metapretrain.data.annotated import Dialogue, RelationRow
from metapretrain.data.documents import Documents
from metapretrain.data.texts import Rows, TextSet
from metapretrain.errors import InputError
from metapretrain.experiments.schedule.tasks import Frame
from metapretrain.experiments.schedule.tasks.sentences import ResponseSelection, Sentences, matthews
from metapretrain.models.text_encoders import TextEncoder


def decoded(frame: Frame, ids: torch.Tensor) -> list[str]:
    """The segments of a sequence."""
    text = frame.tokenizer.decode(ids).replace("[CLS]", "").replace("[PAD]", "")
    return [part.strip() for part in text.split("[SEP]") if part.strip()]


def test_distance_is_that_of_the_sentences_shown(frame: Frame) -> None:
    documents = [["a", "b", "c", "d"], ["e", "f", "g", "h"], ["x", "y", "z"]]
    task = SentenceDistance({"train": Documents([[[word] for word in row] for row in documents])}, frame)
    assert task.sizes == {"train": 6}  # a b c, e f g; the third document is too short
    seen = set()
    for draw in range(40):
        batch = task.make("train", range(6), task.random("train", draw))
        for ids, label, first in zip(batch["input_ids"], batch["labels"].tolist(), "abcefg", strict=True):
            one, other = decoded(frame, ids)
            assert one == first
            together = [row for row in documents if one in row and other in row]
            adjacent = bool(together) and together[0].index(other) == together[0].index(one) + 1
            assert label == (0 if adjacent else 1 if together else 2)
            assert not together or abs(together[0].index(other) - together[0].index(one)) != 1 or adjacent
            seen.add((label, other))
    assert {other for label, other in seen if label == 2} == set("abcdefghxyz")
    assert {label for label, _ in seen} == {0, 1, 2}


def test_distance_needs_two_documents(frame: Frame) -> None:
    with pytest.raises(InputError, match="two documents or more, train has 1"):
        SentenceDistance({"train": Documents([[["a"]] * 5])}, frame)


ROWS = [Dialogue(["q one", "q two"], ["yes", "yo"], ["no", "na"]), *(Dialogue(["q"], [word]) for word in "abcd")]


def test_the_right_response_stands_at_its_label(frame: Frame) -> None:
    task = ResponseSelection({"train": Rows(ROWS)}, frame, choices=4)
    for draw in range(20):
        batch = task.make("train", [0, 2], task.random("train", draw))
        shown = [decoded(frame, ids) for ids in batch["input_ids"]]
        assert {context for context, _ in shown[:4]} == {"q one q two"}
        first, second = [answer for _, answer in shown[:4]], [answer for _, answer in shown[4:]]
        assert first[batch["labels"][0]] in ("yes", "yo") and second[batch["labels"][1]] == "b"
        assert {"no", "na"} < set(first) and len(set(first) & set("abcd")) == 1  # its own wrong ones come first
        assert "b" not in second[: batch["labels"][1]] + second[batch["labels"][1] + 1 :]


def test_long_contexts_keep_what_is_next_to_the_response(frame: Frame) -> None:
    rows = [Dialogue(["far " * 60, "near"], ["yes"]), Dialogue(["q"], ["no " * 90])]
    task = ResponseSelection({"train": Rows(rows)}, frame, choices=2)
    batch = task.make("train", [0, 1], task.random("train", 0))
    assert batch["input_ids"].shape == (4, 64)
    first = decoded(frame, batch["input_ids"][int(batch["labels"][0])])
    assert first[0].endswith("near") and first[1] == "yes"
    with pytest.raises(InputError, match="train has 2 dialogues"):
        ResponseSelection({"train": Rows(rows)}, frame, choices=3)


def test_choice_is_scored_by_the_highest_logit(frame: Frame, encoder: TextEncoder) -> None:
    task = ResponseSelection({"train": Rows(ROWS)}, frame, choices=4)
    batch = task.make("train", range(5), task.random("train", 0))
    states = torch.zeros(20, 16, encoder.features)
    task.logits = lambda *_: 10.0 * torch.eye(4)[batch["labels"]]  # type: ignore[method-assign]
    found = task.outcome(encoder, task.head(encoder.features), states, batch)
    assert task.measure([found]) == {"accuracy": 1.0}
    expected = np.log(1 + 3 * np.exp(-10))
    assert task.loss_of(encoder, torch.nn.Identity(), states, batch).item() == pytest.approx(expected, rel=1e-2)


def test_pairs_are_joined_and_scored(frame: Frame) -> None:
    rows = TextSet(["a b", "c"], ["d", "e"], torch.tensor([1, 0]))
    task = Sentences({"train": rows}, frame, name="cola")
    batch = task.make("train", [1, 0], task.random("train", 0))
    assert [decoded(frame, ids) for ids in batch["input_ids"]] == [["c", "e"], ["a b", "d"]]
    assert batch["labels"].tolist() == [0, 1] and task.metric == "matthews"
    found = {"found": torch.tensor([1, 1, 0, 0]), "labels": torch.tensor([1, 0, 0, 0])}
    assert task.measure([found]) == pytest.approx({"accuracy": 0.75, "f1": 2 / 3, "matthews": 1 / 3**0.5})
    with pytest.raises(InputError, match=r"labels must be in 0\.\.1"):
        Sentences({"train": TextSet(["a"], labels=torch.tensor([2]))}, frame, name="rte")


def test_matthews_is_that_of_sklearn() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    random = np.random.Generator(np.random.Philox(0))
    for classes in (2, 3):
        found, true = random.integers(classes, size=(2, 50))
        assert matthews(found, true) == pytest.approx(metrics.matthews_corrcoef(true, found))
    assert matthews(np.ones(3, int), np.array([0, 1, 1])) == 0.0


RELATIONS = Rows(
    [
        RelationRow("Anna Brown lives in Rome .".split(), [("Peop", 0, 2), ("Loc", 4, 5)], {(0, 1): "Live_In"}),
        RelationRow("Rain .".split(), [], {}),
    ]
)


def test_ordered_pairs_have_their_relation(frame: Frame) -> None:
    task = RelationExtraction({"train": RELATIONS}, frame)
    batch = task.make("train", [0, 1], task.random("train", 0))
    assert batch["labels"].tolist() == [2, 0]  # Live_In is the second relation; Rome does not live in Anna
    for row, names in ((0, ("anna brown", "rome")), (1, ("rome", "anna brown"))):
        for marks, name in zip(batch["pair"][row], names, strict=True):
            assert frame.tokenizer.decode(batch["input_ids"][row][marks.bool()]) == name


def test_the_relation_head_sees_means_of_entities(frame: Frame, encoder: TextEncoder) -> None:
    task = RelationExtraction({"train": RELATIONS}, frame)
    batch = task.make("train", [0], task.random("train", 0))
    states = encoder.hidden(batch)
    seen = task.logits(encoder, torch.nn.Identity(), states, batch)
    assert seen.shape == (1, 3 * encoder.features)
    size = len(frame.ids("Anna Brown"))
    torch.testing.assert_close(seen[0, : encoder.features], states[0, 1 : 1 + size].mean(0))


def test_relation_f1_leaves_none_out(frame: Frame) -> None:
    task = RelationExtraction({"train": RELATIONS}, frame)
    outcome = {"found": torch.tensor([0, 1, 2, 0, 3]), "labels": torch.tensor([0, 1, 1, 2, 0])}
    assert task.measure([outcome]) == pytest.approx({"f1": 2 * 1 / (3 + 3), "accuracy": 2 / 5})


def test_pairs_of_long_sentences_have_a_piece_or_are_counted(frame: Frame) -> None:
    words = ["Anna", *["word"] * 80, "Bo", "near", "Rome"]
    row = RelationRow(words, [("Peop", 0, 1), ("Peop", 81, 82), ("Loc", 83, 84)], {(1, 2): "Live_In"})
    task = RelationExtraction({"train": RELATIONS, "test": Rows([row])}, frame)
    assert task.sizes == {"train": 2, "test": 2} and task.lost == {"train": 0, "test": 4}
    batch = task.make("test", [0, 1], task.random("test", 0))
    assert batch["labels"].tolist() == [2, 0]
    shown = [frame.tokenizer.decode(batch["input_ids"][0][marks.bool()]) for marks in batch["pair"][0]]
    assert shown == ["bo", "rome"] and batch["input_ids"].shape[1] == 64
