"""Streams give what their policy says, count it, and resume where they were."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from torch.utils.data import DataLoader, TensorDataset

from metapretrain.episodes import EpisodeLoader, EpisodeSampler, EpisodeSpec, ShuffledBatches, TaskStream
from metapretrain.errors import InputError
from metapretrain.scheduling import Uniform

LETTERS = {"a": ["a0", "a1", "a2"], "b": ["b0", "b1"], "c": ["c0", "c1", "c2", "c3", "c4"]}


class Alternating:
    """A scheduler with a state: it walks through the names in steps of two."""

    def __init__(self, names: str = "abc") -> None:
        self.names, self.at = names, 0

    def choose(self) -> Any:
        self.at += 2
        return SimpleNamespace(source=self.names[self.at % len(self.names)], at=self.at)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def test_shortest_zips() -> None:
    stream = TaskStream(LETTERS, "shortest", seed=0)
    assert list(stream) == [{"a": "a0", "b": "b0", "c": "c0"}, {"a": "a1", "b": "b1", "c": "c1"}]
    assert stream.counts == {"a": 2, "b": 2, "c": 2}


def test_longest_restarts_the_shorter_until_the_longest_has_been_seen() -> None:
    stream = TaskStream(LETTERS, "longest", seed=0)
    assert len(stream) == 5
    batches = list(stream)
    assert [batch["c"] for batch in batches] == LETTERS["c"]
    assert [batch["a"] for batch in batches] == ["a0", "a1", "a2", "a0", "a1"]
    assert [batch["b"] for batch in batches] == ["b0", "b1", "b0", "b1", "b0"]
    assert stream.counts == {"a": 5, "b": 5, "c": 5}
    assert next(iter(stream)) == {"a": "a2", "b": "b1", "c": "c0"}


def test_round_robin_takes_turns_until_the_longest_is_through() -> None:
    stream = TaskStream(LETTERS, "round-robin", seed=0)
    batches = list(stream)
    assert [next(iter(batch)) for batch in batches] == ["a", "b", "c"] * 5
    assert [batch["c"] for batch in batches[2::3]] == LETTERS["c"]
    assert stream.counts == {"a": 5, "b": 5, "c": 5}


def test_proportional_draws_by_length() -> None:
    stream = TaskStream(LETTERS, "proportional", seed=0, steps=5_000)
    assert all(len(batch) == 1 for batch in stream)
    assert chisquare(list(stream.counts.values()), [1_500, 1_000, 2_500]).pvalue > 1e-3
    assert len(TaskStream(LETTERS, "proportional", seed=0)) == 10
    other = TaskStream(LETTERS, "proportional", seed=1, steps=50)
    assert list(other) != list(TaskStream(LETTERS, "proportional", seed=2, steps=50))


def test_a_scheduler_chooses() -> None:
    stream = TaskStream(LETTERS, Alternating(), seed=0, steps=6)
    assert [next(iter(batch)) for batch in stream] == ["c", "b", "a", "c", "b", "a"]
    assert stream.counts == {"a": 2, "b": 2, "c": 2}
    assert stream.choice.at == 12


def test_steps_run_over_as_many_passes_as_needed_and_then_end() -> None:
    stream = TaskStream({"a": LETTERS["a"]}, "longest", seed=0, steps=7)
    assert [batch["a"] for batch in stream] == ["a0", "a1", "a2", "a0", "a1", "a2", "a0"]
    assert list(stream) == []


class Reiterable:
    """A loader without set_epoch, iter_from or length."""

    def __iter__(self) -> Iterator[str]:
        return iter(["r0", "r1", "r2"])


def loaders() -> dict[str, Any]:
    data = TensorDataset(torch.arange(20.0), torch.arange(20) // 5)
    sampler = EpisodeSampler(data.tensors[1], EpisodeSpec(2, 1, 2), 5, seed=4)
    return {
        "a": ShuffledBatches(20, 4, seed=1),
        "b": EpisodeLoader(data, sampler),
        "c": DataLoader(data, batch_size=3, shuffle=True),
    }


def plain(batch: dict[str, Any]) -> str:
    def flat(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.tolist()
        if isinstance(value, list):
            return [flat(part) for part in value]
        return value if isinstance(value, str) else (value.index, value.support.x.tolist(), value.query.x.tolist())

    return json.dumps({name: flat(value) for name, value in batch.items()})


@pytest.mark.parametrize("policy", ["longest", "shortest", "proportional", "round-robin", "scheduler"])
@pytest.mark.parametrize("stop", [0, 1, 5, 7, 12, 29])
def test_a_resumed_stream_is_the_unbroken_one(policy: str, stop: int) -> None:
    def make(extra: bool) -> TaskStream:
        more = {"r": Reiterable()} if extra else {}
        return TaskStream(loaders() | more, Alternating() if policy == "scheduler" else policy, seed=9, steps=30)

    extra = policy != "proportional"
    torch.manual_seed(0)
    unbroken = [plain(batch) for batch in make(extra)]
    first = make(extra)
    torch.manual_seed(1)
    head = [plain(batch) for batch in itertools.islice(first, stop)]
    state = json.loads(json.dumps(first.state_dict()))
    torch.manual_seed(2)
    second = make(extra)
    second.load_state_dict(state)
    tail = [plain(batch) for batch in second]
    assert head + tail == unbroken
    whole = make(extra)
    list(whole)
    assert second.counts == whole.counts
    assert second.state_dict() == whole.state_dict()


def test_each_pass_is_another_epoch_of_the_loader() -> None:
    stream = TaskStream(loaders(), "longest", seed=0, steps=20)
    seen = list(stream)
    assert torch.equal(seen[5]["a"], next(ShuffledBatches(20, 4, seed=1, epoch=1).iter_from(0)))
    assert not torch.equal(seen[0]["c"][0], seen[7]["c"][0])
    assert not torch.equal(seen[0]["b"].support.x, seen[5]["b"].support.x)


def test_the_global_random_state_is_left_alone() -> None:
    state = torch.get_rng_state()
    list(TaskStream({"c": DataLoader(list(range(10)), batch_size=3, shuffle=True)}, "longest", seed=0))
    assert torch.equal(torch.get_rng_state(), state)


def test_a_plain_episode_data_loader_changes_epoch() -> None:
    sampler = EpisodeSampler([0, 0, 1, 1], EpisodeSpec(2, 1, 1), 2, seed=0)
    loader = LoaderOfPlans(sampler)
    list(TaskStream({"a": loader}, "longest", seed=0, steps=3))
    assert sampler.epoch == 1


class LoaderOfPlans:
    """A loader that has its set_epoch on its batch sampler, as a DataLoader does."""

    def __init__(self, sampler: EpisodeSampler) -> None:
        self.batch_sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batch_sampler)

    def __len__(self) -> int:
        return len(self.batch_sampler)


def test_an_interrupted_iteration_goes_on() -> None:
    stream = TaskStream(LETTERS, "longest", seed=0)
    assert [batch["c"] for batch in itertools.islice(stream, 2)] == ["c0", "c1"]
    assert [batch["c"] for batch in stream] == ["c2", "c3", "c4"]


@pytest.mark.parametrize(
    ("loaders", "policy", "steps", "message"),
    [
        ({}, "longest", None, "loaders is empty"),
        ({"a": []}, "longest", None, "loader 'a' is empty"),
        (LETTERS, "longst", None, "unknown policy 'longst'; did you mean 'longest'"),
        (LETTERS, object(), None, "policy must be one of .* not object"),
        (LETTERS, Uniform, None, "policy must be one of .* not"),
        ({"a": 3}, "longest", 2, "loader 'a' is 3; give a DataLoader"),
        (LETTERS, "longest", 0, "steps is .*; give a whole number of at least 1"),
        (LETTERS, "longest", 1.0, "steps is .*; give a whole number"),
        ({"r": Reiterable()}, "longest", None, "loader 'r' has no length.*steps="),
        ({"r": Reiterable()}, "proportional", 4, "loader 'r' has no length.*'proportional'"),
    ],
)
def test_bad_streams_are_one_line(loaders: Any, policy: Any, steps: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        TaskStream(loaders, policy, seed=0, steps=steps)
    assert "\n" not in str(error.value)


def test_a_loader_that_can_be_read_only_once_is_named() -> None:
    with pytest.raises(InputError, match="loader 'once' gave no batch in pass 1"):
        list(TaskStream({"once": iter([1, 2])}, "longest", seed=0, steps=3))


def test_a_scheduler_that_names_no_loader_is_told() -> None:
    with pytest.raises(InputError, match="unknown task of the scheduler's choice 'z'"):
        list(TaskStream(LETTERS, Alternating("xyz"), seed=0, steps=3))


def test_a_state_of_another_stream_is_refused() -> None:
    state = TaskStream(LETTERS, "longest", seed=0).state_dict()
    with pytest.raises(InputError, match="seed 0, this stream has 1"):
        TaskStream(LETTERS, "longest", seed=1).load_state_dict(state)
    with pytest.raises(InputError, match="policy 'longest', this stream has 'shortest'"):
        TaskStream(LETTERS, "shortest", seed=0).load_state_dict(state)
    with pytest.raises(InputError, match="tasks a, b, c; this stream has a"):
        TaskStream({"a": [1]}, "longest", seed=0).load_state_dict(state)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda state: state.clear(), "state lacks seed, policy, scheduler, step, done, tasks; give what"),
        (lambda state: state.update(tasks=None), "is of tasks None; this stream has a, b, c"),
        (lambda state: state.update(step=-1), "step of the stream's state is .*; give a whole number of at least 0"),
        (lambda state: state.update(done="2"), "done of the stream's state is .*; give a whole number"),
        (lambda state: state["tasks"].update(a=3), "task 'a' of the stream's state is 3; give what"),
        (lambda state: state["tasks"]["a"].pop("count"), "task 'a' of the stream's state lacks count"),
        (lambda state: state["tasks"]["c"].update(position=6), "at batch 6 of task 'c', whose loader has 5"),
        (lambda state: state["tasks"]["c"].update(epoch=-1), "epoch of task 'c' .* is -1; give a whole"),
    ],
)
def test_a_damaged_state_is_one_line_and_changes_nothing(change: Any, told: str) -> None:
    stream = TaskStream(LETTERS, "longest", seed=0)
    next(iter(stream))
    before, state = stream.state_dict(), stream.state_dict()
    change(state)
    with pytest.raises(InputError, match=told) as error:
        stream.load_state_dict(state)
    assert "\n" not in str(error.value) and stream.state_dict() == before
    assert next(iter(stream))["c"] == "c1"


def test_a_state_at_the_end_of_a_loader_goes_on_with_the_next_pass() -> None:
    stream, other = (TaskStream(LETTERS, "longest", seed=0, steps=9) for _ in range(2))
    given = [batch["c"] for batch in itertools.islice(stream, 5)]
    other.load_state_dict(stream.state_dict())
    assert other.state_dict()["tasks"]["c"]["position"] == 5 and given == LETTERS["c"]
    assert [batch["c"] for batch in other] == LETTERS["c"][:4]


def test_counts_say_what_each_task_gave() -> None:
    stream = TaskStream(LETTERS, "round-robin", seed=0, steps=7)
    given = Counter(next(iter(batch)) for batch in stream)
    assert stream.counts == dict(given)


@pytest.mark.parametrize("loaders", [[[1]], None, {}])
def test_loaders_without_names_are_refused(loaders):
    with pytest.raises(InputError, match="loaders is "):
        TaskStream(loaders, "longest", seed=0)
