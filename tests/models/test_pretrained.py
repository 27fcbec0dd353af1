"""Pretrained encoders of other libraries and one's own, and features that are kept."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from metapretrain.errors import InputError
from metapretrain.experiments.saved import load_encoder
from metapretrain.models.pretrained import MEAN, STD, PretrainedModel, image_encoder, kept_features, resized


class Counting(nn.Module):
    """Mean colour, three features; counts how often it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.calls = nn.Parameter(torch.ones(3)), 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return images.mean((2, 3)) * self.weight


def test_ones_own_module_sees_normalised_images_of_its_size() -> None:
    images = torch.full((2, 3, 12, 20), 255, dtype=torch.uint8)
    found = PretrainedModel(Counting(), 8).encode(images)
    torch.testing.assert_close(found, ((1 - torch.tensor(MEAN)) / torch.tensor(STD)).expand(2, 3))
    assert PretrainedModel(nn.Sequential(nn.Flatten(), nn.Linear(192, 2)), 8).encode(images[:1, :1]).shape == (1, 2)


def test_it_learns_new_classes_and_has_none_of_its_own() -> None:
    model = PretrainedModel(Counting(), 8)
    images = torch.stack([torch.full((3, 8, 8), level, dtype=torch.uint8) for level in (0, 250, 10, 240)])
    assert model.adapt(images[:2], [7, 3]).predict(images[2:]).tolist() == [7, 3]
    with pytest.raises(InputError, match="no classes yet"):
        model.predict(images)


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_features_are_made_once_for_the_same_weights_and_rows(cache: Path) -> None:
    net, images = Counting(), torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8)
    model = PretrainedModel(net, 8)
    first, again = kept_features(model, images), kept_features(model, images)
    assert net.calls == 1 and torch.equal(first, again) and torch.equal(first, model.encode(images))
    net.weight.data[0] = 2
    assert not torch.equal(kept_features(model, images), first)
    images[0, 0, 0, 0] ^= 1
    kept_features(model, images)
    kept_features(PretrainedModel(net, 8, std=(1.0, 1.0, 1.0)), images)
    kept_features(PretrainedModel(net, 4), images)
    assert net.calls == 6 and len(list(cache.rglob("*.safetensors"))) == 5
    for file in cache.rglob("*.safetensors"):
        file.write_bytes(b"damaged")
    assert torch.equal(kept_features(model, images), model.encode(images))


def test_a_cache_that_cannot_be_written_costs_time_only(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache.write_text("a file where the folder should be")
    images = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)
    assert kept_features(PretrainedModel(Counting(), 8), images).shape == (2, 3)
    assert "features are not kept" in caplog.text


def test_a_torchvision_model_with_weights_from_a_file(tmp_path: Path) -> None:
    import torchvision

    net = torchvision.models.get_model("mobilenet_v3_small", weights=None)
    save_file(net.state_dict(), tmp_path / "w.safetensors")
    model = image_encoder(f"torchvision:mobilenet_v3_small@{tmp_path / 'w.safetensors'}")
    images = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    found = model.encode(images)
    net.classifier[-1] = nn.Identity()
    torch.testing.assert_close(found, net.eval()(model.prepare(images)))
    assert model.image_size == 224 and found.shape == (2, 1024)
    save_file({"other": torch.zeros(1)}, tmp_path / "w.safetensors")
    with pytest.raises(InputError, match=r"w.safetensors is of another model: it has no features"):
        image_encoder(f"torchvision:mobilenet_v3_small@{tmp_path / 'w.safetensors'}")


def test_a_vision_model_of_transformers_from_a_folder(tmp_path: Path) -> None:
    from transformers import ViTConfig, ViTImageProcessor, ViTModel

    config = ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, image_size=16)
    ViTModel(config).save_pretrained(tmp_path)
    ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(tmp_path)
    model = load_encoder(tmp_path)
    assert model.encode(torch.zeros(2, 3, 16, 16, dtype=torch.uint8)).shape == (2, 8)
    assert model.mean == (0.5, 0.5, 0.5) and model.image_size == 16


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("torchvision:no_such_net", "torchvision:no_such_net is no image encoder"),
        ("no-such-run", "no-such-run is not a run folder"),
        ("torchvision:resnet18@none.safetensors", "no file 'none.safetensors'"),
        ("torchvision:resnet18@", "torchvision:resnet18@: no file ''; .* or torchvision:resnet18 to fetch"),
        ("timm:resnet50@", "timm:resnet50@: no file ''; give a safetensors file, or timm:resnet50 to fetch"),
    ],
)
def test_what_cannot_be_loaded_is_told_in_one_line(name: str, told: str) -> None:
    with pytest.raises(InputError, match=told) as error:
        load_encoder(name)
    assert "\n" not in str(error.value)


def test_a_library_that_is_missing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(InputError, match=r"timm:resnet50 needs a package that is not installed: .*give a finished run"):
        load_encoder("timm:resnet50")


def test_texts_take_a_text_encoder_by_name_and_runs_of_their_kind(tmp_path: Path) -> None:
    assert load_encoder("tiny", texts=True).encode(["one", "two"]).shape[0] == 2
    (tmp_path / "config.json").write_text(json.dumps({"config": {"model": {"kind": "text"}}}))
    with pytest.raises(InputError, match="is a run of texts: give --texts"):
        load_encoder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"config": {"model": {"encoder": "mlp"}}}))
    with pytest.raises(InputError, match="is no run of texts: give"):
        load_encoder(tmp_path, texts=True)


def test_an_encoder_sees_images_of_another_size_if_it_can() -> None:
    model = PretrainedModel(nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, 7)), 8)
    image = torch.randint(0, 256, (1, 3, 32, 32), dtype=torch.uint8)
    small = model.encode(image)
    resized(model, 16)
    assert model.image_size == 16 and not torch.allclose(model.encode(image), small)
    with pytest.raises(InputError, match=r"takes no images of 16 pixels .* its own are 4"):
        resized(PretrainedModel(nn.Sequential(nn.Flatten(), nn.Linear(48, 7)), 4), 16)
    with pytest.raises(InputError, match="pretrained image encoders alone"):
        resized(nn.Identity(), 16)
