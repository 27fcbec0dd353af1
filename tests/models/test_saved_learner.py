"""Saved few-shot learners: what is loaded classifies as the learner that was trained; bad input is one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from metapretrain import load
from metapretrain.errors import InputError
from metapretrain.models import build_encoder
from metapretrain.models.encoders import build_backbone
from metapretrain.models.saved import LEARNER, SavedLearner, is_transductive, make_learner, save_model

MODEL = {"classes": ["a", "b", "c", "d"], "channels": 1, "image_size": 16, "mean": [0.4], "std": [0.2]}
CHOICES = {"inner_lr": 0.2, "inner_steps": 1, "test_steps": 2, "batchnorm": "batch", "chunk": None}


def write_run(folder: Path, kind: str, **changes: Any) -> Any:
    """A run of a learner that has seen some images; returns the learner."""
    torch.manual_seed(0)
    choices = {**CHOICES, "learner": kind, **changes}
    ways = None if kind == "protonet" else 3
    net = build_backbone("conv4", ways=ways, channels=1, image_size=16, mean=[0.4], std=[0.2])
    learner = make_learner(choices, net, 3)
    x, y = torch.randint(0, 256, (2, 6, 1, 16, 16), dtype=torch.uint8), torch.tensor([[0, 1, 2] * 2] * 2)
    learner.backward((x, y), (x, y))  # running statistics and records move
    with torch.no_grad():
        for p in learner.parameters():
            p -= 0.1 * p.grad
    config = {"model": MODEL, "choices": choices, "backbone": "conv4", "tested": {"ways": 3, "shots": 2, "queries": 1}}
    (folder / "config.json").write_text(json.dumps({"config": config}))
    save_file(learner.state_dict(), folder / LEARNER)
    return learner.eval()


def images(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, 1, 16, 16), generator=generator, dtype=torch.uint8)


@pytest.mark.parametrize("batchnorm", ["batch", "per-step"])
@pytest.mark.parametrize("kind", ["maml", "fomaml", "anil", "metasgd", "protonet"])
def test_a_loaded_learner_classifies_as_the_one_that_was_trained(kind: str, batchnorm: str, tmp_path: Path) -> None:
    learner = write_run(tmp_path, kind, batchnorm=batchnorm)
    model = load(tmp_path)
    assert isinstance(model, SavedLearner) and not model.training
    support, query, codes = images(6, 1), images(5, 2), torch.tensor([0, 1, 2] * 2)
    labels = torch.tensor([7, 30, 41])
    classifier = model.adapt(support, labels[codes])
    expected = learner.logits((support[None], codes[None]), (query[None], torch.zeros(1, 5).long()))[0]
    torch.testing.assert_close(classifier.logits(query), expected)
    assert classifier.predict(query).tolist() == labels[expected.argmax(1)].tolist()
    assert classifier.classes.tolist() == [7, 30, 41]
    two = model.adapt(support[:2], labels[:2])
    assert two.logits(query).shape == (5, 2)
    large = torch.nn.functional.interpolate(query.float() / 255, scale_factor=2).expand(-1, 3, -1, -1)
    assert classifier.logits(large).shape == (5, 3)


@pytest.mark.parametrize("batchnorm", ["batch", "per-step"])
@pytest.mark.parametrize("kind", ["anil", "protonet"])
def test_features_are_what_the_head_sees(kind: str, batchnorm: str, tmp_path: Path) -> None:
    learner, seen = write_run(tmp_path, kind, batchnorm=batchnorm), []
    model, x = load(tmp_path), images(4, 3)
    if kind == "protonet":
        expected = learner.module(x)
    else:
        learner.module.head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        learner._outputs()({}, x)
        expected = seen[0]
    torch.testing.assert_close(model.encode(x), expected.detach())
    alone = torch.cat([model.encode(one[None]) for one in x])
    same = bool(torch.allclose(alone, model.encode(x), atol=1e-4))
    assert same != is_transductive(model.learner)


def test_an_encoder_with_other_classes_takes_new_ones_by_their_prototypes(tmp_path: Path) -> None:
    described = {**MODEL, "encoder": "mlp", "stem": "standard", "head": None}
    (tmp_path / "config.json").write_text(json.dumps({"config": {"model": described}}))
    torch.manual_seed(0)
    save_model(tmp_path, build_encoder("mlp", channels=1, image_size=16), None, torch.randn(4, 512))
    model, support, query = load(tmp_path), images(4, 1), images(6, 2)
    found = model.adapt(support, torch.tensor([5, 2, 2, 5])).logits(query)
    z = model.encode(support)
    centres = torch.stack([z[1:3].mean(0), z[[0, 3]].mean(0)])
    expected = -(model.encode(query)[:, None] - centres).square().sum(-1)
    torch.testing.assert_close(found, expected)


def test_bad_input_is_one_clear_line(tmp_path: Path) -> None:
    write_run(tmp_path, "maml")
    model, x = load(tmp_path), images(4, 1)
    with pytest.raises(InputError, match="has no classes yet"):
        model.predict(x)
    with pytest.raises(InputError, match="got 4 support images and 3 labels"):
        model.adapt(x, torch.tensor([0, 1, 2]))
    with pytest.raises(InputError, match="labels must be a tensor of integers"):
        model.adapt(x, torch.ones(4))
    with pytest.raises(InputError, match="labels have 4 classes; this run has learned 3-way tasks"):
        model.adapt(x, torch.arange(4))
    whole = (tmp_path / "config.json").read_text()
    config = json.loads(whole)
    config["config"]["tested"]["ways"] = []
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"config\.json does not describe a model"):
        load(tmp_path)
    config = json.loads(whole)
    del config["config"]["choices"]["inner_lr"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"does not describe a model \(KeyError\('inner_lr'\)\)"):
        load(tmp_path)
