"""Task sets of learn2learn out of our sampler, and in."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from metapretrain.episodes import EpisodeSampler, EpisodeSpec, from_taskset, to_metadataset, to_taskset
from metapretrain.errors import InputError

LABELS = torch.arange(6).repeat_interleave(8) + 10
DATA = TensorDataset(torch.arange(48.0), LABELS)


@pytest.fixture(scope="module")
def l2l() -> Any:
    return pytest.importorskip("learn2learn", exc_type=ImportError)


def sampler(episodes: int | None = 6, **options: Any) -> EpisodeSampler:
    return EpisodeSampler(LABELS, EpisodeSpec(3, 2, 4), episodes, seed=0, **options)


def assert_task_is(task: Any, plan: Any) -> None:
    x, y = task
    assert x.tolist() == [float(row) for row in plan]
    assert torch.equal(y, torch.cat([plan.support_y, plan.query_y]))


def test_task_i_is_episode_i(l2l: Any) -> None:
    taskset = to_taskset(DATA, sampler())
    assert isinstance(taskset, l2l.data.Taskset)
    assert len(taskset) == 6
    for task, plan in zip(taskset, sampler(), strict=True):
        assert_task_is(task, plan)
    assert_task_is(taskset[4], sampler().plan(4))
    x, y = taskset.sample()
    (support, support_y), _ = l2l.data.partition_task(x, y, shots=2)
    assert support.shape == (6,)
    assert support_y.tolist() == [0, 0, 1, 1, 2, 2]


def test_a_rank_gives_its_own_episodes(l2l: Any) -> None:
    taskset = to_taskset(DATA, sampler(rank=1, world_size=2))
    assert len(taskset) == 3
    assert_task_is(taskset[2], sampler().plan(5))


def test_a_start_is_kept(l2l: Any) -> None:
    taskset = to_taskset(DATA, sampler(start=4))
    assert len(taskset) == 2
    assert_task_is(taskset[0], sampler().plan(4))


def test_an_endless_sampler_is_an_endless_taskset(l2l: Any) -> None:
    taskset = to_taskset(l2l.data.MetaDataset(DATA), sampler(None))
    for index in range(3):
        assert_task_is(next(taskset), sampler(None).plan(index))


def test_labels_are_read_from_a_meta_dataset(l2l: Any) -> None:
    read = EpisodeSampler(l2l.data.MetaDataset(DATA), EpisodeSpec(3, 2, 4), 6, seed=0)
    assert list(read) == list(sampler())
    assert read.plan(0).classes == sampler().plan(0).classes


def test_rows_and_labels_become_a_meta_dataset(l2l: Any) -> None:
    held = to_metadataset(DATA.tensors[0], LABELS)
    assert isinstance(held, l2l.data.MetaDataset)
    assert held.labels_to_indices[12] == list(range(16, 24))
    assert list(EpisodeSampler(held, EpisodeSpec(3, 2, 4), 6, seed=0)) == list(sampler())


def test_episodes_out_of_a_taskset(l2l: Any) -> None:
    dataset = l2l.data.MetaDataset(DATA)
    transforms = [
        l2l.data.transforms.FusedNWaysKShots(dataset, n=3, k=6),
        l2l.data.transforms.LoadData(dataset),
        l2l.data.transforms.RemapLabels(dataset),
    ]
    random.seed(0)
    taskset = l2l.data.Taskset(dataset, transforms, num_tasks=4)
    episodes = from_taskset(taskset, shots=2)
    assert len(episodes) == 4
    orders = set()
    for index, episode in enumerate(episodes):
        x, y = taskset[index]
        assert sorted(x.tolist()) == sorted(episode.support.x.tolist() + episode.query.x.tolist())
        for half, each in ((episode.support, 2), (episode.query, 4)):
            assert torch.bincount(half.y).tolist() == [each] * 3
            for value, label in zip(half.x.tolist(), half.y.tolist(), strict=True):
                assert episode.classes[label] == y[x.tolist().index(value)]
        orders.add(tuple(episode.query.y.tolist()))
    assert len(orders) == 4
    assert [e.query.x.tolist() for e in episodes] == [e.query.x.tolist() for e in from_taskset(taskset, shots=2)]
    with pytest.raises(InputError, match="shots = 6 leaves no query"):
        next(iter(from_taskset(taskset, shots=6)))


def test_a_sampler_of_other_labels_is_refused(l2l: Any) -> None:
    with pytest.raises(InputError, match="48 labels, the data set 3 rows"):
        to_taskset(TensorDataset(torch.zeros(3), torch.zeros(3)), sampler())


def test_without_learn2learn_one_line_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "learn2learn", None)
    with pytest.raises(InputError, match="learn2learn, which is not installed: pip install --no-deps") as error:
        to_taskset(DATA, sampler())
    assert "\n" not in str(error.value)


def test_importing_episodes_does_not_import_learn2learn(modules_after: Callable[..., set[str]]) -> None:
    assert not {"learn2learn", "gym"} & modules_after("import metapretrain.episodes")
