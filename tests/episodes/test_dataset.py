"""Any map-style data set, any number of workers: the same episodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from metapretrain.episodes import (
    Batch,
    Episode,
    EpisodeDataset,
    EpisodeLoader,
    EpisodePlan,
    EpisodeSampler,
    EpisodeSpec,
    identity,
    stack,
)
from metapretrain.errors import InputError
from tests.episodes.columns import Column

LABELS = torch.arange(6).repeat_interleave(5)
ROWS = torch.arange(30.0)
SPEC = EpisodeSpec(3, 1, 2)


class Items(Dataset[Any]):
    """A map-style data set whose item i is made of the number i."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return 30

    def __getitem__(self, i: int) -> Any:
        x = torch.tensor(float(i))
        return {
            "pair": (x, 0),
            "single": (x,),
            "plain": x,
            "dict": {"x": x, "label": 0, "mask": torch.ones(2)},
            "triple": (x, x, 0),
            "nested": ({"a": [x, x]}, 0),
        }[self.kind]


class Stream(IterableDataset[Any]):
    """Rows one after the other, of a known number."""

    def __iter__(self) -> Iterator[float]:
        return iter(ROWS.tolist())

    def __len__(self) -> int:
        return 30


def sampler(spec: EpisodeSpec = SPEC, **options: Any) -> EpisodeSampler:
    return EpisodeSampler(LABELS, spec, 7, seed=3, **options)


def assert_is_episode(episode: Episode, plan: EpisodePlan, x: Any) -> None:
    assert torch.equal(x(episode.support), ROWS[plan.support])
    assert torch.equal(x(episode.query), ROWS[plan.query])
    assert torch.equal(episode.support.y, plan.support_y)
    assert torch.equal(episode.query.y, plan.query_y)
    assert (episode.classes, episode.index) == (plan.classes, plan.index)


@pytest.mark.parametrize("dataset", [Items("pair"), Items("single"), Items("plain"), ROWS, TensorDataset(ROWS, LABELS)])
def test_items_of_every_form_are_read(dataset: Any) -> None:
    loader = DataLoader(EpisodeDataset(dataset), batch_sampler=sampler(), collate_fn=identity)
    assert len(loader) == 7
    for episode, plan in zip(loader, sampler(), strict=True):
        assert_is_episode(episode, plan, lambda batch: batch.x)


def columns() -> list[Any]:
    """Columns whose [] is not by position; of pandas too where it is installed."""
    texts = [f"text {row}" for row in range(30)]
    try:
        import pandas as pd
    except ImportError:
        return [Column(texts)]
    return [Column(texts), pd.Series(texts, index=range(30)[::-1]), pd.Series(texts, index=["same"] * 30)]


def test_rows_of_a_column_are_read_by_position() -> None:
    for column in columns():
        for episode, plan in zip(EpisodeLoader(column, sampler()), sampler(), strict=True):
            assert [*episode.support.x, *episode.query.x] == [f"text {row}" for row in plan]


def test_stacked_episodes_have_a_task_axis() -> None:
    episodes = list(EpisodeLoader(Items("dict"), sampler()))
    support, query = stack(episodes)
    assert support.x["mask"].shape == (7, 3, 2) and query.y.shape == (7, 6)
    for place, episode in enumerate(episodes):
        assert torch.equal(support.x["x"][place], episode.support.x["x"])
        assert torch.equal(query.y[place], episode.query.y)


def test_dicts_lose_their_label_and_keep_the_rest() -> None:
    episode = EpisodeDataset(Items("dict"))[sampler().plan(0)]
    assert set(episode.support.x) == {"x", "mask"}
    assert episode.query.x["mask"].shape == (6, 2)


def test_a_data_set_that_reads_many_rows_is_asked_once_for_each_side() -> None:
    class Many(Items):
        asked: list[list[int]] = []  # noqa: RUF012

        def __getitems__(self, rows: list[int]) -> list[Any]:
            self.asked.append(rows)
            return [self[row] for row in rows]

    plan = sampler().plan(2)
    EpisodeDataset(Many("pair"))[plan]
    assert Many.asked == [plan.support, plan.query]


