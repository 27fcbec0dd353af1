"""Checkpoints come back bit-equal, or not at all."""

from __future__ import annotations

import json
import math
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from metapretrain.errors import InputError
from metapretrain.files import CheckpointError, load_tensors, save_tensors
from metapretrain.training import checkpoint
from metapretrain.training.checkpoint import load_latest, save
from tests.training.states import read, round_trip, same


def test_same_tells_apart_what_json_would_mix_up() -> None:
    for a, b in [(0.0, -0.0), (True, 1), ((1,), [1]), ({1: 2}, {"1": 2}), (1, 1.0), (torch.zeros(1), -torch.zeros(1))]:
        assert not same(a, b)
    assert same(math.nan, math.nan)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_float_tensors_keep_their_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-40], dtype=torch.float64).to(dtype)
    state = {"w": torch.randn(3, 5).to(dtype), "special": special}
    assert same(state, round_trip(tmp_path, state))


def test_every_kind_of_tensor(tmp_path: Path) -> None:
    base = torch.arange(24.0).view(2, 3, 4)
    tied = torch.randn(4, 4, requires_grad=True)
    state = {
        "long": torch.tensor([2**62, -1]),
        "byte": torch.arange(256, dtype=torch.uint8),
        "bool": torch.tensor([True, False, True]),
        "empty": torch.empty(0, 7),
        "scalar": torch.tensor(3.5),
        "transposed": base.transpose(0, 2),
        "strided": base[:, ::2],
        "expanded": torch.ones(1).expand(5),
        "views of one storage": [base[0], base[1], base],
        "tied": [tied, tied],
        "parameter": torch.nn.Parameter(torch.randn(2)),
        "odd bytes": [torch.tensor([True]), torch.randn(3, dtype=torch.float64)],
    }
    back = round_trip(tmp_path, state)
    assert same(state, back)
    assert not back["parameter"].requires_grad


def test_channels_last_comes_back_in_its_layout(tmp_path: Path) -> None:
    images = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    volumes = torch.randn(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d)
    back = round_trip(tmp_path, [images, volumes])
    assert same([images, volumes], back)
    assert [t.stride() for t in back] == [images.stride(), volumes.stride()]


def test_what_is_loaded_can_be_changed_in_place(tmp_path: Path) -> None:
    back = round_trip(tmp_path, {"a": torch.zeros(3), "b": torch.zeros(3), "n": np.zeros(2)})
    back["a"].add_(1)
    back["n"] += 1
    assert same(back["b"], torch.zeros(3))
    assert read(tmp_path)[1]["a"].sum() == 0


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.RMSprop])
def test_training_goes_on_bit_equal_after_a_round_trip(tmp_path: Path, make: Any) -> None:
    def fresh() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Conv2d(1, 3, 3), torch.nn.BatchNorm2d(3), torch.nn.Flatten())
        model = model.to(memory_format=torch.channels_last)
        extra = {"momentum": 0.9} if make is torch.optim.SGD else {}
        return model, make(model.parameters(), lr=0.01, **extra)

    def steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
        for i in range(first, last):
            x = torch.randn(4, 1, 5, 5, generator=torch.Generator().manual_seed(i))
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()

    unbroken = fresh()
    steps(*unbroken, 0, 6)
    broken = fresh()
    steps(*broken, 0, 3)
    state = {"model": broken[0].state_dict(), "optimizer": broken[1].state_dict()}
    back = round_trip(tmp_path, state)
    assert same(dict(state["model"]), back["model"])
    assert same(state["optimizer"], back["optimizer"])
    resumed = fresh()
    resumed[0].load_state_dict(back["model"])
    resumed[1].load_state_dict(back["optimizer"])
    steps(*resumed, 3, 6)
    assert same(dict(unbroken[0].state_dict()), dict(resumed[0].state_dict()))
    assert same(unbroken[1].state_dict(), resumed[1].state_dict())


def test_states_of_random_generators(tmp_path: Path) -> None:
    source = np.random.default_rng(5)
    state = {"python": random.Random(3).getstate(), "torch": torch.get_rng_state(), "numpy": source.bit_generator.state}
    legacy = np.random.RandomState(1).get_state()
    back = round_trip(tmp_path, {**state, "legacy": legacy})
    assert same(state, {key: back[key] for key in state})
    assert same(legacy[1], back["legacy"][1])
    again = random.Random()
    again.setstate(back["python"])
    assert again.random() == random.Random(3).random()


leaf = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.just("$"),
    st.lists(st.floats(width=32), max_size=3).map(torch.tensor),
    st.lists(st.integers(-5, 5), max_size=3).map(lambda x: np.array(x, dtype=np.int16)),
)


key = st.one_of(
    st.text(max_size=3), st.integers(), st.just("$"), st.none(), st.booleans(), st.just("a.b"), st.just("a")
)


nest = st.recursive(
    leaf,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.lists(inner, max_size=3).map(tuple), st.dictionaries(key, inner, max_size=3)
    ),
    max_leaves=10,
)


