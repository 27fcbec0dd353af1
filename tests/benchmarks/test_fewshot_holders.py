"""learn2learn's MetaDataset as holder of the classes changes nothing."""

from __future__ import annotations

import sys

import pytest
import torch
from fewshot_learning import EpisodeStacks
from run_fewshot import held_by

from metapretrain.data.registry import load_few_shot
from metapretrain.episodes import EpisodeSpec
from metapretrain.errors import InputError


def test_classes_held_by_learn2learn_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    data = load_few_shot("made", None, 8)
    assert held_by("labels", data) is data
    with pytest.raises(InputError, match="unknown holder 'learntolearn'; did you mean 'learn2learn'"):
        held_by("learntolearn", data)
    l2l = pytest.importorskip("learn2learn", exc_type=ImportError)
    made, plain = [], l2l.data.MetaDataset
    monkeypatch.setattr(l2l.data, "MetaDataset", lambda *given: made.append(given) or plain(*given))
    held = held_by("learn2learn", data)
    assert len(made) == 3
    for name in ("train", "validation", "test"):
        assert torch.equal(getattr(held, name).labels, getattr(data, name).labels)
    first, other = (next(iter(EpisodeStacks(d.train.labels, EpisodeSpec(3, 1, 2), 4, seed=3))) for d in (data, held))
    assert all(torch.equal(other[name], rows) for name, rows in first.items())
    monkeypatch.setitem(sys.modules, "learn2learn", None)
    with pytest.raises(InputError, match="learn2learn, which is not installed"):
        held_by("learn2learn", data)