@pytest.mark.parametrize(("workers", "method"), [(0, None), (2, "fork"), (2, "spawn")])
def test_workers_change_nothing(workers: int, method: str | None) -> None:
    options: dict[str, Any] = {"multiprocessing_context": method} if method else {}
    if method == "spawn":
        dataset: Any = TensorDataset(ROWS, LABELS)  # a class that another process can import
    else:
        dataset = Items("pair")
    loader = EpisodeLoader(dataset, sampler(), num_workers=workers, **options)
    for episode, plan in zip(loader, sampler(), strict=True):
        assert_is_episode(episode, plan, lambda batch: batch.x)


def test_a_loader_changes_epoch_and_starts_in_the_middle() -> None:
    loader = EpisodeLoader(ROWS, sampler())
    loader.set_epoch(2)
    expected = [plan.index for plan in sampler(epoch=2)][4:]
    episodes = list(loader.iter_from(4))
    assert [episode.index for episode in episodes] == expected
    assert torch.equal(episodes[0].support.x, ROWS[sampler(epoch=2).plan(4).support])


def test_a_rank_starts_in_the_middle_of_its_own_episodes() -> None:
    other = EpisodeSampler(LABELS, SPEC, 8, seed=0, rank=1, world_size=2)
    assert [episode.index for episode in EpisodeLoader(ROWS, other).iter_from(2)] == [5, 7]


def test_a_loader_leaves_the_global_random_state_alone() -> None:
    state = torch.get_rng_state()
    list(EpisodeLoader(ROWS, sampler()))
    assert torch.equal(torch.get_rng_state(), state)


def test_episodes_move_with_their_nests() -> None:
    half = Batch({"a": [torch.ones(2), "text"]}, torch.zeros(2, dtype=torch.int64))
    moved = Episode(half, half, ("k",), 4, "g").to("meta", non_blocking=True)
    assert moved.support.x["a"][0].device.type == moved.query.y.device.type == "meta"
    assert moved.support.x["a"][1] == "text"
    assert (moved.classes, moved.index, moved.group) == (("k",), 4, "g")


def test_pinning_asks_every_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self + 1)
    half = Batch({"a": torch.zeros(1)}, torch.zeros(1))
    pinned = Episode(half, half, (), 0).pin_memory()
    assert [pinned.support.x["a"].item(), pinned.support.y.item(), pinned.query.y.item()] == [1, 1, 1]


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda: next(iter(DataLoader(EpisodeDataset(ROWS), batch_size=4))), "indexed with an EpisodePlan, not list"),
        (lambda: EpisodeDataset(ROWS[:20])[sampler().plan(0)], "data set of 20 rows"),
        (lambda: EpisodeLoader(ROWS[:20], sampler()), "30 labels, the data set 20 rows"),
        (lambda: EpisodeDataset(iter([])), "len\\(\\) and indexing"),
        (lambda: EpisodeLoader(Stream(), sampler()), "by the number of a row, not Stream"),
        (lambda: EpisodeLoader(dict.fromkeys(range(30)), sampler()), "by the number of a row, not dict"),
        (lambda: EpisodeDataset([object()] * 30)[sampler().plan(0)], "cannot be put side by side"),
        (lambda: EpisodeDataset([torch.zeros(i) for i in range(30)])[sampler().plan(0)], "cannot be put side by side"),
        (lambda: stack([]), "no episodes"),
        (lambda: stack([EpisodeDataset(["text"] * 30)[sampler().plan(0)]] * 2), "takes episodes of tensors"),
        (
            lambda: stack([EpisodeDataset(ROWS)[sampler(spec).plan(0)] for spec in (SPEC, EpisodeSpec(2, 1, 2))]),
            "differ",
        ),
        (lambda: EpisodeDataset(Items("triple"))[sampler().plan(0)], "not 3 values"),
    ],
)
def test_wrong_use_is_one_line(use: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        use()
    assert "\n" not in str(error.value)
