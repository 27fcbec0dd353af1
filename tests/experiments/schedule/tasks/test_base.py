"""What all tasks of the benchmark share: batches by seed, probes, scores, sequences."""

from __future__ import annotations

import pytest
import source_tasks  # noqa: F401, registers conll04 and squad
import torch

from metapretrain.errors import InputError
from metapretrain.experiments.schedule.tasks import Frame, made_schedule_tasks
from metapretrain.experiments.schedule.tasks.registry import MADE
from metapretrain.models.text_encoders import TextEncoder, build_text_encoder
from metapretrain.scheduling import FunctionProbe, LoaderProbe, UtilityScheduler

SOURCES, TARGETS = made_schedule_tasks(0, names=(*MADE, "conll04", "squad"))
ALL = {**SOURCES, **TARGETS}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("name", ALL)
def test_batch_depends_on_seed_epoch_and_index_alone(name: str) -> None:
    batches = ALL[name].batches("train", batch_size=8, seed=3, epoch=1)
    last = batches[2]
    torch.manual_seed(1)
    again = ALL[name].batches("train", batch_size=8, seed=3)
    assert not same(again[2], last)
    again.set_epoch(1)
    assert same(again[2], last)
    assert not same(ALL[name].batches("train", batch_size=8, seed=4, epoch=1)[2], last)


@pytest.mark.parametrize("name", ALL)
def test_loss_is_a_finite_scalar_that_reaches_encoder_and_head(name: str, encoder: TextEncoder) -> None:
    task = ALL[name]
    head = task.head(encoder.features)
    loss = task.loss(encoder, head, task.batches("train", batch_size=4, seed=0)[0])
    loss.backward()
    assert loss.ndim == 0 and loss.isfinite()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in head.parameters())
    assert encoder.model.get_input_embeddings().weight.grad.abs().sum() > 0


@pytest.mark.parametrize("name", ALL)
def test_score_names_its_metric_and_keeps_modes(name: str) -> None:
    encoder, task = build_text_encoder("tiny"), ALL[name]  # with dropout, which a score must not use
    head = task.head(encoder.features).train()
    encoder.train()
    scores = task.score(encoder, head, "validation")
    assert 0 <= scores[task.metric] <= 1
    assert scores == task.score(encoder, head, "validation")
    assert encoder.training and head.training


def test_an_epoch_has_each_row_once() -> None:
    task = SOURCES["reordering"]
    seen: list[int] = []
    kept, task.make = task.make, lambda split, rows, random: seen.extend(rows) or {}  # type: ignore
    try:
        list(task.batches("train", batch_size=16, seed=0))
    finally:
        task.make = kept  # type: ignore[method-assign]
    assert sorted(seen) == list(range(task.sizes["train"]))


def test_draws_in_a_batch_differ_by_seed_epoch_and_index(monkeypatch: pytest.MonkeyPatch) -> None:
    task = SOURCES["masked-lm"]
    monkeypatch.setattr(task, "make", lambda split, rows, random: {"draw": torch.tensor(random.random())})
    places = [(seed, epoch, index) for seed in (0, 1) for epoch in (0, 1) for index in (0, 1)]
    draws = {
        float(task.batches("train", batch_size=8, seed=seed, epoch=epoch)[index]["draw"])
        for seed, epoch, index in places
    }
    assert len(draws) == len(places)


def test_few_rows_are_one_batch(encoder: TextEncoder) -> None:
    batches = TARGETS["rte"].batches("test", batch_size=999, seed=0)
    assert len(batches) == 1 and len(batches[0]["labels"]) == 16


def test_tasks_are_probes_of_the_utility_scheduler(encoder: TextEncoder) -> None:
    heads = torch.nn.ModuleDict({name: task.head(encoder.features) for name, task in ALL.items()})

    def loss(name: str):
        return lambda batch: ALL[name].loss(encoder, heads[name], batch)

    sources = {
        name: FunctionProbe(lambda generator, task=task: task.sample("train", 4, generator), loss(name))
        for name, task in SOURCES.items()
    }
    targets = {
        name: LoaderProbe(task.batches("validation", batch_size=4, seed=0), loss(name))
        for name, task in TARGETS.items()
    }
    module = torch.nn.ModuleList([encoder, heads])
    choice = UtilityScheduler(sources, targets, module, alpha=0.1, samples=1, updates=1).choose()
    assert choice.source in SOURCES and len(choice.utilities) == 3


def test_hidden_and_pool_are_the_forward_pass(encoder: TextEncoder) -> None:
    batch = TARGETS["rte"].batches("test", batch_size=4, seed=0)[0]
    states = encoder.hidden(batch)
    assert states.shape == (*batch["input_ids"].shape, encoder.features)
    assert torch.equal(encoder.pool(states, batch["attention_mask"]), encoder(batch))


def test_sequences_are_the_tokenizers(frame: Frame) -> None:
    one, two = "a tiny test", "of pairs"
    ids, types, _ = frame.sequence(frame.ids(one), frame.ids(two))
    wanted = frame.tokenizer(one, two)
    assert ids.tolist() == wanted["input_ids"] and types.tolist() == wanted["token_type_ids"]
    ids, _, starts = frame.sequence(frame.ids(one))
    assert ids.tolist() == frame.tokenizer(one)["input_ids"] and starts == [1]


def test_three_segments_have_a_separator_between(frame: Frame) -> None:
    ids, types, starts = frame.sequence([7], [8, 8], [9])
    assert ids.tolist() == [2, 7, 3, 8, 8, 3, 9, 3]
    assert types.tolist() == [0, 0, 0, 1, 1, 1, 1, 1] and starts == [1, 3, 6]


def test_cut_takes_from_the_longest(frame: Frame) -> None:
    sizes = [len(part) for part in frame.cut([7] * 80, [8] * 10, [9] * 50)]
    assert sum(sizes) == frame.room(3) and sizes == [25, 10, 25]


def test_frames_say_what_is_wrong(frame: Frame) -> None:
    with pytest.raises(InputError, match="multiple of 16 of at least 16, got 20"):
        Frame(frame.tokenizer, 20)
    with pytest.raises(InputError, match="65 tokens does not fit max_length 64"):
        frame.pad([frame.sequence([7] * 63)[:2]])
    with pytest.raises(InputError, match="split of rte"):
        TARGETS["rte"].batches("dev", batch_size=4, seed=0)