@settings(max_examples=150)
@given(nest)
def test_any_nest_goes_through_json_unchanged(state: Any) -> None:
    files_ = checkpoint._encode(1, state)
    value = json.loads(files_["state.json"], parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))["state"]
    tensors = checkpoint.safetensors.torch.load(files_["tensors.safetensors"])
    assert same(state, checkpoint.unpack(value, tensors))


def test_names_that_meet_keep_both_tensors(tmp_path: Path) -> None:
    state = {"a": {"b": torch.tensor(1)}, "a.b": torch.tensor(2), "a.b#2": torch.tensor(3), 1: torch.tensor(4)}
    state["1"] = torch.tensor(5)
    assert same(state, round_trip(tmp_path, state))


def test_no_pickle_is_written(tmp_path: Path) -> None:
    save(tmp_path, 1, {"w": torch.ones(2), "betas": (0.9, 0.999)})
    names = sorted(path.name for path in (tmp_path / "step-00000001").iterdir())
    assert names == ["manifest.json", "state.json", "tensors.safetensors"]
    for name in ("manifest.json", "state.json"):
        json.loads((tmp_path / "step-00000001" / name).read_text())
    assert load_tensors(tmp_path / "step-00000001" / "tensors.safetensors")["w"].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"f": {"g": len}}, "builtin_function_or_method.*at f.g"),
        ([torch.device("cpu")], "device.*at 0"),
        ({"s": {1, 2}}, "set.*at s"),
        ({(1, 2): 3}, "keys.*tuple"),
        ({"x": torch.eye(3).to_sparse()}, "at x is sparse"),
        ({"x": torch.empty(3, device="meta")}, "at x is sparse, quantised or on meta"),
        ({"x": np.array(["a"])}, "array of <U1"),
    ],
)
def test_what_a_checkpoint_cannot_hold_is_named(tmp_path: Path, value: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        save(tmp_path, 1, value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("step", [-1, 1.5, True, "3"])
def test_a_step_that_is_no_count_is_refused(tmp_path: Path, step: Any) -> None:
    with pytest.raises(InputError, match="whole number"):
        save(tmp_path, step, {})


def test_keep_below_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="keep"):
        save(tmp_path, 1, {}, keep=0)


def test_the_last_two_are_kept(tmp_path: Path) -> None:
    for step in (5, 10, 15, 100_000_000):
        save(tmp_path, step, {"step": step})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000015", "step-100000000"]
    assert read(tmp_path) == (100_000_000, {"step": 100_000_000})
    save(tmp_path, 100_000_001, {}, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-100000001"]


def test_a_run_that_went_back_leaves_no_later_checkpoint(tmp_path: Path) -> None:
    for step in (10, 20):
        save(tmp_path, step, {"from": "first"})
    save(tmp_path, 15, {"from": "second"})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000010", "step-00000015"]
    assert read(tmp_path) == (15, {"from": "second"})


def test_the_same_step_again_replaces(tmp_path: Path) -> None:
    save(tmp_path, 10, "old")
    save(tmp_path, 10, "new")
    assert read(tmp_path) == (10, "new")
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]


def test_killed_between_the_two_renames_the_old_one_is_used(tmp_path: Path) -> None:
    save(tmp_path, 10, "old")
    os.rename(tmp_path / "step-00000010", tmp_path / ".replaced-step-00000010")
    assert read(tmp_path) == (10, "old")
    save(tmp_path, 10, "new")
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]


def test_nothing_to_load(tmp_path: Path) -> None:
    assert load_latest(tmp_path / "missing") is None
    (tmp_path / ".writing-step-00000001").mkdir()
    (tmp_path / "notes").mkdir()
    (tmp_path / "step-12").mkdir()
    assert load_latest(tmp_path) is None


def test_a_plain_state_dict(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    model[0].weight = torch.nn.Parameter(torch.randn(3, 2).t())
    file = tmp_path / "encoder.safetensors"
    save_tensors(file, model.state_dict())
    assert same(dict(model.state_dict()), dict(sorted(load_tensors(file).items(), key=order_of(model))))
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        load_tensors(file)
    with pytest.raises(CheckpointError, match="cannot read"):
        load_tensors(tmp_path / "missing.safetensors")
    with pytest.raises(CheckpointError, match="cannot write"):
        save_tensors(tmp_path / "missing" / "x.safetensors", model.state_dict())


def order_of(model: torch.nn.Module) -> Any:
    names = list(model.state_dict())
    return lambda pair: names.index(pair[0])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensors_of_a_gpu_come_back_on_the_cpu(tmp_path: Path) -> None:
    state = {"w": torch.randn(3, 4, device="cuda").t(), "rng": torch.cuda.get_rng_state()}
    back = round_trip(tmp_path, state)
    assert back["w"].device.type == "cpu"
    assert same(state, back)


def test_a_key_that_is_no_utf8_is_kept(tmp_path):
    save(tmp_path, 1, {"\udcff": "\udcff"})
    assert load_latest(tmp_path).state == {"\udcff": "\udcff"}
